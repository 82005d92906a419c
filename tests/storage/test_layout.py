# SPDX-License-Identifier: Apache-2.0
"""The bytes of keys and values, as the docstrings of keys.py and values.py draw them. A change here
needs a new format version and a migration."""

import os
import re
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import msgpack  # type: ignore[import-untyped]
import pytest
import xxhash

from freetoken_storage import Database, keys, values
from freetoken_storage.audit import EVERYTHING, Limits, PageAudit
from freetoken_storage.errors import StoreDamaged
from freetoken_storage.eviction import INDEX_BYTES, footprint
from freetoken_storage.pages import NO_PAGE, read_header, read_header_of
from freetoken_storage.records import Changes, NewNode, NodeRecord, SegmentRecord, Snapshot
from freetoken_storage.session_rows import chain
from freetoken_storage.testing import snapshot

ONE, TWO = b"\x00" * 7 + b"\x01", b"\x00" * 7 + b"\x02"


def test_keys() -> None:
    """Oracle: the table in keys.py, written out by hand."""
    a, b = b"A" * 32, b"B" * 32
    assert keys.name(b"x") == b"nx"
    assert keys.meta(b"x") == b"mx"
    assert keys.scope(keys.INFO, 1) == b"i" + ONE
    assert keys.scope(keys.BODY, 1) == b"d" + ONE
    assert keys.branch(1, b"main") == b"b" + ONE + b"main"
    assert keys.log(1, 2, 1) == b"l" + ONE + TWO + ONE
    assert keys.node(1, 2) == b"t" + ONE + TWO
    assert keys.segment(1, b"id") == b"s" + ONE + b"id"
    owning = keys.segment(1, b"id")
    piece = b"x" + ONE + xxhash.xxh3_128(owning).digest() + b"\0\0\0\x05"
    assert keys.piece(keys.pieces(owning), 5) == piece
    assert keys.record(a) == b"r" + a
    assert keys.child(a, b) == b"k" + a + b
    assert keys.use(2, a) == b"u" + TWO + a
    assert keys.chunk(2, 5) == b"d" + TWO + b"\0\0\0\x05"
    assert keys.writing(2) == b"w" + TWO
    assert keys.owner(b"o") == b"oo"
    longest = max(len(keys.segment(1, b"x" * 128)), len(keys.owner(b"x" * 400)))
    assert longest <= keys.MAX_KEY_BYTES


def test_frames() -> None:
    """Oracle: the drawing in values.py, written out by hand with the xxhash package."""
    key, payload = b"some key", b"some payload"
    seed = xxhash.xxh3_64(b"\xf1" + key).intdigest()
    checksum = xxhash.xxh3_64(payload, seed=seed).digest()[::-1]  # the digest is big-endian
    value = values.seal(values.WHOLE, key, payload)
    assert value == b"\xf1" + checksum + payload
    assert values.unseal(values.WHOLE, key, memoryview(value), "x") == payload
    assert values.PAYLOAD_BYTES == 16 * 4096 - 16 - 9


def stored(path: Path, kind: str) -> dict[bytes, bytes]:
    """Every key and value, read with LMDB alone."""
    with lmdb.open(str(path / kind), readonly=True) as env, env.begin() as txn:
        return dict(txn.cursor())


def test_a_whole_store(tmp_path: Path) -> None:
    """Oracle: every key of a small store listed by hand, every record decoded with msgpack."""
    path, one, two = tmp_path / "store", b"1" * 32, b"2" * 32
    with Database(path) as store:
        store.sessions.create("ü", b"body", branch_body=b"first")
        changes = Changes(
            segments=[SegmentRecord("seg", b"S"), SegmentRecord("long", bytes(100_000))],
            nodes=[NewNode(0, "seg", b"N")],
            head=-1,
            log=[b"L"],
        )
        committed = store.sessions.commit("ü", "main", changes, expected_version=0)
        store.set_meta("k", b"v")
        store.snapshots.put([Snapshot(one, None, {"a": bytes(100_000), "b": b""}, b"M")])
        store.snapshots.put([Snapshot(two, one, {})])
        store.snapshots.pin("owner", [two])
    session = stored(path, "sessions")
    pieces = keys.pieces(keys.segment(1, b"long"))
    assert set(session) == {
        b"F",
        b"c",
        b"mk",
        "nü".encode(),
        b"i" + ONE,
        b"d" + ONE,
        b"b" + ONE + b"main",
        b"l" + ONE + ONE + bytes(8),
        b"t" + ONE + ONE,
        b"s" + ONE + b"long",
        b"s" + ONE + b"seg",
        pieces + b"\0\0\0\0",
        pieces + b"\0\0\0\x01",
    }

    def fields(key: bytes) -> Any:
        return msgpack.unpackb(session[key][9:])

    assert fields(b"F") == ["freetoken sessions", 1]
    assert fields(b"c") == [2]
    assert fields("nü".encode())[0] == 1
    assert fields(b"i" + ONE)[1:] == [2, 2]
    assert session[b"d" + ONE][9:] == b"body"
    path_hash = chain(bytes(16), NodeRecord(committed.node_ids[0], 0, "seg", b"N"))
    assert fields(b"t" + ONE + ONE) == [0, 1, path_hash, "seg", b"N"]
    assert fields(b"b" + ONE + b"main") == [1, 1, 1, 1, 1, path_hash, b"first"]
    assert session[b"l" + ONE + ONE + bytes(8)][9:] == b"L"
    assert session[b"s" + ONE + b"long"][:1] == b"\xf2"
    assert fields(b"s" + ONE + b"long") == [100_000, 2]
    assert [session[pieces + bytes(3) + bytes([i])][:1] for i in (0, 1)] == [b"\xf3"] * 2
    states = stored(path, "states")
    assert set(states) == {
        b"F",
        b"c",
        b"r" + one,
        b"r" + two,
        b"k" + one + two,
        b"u" + ONE + one,
        b"u" + TWO + two,
        b"d" + ONE + bytes(4),
        b"d" + ONE + b"\0\0\0\x01",
        b"oowner",
    }
    record = msgpack.unpackb(states[b"r" + one][9:])
    assert record == [None, b"M", [["a", 100_000], ["b", 0]], 1, 1]
    assert len(states[b"d" + ONE + bytes(4)]) == 9 + values.PAYLOAD_BYTES
    assert states[b"oowner"][9:] == two
    assert all(len(value) <= 1 << 20 for value in [*session.values(), *states.values()])


@pytest.mark.parametrize("seed", ["0", "4242"])
def test_c42_equal_programs_make_equal_bytes(seed: str, tmp_path: Path) -> None:
    """Oracle: this process, with another hash seed; times are the only difference."""
    script = (
        "import sys, time; time.time = lambda: 1.0\n"
        "from freetoken_storage import Database\n"
        "from freetoken_storage.testing import grow, snapshot\n"
        "with Database(sys.argv[1]) as store:\n"
        "    store.sessions.create('s', b'body'); grow(store, 'abc')\n"
        "    store.snapshots.put([snapshot('x', size_bytes=100000), snapshot('y', 'x')])\n"
        "    store.snapshots.pin('owner', [snapshot('y').digest, snapshot('x').digest])\n"
    )
    paths = [tmp_path / "one", tmp_path / "two"]
    for path, hash_seed in zip(paths, ("1", seed), strict=True):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        subprocess.run([sys.executable, "-c", script, str(path)], env=environment, check=True)
    for kind in ("sessions", "states"):
        assert stored(paths[0], kind) == stored(paths[1], kind)


def test_header(tmp_path: Path) -> None:
    """Oracle: LMDB's own account of the same file."""
    path = tmp_path / "db"
    with lmdb.open(str(path), map_size=1 << 30, sync=False) as env:
        for i in range(300):
            with env.begin(write=True) as txn:
                txn.put(b"%05d" % i, bytes(i * 40))
                if i % 3 == 0:
                    txn.delete(b"%05d" % (i // 2))
        info, stat = env.info(), env.stat()
    header = read_header(path / "data.mdb")
    assert header.txn_id == info["last_txnid"] and header.last_page == info["last_pgno"]
    assert header.page_bytes == stat["psize"]
    tree = header.main
    assert (tree.depth, tree.branch_pages, tree.leaf_pages, tree.overflow_pages, tree.entries) == (
        stat["depth"],
        stat["branch_pages"],
        stat["leaf_pages"],
        stat["overflow_pages"],
        stat["entries"],
    )
    assert stat["depth"] >= 2 and tree.overflow_pages > 100
    older = read_header_of(path / "data.mdb", header.txn_id - 1)
    assert older is not None and older.txn_id == header.txn_id - 1
    assert read_header_of(path / "data.mdb", header.txn_id - 2) is None
    assert PageAudit(path / "data.mdb", header, EVERYTHING).run() is True
    for limits in (Limits(3, 10**9), Limits(0, 0)):
        assert PageAudit(path / "data.mdb", header, limits).run() is False
    assert PageAudit(path / "data.mdb", header, Limits(10**9, 5)).run() is True


def altered(good: bytes, page: int, offset: int, form: str, value: int) -> bytes:
    """The file with one field of a header replaced."""
    data = bytearray(good)
    struct.pack_into(form, data, page * 4096 + offset, value)
    return bytes(data)


def test_a_header_is_refused_by_each_of_its_fields(tmp_path: Path) -> None:
    """Oracle: the drawing in pages.py: the offset of each field, the values it may have, and what
    the message must say of another one; on both pages, and at the edge of what is allowed."""
    with lmdb.open(str(tmp_path / "db"), map_size=1 << 30) as env:
        for i in range(3):
            with env.begin(write=True) as txn:
                txn.put(b"%d" % i, bytes(10_000))
    path = tmp_path / "db" / "data.mdb"
    good = path.read_bytes()
    header = read_header(path)
    assert header.txn_id == 3 and header.file_bytes <= len(good)
    main = 16 + 24 + 48  # after the page header, the fields before the trees and the free list tree
    spare = header.last_page + 1 - header.main.branch_pages - header.main.leaf_pages
    foreign = "is not a database"
    cases: list[tuple[int, int, str, int, str]] = [
        *[(0, 40, "<I", size, f"{foreign}; got 'page size {size}'") for size in (0, 256, 5000)],
        (0, 40, "<I", 131_072, f"{foreign}; got 'page size"),
        *[(page, 0, "<Q", 7, foreign) for page in (0, 1)],
        *[(page, 10, "<H", 0x09, foreign) for page in (0, 1)],
        *[(page, 16, "<I", 0xBEEFC0DF, foreign) for page in (0, 1)],
        *[(page, 20, "<I", 999, "another LMDB version; got 999") for page in (0, 1)],
        *[(1, tree + 4, "<H", 0x04, "foreign kind") for tree in (40, main)],
        (1, main + 24, "<Q", spare + 1, "a tree of more pages than it has"),
        (1, 16 + 120, "<Q", len(good) // 4096, "is truncated"),
        (1, 16 + 128, "<Q", 5, "contradicting headers"),
        (1, 16 + 128, "<Q", 4, "contradicting headers"),
    ]
    for page, offset, form, value, message in cases:
        path.write_bytes(altered(good, page, offset, form, value))
        with pytest.raises(StoreDamaged, match=re.escape(message)) as raised:
            read_header(path)
        assert str(path) in str(raised.value)
    for length in (0, 100, 151, 4095, 4096, 8191):
        path.write_bytes(good[:length])
        with pytest.raises(StoreDamaged, match="truncated|too short"):
            read_header(path)
    for page, offset, form, value in ((1, main + 24, "<Q", spare), (1, 24, "<Q", 1 << 47)):
        path.write_bytes(altered(good, page, offset, form, value))
        assert read_header(path).txn_id == 3


def test_a_sound_file_passes_the_audit_whatever_was_done_to_it(tmp_path: Path) -> None:
    """Oracle: LMDB wrote it. Large free lists, replaced long values, deep trees."""
    path = tmp_path / "db"
    with lmdb.open(str(path), map_size=1 << 30, sync=False) as env:
        for round_number in range(6):
            with env.begin(write=True) as txn:
                for i in range(3000):
                    txn.put(struct.pack(">Q", i * 7919 % 5000), bytes((i * round_number) % 9000))
            with env.begin(write=True) as txn:
                for i in range(round_number, 5000, 3):
                    txn.delete(struct.pack(">Q", i))
            env.sync(True)
            header = read_header(path / "data.mdb")
            assert PageAudit(path / "data.mdb", header, EVERYTHING).run() is True


def test_the_audit_knows_whose_a_page_is(tmp_path: Path) -> None:
    """Oracle: the drawings in pages.py and audit.py. One page number at a time is replaced, where a
    long value and where the free list names its pages: each page belongs to one only."""
    with lmdb.open(str(tmp_path / "db"), map_size=1 << 30) as env:
        for key in (b"long-a", b"long-b", b"gone-1", b"gone-2"):
            with env.begin(write=True) as txn:
                txn.put(key, key[-1:] * 10_000)
        for key in (b"gone-1", b"gone-2"):
            with env.begin(write=True) as txn:
                txn.delete(key)
    path = tmp_path / "db" / "data.mdb"
    good = path.read_bytes()
    header = read_header(path)
    assert PageAudit(path, header, EVERYTHING).run() is True

    def number(at: int) -> int:
        found: int = struct.unpack_from("<Q", good, at)[0]
        return found

    leaf = header.main.root * 4096
    long_a, long_b = (good.index(key, leaf) + len(key) for key in (b"long-a", b"long-b"))
    free = header.free.root * 4096
    entry = free + struct.unpack_from("<H", good, free + 16)[0] + 8 + 8  # node header, key
    count, first, second = entry, entry + 8, entry + 16
    assert number(count) >= 3 and number(long_a) != number(long_b)
    taken, outside = "lies where something else is", "lies outside the file"
    unnamed, short = "is not where its key says", "is cut short"
    overflow = number(long_a) * 4096
    cases = [
        (long_b, number(long_a), f"a long value {taken}"),
        (long_b, header.main.root, unnamed),
        (long_b, header.last_page + 1, outside),
        (first, header.main.root, f"a free page {taken}"),
        (first, header.free.root, f"a free page {taken}"),
        (first, number(long_a) + 1, f"a free page {taken}"),
        (first, 0, f"a free page {taken}"),
        (first, 1, f"a free page {taken}"),
        (first, header.last_page + 1, f"a free page {outside}"),
        (first, number(second), f"a free page {taken}"),
        (count, number(count) + 1, short),
        (overflow, number(long_b), unnamed),
        (overflow + 8, 0x04 << 16 | 2 << 32, unnamed),
        (overflow + 8, 0x04 << 16 | 4000 << 32, outside),
        (overflow + 8, 0x02 << 16 | 3 << 32, unnamed),
    ]
    for at, value, message in cases:
        path.write_bytes(altered(good, 0, at, "<Q", value))
        with pytest.raises(StoreDamaged, match=re.escape(message)) as raised:
            PageAudit(path, header, EVERYTHING).run()
        assert str(path) in str(raised.value)
    path.write_bytes(good[: leaf + 100])
    with pytest.raises(StoreDamaged, match="the file ends inside a page"):
        PageAudit(path, header, EVERYTHING).run()


@pytest.mark.parametrize("name", ["main", "free"])
def test_the_audit_counts_what_a_tree_holds(name: str, tmp_path: Path) -> None:
    """Oracle: LMDB's counts are right; each of them, one too high or too low, contradicts."""
    with lmdb.open(str(tmp_path / "db"), map_size=1 << 30) as env:
        for i in range(200):
            with env.begin(write=True) as txn:
                txn.put(b"%0400d" % i, bytes(5000 * (i % 2)))
        with env.begin(write=True) as txn:
            txn.delete(b"%0400d" % 7)
    path = tmp_path / "db" / "data.mdb"
    header = read_header(path)
    tree = getattr(header, name)
    wrong = [
        {field: getattr(tree, field) + step}
        for field in ("branch_pages", "leaf_pages", "overflow_pages", "entries")
        for step in (1, -1)
    ]
    wrong += [{"root": NO_PAGE}, {"entries": 0}, {"depth": 0}, {"depth": tree.depth + 1}]
    wrong += [{"root": 0}, {"root": header.last_page + 1}]
    nothing = ("depth", "branch_pages", "leaf_pages", "overflow_pages", "entries")
    wrong += [dict.fromkeys(nothing, 0)]  # a root with nothing in it
    for fields in wrong:
        altered_header = replace(header, **{name: replace(tree, **fields)})
        with pytest.raises(StoreDamaged, match=r"data\.mdb"):
            PageAudit(path, altered_header, EVERYTHING).run()
    assert PageAudit(path, header, EVERYTHING).run() is True


def test_the_audit_knows_the_order_of_keys(tmp_path: Path) -> None:
    """Oracle: the keys are ascending in every page and lie between the keys of the page above. Two
    neighbours change places, or a first or last key leaves those bounds."""
    with lmdb.open(str(tmp_path / "db"), map_size=1 << 30) as env, env.begin(write=True) as txn:
        for i in range(40):
            txn.put(b"%0400d" % i, b"")
    path = tmp_path / "db" / "data.mdb"
    good = path.read_bytes()
    header = read_header(path)
    assert header.main.depth == 2

    def offsets(page: int) -> list[int]:
        count = (struct.unpack_from("<H", good, page * 4096 + 12)[0] - 16) // 2
        return list(struct.unpack_from(f"<{count}H", good, page * 4096 + 16))

    def swapped(page: int, index: int) -> bytes:
        data = bytearray(good)
        pair = offsets(page)[index : index + 2]
        struct.pack_into("<2H", data, page * 4096 + 16 + 2 * index, *pair[::-1])
        return bytes(data)

    def rekeyed(page: int, index: int, first: bytes) -> bytes:
        at = page * 4096 + offsets(page)[index] + 8
        return good[:at] + first + good[at + 1 :]

    branch = header.main.root
    low, _, flags, _ = struct.unpack_from("<4H", good, branch * 4096 + offsets(branch)[3])
    leaf = low | flags << 32
    for data, message in (
        (swapped(leaf, 0), "out of order"),
        (swapped(leaf, len(offsets(leaf)) - 2), "out of order"),
        (swapped(branch, 2), "out of order"),
        (rekeyed(leaf, 0, b"/"), "do not belong below its parent"),
        (rekeyed(leaf, -1, b"1"), "do not belong below its parent"),
    ):
        path.write_bytes(data)
        with pytest.raises(StoreDamaged, match=message):
            PageAudit(path, header, EVERYTHING).run()


@pytest.mark.parametrize("size_bytes", [0, 3000, 4071, 4072, 65_510, 65_511, 69_000, 1 << 20])
def test_a_snapshot_occupies_what_its_footprint_says(size_bytes: int, tmp_path: Path) -> None:
    """Oracle: LMDB's own count of pages in use, before and after forty of them."""
    count = 40
    with Database(tmp_path / "store") as store:
        before = store.snapshots.size_bytes()
        store.snapshots.put([snapshot(f"n{i}", size_bytes=size_bytes) for i in range(count)])
        growth_bytes = store.snapshots.size_bytes() - before
    assert footprint(3 * values.PAYLOAD_BYTES) == 3 * 65_536 + INDEX_BYTES
    assert growth_bytes <= count * footprint(size_bytes)
    inline_bytes = 4096  # a short rest lies in a page with others
    assert growth_bytes >= count * (footprint(size_bytes) - INDEX_BYTES - inline_bytes)
