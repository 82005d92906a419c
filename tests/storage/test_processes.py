# SPDX-License-Identifier: Apache-2.0
"""Several writers of one store: processes and threads, on one branch and on several."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from freetoken_storage import Database, MemoryDatabase
from freetoken_storage.errors import SessionConflict
from freetoken_storage.records import Changes, NewNode, SegmentRecord
from freetoken_storage.testing import AnyDatabase, digest, grow, read_back, snapshot

# Commits `count` nodes to a branch, one each, taking up whatever others committed in between.
WRITER = """
import sys
from freetoken_storage import Database
from freetoken_storage.errors import SessionConflict
from freetoken_storage.records import Changes, NewNode, SegmentRecord

path, branch, label, count = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
conflicts = 0
with Database(path) as store:
    print("open", flush=True)
    sys.stdin.readline()
    version, head = 0, 0
    for i in range(count):
        name = f"{label}-{i}"
        while True:
            changes = Changes(
                segments=[SegmentRecord(name, b"text")],
                nodes=[NewNode(head, name, name.encode())],
                head=-1,
                log=[name.encode()],
            )
            try:
                record = store.sessions.commit(
                    "s", branch, changes, expected_version=version
                ).branch
            except SessionConflict as conflict:
                conflicts += 1
                record = store.sessions.branch("s", branch)
                assert conflict.value <= record.version
                version, head = record.version, record.head
                continue
            version, head = record.version, record.head
            break
print(conflicts, flush=True)
"""


def start_writer(path: Path, branch: str, label: str, count: int) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), branch, label, str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None and child.stdout.readline() == "open\n"
    return child


def finish(children: list[subprocess.Popen[str]]) -> list[int]:
    """Let all writers go at once; the conflicts each met."""
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    answers = [child.communicate(timeout=120)[0] for child in children]
    assert [child.returncode for child in children] == [0] * len(children)
    return [int(answer) for answer in answers]


def test_two_processes_on_two_branches(tmp_path: Path) -> None:
    """Oracle: no conflict, each branch holds exactly its own writer's nodes in order, and no node
    id was given twice."""
    path, count = tmp_path / "store", 60
    with Database(path) as store:
        store.sessions.create("s", b"")
        store.sessions.create_branch("s", "other", head=0, body=b"")
    conflicts = finish(
        [start_writer(path, "main", "m", count), start_writer(path, "other", "o", count)]
    )
    assert conflicts == [0, 0]
    with Database(path) as store:
        for branch, label in (("main", "m"), ("other", "o")):
            record = store.sessions.branch("s", branch)
            nodes = store.sessions.path("s", record.head)
            assert [node.body.decode() for node in nodes] == [f"{label}-{i}" for i in range(count)]
            assert record.version == record.log_length == count
        assert [node.id for node in store.sessions.nodes("s")] == list(range(1, 2 * count + 1))
        assert store.verify().ok


def test_two_processes_on_one_branch(tmp_path: Path) -> None:
    """Oracle: every acknowledged node of both is on the path once, in each writer's order; whoever
    was late got SessionConflict and repeated."""
    path, count = tmp_path / "store", 60
    with Database(path) as store:
        store.sessions.create("s", b"")
    conflicts = finish(
        [start_writer(path, "main", "a", count), start_writer(path, "main", "b", count)]
    )
    assert sum(conflicts) > 0, "the writers never met: the test proves nothing"
    with Database(path) as store:
        record = store.sessions.branch("s", "main")
        bodies = [node.body.decode() for node in store.sessions.path("s", record.head)]
        for label in "ab":
            own = [body for body in bodies if body.startswith(label)]
            assert own == [f"{label}-{i}" for i in range(count)]
        assert record.version == len(bodies) == 2 * count
        assert [entry.body.decode() for entry in store.sessions.log("s", "main")] == bodies


def test_a_stale_handle_loses_nothing(tmp_path: Path) -> None:
    """Oracle: the other process's commit stays as it was, the refused one left no trace."""
    path = tmp_path / "store"
    with Database(path) as store:
        store.sessions.create("s", b"")
        stale = store.sessions.branch("s", "main")
        finish([start_writer(path, "main", "x", 1)])
        changes = Changes(
            segments=[SegmentRecord("mine", b"")], nodes=[NewNode(0, "mine", b"")], head=-1
        )
        with pytest.raises(SessionConflict, match="expected version 0") as raised:
            store.sessions.commit("s", "main", changes, expected_version=stale.version)
        assert raised.value.value == 1
        assert [segment.id for segment in store.sessions.all_segments("s")] == ["x-0"]


def test_two_processes_share_snapshots(tmp_path: Path) -> None:
    """Oracle: the bytes; what one put the other reads, and an eviction by one is a miss of both."""
    path = tmp_path / "store"
    script = (
        "import sys; from freetoken_storage import Database\n"
        "from freetoken_storage.testing import digest, read_back, snapshot\n"
        "with Database(sys.argv[1]) as store:\n"
        "    read_back(store, snapshot('ours', size_bytes=300000))\n"
        "    store.snapshots.put([snapshot('theirs', 'ours', 300000)])\n"
        "    store.snapshots.pin('them', [digest('theirs')])\n"
    )
    with Database(path, disk_budget_bytes=8 << 20) as store:
        store.snapshots.put([snapshot("ours", size_bytes=300_000)])
        subprocess.run([sys.executable, "-c", script, str(path)], check=True, timeout=60)
        read_back(store, snapshot("theirs", "ours", 300_000))
        for i in range(20):
            store.snapshots.put([snapshot(f"n{i}", size_bytes=500_000)])
        assert store.snapshots.contains(digest("ours")), "a pin of the other process was ignored"
        store.snapshots.pin("them", [])
        for i in range(20, 40):
            store.snapshots.put([snapshot(f"n{i}", size_bytes=500_000)])
        assert not store.snapshots.contains(digest("ours"))


@pytest.mark.parametrize("kind", ["lmdb", "memory"])
def test_threads_on_five_branches(kind: str, tmp_path: Path) -> None:
    """Oracle: no conflict; each branch holds its own thread's letters; snapshots put meanwhile by
    another thread read back."""
    store: AnyDatabase = MemoryDatabase() if kind == "memory" else Database(tmp_path / "store")
    branches = [f"b{i}" for i in range(5)]
    letters = "abcdefghijklmnop"
    failures: list[BaseException] = []

    def write(branch: str) -> None:
        try:
            for letter in letters:
                grow(store, letter, branch=branch)
        except BaseException as error:  # noqa: BLE001  # handed to the main thread
            failures.append(error)

    def persist() -> None:
        try:
            for i in range(20):
                store.snapshots.put([snapshot(f"n{i}", size_bytes=200_000)])
                read_back(store, snapshot(f"n{i}", size_bytes=200_000))
        except BaseException as error:  # noqa: BLE001  # handed to the main thread
            failures.append(error)

    with store:
        store.sessions.create("s", b"")
        for branch in branches:
            store.sessions.create_branch("s", branch, head=0, body=b"")
        threads = [threading.Thread(target=write, args=(branch,)) for branch in branches]
        threads.append(threading.Thread(target=persist))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert failures == []
        for branch in branches:
            head = store.sessions.branch("s", branch).head
            bodies = [node.body for node in store.sessions.path("s", head)]
            assert bodies == [b"node " + letter.encode() for letter in letters]
        assert len(list(store.sessions.nodes("s"))) == len(branches) * len(letters)


def test_a_commit_does_not_wait_for_a_snapshot(tmp_path: Path) -> None:
    """Oracle: while a write transaction of the states is held open, an edit commits."""
    with Database(tmp_path / "store") as store:
        store.sessions.create("s", b"")
        states = store._states
        assert states is not None
        committed = threading.Event()

        def commit() -> None:
            grow(store, "a")
            committed.set()

        with states.write():
            writer = threading.Thread(target=commit)
            writer.start()
            assert committed.wait(30), "the commit waited for the states"
        writer.join(30)


def test_stale_readers_of_killed_processes_are_forgotten(tmp_path: Path) -> None:
    """Oracle: the budget: pages that a killed reader kept are reused once it is forgotten."""
    path, budget_bytes = tmp_path / "store", 8 << 20
    script = (
        "import sys; from freetoken_storage import Database\n"
        "store = Database(sys.argv[1])\n"
        "with store.snapshots.reader():\n"
        "    print('reading', flush=True); sys.stdin.readline()\n"
    )
    with Database(path, disk_budget_bytes=budget_bytes) as store:
        store.snapshots.put([snapshot("old", size_bytes=1 << 20)])
        child = subprocess.Popen(
            [sys.executable, "-c", script, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None and child.stdout.readline() == "reading\n"
        child.kill()
        child.communicate(timeout=30)
        for i in range(60):
            store.snapshots.put([snapshot(f"n{i}", size_bytes=1 << 20)])
        assert sum(store.sizes().values()) <= budget_bytes


def test_updated_times_follow_the_commits(tmp_path: Path) -> None:
    """Oracle: the clock around the commit."""
    with Database(tmp_path / "store") as store:
        created = store.sessions.create("s", b"")
        before_s = time.time()
        grow(store, "a")
        record = store.sessions.get("s")
        assert created.created_s == record.created_s
        assert before_s <= record.updated_s <= time.time()
