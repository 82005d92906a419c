# SPDX-License-Identifier: Apache-2.0
"""Flipped, cut, foreign and missing bytes: an answer by name, never a wrong value, never a crash.

What could kill a process runs in a forked child, so that a crash is a failed test.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lmdb
import pytest

from freetoken_storage import Database, keys, values, verify_store
from freetoken_storage.errors import InvalidRecord, StoreDamaged, StoreNewer, StoreReadOnly
from freetoken_storage.records import Changes, NewNode, SegmentRecord, Snapshot
from freetoken_storage.testing import (
    digest,
    flip_bytes,
    grow,
    present,
    read_back,
    snapshot,
    truncate,
)

SNAPSHOTS = [
    snapshot("a", size_bytes=200_000),
    snapshot("b", "a", size_bytes=70_000),
    snapshot("c", "b", size_bytes=100),
]
PATH = list(range(1, 41))
PAGE_BYTES = 4096


@pytest.fixture(scope="module")
def sound_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed store with a session of 40 nodes, some of them long, and a chain of snapshots."""
    path = tmp_path_factory.mktemp("sound") / "store"
    with Database(path) as store:
        store.sessions.create("s", b"body")
        for i in PATH:
            body = b"x%d " % i * (3000 if i % 10 == 0 else 30)
            head = store.sessions.branch("s", "main").head
            changes = Changes(
                segments=[SegmentRecord(f"s{i}", body)],
                nodes=[NewNode(head, f"s{i}", body)],
                head=-1,
                log=[body],
            )
            store.sessions.commit("s", "main", changes, expected_version=i - 1)
        store.sessions.create("other", b"")
        grow(store, "xyz", name="other")
        store.snapshots.put(SNAPSHOTS)
    return path


@pytest.fixture
def store_path(sound_store: Path, tmp_path: Path) -> Path:
    """A copy to hurt."""
    return Path(shutil.copytree(sound_store, tmp_path / "store"))


def contents(store: Database, name: str = "s") -> object:
    sessions = store.sessions
    head = sessions.branch(name, "main").head
    return (
        sessions.list(),
        sessions.branches(name),
        sessions.path(name, head),
        list(sessions.nodes(name)),
        list(sessions.all_segments(name)),
        sessions.log(name, "main"),
    )


def in_child(action: Callable[[], None]) -> None:
    """Run in a forked child; a signal or an exception there fails here."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            action()
            os._exit(0)
        except BaseException as error:  # noqa: BLE001  # the child's last words, whatever they are
            os.write(write_end, repr(error).encode()[:4000])
            os._exit(1)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        words = pipe.read()
    status = os.waitpid(pid, 0)[1]
    assert status == 0, f"the child ended with status {status}: {words}"


@contextmanager
def restored(file: Path) -> Iterator[None]:
    """Whatever happens to the file inside the block is undone after it."""
    good = file.read_bytes()
    try:
        yield
    finally:
        file.write_bytes(good)


def open_and_compare(path: Path, expected: object) -> str:
    """`same`, or `damaged` where StoreDamaged said so; anything else raises."""
    try:
        with Database(path) as store:
            assert contents(store) == expected, "wrong values came out"
            return "same"
    except StoreDamaged as damage:
        assert str(damage)
        return "damaged"


def flip_sessions(path: Path, positions: list[int]) -> None:
    """Flip each position by itself; the sessions must come out right or not at all."""
    file = path / "sessions" / "data.mdb"
    with Database(path) as store:
        expected = contents(store)
    good = file.read_bytes()
    for position in positions:
        file.write_bytes(flipped(good, position))
        open_and_compare(path, expected)
    file.write_bytes(good)


def flip_states(path: Path, positions: list[int]) -> None:
    """Flip each position by itself; the sessions must come out right, each state right or not at
    all, and removing and writing states must go on."""
    file = path / "states" / "data.mdb"
    with Database(path) as store:
        expected = contents(store)
    good = file.read_bytes()
    for position in positions:
        file.write_bytes(flipped(good, position))
        assert open_and_compare(path, expected) == "same", "the states hurt the sessions"
        with Database(path) as store:
            for state in SNAPSHOTS:
                with suppress(StoreDamaged, KeyError, AttributeError):
                    if store.snapshots.contains(state.digest):
                        read_back(store, state)
            store.snapshots.remove([digest("a"), digest("b"), digest("c")])
            store.snapshots.put(SNAPSHOTS)
            for state in SNAPSHOTS:
                read_back(store, state)


def flipped(good: bytes, position: int) -> bytes:
    altered = bytearray(good)
    altered[position] ^= 1 << (position % 8)
    return bytes(altered)


@pytest.mark.parametrize("fraction", [0.01, 0.5, 0.99])
@pytest.mark.parametrize("kind", ["sessions", "states"])
def test_c38_flipped_bytes(kind: str, fraction: float, store_path: Path) -> None:
    """Oracle: the contents before the flip. A damaged state is a miss and the sessions answer; a
    damaged session is an error that names it, and the rest answers."""
    with Database(store_path) as store:
        before, other = contents(store), contents(store, "other")
    flip_bytes(store_path / kind / "data.mdb", fraction, count=16)

    def look() -> None:
        if kind == "sessions":
            if open_and_compare(store_path, before) == "same":
                with Database(store_path) as store:
                    assert contents(store, "other") == other
            return
        with Database(store_path) as store:
            assert contents(store) == before
            for expected in SNAPSHOTS:
                try:
                    if store.snapshots.contains(expected.digest):
                        read_back(store, expected)
                except StoreDamaged:
                    store.snapshots.remove([expected.digest])
            store.snapshots.put(SNAPSHOTS)
            for expected in SNAPSHOTS:
                read_back(store, expected)

    in_child(look)


def risky_positions(file: Path, count: int, seed: int) -> list[int]:
    """Every header byte, and random bytes of tree pages, half of them among a page's own header and
    offsets, where a flip does the most harm."""
    pages = _tree_pages(file)
    assert len(pages) >= 2
    chosen = random.Random(seed)
    positions = [page * PAGE_BYTES + byte for page in (0, 1) for byte in range(152)]
    for _ in range(count):
        page = chosen.choice(pages) * PAGE_BYTES
        positions.append(page + chosen.randrange(chosen.choice((120, PAGE_BYTES))))
    return positions


def test_c38_many_flips_in_the_sessions(store_path: Path) -> None:
    """Oracle: the contents before; every header byte and 250 bytes of tree pages, one by one.
    LMDB alone answers many of these with wrong records, SIGSEGV or SIGBUS."""
    positions = risky_positions(store_path / "sessions" / "data.mdb", 250, seed=1)
    in_child(lambda: flip_sessions(store_path, positions))


def test_c38_many_flips_in_the_states(store_path: Path) -> None:
    """Oracle: the sessions' contents and the snapshots' bytes; 100 bytes of tree pages, the header,
    and the headers of long values, which LMDB believes when it frees them."""
    file = store_path / "states" / "data.mdb"
    positions = risky_positions(file, 100, seed=2)[::3]
    positions += [page * PAGE_BYTES + byte for page in _pages(file, 4) for byte in (8, 10, 12, 13)]
    in_child(lambda: flip_states(store_path, positions))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_c38_very_many_flips(store_path: Path) -> None:
    """Oracle: as above, over 6,000 places."""
    file = store_path / "sessions" / "data.mdb"
    chosen = random.Random(3)
    positions = [chosen.randrange(file.stat().st_size) for _ in range(1000)]
    positions += risky_positions(file, 5000, seed=3)
    in_child(lambda: flip_sessions(store_path, positions))
    in_child(lambda: flip_states(store_path, risky_positions(file, 1500, seed=4)))


def _tree_pages(file: Path) -> list[int]:
    return _pages(file, 1, 2)


def _pages(file: Path, *kinds: int) -> list[int]:
    """Pages whose header says they are of one of these kinds: 1 branch, 2 leaf, 4 overflow."""
    data = file.read_bytes()
    starts = range(0, len(data), PAGE_BYTES)
    flags = [int.from_bytes(data[at + 10 : at + 12], "little") for at in starts]
    return [page for page, flag in enumerate(flags) if flag in kinds]


@pytest.mark.parametrize("fraction", [0, 0.0001, 0.02, 0.5, 0.99])
def test_truncated_sessions(fraction: float, store_path: Path) -> None:
    """Oracle: the error names the file; the file is left as it was."""
    file = store_path / "sessions" / "data.mdb"
    length = truncate(file, fraction)

    def look() -> None:
        for read_only in (False, True):
            with pytest.raises(StoreDamaged, match=r"sessions/data\.mdb") as raised:
                Database(store_path, read_only=read_only)
            assert raised.value.code == "store_damaged"
        report = verify_store(store_path)
        assert not report.ok and report.faults[0].database == "sessions"
        assert report.counts["snapshots"] == len(SNAPSHOTS), "the states could still be read"

    in_child(look)
    assert file.stat().st_size == length


@pytest.mark.parametrize("fraction", [0, 0.0001, 0.02, 0.5, 0.99])
def test_truncated_states(fraction: float, store_path: Path) -> None:
    """Oracle: the sessions as they were; the states begin anew and say so."""
    with Database(store_path) as store:
        before = contents(store)
    truncate(store_path / "states" / "data.mdb", fraction)
    assert verify_store(store_path).faults[0].database == "states"

    def look() -> None:
        with Database(store_path) as store:
            assert len(store.notices) == 1 and "discarded" in store.notices[0]
            assert contents(store) == before
            assert not store.snapshots.contains(digest("a"))
            store.snapshots.put(SNAPSHOTS)
            read_back(store, SNAPSHOTS[0])
        with Database(store_path) as store:
            assert store.notices == []
            assert store.verify().ok

    in_child(look)


def test_damaged_states_that_cannot_be_rebuilt_now(store_path: Path) -> None:
    """Oracle: a read-only opening changes no byte, reads the sessions and misses every state."""
    file = store_path / "states" / "data.mdb"
    truncate(file, 0.5)
    left = file.read_bytes()
    with Database(store_path, read_only=True) as store:
        assert "not used" in store.notices[0]
        assert len(store.sessions.path("s", PATH[-1])) == len(PATH)
        with store.snapshots.reader() as reader:
            assert reader.info(digest("a")) is None
        with pytest.raises(StoreReadOnly):
            store.snapshots.put(SNAPSHOTS)
    assert file.read_bytes() == left


FOREIGN = {
    "text": b"this is not a database\n" * 1000,
    "sqlite": b"SQLite format 3\x00" + bytes(8176),
    "zeros": bytes(65536),
    "noise": random.Random(5).randbytes(65536),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_files(name: str, store_path: Path) -> None:
    """Oracle: the sessions' foreign file is refused by name and left alone, the states' is
    replaced."""
    file = store_path / "sessions" / "data.mdb"
    with restored(file):
        file.write_bytes(FOREIGN[name])
        with pytest.raises(StoreDamaged, match=r"sessions/data\.mdb"):
            Database(store_path)
        assert file.read_bytes() == FOREIGN[name]
    (store_path / "states" / "data.mdb").write_bytes(FOREIGN[name])
    with Database(store_path) as store:
        assert "discarded" in store.notices[0]
        assert len(store.sessions.path("s", PATH[-1])) == len(PATH)


def test_databases_of_other_programs(store_path: Path, tmp_path: Path) -> None:
    """Oracle: sound LMDB files that are not ours are told apart from ours and from each other."""
    with lmdb.open(str(tmp_path / "foreign")) as env, env.begin(write=True) as txn:
        txn.put(b"key", b"value")
    for source in (tmp_path / "foreign", store_path / "states"):
        with restored(store_path / "sessions" / "data.mdb"):
            shutil.copy(source / "data.mdb", store_path / "sessions" / "data.mdb")
            with pytest.raises(StoreDamaged, match="something else|another kind"):
                Database(store_path)
    with Database(store_path) as store:
        assert len(store.sessions.path("s", PATH[-1])) == len(PATH)


def test_missing_sessions(store_path: Path) -> None:
    """Oracle: lost sessions are not quietly replaced by none."""
    (store_path / "sessions" / "data.mdb").unlink()
    with pytest.raises(StoreDamaged, match="missing"):
        Database(store_path)
    shutil.rmtree(store_path / "sessions")
    with pytest.raises(StoreDamaged, match="missing"):
        Database(store_path)
    shutil.rmtree(store_path / "states")
    with Database(store_path) as store:
        assert store.sessions.list() == []


def edit(path: Path, kind: str, change: Callable[[Any], None]) -> None:
    """Change a closed database behind the store's back, pages intact."""
    with lmdb.open(str(path / kind)) as env, env.begin(write=True) as txn:
        change(txn)


def sealed(key: bytes, *fields: object) -> bytes:
    return values.seal(values.WHOLE, key, values.pack(*fields))


def node_value(txn: Any, node: int) -> tuple[object, ...]:
    key = keys.node(1, node)
    fields: tuple[object, ...] = values.unpack(
        bytes(values.unseal(values.WHOLE, key, memoryview(txn.get(key)), "x")), 5, "x"
    )
    return fields


def lose_node(txn: Any) -> None:
    txn.delete(keys.node(1, 7))


def alter_node(txn: Any) -> None:
    parent, depth, path_hash, segment, _ = node_value(txn, 7)
    txn.put(keys.node(1, 7), sealed(keys.node(1, 7), parent, depth, path_hash, segment, b"other"))


def reparent_node(txn: Any) -> None:
    _, depth, path_hash, segment, body = node_value(txn, 7)
    txn.put(keys.node(1, 7), sealed(keys.node(1, 7), 9, depth, path_hash, segment, body))


def swap_nodes(txn: Any) -> None:
    six, seven = bytes(txn.get(keys.node(1, 6))), bytes(txn.get(keys.node(1, 7)))
    txn.put(keys.node(1, 6), seven)
    txn.put(keys.node(1, 7), six)


def garble_node(txn: Any) -> None:
    value = bytearray(txn.get(keys.node(1, 7)))
    value[20] ^= 1
    txn.put(keys.node(1, 7), bytes(value))


def cut_node(txn: Any) -> None:
    txn.put(keys.node(1, 7), b"\xf1")


def no_record(txn: Any) -> None:
    txn.put(keys.node(1, 7), values.seal(values.WHOLE, keys.node(1, 7), b"\xc1"))


def wrong_record(txn: Any) -> None:
    txn.put(keys.node(1, 7), sealed(keys.node(1, 7), 1, 2))


@pytest.mark.parametrize(
    "change",
    [
        lose_node,
        alter_node,
        reparent_node,
        swap_nodes,
        garble_node,
        cut_node,
        no_record,
        wrong_record,
    ],
)
def test_altered_nodes(change: Callable[[Any], None], store_path: Path) -> None:
    """Oracle: a path over the altered node is refused with the session and a node in the message;
    paths that end before it, and other sessions, read as before; `verify` names the session."""
    with Database(store_path) as store:
        before, other = store.sessions.path("s", 5), contents(store, "other")
    edit(store_path, "sessions", change)
    with Database(store_path) as store:
        with pytest.raises(StoreDamaged, match=r"node \d+.* of session 's'"):
            store.sessions.path("s", PATH[-1])
        assert store.sessions.path("s", 5) == before
        assert contents(store, "other") == other
        report = store.verify()
        assert {fault.session for fault in report.faults} == {"s"}
        assert report.counts["snapshots"] == len(SNAPSHOTS)


def test_a_branch_that_does_not_match_its_path(store_path: Path) -> None:
    """Oracle: the count and hash in the branch's record."""

    def move(txn: Any) -> None:
        key = keys.branch(1, b"main")
        value = values.unseal(values.WHOLE, key, memoryview(txn.get(key)), "x")
        number, version, _, *rest = values.unpack(bytes(value), 7, "x")
        txn.put(key, sealed(key, number, version, 12, *rest))

    edit(store_path, "sessions", move)
    with Database(store_path) as store:
        with pytest.raises(StoreDamaged, match="branch 'main' of session 's'"):
            store.sessions.path("s", 12)
        assert any("main" in fault.what for fault in store.verify().faults)


def test_a_lost_head_is_told_from_an_unknown_node(store_path: Path) -> None:
    """Oracle: whether a branch says that the node should be there."""
    edit(store_path, "sessions", lambda txn: txn.delete(keys.node(1, PATH[-1])))
    with Database(store_path) as store:
        with pytest.raises(StoreDamaged, match="branches with that head: main"):
            store.sessions.path("s", PATH[-1])
        with pytest.raises(InvalidRecord):
            store.sessions.path("s", PATH[-1] + 1)


def test_a_lost_piece_of_a_long_value(store_path: Path) -> None:
    """Oracle: the missing key; everything else of the session reads."""
    with Database(store_path) as store:
        store.sessions.create("long", bytes(300_000))
    prefix = keys.pieces(keys.scope(keys.BODY, 3))
    edit(store_path, "sessions", lambda txn: txn.delete(keys.piece(prefix, 2)))
    with Database(store_path) as store:
        with pytest.raises(StoreDamaged, match="the body of session 'long' lacks piece 2"):
            store.sessions.get("long")
        assert store.sessions.path("long", 0) == []
        store.sessions.delete("long")
        assert [record.name for record in store.sessions.list()] == ["other", "s"]
        assert store.verify().ok


@pytest.mark.parametrize("part", ["record", "chunk", "lost chunk", "short chunk"])
def test_damaged_snapshots(part: str, store_path: Path) -> None:
    """Oracle: the damaged one raises, is removed or written again; its neighbours read."""
    record, chunk = keys.record(digest("b")), keys.chunk(2, 1)

    def change(txn: Any) -> None:
        if part == "lost chunk":
            txn.delete(chunk)
        elif part == "short chunk":
            txn.put(chunk, values.seal(values.PIECE, chunk, b"short"))
        else:
            key = record if part == "record" else chunk
            value = bytearray(txn.get(key))
            value[-1] ^= 1
            txn.put(key, bytes(value))

    edit(store_path, "states", change)
    with Database(store_path) as store:
        assert not store.verify().ok
        with pytest.raises(StoreDamaged, match="snapshot"):
            read_back(store, SNAPSHOTS[1])
        read_back(store, SNAPSHOTS[0])
        read_back(store, SNAPSHOTS[2])
        if part != "record":  # a damaged record is replaced by the put itself
            assert store.snapshots.remove([digest("b")]) == 2
        store.snapshots.put(SNAPSHOTS)
        read_back(store, SNAPSHOTS[1])
        assert store.compact()
        assert store.verify().ok
        read_back(store, SNAPSHOTS[1])


def test_damaged_records_do_not_stop_eviction(tmp_path: Path) -> None:
    """Oracle: puts go on under the budget although half of the records are unreadable."""
    path, budget_bytes = tmp_path / "store", 8 << 20
    labels = [f"n{i}" for i in range(6)]
    with Database(path, disk_budget_bytes=budget_bytes) as store:
        for label in labels:
            store.snapshots.put([snapshot(label, size_bytes=1 << 20)])

    def garble(txn: Any) -> None:
        for label in labels[::2]:
            txn.put(keys.record(digest(label)), b"garbage")

    edit(path, "states", garble)
    with Database(path, disk_budget_bytes=budget_bytes) as store:
        for i in range(12):
            store.snapshots.put([snapshot(f"m{i}", size_bytes=300_000)])
        read_back(store, snapshot("m11", size_bytes=300_000))
        assert not any(store.snapshots.contains(digest(label)) for label in labels[::2][:1])
        store.snapshots.shrink(0)
        assert present(store, labels) == []
        report = store.verify()
        assert report.ok, f"something of a damaged one was left in an index: {report.faults}"
        assert sum(store.sizes().values()) <= budget_bytes


def test_a_damaged_record_that_was_written_anew_counts_as_new(tmp_path: Path) -> None:
    """Oracle: the order of the puts: its old place in the order of use is no longer its own."""
    path, budget_bytes = tmp_path / "store", 8 << 20
    labels = [f"n{i}" for i in range(6)]
    with Database(path, disk_budget_bytes=budget_bytes) as store:
        for label in labels:
            store.snapshots.put([snapshot(label, size_bytes=1 << 20)])
    edit(path, "states", lambda txn: txn.put(keys.record(digest("n0")), b"garbage"))
    with Database(path, disk_budget_bytes=budget_bytes) as store:
        store.snapshots.put([snapshot("n0", size_bytes=1 << 20)])
        store.snapshots.put([snapshot("new", size_bytes=1 << 20)])
        left = present(store, labels)
        assert left[0] == "n0" and left[1:] == labels[-len(left) + 1 :] and len(left) < 6
        read_back(store, snapshot("n0", size_bytes=1 << 20))


@pytest.mark.parametrize("kind", ["sessions", "states"])
def test_newer_format(kind: str, store_path: Path) -> None:
    """Oracle: the version in the message; nothing is touched, not even disposable states."""
    name = f"freetoken {kind}"
    edit(store_path, kind, lambda txn: txn.put(b"F", sealed(b"F", name, 2)))
    before = (store_path / kind / "data.mdb").read_bytes()
    with pytest.raises(StoreNewer, match=r"format 2.*format 1.*update") as raised:
        Database(store_path)
    assert raised.value.code == "store_newer"
    assert (store_path / kind / "data.mdb").read_bytes() == before
    assert "newer" in verify_store(store_path).faults[0].what


def test_verify_of_nothing(tmp_path: Path) -> None:
    """Oracle: a report, not an exception, and nothing is created."""
    report = verify_store(tmp_path / "absent")
    assert len(report.faults) == 2 and not (tmp_path / "absent").exists()


def test_a_reader_that_meets_damage_leaves_the_store_usable(store_path: Path) -> None:
    """Oracle: after 50 refused reads, everything else works and nothing is left open."""
    edit(store_path, "sessions", garble_node)
    with Database(store_path) as store:
        for _ in range(50):
            with pytest.raises(StoreDamaged):
                store.sessions.path("s", PATH[-1])
        grow(store, "w", name="other")
        store.snapshots.put([Snapshot(digest("new"), None, {"k": b"v"})])
        assert store.compact(), "a failed read left a transaction open"
