# SPDX-License-Identifier: Apache-2.0
"""What every store's `snapshots` must do: functions that take an empty, writable store.

BUDGET_CHECKS want one whose disk budget is BUDGET_BYTES.
"""

import hashlib
import random
from collections.abc import Iterable

from .errors import InvalidName, InvalidRecord, StoreClosed, StoreFull
from .records import Snapshot
from .session_conformance import AnyDatabase, Check, refused

BUDGET_BYTES = 16 << 20
SNAPSHOT_BYTES = 1 << 20
FITTING = 10  # snapshots of SNAPSHOT_BYTES that certainly fit into the budget
TOO_MANY = 17  # and so many that certainly do not


def digest(label: str) -> bytes:
    return hashlib.blake2b(label.encode(), digest_size=32).digest()


def snapshot(label: str, parent: str | None = None, size_bytes: int = 1000) -> Snapshot:
    """A snapshot whose content follows from its label."""
    content = random.Random(label).randbytes(size_bytes)
    return Snapshot(
        digest(label), None if parent is None else digest(parent), {"kv": content}, label.encode()
    )


def read_back(store: AnyDatabase, expected: Snapshot) -> None:
    """The stored snapshot must equal `expected`, byte for byte."""
    with store.snapshots.reader() as reader:
        info = reader.info(expected.digest)
        assert info is not None and info.parent == expected.parent and info.meta == expected.meta
        assert list(info.sizes) == list(expected.buffers), "buffers changed their order"
        targets = {name: bytearray(size) for name, size in info.sizes.items()}
        reader.read_into(
            expected.digest, {name: memoryview(target) for name, target in targets.items()}
        )
    for name, buffer in expected.buffers.items():
        assert targets[name] == bytes(buffer), f"buffer {name} differs"


def present(store: AnyDatabase, labels: Iterable[str]) -> list[str]:
    return [label for label in labels if store.snapshots.contains(digest(label))]


def round_trips(store: AnyDatabase) -> None:
    """Sizes around every edge of the chunks, several buffers, views, odd element types."""
    piece = 65_511  # payload bytes of one stored chunk
    for size in (0, 1, 63, piece - 1, piece, piece + 1, 2 * piece, 3 << 20, (1 << 20) + 7):
        single = snapshot(f"size {size}", size_bytes=size)
        store.snapshots.put([single])
        read_back(store, single)
    data = random.Random(7).randbytes(300_000)
    many = Snapshot(
        digest("many"),
        digest("absent parent"),
        {
            "empty": b"",
            "a": data[:10],
            "view": memoryview(data)[5:200_005],
            "words": memoryview(data[:80_000]).cast("H"),
            "b": data[10:],
        },
        meta=bytes(1000),
    )
    store.snapshots.put([many])
    read_back(store, many)
    none = Snapshot(digest("no buffers"), None, {})
    store.snapshots.put([none])
    read_back(store, none)


def large_snapshots(store: AnyDatabase) -> None:
    """Larger than one transaction may be, between small ones."""
    group = [
        snapshot("small 1"),
        snapshot("large", "small 1", size_bytes=20 << 20),
        snapshot("small 2", "large"),
    ]
    store.snapshots.put(group)
    for single in group:
        read_back(store, single)
    size_bytes = store.snapshots.size_bytes()
    store.snapshots.put(group)
    assert store.snapshots.size_bytes() == size_bytes, "a known digest was written again"


def partial_reads(store: AnyDatabase) -> None:
    data = random.Random(3).randbytes(400_000)
    parts = {"a": data[:100_001], "b": data[100_001:100_002], "c": data[100_002:]}
    store.snapshots.put([Snapshot(digest("x"), None, parts)])
    for name in parts:
        target = bytearray(len(parts[name]))
        with store.snapshots.reader() as reader:
            reader.read_into(digest("x"), {name: memoryview(target)})
            reader.read_into(digest("x"), {})
        assert target == parts[name]


def refused_reads(store: AnyDatabase) -> None:
    store.snapshots.put([snapshot("x", size_bytes=100)])
    right = memoryview(bytearray(100))
    with store.snapshots.reader() as reader:
        assert reader.info(digest("y")) is None
        for unknown in ((digest("y"), "kv"), (digest("x"), "other")):
            try:
                reader.read_into(unknown[0], {unknown[1]: right})
            except KeyError:
                pass
            else:
                raise AssertionError("an unknown name was read")
        for wrong in (
            memoryview(bytearray(99)),
            memoryview(bytearray(101)),
            memoryview(bytes(100)),
            memoryview(bytearray(200))[::2],
        ):
            with refused(InvalidRecord, "kv"):
                reader.read_into(digest("x"), {"kv": wrong})
        with refused(InvalidRecord):
            reader.info(b"short")
    with refused(StoreClosed):
        reader.info(digest("x"))


def refused_puts(store: AnyDatabase) -> None:
    good = snapshot("good")
    for bad in (
        Snapshot(b"short", None, {}),
        Snapshot(digest("x"), b"short", {}),
        Snapshot(digest("x"), digest("x"), {}),
        Snapshot(digest("x"), None, {"a": memoryview(bytes(10))[::2]}),
        Snapshot(digest("x"), None, {}, meta=bytes(1 << 20)),
    ):
        with refused(InvalidRecord):
            store.snapshots.put([good, bad])
    with refused(InvalidName):
        store.snapshots.put([good, Snapshot(digest("x"), None, {"": b""})])
    with refused(InvalidName):
        store.snapshots.pin("", [digest("x")])
    with refused(InvalidRecord):
        store.snapshots.pin("owner", [b"short"])
    assert not store.snapshots.contains(good.digest), "a refused put wrote something"


def removal(store: AnyDatabase) -> None:
    snapshots = store.snapshots
    snapshots.put(
        [snapshot("a"), snapshot("b", "a"), snapshot("c", "b"), snapshot("d", "b"), snapshot("e")]
    )
    assert snapshots.children(digest("b")) == sorted([digest("c"), digest("d")])
    assert snapshots.children(digest("e")) == snapshots.children(digest("none")) == []
    assert snapshots.remove([digest("none")]) == 0
    snapshots.pin("owner", [digest("d")])
    assert snapshots.remove([digest("b"), digest("c")]) == 3, "a pin must not stop a removal"
    assert present(store, "abcde") == ["a", "e"]
    assert snapshots.children(digest("a")) == []
    snapshots.put([snapshot("d", "b")])
    assert snapshots.remove([digest("b")]) == 1, "descendants of an absent snapshot stay"
    read_back(store, snapshot("a"))


def parents_in_a_circle(store: AnyDatabase) -> None:
    """Nobody says that digests form a tree; whoever walks up must end."""
    circle = [snapshot("a", "c"), snapshot("b", "a"), snapshot("c", "b")]
    for single in circle:
        store.snapshots.put([single])
    store.snapshots.put([snapshot("d", "b")])
    for single in circle:
        read_back(store, single)
    assert store.snapshots.remove([digest("b")]) == 4


def consistent_readers(store: AnyDatabase) -> None:
    """A reader sees what was there when it began, whatever happens beside it."""
    first = snapshot("a", size_bytes=200_000)
    store.snapshots.put([first])
    with store.snapshots.reader() as reader:
        store.snapshots.remove([first.digest])
        store.snapshots.put([snapshot("b")])
        target = bytearray(200_000)
        reader.read_into(first.digest, {"kv": memoryview(target)})
        assert target == bytes(first.buffers["kv"])
        assert reader.info(digest("b")) is None
    assert present(store, "ab") == ["b"]


def flushes(store: AnyDatabase) -> None:
    store.snapshots.put([snapshot("a")])
    store.snapshots.touch([digest("a"), digest("none")])
    store.snapshots.flush()
    read_back(store, snapshot("a"))


def sizes_shrink(store: AnyDatabase) -> None:
    empty_bytes = store.snapshots.size_bytes()
    store.snapshots.put([snapshot("a", size_bytes=SNAPSHOT_BYTES)])
    full_bytes = store.snapshots.size_bytes()
    assert SNAPSHOT_BYTES <= full_bytes - empty_bytes <= 1.1 * SNAPSHOT_BYTES
    store.snapshots.remove([digest("a")])
    assert store.snapshots.size_bytes() <= empty_bytes + 40_960


def _fill(store: AnyDatabase, labels: Iterable[str], parent: str | None = None) -> None:
    for label in labels:
        store.snapshots.put([snapshot(label, parent, SNAPSHOT_BYTES)])


def oldest_go_first(store: AnyDatabase) -> None:
    labels = [f"n{i}" for i in range(FITTING + TOO_MANY)]
    _fill(store, labels)
    left = present(store, labels)
    assert FITTING <= len(left) < TOO_MANY
    assert left == labels[-len(left) :], "something newer went before something older"
    assert store.snapshots.size_bytes() <= BUDGET_BYTES
    read_back(store, snapshot(left[0], size_bytes=SNAPSHOT_BYTES))


def touched_stay(store: AnyDatabase) -> None:
    labels = [f"n{i}" for i in range(FITTING)]
    _fill(store, labels)
    store.snapshots.touch([digest(labels[0])])
    store.snapshots.put([snapshot(labels[1], size_bytes=SNAPSHOT_BYTES)])  # putting is touching
    _fill(store, [f"m{i}" for i in range(FITTING)])
    left = present(store, labels)
    assert labels[0] in left and labels[1] in left and labels[2] not in left


def children_go_first(store: AnyDatabase) -> None:
    chain = [f"c{i}" for i in range(FITTING)]
    for parent, label in zip([None, *chain], chain, strict=False):
        _fill(store, [label], parent)
    _fill(store, [f"other{i}" for i in range(FITTING)])
    left = present(store, chain)
    assert left and left == chain[: len(left)], "a parent went before its child"
    assert len(left) < FITTING


def one_chain_makes_room(store: AnyDatabase) -> None:
    """Whatever becomes a leaf because its child goes may go at once, as far up as is needed."""
    chain = [f"c{i}" for i in range(FITTING)]
    for parent, label in zip([None, *chain], chain, strict=False):
        _fill(store, [label], parent)
    large = snapshot("large", size_bytes=9 * SNAPSHOT_BYTES)
    store.snapshots.put([large])
    read_back(store, large)
    left = present(store, chain)
    assert left == chain[: len(left)] and 2 <= len(left) <= FITTING - 3


def children_older_than_their_parents(store: AnyDatabase) -> None:
    """A parent that comes after its child in the order of use goes once, and counts once."""
    for i in range(FITTING // 2):
        _fill(store, [f"c{i}"], f"p{i}")
        _fill(store, [f"p{i}"])
    large = snapshot("large", size_bytes=9 * SNAPSHOT_BYTES)
    store.snapshots.put([large])
    read_back(store, large)
    assert store.snapshots.size_bytes() <= BUDGET_BYTES
    labels = [label for i in range(FITTING // 2) for label in (f"c{i}", f"p{i}")]
    left = present(store, labels)
    assert left and left == labels[-len(left) :], "they went in another order than they came"


def chains_under_construction(store: AnyDatabase) -> None:
    """What a put needs above it is not evicted for it, however old it is."""
    _fill(store, ["root"])
    _fill(store, [f"other{i}" for i in range(FITTING)])
    chain = ["root", *(f"c{i}" for i in range(FITTING - 1))]
    for parent, label in zip(chain, chain[1:], strict=False):
        _fill(store, [label], parent)
    assert present(store, chain) == chain


def pinned_stay(store: AnyDatabase) -> None:
    _fill(store, ["a"])
    _fill(store, ["b"], "a")
    _fill(store, ["free"])
    store.snapshots.pin("one", [digest("b"), digest("not there")])
    store.snapshots.pin("two", [digest("b")])
    store.snapshots.pin("two", [])
    _fill(store, [f"other{i}" for i in range(TOO_MANY)])
    assert present(store, ["a", "b", "free"]) == ["a", "b"]
    store.snapshots.pin("one", [digest("free")])
    _fill(store, [f"again{i}" for i in range(TOO_MANY)])
    assert present(store, ["a", "b"]) == []


def nothing_left_to_evict(store: AnyDatabase) -> None:
    labels = [f"p{i}" for i in range(FITTING)]
    _fill(store, labels)
    store.snapshots.pin("owner", [digest(label) for label in labels])
    others = [f"n{i}" for i in range(TOO_MANY)]
    with refused(StoreFull, "limit", "remedy"):
        store.snapshots.put([snapshot("huge", size_bytes=BUDGET_BYTES + 1)])
    assert present(store, labels) == labels, "a hopeless put evicted something"
    _fill(store, others[:2])
    with refused(StoreFull):
        store.snapshots.put([snapshot("large", size_bytes=10 * SNAPSHOT_BYTES)])
    assert present(store, labels) == labels
    for label in labels:
        read_back(store, snapshot(label, size_bytes=SNAPSHOT_BYTES))


def shrinking(store: AnyDatabase) -> None:
    """Children before parents, oldest first, pins spared; 0 drops all that may go."""
    snapshots = store.snapshots
    assert snapshots.shrink(0) == 0
    _fill(store, ["a"])
    _fill(store, ["b"], "a")
    _fill(store, ["c", "d"])
    snapshots.touch([digest("c")])
    size_bytes = snapshots.size_bytes()
    assert snapshots.shrink(size_bytes) == 0
    assert snapshots.shrink(size_bytes - SNAPSHOT_BYTES // 2) == 1
    assert present(store, "abcd") == ["a", "c", "d"]
    snapshots.pin("owner", [digest("d")])
    assert snapshots.shrink(size_bytes - 2 * SNAPSHOT_BYTES) == 1
    assert present(store, "abcd") == ["c", "d"]
    assert snapshots.shrink(0) == 1
    assert present(store, "abcd") == ["d"]
    read_back(store, snapshot("d", size_bytes=SNAPSHOT_BYTES))
    tiny = [snapshot(f"tiny{i}", size_bytes=10) for i in range(7)]
    snapshots.put(tiny)
    assert snapshots.shrink(0) == len(tiny), "small ones were left behind"


SNAPSHOT_CHECKS: tuple[Check, ...] = (
    round_trips,
    large_snapshots,
    partial_reads,
    refused_reads,
    refused_puts,
    removal,
    parents_in_a_circle,
    consistent_readers,
    flushes,
    sizes_shrink,
    shrinking,
)

BUDGET_CHECKS: tuple[Check, ...] = (
    oldest_go_first,
    touched_stay,
    children_go_first,
    one_chain_makes_room,
    children_older_than_their_parents,
    chains_under_construction,
    pinned_stay,
    nothing_left_to_evict,
)
