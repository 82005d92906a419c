# SPDX-License-Identifier: Apache-2.0
"""A snapshot store as states see it: what is damaged counts as absent until it is written anew."""

import logging
import threading
from collections.abc import Sequence

from freetoken_storage.errors import StorageError, StoreDamaged
from freetoken_storage.records import Snapshot, SnapshotInfo, SnapshotReader, Snapshots

_log = logging.getLogger(__name__)


class StateRecords:
    """Thread-safe. Remembers for this process which records were found damaged."""

    def __init__(self, snapshots: Snapshots) -> None:
        self.snapshots = snapshots
        self._lock = threading.Lock()
        self._damaged: set[bytes] = set()  # found so; until written anew
        self._stuck: set[bytes] = set()  # damaged, and could not be removed: not to be used

    def info(self, reader: SnapshotReader, digest: bytes) -> SnapshotInfo | None:
        """The record's info, or None if it is absent or damaged."""
        try:
            info = reader.info(digest)
        except StoreDamaged:
            with self._lock:
                self._damaged.add(digest)
            return None
        return None if digest in self._stuck else info

    def was_damaged(self, digest: bytes) -> bool:
        """Whether this process found the stored state damaged and removed it."""
        with self._lock:
            return digest in self._damaged

    def is_stored(self, digest: bytes) -> bool:
        """Whether it is there and readable, as far as its record tells: a damaged record must not
        keep its state from being written anew."""
        with self.snapshots.reader() as reader:
            return self.info(reader, digest) is not None

    def put(self, snapshots: Sequence[Snapshot]) -> None:
        """Write states that are not stored, in place of damaged ones."""
        names = {snapshot.digest for snapshot in snapshots}
        if stuck := names & self._stuck:
            self.snapshots.remove(list(stuck))  # or else put would find them there
            self._stuck -= stuck
        self.snapshots.put(snapshots)
        with self._lock:
            self._damaged -= names

    def discard(self, digest: bytes) -> None:
        """Remove a damaged state; where that cannot be done now, stop using it."""
        with self._lock:
            self._damaged.add(digest)
        if not self.remove(digest):
            self._stuck.add(digest)

    def distrust(self, digest: bytes) -> None:
        """Stop using a state, and all that hangs on it, whose bytes are as they were written and
        still wrong. `expel` removes them."""
        found, pending = {digest}, [digest]
        while pending:
            below = set(self.snapshots.children(pending.pop())) - found
            found |= below
            pending += below
        with self._lock:
            self._damaged |= found
        self._stuck |= found

    def expel(self) -> int:
        """Remove what must not be used; returns how many states went. What cannot be removed now
        stays unused."""
        doomed = list(self._stuck)
        try:
            removed = self.snapshots.remove(doomed)
        except StorageError as error:
            _log.warning("wrong states could not be removed: %s", error)
            return 0
        self._stuck -= set(doomed)
        return removed

    def remove(self, digest: bytes) -> bool:
        """Remove a state and what hangs on it. False where that cannot be done now."""
        try:
            self.snapshots.remove([digest])
        except StorageError as error:
            _log.warning("a damaged state could not be removed: %s", error)
            return False
        return True
