# SPDX-License-Identifier: Apache-2.0
"""Snapshots over a database: named buffers under digests. See `records.Snapshots`.

Writes belong to the thread that calls; a reader is one read transaction. The order of use is kept
in memory between writes (`touch`) and written with the next one.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice

from . import keys, values
from .budgets import COMMIT_BYTES, DiskBudget, PagesHeld
from .errors import StorageError, StoreFull
from .eviction import Victim, ancestors, choose, delete_victims, footprint, load_or_none
from .names import MAX_OWNER_BYTES, encode_name
from .records import Snapshot, SnapshotInfo
from .snapshot_checks import check_digest, check_targets, ended_reader, snapshot_info
from .snapshot_rows import (
    Counters,
    Stored,
    children,
    copy_into,
    cut,
    delete_chunks,
    delete_record,
    load_counters,
    load_record,
    put_chunks,
    put_empty,
    restamp,
    save_counters,
    save_record,
)
from .transactions import Environment, Transaction

TRANSACTION_BYTES = 8 << 20
MIN_EVICTION_BYTES = 1 << 20
# Looking for the oldest leaf may mean to look at many old branches: make room for several puts.
EVICTION_SHARE = 64
DISK_FULL = "the disk is nearly full: the oldest states were evicted"
MAX_ATTEMPTS = 4  # of one write on a full disk, each after evicting what it needs


@dataclass(frozen=True)
class Evicted:
    """What an eviction did. `size_bytes`: about how much room it made."""

    count: int
    size_bytes: int


class StoredReader:
    """`records.SnapshotReader` on one read transaction, until `end`."""

    def __init__(self, txn: Transaction) -> None:
        self._open_txn: Transaction | None = txn

    @property
    def _txn(self) -> Transaction:
        if self._open_txn is None:
            raise ended_reader()
        return self._open_txn

    def end(self) -> None:
        self._open_txn = None

    def info(self, digest: bytes) -> SnapshotInfo | None:
        stored = load_record(self._txn, check_digest(digest))
        return None if stored is None else stored.info

    def read_into(self, digest: bytes, buffers: Mapping[str, memoryview]) -> None:
        txn = self._txn
        stored = load_record(txn, check_digest(digest))
        if stored is None:
            raise KeyError(digest)
        copy_into(txn, digest, stored, check_targets(stored.info, buffers))


class StoredSnapshots:
    """`records.Snapshots` in an environment. `notify` gets a sentence when something happened that
    a person should know."""

    def __init__(
        self,
        environment: Environment,
        budget: DiskBudget,
        notify: Callable[[str], None],
    ) -> None:
        self._environment = environment
        self._budget = budget
        self._notify = notify
        self._lock = threading.Lock()
        self._touched: dict[bytes, None] = {}  # in order of use; guarded by the lock

    def put(self, snapshots: Sequence[Snapshot]) -> None:
        infos = [snapshot_info(snapshot) for snapshot in snapshots]
        group: list[tuple[Snapshot, SnapshotInfo]] = []
        group_bytes = 0
        for snapshot, info in zip(snapshots, infos, strict=True):
            size_bytes = footprint(sum(info.sizes.values()))
            if group and group_bytes + size_bytes > TRANSACTION_BYTES:
                self._put_group(group)
                group, group_bytes = [], 0
            if size_bytes > TRANSACTION_BYTES:
                self._put_large(snapshot, info)
            else:
                group.append((snapshot, info))
                group_bytes += size_bytes
        if group:
            self._put_group(group)

    def reader(self) -> AbstractContextManager[StoredReader]:
        return self._reader()

    @contextmanager
    def _reader(self) -> Iterator[StoredReader]:
        with self._environment.read() as txn:
            reader = StoredReader(txn)
            try:
                yield reader
            finally:
                reader.end()

    def contains(self, digest: bytes) -> bool:
        with self._environment.read() as txn:
            return txn.get(keys.record(check_digest(digest))) is not None

    def touch(self, digests: Sequence[bytes]) -> None:
        with self._lock:
            for digest in digests:
                self._touched.pop(check_digest(digest), None)
                self._touched[digest] = None

    def remove(self, digests: Sequence[bytes]) -> int:
        removed = 0
        with self._write() as txn:
            pending = [check_digest(digest) for digest in digests]
            seen = set(pending)
            while pending:
                digest = pending.pop()
                below = [child for child in children(txn, digest) if child not in seen]
                pending += below
                seen.update(below)
                if txn.get(keys.record(digest)) is not None:
                    delete_record(txn, digest, load_or_none(txn, digest))
                    removed += 1
        if removed:
            self._release_pages()
        return removed

    def children(self, digest: bytes) -> list[bytes]:
        with self._environment.read() as txn:
            return children(txn, check_digest(digest))

    def pin(self, owner: str, digests: Sequence[bytes]) -> None:
        key = keys.owner(encode_name("owner", owner, MAX_OWNER_BYTES))
        joined = b"".join(check_digest(digest) for digest in dict.fromkeys(digests))
        with self._write() as txn:
            if joined:
                values.save(txn, key, joined)
            else:
                values.discard(txn, key)

    def size_bytes(self) -> int:
        with self._environment.read() as txn:
            return txn.pages_in_use() * self._environment.page_bytes

    def flush(self) -> None:
        self.write_touches()
        self._environment.sync()

    def write_touches(self) -> None:
        """Write the order of use that `touch` collected, if there is any."""
        with self._lock:
            pending = bool(self._touched)
        if pending and not self._environment.read_only:
            # They stay in memory where writing them would grow the file beyond its limit.
            with suppress(PagesHeld), self._write():
                self._budget.check_readers(0)

    def shrink(self, limit_bytes: int) -> int:
        count = 0
        while (excess_bytes := self.size_bytes() - limit_bytes) > 0:
            evicted = self._evict(0, set(), wanted_bytes=excess_bytes)
            if not evicted.count:
                break
            count += evicted.count  # what a victim frees is an estimate: look again
        return count

    def sweep(self) -> int:
        """Remove what a killed process left half written; returns the number of blobs. Only while
        no other process has the store open."""
        with self._environment.read() as txn:
            blobs = [keys.last_number(key) for key, _ in txn.scan(keys.WRITING)]
        for blob in blobs:
            self._drop_blob(blob)
        return len(blobs)

    @contextmanager
    def _write(self) -> Iterator[Transaction]:
        """A write transaction that first brings the order of use up to date."""
        with self._lock:
            touched, self._touched = self._touched, {}
        try:
            with self._environment.write() as txn:
                if touched:
                    counters = load_counters(txn)
                    for digest in touched:
                        counters = restamp(txn, digest, counters)
                    save_counters(txn, counters)
                yield txn
        except BaseException:
            with self._lock:
                self._touched = {**touched, **self._touched}
            raise

    def _put_group(self, group: Sequence[tuple[Snapshot, SnapshotInfo]]) -> None:
        """Write small snapshots in one transaction."""

        def write(txn: Transaction) -> None:
            counters = load_counters(txn)
            for snapshot, info in group:
                if load_or_none(txn, snapshot.digest) is not None:
                    counters = restamp(txn, snapshot.digest, counters)
                    continue
                delete_record(txn, snapshot.digest, None)  # if there is one, it is damaged
                put_chunks(txn, counters.blob, 0, cut(snapshot))
                stored = Stored(info, counters.blob, counters.stamp)
                save_record(txn, snapshot.digest, stored)
                counters = Counters(counters.blob + 1, counters.stamp + 1)
            save_counters(txn, counters)

        protected, needed_bytes = self._wants(group)
        if not needed_bytes:
            self.touch([snapshot.digest for snapshot, _ in group])
            return
        self._make_room(needed_bytes, protected)
        self._attempt(write, needed_bytes, protected)

    def _put_large(self, snapshot: Snapshot, info: SnapshotInfo) -> None:
        """Write one snapshot in several transactions; the last makes it visible."""
        protected, needed_bytes = self._wants([(snapshot, info)])
        if not needed_bytes:
            self.touch([snapshot.digest])
            return
        self._make_room(needed_bytes, protected)
        blob = 0

        def begin(txn: Transaction) -> None:
            nonlocal blob
            counters = load_counters(txn)
            blob = counters.blob
            put_empty(txn, keys.writing(blob))
            save_counters(txn, replace(counters, blob=blob + 1))

        def finish(txn: Transaction) -> None:
            counters = load_counters(txn)
            txn.delete(keys.writing(blob))
            if load_or_none(txn, snapshot.digest) is not None:  # another process was faster
                delete_chunks(txn, blob)
                save_counters(txn, restamp(txn, snapshot.digest, counters))
                return
            save_record(txn, snapshot.digest, Stored(info, blob, counters.stamp))
            save_counters(txn, replace(counters, stamp=counters.stamp + 1))

        self._attempt(begin, 0, protected)
        try:
            chunks = cut(snapshot)
            first = 0
            while batch := list(islice(chunks, TRANSACTION_BYTES // values.PAYLOAD_BYTES)):
                self._attempt(_ChunkWriter(blob, first, batch), TRANSACTION_BYTES, protected)
                first += len(batch)
            self._attempt(finish, 0, protected)
        except BaseException:
            with suppress(StorageError):  # the next exclusive opening sweeps what this cannot
                self._drop_blob(blob)
            raise

    def _wants(self, group: Sequence[tuple[Snapshot, SnapshotInfo]]) -> tuple[set[bytes], int]:
        """What eviction must spare while `group` is written (its snapshots and what is above
        them), and the bytes that the unknown ones need."""
        protected: set[bytes] = set()
        needed_bytes = 0
        with self._environment.read() as txn:
            for snapshot, info in group:
                if load_or_none(txn, snapshot.digest) is None:
                    needed_bytes += footprint(sum(info.sizes.values()))
                protected.add(snapshot.digest)
                protected.update(ancestors(txn, snapshot.parent, protected))
        return protected, needed_bytes

    def _make_room(self, needed_bytes: int, protected: set[bytes]) -> None:
        """Evict until `needed_bytes` fit into the budget. StoreFull, with nothing evicted, if they
        cannot."""
        with self._environment.write():  # while nobody else takes free pages
            self._budget.check_readers(needed_bytes + COMMIT_BYTES)
        limit = self._budget.limit()
        excess_bytes = self.size_bytes() + needed_bytes - limit.size_bytes
        if excess_bytes <= 0:
            return
        wanted_bytes = excess_bytes + limit.size_bytes // EVICTION_SHARE
        if not self._evict(excess_bytes, protected, wanted_bytes=wanted_bytes).count:
            raise StoreFull(
                "the states do not fit into the disk budget and nothing more can be evicted",
                value=f"{needed_bytes} bytes needed",
                limit=f"{limit.size_bytes} bytes for states",
                remedy="raise the disk budget, free disk space, unpin or delete sessions",
            )
        if limit.by_disk:
            self._notify(DISK_FULL)

    def _evict(self, needed_bytes: int, protected: set[bytes], *, wanted_bytes: int = 0) -> Evicted:
        """Delete the least valuable snapshots until `needed_bytes`, and if possible `wanted_bytes`,
        are free; nothing is deleted if that would not free `needed_bytes`. A delete writes pages,
        too: on a full disk it goes a few at a time."""
        self._environment.reap_readers()
        wanted_bytes = max(needed_bytes, wanted_bytes)
        portion_bytes, evicted = wanted_bytes, Evicted(0, 0)
        victims: list[Victim] = []
        while evicted.size_bytes < wanted_bytes:
            try:
                with self._environment.write() as txn:
                    limit_bytes = min(portion_bytes, wanted_bytes - evicted.size_bytes)
                    victims = choose(txn, limit_bytes, protected, self._recent())
                    gained_bytes = sum(victim.freed_bytes for victim in victims)
                    everything = portion_bytes == wanted_bytes and not evicted.count
                    if not victims or (everything and gained_bytes < needed_bytes):
                        break
                    delete_victims(txn, victims)
                self._release_pages()
                evicted = Evicted(evicted.count + len(victims), evicted.size_bytes + gained_bytes)
            except StoreFull:
                if len(victims) <= 1:
                    raise
                portion_bytes //= 4
        return evicted

    def _recent(self) -> list[bytes]:
        with self._lock:
            return list(self._touched)

    def _release_pages(self) -> None:
        """A small commit after one that deleted: LMDB reuses pages one commit later, and until then
        a put would grow the file."""
        with self._environment.write() as txn:
            save_counters(txn, load_counters(txn))

    def _attempt(
        self, write: Callable[[Transaction], None], needed_bytes: int, protected: set[bytes]
    ) -> None:
        """Run `write` in a transaction; on a full disk evict what it needs and try again."""
        for attempt in range(MAX_ATTEMPTS):
            try:
                with self._write() as txn:
                    self._budget.check_readers(needed_bytes)
                    self._environment.reserve(self._growth_bytes(txn, needed_bytes))
                    write(txn)
                return
            except StoreFull:
                # What is evicted beside a reader makes no room before it ends.
                hopeless = attempt == MAX_ATTEMPTS - 1 or self._environment.readers()
                if hopeless or not self._evict(needed_bytes + MIN_EVICTION_BYTES, protected).count:
                    raise
                self._notify(DISK_FULL)

    def _growth_bytes(self, txn: Transaction, needed_bytes: int) -> int:
        """By how much a write of `needed_bytes` may grow the file, beyond the pages that are free
        in it."""
        used_bytes = txn.pages_in_use() * self._environment.page_bytes
        return max(0, used_bytes + needed_bytes - self._environment.file_bytes())

    def _drop_blob(self, blob: int) -> None:
        with self._environment.write() as txn:
            delete_chunks(txn, blob)
            txn.delete(keys.writing(blob))


class _ChunkWriter:
    """Writes a run of chunks of a blob."""

    def __init__(self, blob: int, first: int, chunks: Sequence[bytes | memoryview]) -> None:
        self._blob = blob
        self._first = first
        self._chunks = chunks

    def __call__(self, txn: Transaction) -> None:
        put_chunks(txn, self._blob, self._first, self._chunks)
