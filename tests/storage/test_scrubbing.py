# SPDX-License-Identifier: Apache-2.0
"""Purged bytes leave the files. Oracle of every test: a search for a canary in all of them."""

import os
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest

from freetoken_storage import Database, keys
from freetoken_storage.errors import StoreDamaged
from freetoken_storage.pages import read_header
from freetoken_storage.records import Changes, NewNode, Scrub, SegmentRecord, Snapshot
from freetoken_storage.testing import digest, flip_bytes, read_back, snapshot

CANARY = b"canary-7f3a-do-not-keep"
LONG = CANARY + bytes(range(256)) * 1000 + CANARY

HOLDER = (
    "import sys; from freetoken_storage import Database\n"
    "with Database(sys.argv[1]) as store:\n"
    "    print('open', flush=True)\n"
    "    for line in sys.stdin:\n"
    "        store.sessions.create(line.strip(), b'body'); print('done', flush=True)\n"
)


def files_with_canary(path: Path) -> list[str]:
    files = [file for file in path.rglob("*") if file.is_file()]
    assert len(files) >= 6
    return sorted(str(f.relative_to(path)) for f in files if CANARY in f.read_bytes())


def plant(store: Database) -> None:
    """Canaries in every kind of value, short and long; beside them something to keep."""
    store.sessions.create("keep", b"kept body")
    store.sessions.create("s", CANARY, branch_body=CANARY)
    changes = Changes(
        segments=[SegmentRecord("keep", b"kept"), SegmentRecord("a", CANARY + b"segment")]
        + [SegmentRecord("b", LONG), SegmentRecord(CANARY.decode(), b"named")],
        nodes=[
            NewNode(0, "keep", b"kept"),
            NewNode(-1, "a", CANARY + b"node"),
            NewNode(-2, "b", LONG),
            NewNode(-3, CANARY.decode(), b""),
        ],
        head=-4,
        log=[b"kept", CANARY + b"log", LONG],
        body=LONG,
        session_body=LONG,
    )
    store.sessions.commit("s", "main", changes, expected_version=0)
    store.sessions.commit(
        "s", "main", Changes(head=1, body=b"b", session_body=b"s"), expected_version=1
    )
    store.sessions.create("gone", LONG)
    store.sessions.create(CANARY.decode(), b"")
    store.sessions.create_branch("s", CANARY.decode(), head=1, body=LONG)
    store.snapshots.put(
        [
            snapshot("keep", size_bytes=300_000),
            Snapshot(digest("gone"), None, {"kv": CANARY * 40_000}, meta=CANARY),
            Snapshot(digest("evicted"), digest("gone"), {CANARY.decode(): LONG}),
        ]
    )
    store.snapshots.pin(CANARY.decode(), [digest("gone")])


def purge(store: Database) -> None:
    store.sessions.scrub(
        "s",
        Scrub(
            node_ids=frozenset({2, 3, 4}),
            segment_ids=frozenset({"a", "b", CANARY.decode()}),
            logs={"main": frozenset({1, 2})},
        ),
    )
    store.sessions.delete("gone")
    store.sessions.delete(CANARY.decode())
    store.sessions.delete_branch("s", CANARY.decode())
    store.snapshots.remove([digest("gone")])
    store.snapshots.pin(CANARY.decode(), [])


def check_kept(store: Database) -> None:
    assert store.sessions.get("keep").body == b"kept body"
    assert [node.body for node in store.sessions.path("s", 1)] == [b"kept"]
    assert [entry.body for entry in store.sessions.log("s", "main")] == [b"kept"]
    read_back(store, snapshot("keep", size_bytes=300_000))
    assert store.verify().ok


def test_purged_bytes_leave_every_file(tmp_path: Path) -> None:
    """Oracle: the canary is in both databases before, still there after deleting (so that the test
    can fail), and nowhere after compacting; what was kept reads, here and after reopening."""
    path = tmp_path / "store"
    with Database(path) as store:
        plant(store)
        both = ["sessions/data.mdb", "states/data.mdb"]
        assert files_with_canary(path) == both
        purge(store)
        assert files_with_canary(path) == both
        before = sum(store.sizes().values())
        assert store.compact() is True
        assert files_with_canary(path) == []
        assert sum(store.sizes().values()) < before
        check_kept(store)
        store.sessions.create("later", b"")
        store.snapshots.put([snapshot("later")])
    with Database(path) as store:
        check_kept(store)
        assert [record.name for record in store.sessions.list()] == ["keep", "later", "s"]
        read_back(store, snapshot("later"))


def test_another_process_holds_the_store(tmp_path: Path) -> None:
    """Oracle: scrubbed=False leaves the bytes and both processes go on writing; the next opening
    that is alone finishes, and loses nothing that either wrote."""
    path = tmp_path / "store"
    with Database(path) as store:
        plant(store)
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert holder.stdin is not None and holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        purge(store)
        assert store.compact() is False
        assert files_with_canary(path) == ["sessions/data.mdb", "states/data.mdb"]
        store.sessions.create("ours", b"")
        holder.stdin.write("theirs\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == "done\n"
    with Database(path, read_only=True) as store:
        assert files_with_canary(path), "a read-only opening rewrote the files"
        check_kept(store)
    with Database(path) as store:  # not alone yet
        assert files_with_canary(path)
    holder.communicate(timeout=30)
    assert holder.returncode == 0
    with Database(path) as store:
        assert files_with_canary(path) == []
        assert [record.name for record in store.sessions.list()] == ["keep", "ours", "s", "theirs"]
        check_kept(store)
        assert store.notices == []


def test_damaged_states_leave_nothing_behind(tmp_path: Path) -> None:
    """Oracle: states that are discarded for damage are not set aside where a purge cannot reach."""
    path = tmp_path / "store"
    with Database(path) as store:
        plant(store)
    flip_bytes(path / "states" / "data.mdb", 0.0, count=64)
    with Database(path) as store:
        assert "discarded" in store.notices[0]
        purge(store)
        assert store.compact()
        assert files_with_canary(path) == []


def test_a_damaged_file_is_not_replaced(tmp_path: Path) -> None:
    """Oracle: compaction of a file that became unreadable under an open handle is refused by name;
    the file keeps its bytes, the marker stays, and other openings say what is wrong."""
    path = tmp_path / "store"
    with Database(path) as store:
        plant(store)
        purge(store)
        file = path / "sessions" / "data.mdb"
        flip_bytes(file, 0.0, count=8192)
        damaged = file.read_bytes()
        with pytest.raises(StoreDamaged, match="sessions"):
            store.compact()
        assert file.read_bytes() == damaged
        assert (path / "scrub.pending").exists()
        assert not (path / "sessions.new").exists(), "half a new file was left"
    with pytest.raises(StoreDamaged, match="sessions"):
        Database(path)


def test_compacting_drops_chunks_of_dead_writers(tmp_path: Path) -> None:
    """Oracle: the size of a store in which nothing was ever left half written."""
    path = tmp_path / "store"
    script = (
        "import os, sys; from freetoken_storage import Database, snapshots\n"
        "from freetoken_storage.testing import snapshot\n"
        "store = Database(sys.argv[1])\n"
        "snapshots.save_record = lambda *arguments: os._exit(9)\n"
        "store.snapshots.put([snapshot('large', size_bytes=20 << 20)])\n"
    )
    with Database(path) as store:
        store.snapshots.put([snapshot("keep", size_bytes=300_000)])
        clean_bytes = store.snapshots.size_bytes()
        child = subprocess.run([sys.executable, "-c", script, str(path)], timeout=60, check=False)
        assert child.returncode == 9
        assert store.snapshots.size_bytes() > 20 << 20
        assert not store.snapshots.contains(digest("large"))
        assert store.compact()
        assert store.snapshots.size_bytes() <= clean_bytes + 8192
        subprocess.run([sys.executable, "-c", script, str(path)], timeout=60, check=False)
    with Database(path) as store:  # alone: swept at opening
        assert store.snapshots.size_bytes() <= clean_bytes + 40_960
        read_back(store, snapshot("keep", size_bytes=300_000))


def test_compaction_reaches_the_disk_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: what lay in the folder at each sync of a folder. The marker is durable before the
    first file is replaced, each file before the marker goes, and its going before `compact` says
    that the bytes are gone; no descriptor stays open."""
    path, seen = tmp_path / "store", []
    really_sync = os.fsync

    def inode(kind: str) -> int:
        return (path / kind / "data.mdb").stat().st_ino

    def sync(descriptor: int) -> None:
        folder = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        marked = (path / "scrub.pending").exists()
        seen.append((folder.name, marked, inode("sessions") != old[0], inode("states") != old[1]))
        really_sync(descriptor)

    with Database(path) as store:
        plant(store)
        old = inode("sessions"), inode("states")
        keep = (
            (path / "sessions" / "data.mdb").open("rb"),
            (path / "states" / "data.mdb").open("rb"),
        )
        descriptors = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(os, "fsync", sync)
        assert store.compact()
        assert len(os.listdir("/proc/self/fd")) == descriptors
        for file in keep:  # they held the old inodes, so that no new file could get one of them
            file.close()
    assert seen == [
        ("store", True, False, False),
        ("sessions", True, True, False),
        ("states", True, True, True),
        ("store", False, True, True),
    ]


def states_keys(path: Path) -> set[bytes]:
    """Every key of the states, read with LMDB alone."""
    with lmdb.open(str(path / "states"), readonly=True) as env, env.begin() as txn:
        return {key for key, _ in txn.cursor()}


def test_compacting_keeps_exactly_what_readable_records_lead_to(tmp_path: Path) -> None:
    """Oracle: the keys, written out by hand: without the damaged record, its place among its
    parent's children, its use and its chunks; a use and a chunk of nobody go, too."""
    path = tmp_path / "store"
    with Database(path) as store:
        store.snapshots.put([snapshot("a", size_bytes=100_000), snapshot("b", "a", 200_000)])
        store.snapshots.put([snapshot("c", "b", 100)])
        store.snapshots.pin("owner", [digest("c")])
    before = states_keys(path)
    a, b, c = digest("a"), digest("b"), digest("c")
    with lmdb.open(str(path / "states")) as env, env.begin(write=True) as txn:
        txn.put(keys.record(b), b"garbage")
        for stray in (keys.use(99, c), keys.use(98, b), keys.chunk(77, 0), keys.writing(77)):
            txn.put(stray, b"stray")
    with Database(path) as store:
        assert store.compact()
        assert store.snapshots.children(a) == [] and store.snapshots.children(b) == [c]
        read_back(store, snapshot("a", size_bytes=100_000))
        read_back(store, snapshot("c", "b", 100))
        assert store.verify().ok
    gone = {keys.record(b), keys.child(a, b), keys.use(2, b)}
    gone |= {keys.chunk(2, index) for index in range(4)}
    assert gone <= before and states_keys(path) == before - gone


def test_compacting_copies_in_short_transactions(tmp_path: Path) -> None:
    """Oracle: LMDB's count of the commits that made the new file, for 20 MiB in batches of 8."""
    path = tmp_path / "store"
    with Database(path) as store:
        for i in range(20):
            store.snapshots.put([snapshot(f"n{i}", size_bytes=1 << 20)])
        assert store.compact()
        assert 3 <= read_header(path / "states" / "data.mdb").txn_id <= 5
        for i in range(20):
            read_back(store, snapshot(f"n{i}", size_bytes=1 << 20))
