# SPDX-License-Identifier: Apache-2.0
"""Snapshots in dicts, for stores that keep nothing. See `records.Snapshots`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from .errors import StoreFull
from .eviction import footprint
from .life import Life
from .names import MAX_OWNER_BYTES, encode_name
from .records import Snapshot, SnapshotInfo
from .snapshot_checks import check_digest, check_targets, ended_reader, snapshot_info


@dataclass(frozen=True)
class _Entry:
    info: SnapshotInfo
    buffers: Mapping[str, bytes]

    @property
    def size_bytes(self) -> int:
        return footprint(sum(self.info.sizes.values()))


class MemoryReader:
    """`records.SnapshotReader` over the entries as they were."""

    def __init__(self, entries: Mapping[bytes, _Entry]) -> None:
        self._open_entries: Mapping[bytes, _Entry] | None = entries

    @property
    def _entries(self) -> Mapping[bytes, _Entry]:
        if self._open_entries is None:
            raise ended_reader()
        return self._open_entries

    def end(self) -> None:
        self._open_entries = None

    def info(self, digest: bytes) -> SnapshotInfo | None:
        entry = self._entries.get(check_digest(digest))
        return None if entry is None else entry.info

    def read_into(self, digest: bytes, buffers: Mapping[str, memoryview]) -> None:
        entry = self._entries[check_digest(digest)]
        for name, target in check_targets(entry.info, buffers).items():
            if entry.info.sizes[name]:
                target[:] = entry.buffers[name]


class MemorySnapshots:
    """`records.Snapshots` in a dict that is in order of use, least recently used first."""

    def __init__(self, life: Life, budget_bytes: int | None = None) -> None:
        self._life = life
        self._budget_bytes = budget_bytes
        self._entries: dict[bytes, _Entry] = {}
        self._children: dict[bytes, set[bytes]] = {}
        self._pins: dict[str, frozenset[bytes]] = {}
        self._size_bytes = 0

    def put(self, snapshots: Sequence[Snapshot]) -> None:
        infos = {snapshot.digest: snapshot_info(snapshot) for snapshot in snapshots}
        with self._life.write():
            new = {s.digest: s for s in snapshots if s.digest not in self._entries}
            entries = {
                digest: _Entry(
                    infos[digest], {name: bytes(buffer) for name, buffer in s.buffers.items()}
                )
                for digest, s in new.items()
            }
            self._make_room(sum(entry.size_bytes for entry in entries.values()), snapshots)
            for snapshot in snapshots:
                if snapshot.digest in self._entries:
                    self._use(snapshot.digest)
                else:
                    self._add(snapshot.digest, entries[snapshot.digest])

    def _add(self, digest: bytes, entry: _Entry) -> None:
        self._entries[digest] = entry
        self._size_bytes += entry.size_bytes
        if entry.info.parent is not None:
            self._children.setdefault(entry.info.parent, set()).add(digest)

    def reader(self) -> AbstractContextManager[MemoryReader]:
        return self._reader()

    @contextmanager
    def _reader(self) -> Iterator[MemoryReader]:
        with self._life.read():
            entries = dict(self._entries)
        reader = MemoryReader(entries)
        try:
            yield reader
        finally:
            reader.end()

    def contains(self, digest: bytes) -> bool:
        with self._life.read():
            return check_digest(digest) in self._entries

    def touch(self, digests: Sequence[bytes]) -> None:
        with self._life.read():
            for digest in digests:
                if check_digest(digest) in self._entries:
                    self._use(digest)

    def remove(self, digests: Sequence[bytes]) -> int:
        with self._life.write():
            gone: dict[bytes, None] = {}
            pending = [check_digest(digest) for digest in digests]
            while pending:
                digest = pending.pop()
                if digest not in gone:
                    gone[digest] = None
                    pending += self._children.get(digest, ())
            present = [digest for digest in gone if digest in self._entries]
            for digest in present:
                self._delete(digest)
            return len(present)

    def children(self, digest: bytes) -> list[bytes]:
        with self._life.read():
            return sorted(self._children.get(check_digest(digest), ()))

    def pin(self, owner: str, digests: Sequence[bytes]) -> None:
        encode_name("owner", owner, MAX_OWNER_BYTES)
        pinned = frozenset(check_digest(digest) for digest in digests)
        with self._life.write():
            self._pins[owner] = pinned
            if not pinned:
                del self._pins[owner]

    def size_bytes(self) -> int:
        with self._life.read():
            return self._size_bytes

    def shrink(self, limit_bytes: int) -> int:
        with self._life.write():
            gone = self._choose(self._size_bytes - limit_bytes, self._spared(()))
            for digest in gone:
                self._delete(digest)
            return len(gone)

    def flush(self) -> None:
        with self._life.read():
            pass  # there is nothing that could be lost later than now

    def counts(self) -> dict[str, int]:
        """What `VerifyReport.counts` says of snapshots."""
        with self._life.read():
            sizes = [sum(entry.info.sizes.values()) for entry in self._entries.values()]
            return {"snapshots": len(sizes), "bytes": sum(sizes)}

    def _use(self, digest: bytes) -> None:
        self._entries[digest] = self._entries.pop(digest)

    def _delete(self, digest: bytes) -> None:
        entry = self._entries.pop(digest)
        self._size_bytes -= entry.size_bytes
        if entry.info.parent is not None:
            siblings = self._children[entry.info.parent]
            siblings.discard(digest)
            if not siblings:
                del self._children[entry.info.parent]

    def _make_room(self, needed_bytes: int, incoming: Sequence[Snapshot]) -> None:
        if self._budget_bytes is None:
            return
        excess_bytes = self._size_bytes + needed_bytes - self._budget_bytes
        if excess_bytes <= 0:
            return
        gone = self._choose(excess_bytes, self._spared(incoming))
        if sum(self._entries[digest].size_bytes for digest in gone) < excess_bytes:
            raise StoreFull(
                "the states do not fit into the budget and nothing more can be evicted",
                value=f"{needed_bytes} bytes needed",
                limit=f"{self._budget_bytes} bytes",
                remedy="raise the budget, unpin or delete sessions",
            )
        for digest in gone:
            self._delete(digest)

    def _choose(self, needed_bytes: int, keep: set[bytes]) -> set[bytes]:
        """What to delete so that `needed_bytes` become free, or all that may go."""
        gone: set[bytes] = set()
        while needed_bytes > 0:
            victim = next((d for d in self._entries if self._may_go(d, gone, keep)), None)
            if victim is None:
                break
            gone.add(victim)
            needed_bytes -= self._entries[victim].size_bytes
        return gone

    def _may_go(self, digest: bytes, gone: set[bytes], keep: set[bytes]) -> bool:
        return (
            digest not in keep and digest not in gone and self._children.get(digest, set()) <= gone
        )

    def _spared(self, incoming: Sequence[Snapshot]) -> set[bytes]:
        """What is pinned, what is being put, and what is above that."""
        keep: set[bytes] = set().union(*self._pins.values())
        for snapshot in incoming:
            keep.add(snapshot.digest)
            digest = snapshot.parent
            while digest is not None and digest not in keep and digest in self._entries:
                keep.add(digest)
                digest = self._entries[digest].info.parent
        return keep
