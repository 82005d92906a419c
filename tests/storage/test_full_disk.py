# SPDX-License-Identifier: Apache-2.0
"""No room left: on a small file system of its own where mounting is allowed, and by a limit on file
sizes everywhere."""

import logging
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest

from freetoken_storage import Database
from freetoken_storage.errors import StoreFull, WriteFailed
from freetoken_storage.records import Changes, NewNode, SegmentRecord
from freetoken_storage.testing import (
    digest,
    file_size_limit,
    grow,
    present,
    read_back,
    snapshot,
)

MIB = 1 << 20


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """A file system of `size_bytes`; skips where mounting is not allowed."""
    folder.mkdir()
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)],
            check=True,
            capture_output=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting is not allowed here: {error}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Use up every block that is left."""
    ballast = folder / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for size_bytes in (MIB, 4096):
            try:
                while file.write(bytes(size_bytes)) == size_bytes:
                    pass
            except OSError:
                continue
    return ballast


def commit_until_full(store: Database, size_bytes: int) -> int:
    """Commit nodes of `size_bytes` until StoreFull; the number of acknowledged ones."""
    for count in range(10_000):
        record = store.sessions.branch("s", "main")
        changes = Changes(
            segments=[SegmentRecord(f"full-{count}", bytes(size_bytes))],
            nodes=[NewNode(record.head, f"full-{count}", b"")],
            head=-1,
        )
        try:
            store.sessions.commit("s", "main", changes, expected_version=record.version)
        except StoreFull as error:
            assert error.code == "store_full" and "remedy" in str(error)
            return count
    raise AssertionError("the disk never filled")


def c46(path: Path, count: int, size_bytes: int, caplog: pytest.LogCaptureFixture) -> None:
    """Put more than fits; then look who is left."""
    sessions = [f"session {i}" for i in range(5)]
    labels = [f"n{i}" for i in range(count)]
    with Database(path) as store:
        for name in sessions:
            store.sessions.create(name, name.encode())
        pinned = [f"pinned{i}" for i in range(4)]
        for parent, label in zip([None, *pinned], pinned, strict=False):
            store.snapshots.put([snapshot(label, parent, size_bytes)])
        store.snapshots.pin("owner", [digest(pinned[-1])])
        for number, label in enumerate(labels):
            store.snapshots.put([snapshot(label, size_bytes=size_bytes)])
            if number % 10 == 0:
                store.sessions.create(f"late {number}", b"")
        left = present(store, labels)
        assert 0 < len(left) < count and left == labels[-len(left) :], "not the oldest went"
        assert present(store, pinned) == pinned
        disk = os.statvfs(path)
        kept_free = min(64 * MIB, disk.f_blocks * disk.f_frsize // 10)
        assert kept_free - MIB < disk.f_bavail * disk.f_frsize < kept_free + 4 * size_bytes
        for label in (left[0], left[-1]):
            read_back(store, snapshot(label, size_bytes=size_bytes))
        late = [f"late {number}" for number in range(0, count, 10)]
        assert {record.name for record in store.sessions.list()} == {*sessions, *late}
        assert len(store.notices) == 1 and "oldest states" in store.notices[0]
        assert "oldest states" in caplog.text, "nobody was warned"
    with Database(path) as store:
        assert store.verify().ok
        assert present(store, labels) == left


def test_c46_small_file_system(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: the order in which the snapshots were put, the pins, and the list of sessions."""
    caplog.set_level(logging.WARNING)
    with small_disk(tmp_path / "disk", 40 * MIB) as disk:
        c46(disk / "store", count=80, size_bytes=MIB, caplog=caplog)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_c46_200_mb_file_system(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: as above, at the size and the snapshots of the case."""
    caplog.set_level(logging.WARNING)
    with small_disk(tmp_path / "disk", 200 * MIB) as disk:
        c46(disk / "store", count=200, size_bytes=3 * MIB, caplog=caplog)


def test_c47_no_space_at_commit(tmp_path: Path) -> None:
    """Oracle: every acknowledged node is there, the refused one is not; the session and its states
    can be read while the disk is full, and written once it is not, also after reopening."""
    with small_disk(tmp_path / "disk", 24 * MIB) as disk:
        path = disk / "store"
        with Database(path) as store:
            store.sessions.create("s", b"")
            store.snapshots.put([snapshot("kept", size_bytes=MIB)])
            ballast = fill(disk)
            count = commit_until_full(store, 20_000)
            for _ in range(3):
                assert commit_until_full(store, 200_000) == 0
            head = store.sessions.branch("s", "main").head
            assert len(store.sessions.path("s", head)) == count
            read_back(store, snapshot("kept", size_bytes=MIB))
            with pytest.raises(StoreFull):
                store.snapshots.put([snapshot("new", size_bytes=3 * MIB)])
            read_back(store, snapshot("kept", size_bytes=MIB))
            with pytest.raises(StoreFull):
                store.compact()
            assert len(store.sessions.path("s", head)) == count
        with Database(path) as store:  # opens on a full disk
            assert len(store.sessions.path("s", head)) == count
            read_back(store, snapshot("kept", size_bytes=MIB))
        ballast.unlink()
        with Database(path) as store:
            grow(store, "abc")
            store.snapshots.put([snapshot("new", size_bytes=3 * MIB)])
            assert store.compact() and store.verify().ok


def test_c47_states_go_on_when_others_fill_the_disk(tmp_path: Path) -> None:
    """Oracle: the order of the puts: with not one free block left, new states take the room of the
    oldest, the pinned one stays, and every session can be read."""
    with small_disk(tmp_path / "disk", 32 * MIB) as disk, Database(disk / "store") as store:
        store.sessions.create("s", b"body")
        for i in range(10):
            store.snapshots.put([snapshot(f"n{i}", size_bytes=MIB)])
        store.snapshots.pin("owner", [digest("n3")])
        store.snapshots.touch([digest("n0")])
        fill(disk)
        for i in range(10, 30):
            store.snapshots.put([snapshot(f"n{i}", size_bytes=MIB)])
            if i == 11:
                assert store.snapshots.contains(digest("n0")), "a touched one went first"
        left = present(store, [f"n{i}" for i in range(30)])
        assert left[0] == "n3" and left[1:] == [f"n{i}" for i in range(31 - len(left), 30)]
        assert len(left) >= 9, "room that the file already had was given up"
        for label in left:
            read_back(store, snapshot(label, size_bytes=MIB))
        assert store.sessions.get("s").body == b"body"


def test_c47_creating_on_a_full_disk(tmp_path: Path) -> None:
    """Oracle: StoreFull, nothing half, and the same folder works once there is room."""
    with small_disk(tmp_path / "disk", 4 * MIB) as disk:
        ballast = fill(disk)
        with pytest.raises(StoreFull):
            Database(disk / "store")
        ballast.unlink()
        with Database(disk / "store") as store:
            store.sessions.create("s", b"")


def test_c51_a_write_error_keeps_the_old_snapshot(tmp_path: Path) -> None:
    """Oracle: a limit on file sizes makes the write fail in the middle; the caller gets an error,
    and what was there before reads back, byte for byte."""
    path = tmp_path / "store"
    with Database(path) as store:
        store.sessions.create("s", b"")
        first = grow(store, "ab")
        store.snapshots.put([snapshot("old", size_bytes=300_000)])
        limit_bytes = max(store.sizes().values()) + 100_000
        with file_size_limit(limit_bytes):
            for size_bytes in (MIB, 20 * MIB):  # in one transaction, and in several
                with pytest.raises(StoreFull):
                    store.snapshots.put([snapshot("new", size_bytes=size_bytes)])
            with pytest.raises(StoreFull):
                store.sessions.create("long", bytes(2 * MIB))
            assert [record.name for record in store.sessions.list()] == ["s"]
            grow(store, "c")  # what fits is still written
        assert not store.snapshots.contains(digest("new"))
        read_back(store, snapshot("old", size_bytes=300_000))
        assert [node.id for node in store.sessions.path("s", 3)] == [*first, 3]
        store.snapshots.put([snapshot("new", size_bytes=20 * MIB)])
        read_back(store, snapshot("new", size_bytes=20 * MIB))
        assert store.verify().ok


def test_a_full_disk_evicts_and_goes_on(tmp_path: Path) -> None:
    """Oracle: the order of the puts, and the pin; a limit on file sizes stands for the disk."""
    path = tmp_path / "store"
    with Database(path) as store:
        for i in range(12):
            store.snapshots.put([snapshot(f"n{i}", size_bytes=MIB)])
        store.snapshots.pin("owner", [digest("n0")])
        with file_size_limit(store.sizes()["states"] + MIB):
            for i in range(12, 40):
                store.snapshots.put([snapshot(f"n{i}", size_bytes=MIB)])
            labels = [f"n{i}" for i in range(40)]
            left = present(store, labels)
            assert left[0] == "n0" and left[1:] == labels[-len(left) + 1 :]
            assert len(store.notices) == 1 and "oldest states" in store.notices[0]
            read_back(store, snapshot("n0", size_bytes=MIB))


def test_sessions_take_room_from_the_states_and_never_the_other_way(tmp_path: Path) -> None:
    """Oracle: the budget of 16 MiB against the sizes of both files; the states get what a session
    of 8 MiB leaves, nothing once the sessions are larger than all of it; the sessions go on."""
    labels = [f"n{i}" for i in range(20)]
    with Database(tmp_path / "store", disk_budget_bytes=16 * MIB) as store:
        store.sessions.create("large", bytes(8 * MIB))
        for label in labels:
            store.snapshots.put([snapshot(label, size_bytes=MIB)])
        left = present(store, labels)
        assert 5 <= len(left) <= 7 and left == labels[-len(left) :]
        assert sum(store.sizes().values()) <= 16 * MIB
        store.snapshots.pin("owner", [digest(left[-1])])
        store.sessions.create("larger", bytes(9 * MIB))
        with pytest.raises(
            StoreFull, match="nothing more can be evicted.*limit: 0 bytes for states"
        ):
            store.snapshots.put([snapshot("new", size_bytes=MIB)])
        read_back(store, snapshot(left[-1], size_bytes=MIB))
        grow(store, "abc", name="large")
        store.sessions.delete("larger")
        assert store.compact()
        store.snapshots.put([snapshot("new", size_bytes=MIB)])


def test_an_unwritable_header_is_survived(tmp_path: Path) -> None:
    """Oracle: what was acknowledged. LMDB refuses every write after a header could not be written
    ("panic"); the store opens the file anew and goes on."""
    with Database(tmp_path / "store") as store:
        store.sessions.create("s", b"")
        grow(store, "a")
        sessions = store._sessions
        failure = sessions._translate(lmdb.PanicError("mdb_txn_begin: MDB_PANIC"))
        assert isinstance(failure, WriteFailed)
        env = sessions._env
        grow(store, "b")
        assert sessions._env is not env
        assert [node.id for node in store.sessions.path("s", 2)] == [1, 2]
