# SPDX-License-Identifier: Apache-2.0
"""Reads every value of a database and says what is wrong with it. One fault does not hide others.

Runs in the child process of `verify_store`.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from . import keys, values
from .errors import StorageError, StoreDamaged
from .eviction import split_digests
from .records import ROOT
from .session_rows import ROOT_HASH, Branch, SessionRows, chain
from .snapshot_rows import Stored, load_chunk, load_record, num_chunks
from .transactions import Transaction

Tell = Callable[[str, str | None], None]  # (fault, name of the session or None)


class Inspection:
    """Collects counts and tells faults as they are found."""

    def __init__(self, txn: Transaction, tell: Tell) -> None:
        self._txn = txn
        self._tell = tell
        self.counts: Counter[str] = Counter()

    @contextmanager
    def _telling(self, session: str | None = None) -> Iterator[None]:
        """A StorageError inside is a fault, and the inspection goes on after the block."""
        try:
            yield
        except StorageError as error:
            self._tell(str(error), session)

    # sessions

    def sessions(self) -> None:
        numbers = set()
        for key in self._keys(keys.NAME):
            name = key[1:].decode(errors="replace")
            with self._telling(name):
                rows = SessionRows(self._txn, name)
                numbers.add(rows.number)
                self.counts["sessions"] += 1
                self._session(rows)
        for key in self._keys(keys.META):
            with self._telling():
                values.load(self._txn, key, f"the value {key[1:].decode(errors='replace')!r}")
        for kind in keys.SESSION_KINDS:
            owners = {keys.first_number(key) for key in self._keys(kind)}
            if strays := len(owners - numbers):
                self._tell(
                    f"values of kind {kind.decode()!r} belong to {strays} sessions without a name",
                    None,
                )

    def _session(self, rows: SessionRows) -> None:
        next_node = None
        with self._telling(rows.name):
            next_node = rows.info().next_node
        with self._telling(rows.name):
            rows.body()
        segments = self._segments(rows)
        places = self._nodes(rows, segments, next_node)
        for key in self._keys(keys.scope(keys.BRANCH, rows.number)):
            with self._telling(rows.name):
                name = keys.tail(key).decode(errors="replace")
                branch = rows.branch(name)
                if branch is not None:
                    self.counts["branches"] += 1
                    self._branch(rows, branch, places)

    def _segments(self, rows: SessionRows) -> set[str]:
        found = set()
        for key in self._keys(keys.scope(keys.SEGMENT, rows.number)):
            segment_id = keys.tail(key).decode(errors="replace")
            with self._telling(rows.name):
                rows.segment(segment_id)
                self.counts["segments"] += 1
            found.add(segment_id)
        return found

    def _nodes(
        self, rows: SessionRows, segments: set[str], next_node: int | None
    ) -> dict[int, tuple[int, bytes]]:
        places = {ROOT: (0, ROOT_HASH)}
        for key in self._keys(keys.scope(keys.NODE, rows.number)):
            node_id = keys.last_number(key)
            with self._telling(rows.name):
                node = rows.node(node_id)
                if node is None:
                    continue
                self.counts["nodes"] += 1
                places[node_id] = node.depth, node.hash
                record = node.record
                what = rows.label(f"node {node_id}")
                if record.parent not in places:
                    raise StoreDamaged(f"{what} has lost its parent", value=record.parent)
                depth, parent_hash = places[record.parent]
                if (node.depth, node.hash) != (depth + 1, chain(parent_hash, record)):
                    raise StoreDamaged(f"{what} does not continue its path")
                if record.segment_id not in segments:
                    raise StoreDamaged(f"{what} has lost its segment", value=record.segment_id)
                if next_node is not None and node_id >= next_node:
                    raise StoreDamaged(f"{what} is newer than the session", limit=next_node)
        return places

    def _branch(
        self, rows: SessionRows, branch: Branch, places: dict[int, tuple[int, bytes]]
    ) -> None:
        record = branch.record
        what = rows.label(f"branch {record.name!r}")
        if record.head not in places:
            raise StoreDamaged(f"{what} has lost its head", value=record.head)
        if places[record.head] != (record.node_count, record.path_hash):
            raise StoreDamaged(f"{what} does not match its path", limit=record.node_count)
        log = rows.log(branch)
        self.counts["logs"] += len(log)
        if log and log[-1].sequence >= record.log_length:
            raise StoreDamaged(f"{what} has a log longer than it says", value=log[-1].sequence)

    # states

    def states(self) -> None:
        stamps: dict[bytes, int] = {}
        for key in self._keys(keys.RECORD):
            with self._telling():
                stored = load_record(self._txn, key[1:])
                if stored is not None:
                    self.counts["snapshots"] += 1
                    stamps[key[1:]] = stored.stamp
                    self._snapshot(key[1:], stored)
        for key in self._keys(keys.USE):
            stamp, digest = keys.first_number(key), keys.tail(key)
            if stamps.get(digest) != stamp:
                self._tell(f"the use index names snapshot {digest.hex()[:16]}… wrongly", None)
        for key in self._keys(keys.OWNER):
            with self._telling():
                what = f"the pins of {key[1:].decode(errors='replace')!r}"
                split_digests(values.load(self._txn, key, what) or b"")

    def _snapshot(self, digest: bytes, stored: Stored) -> None:
        what = f"snapshot {digest.hex()[:16]}…"
        for index in range(num_chunks(stored.size_bytes)):
            load_chunk(self._txn, digest, stored, index)
        self.counts["bytes"] += stored.size_bytes
        if self._txn.get(keys.use(stored.stamp, digest)) is None:
            raise StoreDamaged(f"{what} is not in the use index")
        parent = stored.info.parent
        if parent is not None and self._txn.get(keys.child(parent, digest)) is None:
            raise StoreDamaged(f"{what} is not among the children of its parent")

    def _keys(self, prefix: bytes) -> list[bytes]:
        return [key for key, _ in self._txn.scan(prefix)]
