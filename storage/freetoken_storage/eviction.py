# SPDX-License-Identifier: Apache-2.0
"""Which snapshots go when room is needed: least recently used leaves that nobody protects."""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from . import keys, values
from .errors import StoreDamaged
from .snapshot_rows import Stored, children, delete_record, load_record
from .transactions import Transaction

PAGE_BYTES = 4096
INDEX_BYTES = 1024  # record, child, use and chunk keys of a snapshot in leaf pages, rounded up


@dataclass(frozen=True)
class Victim:
    """A snapshot to delete. `stored` is None where its record is gone or damaged; `stamp` is its
    place in the use index."""

    digest: bytes
    stamp: int
    stored: Stored | None

    @property
    def freed_bytes(self) -> int:
        return footprint(0 if self.stored is None else self.stored.size_bytes)


def footprint(size_bytes: int) -> int:
    """Bytes of pages that a snapshot with this many buffer bytes occupies."""
    full, rest = divmod(size_bytes, values.PAYLOAD_BYTES)
    full_bytes = values.PAYLOAD_BYTES + values.HEADER_BYTES + values.PAGE_HEADER_BYTES
    rest_bytes = -(-(rest + values.HEADER_BYTES + values.PAGE_HEADER_BYTES) // PAGE_BYTES)
    return full * full_bytes + (rest_bytes * PAGE_BYTES if rest else 0) + INDEX_BYTES


def load_pins(txn: Transaction) -> set[bytes]:
    """Every digest pinned by some owner."""
    pinned: set[bytes] = set()
    for key, value in txn.scan(keys.OWNER):
        what = f"the pins of {key[1:].decode(errors='replace')!r}"
        pinned.update(split_digests(values.read(txn, key, value, what)))
    return pinned


def split_digests(joined: bytes) -> list[bytes]:
    size = keys.DIGEST_BYTES
    return [joined[start : start + size] for start in range(0, len(joined), size)]


def ancestors(txn: Transaction, digest: bytes | None, known: set[bytes]) -> set[bytes]:
    """`digest` and what is above it, up to the first that is absent or in `known`."""
    found: set[bytes] = set()
    while digest is not None and digest not in known and digest not in found:
        found.add(digest)
        stored = load_or_none(txn, digest)
        digest = None if stored is None else stored.info.parent
    return found


def load_or_none(txn: Transaction, digest: bytes) -> Stored | None:
    """The record, or None where it is absent or damaged: a state that cannot be read is of no use
    to anyone, so it may go."""
    try:
        return load_record(txn, digest)
    except StoreDamaged:
        return None


@dataclass(frozen=True, order=True)
class _Entry:
    """A snapshot at its place in the order of use: written stamps first, then what was used since,
    in that order. `stamp` is what its entry in the use index says."""

    unwritten: bool
    place: int
    digest: bytes
    stamp: int = field(compare=False)


def choose(
    txn: Transaction, needed_bytes: int, protected: set[bytes], recent: Sequence[bytes]
) -> list[Victim]:
    """Snapshots to delete, in order, so that at least `needed_bytes` become free, or all that may
    go if that is less. Reads only. `recent`: used since the last write, in that order.

    One scan over the use index, oldest first, skips whatever has children; a parent whose last
    child was chosen joins through the heap, at its own place in the order of use."""
    keep = protected | load_pins(txn)
    places = {digest: place for place, digest in enumerate(recent)}
    chosen: dict[bytes, Victim] = {}
    exposed: list[_Entry] = []
    freed_bytes = 0

    def is_free_leaf(digest: bytes) -> bool:
        return digest not in keep and all(child in chosen for child in children(txn, digest))

    leaves = (entry for entry in _by_use(txn, places) if is_free_leaf(entry.digest))
    for entry in _merge(leaves, exposed):
        if entry.digest in chosen:
            continue
        stored = load_or_none(txn, entry.digest)
        if stored is not None and stored.stamp != entry.stamp:
            continue  # left behind by a damaged record that was written anew
        chosen[entry.digest] = Victim(entry.digest, entry.stamp, stored)
        freed_bytes += chosen[entry.digest].freed_bytes
        if freed_bytes >= needed_bytes:
            break
        parent = None if stored is None else stored.info.parent
        above = None if parent is None else load_or_none(txn, parent)
        if parent is not None and above is not None and is_free_leaf(parent):
            heapq.heappush(exposed, _entry(parent, above.stamp, places))
    return list(chosen.values())


def delete_victims(txn: Transaction, victims: Sequence[Victim]) -> None:
    for victim in victims:
        delete_record(txn, victim.digest, victim.stored)
        txn.delete(keys.use(victim.stamp, victim.digest))


def _entry(digest: bytes, stamp: int, places: Mapping[bytes, int]) -> _Entry:
    unwritten = digest in places
    return _Entry(unwritten, places[digest] if unwritten else stamp, digest, stamp)


def _by_use(txn: Transaction, places: Mapping[bytes, int]) -> Iterator[_Entry]:
    """Every snapshot, least recently used first."""
    for key, _ in txn.scan(keys.USE):
        digest = keys.tail(key)
        if digest not in places:
            yield _entry(digest, keys.first_number(key), places)
    for digest in places:
        stored = load_or_none(txn, digest)
        if stored is not None:
            yield _entry(digest, stored.stamp, places)


def _merge(leaves: Iterator[_Entry], exposed: list[_Entry]) -> Iterator[_Entry]:
    """Both sources in order; `exposed` is a heap that grows between two steps."""
    for entry in leaves:
        while exposed and exposed[0] < entry:
            yield heapq.heappop(exposed)
        yield entry
    while exposed:
        yield heapq.heappop(exposed)
