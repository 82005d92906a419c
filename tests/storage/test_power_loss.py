# SPDX-License-Identifier: Apache-2.0
"""A power loss in the middle of a commit, rebuilt from copies of the file before and after it.

A commit writes its pages, waits for the disk, then writes the header. When the power goes, any of
its pages may have reached the disk, in any order, whole or by sectors, but no header from after the
wait. So the file after commit k, with a random part of what commit k + 1 wrote laid over it, must
open as commit k; with all of it, as commit k + 1.
"""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from freetoken_storage import Database, verify_store
from freetoken_storage.errors import StoreDamaged
from freetoken_storage.pages import read_header
from freetoken_storage.records import Changes, NewNode, Scrub, SegmentRecord
from freetoken_storage.testing import digest, present, read_back, snapshot

PAGE_BYTES = 4096
SECTOR_BYTES = 512
HEADER_PAGES = 2

# Commits one node with a body of the length it is told, to its own branch.
OTHER_WRITER = """
import sys
from freetoken_storage import Database
from freetoken_storage.records import Changes, NewNode, SegmentRecord

with Database(sys.argv[1]) as store:
    print("open", flush=True)
    for line in sys.stdin:
        branch = store.sessions.branch("s", "theirs")
        name = f"theirs-{branch.version}"
        changes = Changes(segments=[SegmentRecord(name, name.encode() * int(line))],
                          nodes=[NewNode(branch.head, name, b"")], head=-1, log=[name.encode()])
        store.sessions.commit("s", "theirs", changes, expected_version=branch.version)
        print("done", flush=True)
"""


@contextmanager
def other_writer(path: Path) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", OTHER_WRITER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None and child.stdout.readline() == "open\n"
    try:
        yield child
    finally:
        child.communicate(timeout=30)
        assert child.returncode == 0


def contents(store: Database) -> object:
    """Everything about every session, times included."""
    sessions = store.sessions
    return [
        (
            record,
            list(sessions.nodes(record.name)),
            list(sessions.all_segments(record.name)),
            [
                (
                    branch,
                    sessions.path(record.name, branch.head),
                    sessions.log(record.name, branch.name),
                )
                for branch in sessions.branches(record.name)
            ],
        )
        for record in sessions.list()
    ]


def commit_one(store: Database, chosen: random.Random, number: int) -> None:
    """One random commit: new nodes, short and long, a rewind, or a purge of what a rewind left."""
    sessions = store.sessions
    branch = sessions.branch("s", "main")
    nodes = sessions.path("s", branch.head)
    alive = {node.id for node in [*nodes, *sessions.path("s", sessions.branch("s", "theirs").head)]}
    left = [node for node in sessions.nodes("s") if node.id not in alive]
    if left and chosen.random() < 0.5:
        ids, segments = {node.id for node in left}, {node.segment_id for node in left}
        sessions.scrub("s", Scrub(node_ids=frozenset(ids), segment_ids=frozenset(segments)))
        return
    if nodes and chosen.random() < 0.25:
        head = chosen.choice(nodes[-4:]).parent
        sessions.commit("s", "main", Changes(head=head), expected_version=branch.version)
        return
    labels = [f"{number}-{i}" for i in range(chosen.randint(1, 4))]
    changes = Changes(
        segments=[
            SegmentRecord(x, chosen.randbytes(chosen.choice((20, 900, 30_000)))) for x in labels
        ],
        nodes=[NewNode(-i if i else branch.head, x, b"body") for i, x in enumerate(labels)],
        head=-len(labels),
        log=[labels[0].encode()],
        body=chosen.randbytes(60),
    )
    store.sessions.commit("s", "main", changes, expected_version=branch.version)


def partly_written(before: bytes, after: bytes, chosen: random.Random) -> bytes:
    """`before`, with a random part of the pages that are new in `after` laid over it, some of them
    only by sectors; the headers stay. A file that grew has its new length already, or not."""
    grown = chosen.random() < 0.5 and len(after) > len(before)
    result = bytearray(before.ljust(len(after), b"\0") if grown else before)
    share = chosen.choice((0.1, 0.5, 0.9, 1.0))
    for start in range(HEADER_PAGES * PAGE_BYTES, len(result), PAGE_BYTES):
        if before[start : start + PAGE_BYTES] == after[start : start + PAGE_BYTES]:
            continue
        if chosen.random() >= share:
            continue
        torn = chosen.random() < 0.2
        for at in range(start, start + PAGE_BYTES, SECTOR_BYTES):
            if not torn or chosen.random() < 0.5:
                result[at : at + SECTOR_BYTES] = after[at : at + SECTOR_BYTES]
    return bytes(result)


def recorded_commits(path: Path, count: int, seed: int) -> list[tuple[bytes, object]]:
    """The sessions' file and contents after each of `count` commits of two processes."""
    chosen = random.Random(seed)
    file = path / "sessions" / "data.mdb"
    recorded = []
    with Database(path) as store:
        store.sessions.create("s", b"body")
        store.sessions.create_branch("s", "theirs", head=0, body=b"")
        with other_writer(path) as child:
            assert child.stdin is not None and child.stdout is not None
            for number in range(count):
                if chosen.random() < 0.4:
                    child.stdin.write(f"{chosen.choice((1, 100, 4000))}\n")
                    child.stdin.flush()
                    assert child.stdout.readline() == "done\n"
                else:
                    commit_one(store, chosen, number)
                recorded.append((file.read_bytes(), contents(store)))
    return recorded


def lose_power(path: Path, commits: int, cuts: int, seed: int) -> None:
    """Every neighbouring pair of commits, cut `cuts` times each."""
    recorded = recorded_commits(path, commits, seed)
    file = path / "sessions" / "data.mdb"
    chosen = random.Random(seed + 1)
    for number, (before, old) in enumerate(recorded[:-1]):
        after, new = recorded[number + 1]
        assert old != new
        for cut in range(cuts):
            file.write_bytes(partly_written(before, after, chosen))
            with Database(path) as store:
                assert contents(store) == old, "not the acknowledged prefix"
                if cut == 0:  # and the store goes on from there
                    commit_one(store, chosen, 10**6)
            if cut == 0 and number % 3 == 0:
                report = verify_store(path)
                assert report.ok, report.faults
        file.write_bytes(after)
        with Database(path) as store:
            assert contents(store) == new


def test_power_loss_while_sessions_commit(tmp_path: Path) -> None:
    """Oracle: what both processes had acknowledged, read from the handle that was open then."""
    lose_power(tmp_path / "store", commits=16, cuts=5, seed=31)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_power_losses_while_sessions_commit(tmp_path: Path) -> None:
    """Oracle: as above."""
    for seed in range(40, 44):
        lose_power(tmp_path / f"store{seed}", commits=60, cuts=12, seed=seed)


def test_a_header_before_its_pages_is_noticed(tmp_path: Path) -> None:
    """Oracle: a disk that lies about having written: the header of commit k + 1 over pages that are
    partly those of commit k. That must show, or else the cuts above would prove nothing."""
    path = tmp_path / "store"
    recorded = recorded_commits(path, 12, seed=33)
    file = path / "sessions" / "data.mdb"
    chosen = random.Random(34)
    damaged = 0
    for (before, _), (after, new) in zip(recorded, recorded[1:], strict=False):
        cut = bytearray(partly_written(before, after, chosen).ljust(len(after), b"\0"))
        cut[: HEADER_PAGES * PAGE_BYTES] = after[: HEADER_PAGES * PAGE_BYTES]
        file.write_bytes(cut)
        try:
            with Database(path) as store:
                assert contents(store) == new or not store.verify().ok
        except StoreDamaged:
            damaged += 1
    assert damaged > 3


def test_power_loss_while_states_are_written(tmp_path: Path) -> None:
    """Oracle: which snapshots were there after each commit. The header of the states is not synced,
    so a power loss may also take the last one back; what opens is a state that was, whole."""
    path = tmp_path / "store"
    file = path / "states" / "data.mdb"
    chosen = random.Random(35)
    labels: list[str] = []
    recorded: dict[int, tuple[bytes, list[str]]] = {}
    with Database(path, disk_budget_bytes=6 << 20) as store:
        for number in range(30):
            labels.append(f"n{number}")
            size_bytes = chosen.choice((100, 70_000, 900_000))
            store.snapshots.put([snapshot(labels[-1], size_bytes=size_bytes)])
            commit = read_header(file).txn_id
            recorded[commit] = file.read_bytes(), present(store, labels)
    checked = 0
    for commit, (before, here) in recorded.items():
        if commit + 1 not in recorded:
            continue  # an eviction came between
        after, _ = recorded[commit + 1]
        for _ in range(3):
            cut = bytearray(partly_written(before, after, chosen))
            expected = here
            if commit - 1 in recorded and chosen.random() < 0.5:
                older, expected = recorded[commit - 1]
                lost = (commit % HEADER_PAGES) * PAGE_BYTES
                cut[lost : lost + PAGE_BYTES] = older[lost : lost + PAGE_BYTES]
            file.write_bytes(cut)
            with Database(path) as store:
                assert store.notices == [] and present(store, labels) == expected
                for label in expected:
                    with store.snapshots.reader() as reader:
                        info = reader.info(digest(label))
                    assert info is not None
                    read_back(store, snapshot(label, size_bytes=info.sizes["kv"]))
            checked += 1
    assert checked > 15
    assert verify_store(path).ok


def test_a_new_store_reaches_the_disk_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: which folders were synced, in order, by the time the store is open. A file whose
    folder is not synced may be gone after a power loss, however often the file was: every new entry
    is followed by a sync of the folder it is in, and a database's own before it gets its name."""
    synced: list[str] = []
    really_sync = os.fsync

    def sync(descriptor: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        really_sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    descriptors = len(os.listdir("/proc/self/fd"))
    path = tmp_path / "deep" / "store"
    Database(path).close()
    databases = ["deep/store/sessions.new", "deep/store", "deep/store/states.new", "deep/store"]
    assert synced == ["deep", ".", *databases]
    synced.clear()
    Database(path).close()
    assert synced == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_store_in_a_folder_that_only_takes_entries(tmp_path: Path) -> None:
    """Oracle: such a folder cannot be synced, and that must not keep a store from being made."""
    if os.getuid() != 0:
        pytest.skip("needs root to become another user")
    (tmp_path / "inbox").mkdir()
    (tmp_path / "inbox").chmod(0o733)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    child = subprocess.run(
        [sys.executable, "-c", "import sys; from freetoken_storage import Database\n"
         "import os; os.setgid(65534); os.setuid(65534)\n"
         "with Database(sys.argv[1]) as store: store.sessions.create('s', b'')\n",
         str(tmp_path / "inbox" / "store")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
