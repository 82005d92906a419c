# SPDX-License-Identifier: Apache-2.0
"""The rows of the snapshots inside one transaction: records to bytes and back, each verified.

A snapshot's buffers lie one after another in one blob, cut into chunks of values.PAYLOAD_BYTES
regardless of where a buffer ends, so that sixty small buffers cost no more keys than one large:

    buffers   | k0          | v0          | conv | k1          | …
    chunks    |   0   |   1   |   2   |   3   |   4   |   5   | …
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from . import keys, values
from .errors import StoreDamaged
from .records import Snapshot, SnapshotInfo
from .transactions import Transaction


@dataclass(frozen=True)
class Stored:
    """The record of one snapshot. `stamp` orders snapshots by their last use."""

    info: SnapshotInfo
    blob: int
    stamp: int

    @property
    def size_bytes(self) -> int:
        return sum(self.info.sizes.values())


@dataclass(frozen=True)
class Counters:
    """The next numbers to give."""

    blob: int
    stamp: int


def pack_record(stored: Stored) -> bytes:
    info = stored.info
    sizes = list(info.sizes.items())
    return values.pack(info.parent, info.meta, sizes, stored.blob, stored.stamp)


def load_record(txn: Transaction, digest: bytes) -> Stored | None:
    """The verified record of a snapshot, or None. StoreDamaged."""
    key = keys.record(digest)
    value = txn.get(key)
    if value is None:
        return None
    what = f"the record of snapshot {digest.hex()[:16]}…"
    payload = values.unseal(values.WHOLE, key, value, what)
    parent, meta, sizes, blob, stamp = values.unpack(bytes(payload), 5, what)
    return Stored(SnapshotInfo(parent, meta, dict(sizes)), blob, stamp)


def save_record(txn: Transaction, digest: bytes, stored: Stored) -> None:
    """Write the record and its entries in the children and use indexes."""
    key = keys.record(digest)
    txn.put(key, values.seal(values.WHOLE, key, pack_record(stored)))
    put_empty(txn, keys.use(stored.stamp, digest))
    if stored.info.parent is not None:
        put_empty(txn, keys.child(stored.info.parent, digest))


def delete_record(txn: Transaction, digest: bytes, stored: Stored | None) -> None:
    """Remove a snapshot with its chunks and index entries. `stored` None: its record is damaged, so
    only the record goes; a rewrite of the file drops what hung on it."""
    txn.delete(keys.record(digest))
    if stored is None:
        return
    delete_chunks(txn, stored.blob)
    txn.delete(keys.use(stored.stamp, digest))
    if stored.info.parent is not None:
        txn.delete(keys.child(stored.info.parent, digest))


def delete_chunks(txn: Transaction, blob: int) -> None:
    """Remove every chunk of a blob."""
    for key in [key for key, _ in txn.scan(keys.chunks(blob))]:
        txn.delete(key)


def put_chunks(
    txn: Transaction, blob: int, first: int, chunks: Iterable[bytes | memoryview]
) -> None:
    """Write chunks `first`, `first + 1`, … of a blob."""
    for index, chunk in enumerate(chunks, start=first):
        key = keys.chunk(blob, index)
        txn.put(key, values.seal(values.PIECE, key, chunk))


def restamp(txn: Transaction, digest: bytes, counters: Counters) -> Counters:
    """Mark a snapshot as used now, if it is there and readable."""
    try:
        stored = load_record(txn, digest)
    except StoreDamaged:
        return counters
    if stored is None:
        return counters
    txn.delete(keys.use(stored.stamp, digest))
    save_record(txn, digest, replace(stored, stamp=counters.stamp))
    return replace(counters, stamp=counters.stamp + 1)


def children(txn: Transaction, digest: bytes) -> list[bytes]:
    prefix = keys.children(digest)
    return [key[len(prefix) :] for key, _ in txn.scan(prefix)]


def put_empty(txn: Transaction, key: bytes) -> None:
    txn.put(key, values.seal(values.WHOLE, key, b""))


def load_counters(txn: Transaction) -> Counters:
    payload = values.load(txn, keys.COUNTERS, "the snapshot counters")
    if payload is None:
        return Counters(1, 1)
    return Counters(*values.unpack(payload, 2, "the snapshot counters"))


def save_counters(txn: Transaction, counters: Counters) -> None:
    values.save(txn, keys.COUNTERS, values.pack(counters.blob, counters.stamp))


def num_chunks(size_bytes: int) -> int:
    return -(-size_bytes // values.PAYLOAD_BYTES)


def cut(snapshot: Snapshot) -> Iterator[bytes | memoryview]:
    """The payloads of the snapshot's chunks, in order. A chunk inside one buffer is a view."""
    pending: list[memoryview] = []
    missing = values.PAYLOAD_BYTES
    for buffer in snapshot.buffers.values():
        view = memoryview(buffer).cast("B")
        while len(view) >= missing:
            pending.append(view[:missing])
            view = view[missing:]
            yield pending[0] if len(pending) == 1 else b"".join(pending)
            pending, missing = [], values.PAYLOAD_BYTES
        if len(view):
            pending.append(view)
            missing -= len(view)
    if pending:
        yield b"".join(pending)


def copy_into(
    txn: Transaction, digest: bytes, stored: Stored, targets: Mapping[str, memoryview]
) -> None:
    """Copy buffers out of the blob, each chunk verified first. Chunks without a wanted byte are
    not read."""
    start = 0
    wanted: list[tuple[int, int, memoryview]] = []  # (first byte in the blob, end, target)
    for name, size_bytes in stored.info.sizes.items():
        if size_bytes and name in targets:
            wanted.append((start, start + size_bytes, targets[name]))
        start += size_bytes
    chunk_index, chunk = -1, memoryview(b"")
    for first, end, target in wanted:
        position = first
        while position < end:
            index, offset = divmod(position, values.PAYLOAD_BYTES)
            if index != chunk_index:
                chunk_index, chunk = index, load_chunk(txn, digest, stored, index)
            count = min(end - position, len(chunk) - offset)
            target[position - first : position - first + count] = chunk[offset : offset + count]
            position += count


def load_chunk(txn: Transaction, digest: bytes, stored: Stored, index: int) -> memoryview:
    """The verified payload of one chunk, of exactly the length it must have. StoreDamaged."""
    key = keys.chunk(stored.blob, index)
    what = f"chunk {index} of snapshot {digest.hex()[:16]}…"
    value = txn.get(key)
    if value is None:
        raise StoreDamaged(f"{what} is missing")
    payload = values.unseal(values.PIECE, key, value, what)
    expected = min(values.PAYLOAD_BYTES, stored.size_bytes - index * values.PAYLOAD_BYTES)
    if len(payload) != expected:
        raise StoreDamaged(f"{what} has another length", value=len(payload), limit=expected)
    return payload
