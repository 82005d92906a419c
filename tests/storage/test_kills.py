# SPDX-License-Identifier: Apache-2.0
"""SIGKILL at any moment: what was acknowledged is there, and nothing half."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from freetoken_storage import Database
from freetoken_storage.testing import digest, read_back, snapshot

# Commits three nodes at a time with their log, now and then a snapshot (some of them larger than a
# transaction may be), and says so after each.
VICTIM = """
import sys
from freetoken_storage import Database
from freetoken_storage.records import Changes, NewNode, SegmentRecord
from freetoken_storage.testing import snapshot

with Database(sys.argv[1], disk_budget_bytes=48 << 20) as store:
    record = store.sessions.branch("s", "main")
    round = record.version
    print("open", flush=True)
    while True:
        names = [f"{round}-{i}" for i in range(3)]
        changes = Changes(
            segments=[SegmentRecord(name, name.encode() * 300) for name in names],
            nodes=[NewNode(record.head if i == 0 else -i, name, name.encode() * 2000 * i)
                   for i, name in enumerate(names)],
            head=-3,
            log=[names[0].encode()],
            body=str(round).encode(),
        )
        record = store.sessions.commit("s", "main", changes, expected_version=round).branch
        round += 1
        print("commit", round, flush=True)
        size_bytes = 12 << 20 if round % 5 == 0 else 300_000
        store.snapshots.put([snapshot(f"n{round}", size_bytes=size_bytes)])
        print("put", round, flush=True)
"""


def kill_after(path: Path, delay_s: float) -> tuple[int, int]:
    """Run the victim, kill it; the last commit and the last snapshot it acknowledged."""
    child = subprocess.Popen(
        [sys.executable, "-c", VICTIM, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "open\n"
    time.sleep(delay_s)
    child.send_signal(signal.SIGKILL)
    output = child.communicate(timeout=60)[0]
    assert child.returncode == -signal.SIGKILL
    acknowledged = {"commit": 0, "put": 0}
    for line in output.splitlines(keepends=True):
        if line.endswith("\n"):
            kind, number = line.split()
            acknowledged[kind] = int(number)
    return acknowledged["commit"], acknowledged["put"]


def check_after_kill(path: Path, commits: int, last_put: int) -> int:
    """Open what is left; returns the number of commits in it."""
    with Database(path, disk_budget_bytes=48 << 20) as store:
        assert store.notices == []
        record = store.sessions.branch("s", "main")
        assert record.version >= commits, "an acknowledged commit is lost"
        nodes = store.sessions.path("s", record.head)
        expected = [f"{i}-{j}" for i in range(record.version) for j in range(3)]
        assert [node.segment_id for node in nodes] == expected
        assert [node.id for node in store.sessions.nodes("s")] == [node.id for node in nodes]
        segments = store.sessions.segments("s", expected)
        assert len(segments) == len(expected)
        assert all(segments[name].body == name.encode() * 300 for name in expected)
        assert [len(node.body) for node in nodes] == [
            len(name) * 2000 * (i % 3) for i, name in enumerate(expected)
        ]
        log = [entry.body.decode() for entry in store.sessions.log("s", "main")]
        assert log == expected[::3] and record.log_length == record.version
        assert record.version == 0 or record.body == str(record.version - 1).encode()
        if last_put:
            large = last_put % 5 == 0
            read_back(store, snapshot(f"n{last_put}", size_bytes=12 << 20 if large else 300_000))
        return record.version


def run_kills(path: Path, times: int, seed: int) -> None:
    chosen = random.Random(seed)
    with Database(path) as store:
        store.sessions.create("s", b"")
    total = 0
    for _ in range(times):
        commits, last_put = kill_after(path, chosen.uniform(0, 0.15))
        total = check_after_kill(path, max(commits, total), last_put)
    assert total > times, "hardly anything was committed: the test proves nothing"
    with Database(path) as store:
        report = store.verify()
        assert report.ok, report.faults
        states_bytes = store.snapshots.size_bytes()
        assert states_bytes <= 1.1 * report.counts["bytes"] + (1 << 20), "half snapshots were left"


def test_c43_sigkill_at_random_points(tmp_path: Path) -> None:
    """Oracle: what the victim said it had done, and the fixed program it follows."""
    run_kills(tmp_path / "store", times=8, seed=20)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_c43_sigkill_at_50_random_points(tmp_path: Path) -> None:
    """Oracle: as above."""
    run_kills(tmp_path / "store", times=50, seed=21)


COMPACTOR = """
import sys
from freetoken_storage import Database
with Database(sys.argv[1]) as store:
    print("open", flush=True)
    while True:
        assert store.compact()
        print("compacted", flush=True)
"""


def test_c43_sigkill_while_compacting(tmp_path: Path) -> None:
    """Oracle: the contents before the first compaction; no temporary file stays after opening."""
    path = tmp_path / "store"
    with Database(path) as store:
        store.sessions.create("s", bytes(200_000))
        for i in range(8):
            store.snapshots.put([snapshot(f"n{i}", size_bytes=1 << 20)])
        expected = store.sessions.list()
    chosen = random.Random(22)
    for _ in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", COMPACTOR, str(path)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert child.stdout is not None and child.stdout.readline() == "open\n"
        time.sleep(chosen.uniform(0, 0.4))
        os.killpg(child.pid, signal.SIGKILL)  # its worker, too
        child.communicate(timeout=30)
        with Database(path) as store:
            assert store.sessions.list() == expected
            for i in range(8):
                read_back(store, snapshot(f"n{i}", size_bytes=1 << 20))
            assert store.notices == []
        assert sorted(entry.name for entry in path.iterdir()) == [
            "opening.lock",
            "sessions",
            "states",
            "store.lock",
        ]


def test_c43_sigkill_while_creating(tmp_path: Path) -> None:
    """Oracle: the folder opens, empty or whole, whenever its creator died."""
    script = "import sys; from freetoken_storage import Database\nprint('go', flush=True)\n"
    script += "Database(sys.argv[1]).sessions.create('s', b'body'); print('done', flush=True)\n"
    chosen = random.Random(23)
    for i in range(5):
        path = tmp_path / f"store{i}"
        child = subprocess.Popen(
            [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None and child.stdout.readline() == "go\n"
        time.sleep(chosen.uniform(0, 0.02))
        child.kill()
        done = "done" in child.communicate(timeout=30)[0]
        with Database(path) as store:
            found = [record.body for record in store.sessions.list()]
            assert found in ([[b"body"]] if done else [[], [b"body"]])
            assert not store.snapshots.contains(digest("x"))
