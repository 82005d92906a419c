# SPDX-License-Identifier: Apache-2.0
"""Who may open a store, when, and what a handle does once it may no longer be used."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from freetoken_storage import Database, MemoryDatabase, verify_store
from freetoken_storage.errors import (
    FreetokenError,
    InvalidRecord,
    StorageError,
    StoreAlreadyOpen,
    StoreClosed,
    StoreDamaged,
    StoreForked,
    StoreFull,
    StoreLocked,
    StoreReadOnly,
)
from freetoken_storage.locks import Gate, StoreLock
from freetoken_storage.records import Changes, SegmentRecord, Snapshot
from freetoken_storage.testing import AnyDatabase, digest, grow, read_back, snapshot

OPEN_AND_WAIT = (
    "import sys; from freetoken_storage import Database\n"
    "with Database(sys.argv[1]):\n"
    "    print('open', flush=True); sys.stdin.readline()\n"
)


@contextmanager
def held_by_another_process(path: Path) -> Iterator[None]:
    child = subprocess.Popen(
        [sys.executable, "-c", OPEN_AND_WAIT, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline() == "open\n"
    try:
        yield
    finally:
        child.communicate("\n", timeout=30)
        assert child.returncode == 0


def in_forked_child(action: Callable[[], str]) -> str:
    """What `action` returned in a child made by fork()."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.write(write_end, action().encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        answer = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    return answer


def code_of(action: Callable[[], object]) -> str:
    try:
        action()
    except FreetokenError as error:
        return error.code
    return "no error"


def writes(store: AnyDatabase) -> list[Callable[[], object]]:
    """Every call that writes."""
    sessions, snapshots = store.sessions, store.snapshots
    return [
        lambda: sessions.create("new", b""),
        lambda: sessions.delete("s"),
        lambda: sessions.create_branch("s", "b", head=0, body=b""),
        lambda: sessions.delete_branch("s", "main"),
        lambda: sessions.commit("s", "main", Changes(), expected_version=1),
        lambda: snapshots.put([snapshot("new")]),
        lambda: snapshots.remove([digest("x")]),
        lambda: snapshots.pin("owner", [digest("x")]),
        lambda: snapshots.shrink(-1),
        lambda: store.set_meta("key", b""),
        lambda: store.compact(),
    ]


def reads(store: AnyDatabase) -> list[Callable[[], object]]:
    sessions, snapshots = store.sessions, store.snapshots

    def open_reader() -> None:
        with snapshots.reader():
            pass

    return [
        lambda: sessions.get("s"),
        lambda: sessions.list(),
        lambda: sessions.path("s", 1),
        lambda: list(sessions.nodes("s")),
        lambda: sessions.log("s", "main"),
        lambda: snapshots.contains(digest("x")),
        lambda: snapshots.size_bytes(),
        lambda: store.get_meta("key"),
        open_reader,
    ]


def filled(path: Path) -> Path:
    with Database(path) as store:
        store.sessions.create("s", b"")
        grow(store, "ab")
        store.snapshots.put([snapshot("x")])
        store.set_meta("key", b"value")
    return path


def test_one_handle_per_process(tmp_path: Path) -> None:
    """Oracle: the error's type, also through another spelling of the path."""
    link = tmp_path / "link"
    with Database(tmp_path / "store") as store:
        link.symlink_to(tmp_path / "store")
        for path in (tmp_path / "store", tmp_path / "x" / ".." / "store", link):
            with pytest.raises(StoreAlreadyOpen) as raised:
                Database(path)
            assert raised.value.code == "store_already_open"
            with pytest.raises(StoreAlreadyOpen):
                Database(path, read_only=True)
        store.sessions.create("s", b"")
    with Database(link) as store:
        assert [record.name for record in store.sessions.list()] == ["s"]


@pytest.mark.parametrize("kind", ["lmdb", "memory"])
def test_closed(kind: str, tmp_path: Path) -> None:
    """Oracle: every call of the surface, read or write, says StoreClosed."""
    store: AnyDatabase = MemoryDatabase() if kind == "memory" else Database(filled(tmp_path / "s"))
    calls = reads(store) + writes(store)
    store.close()
    store.close()
    assert {code_of(call) for call in calls} == {"store_closed"}


@pytest.mark.parametrize("kind", ["lmdb", "memory"])
def test_read_only(kind: str, tmp_path: Path) -> None:
    """Oracle: what was written before; every write says StoreReadOnly and changes nothing."""
    store: AnyDatabase
    if kind == "memory":
        store = MemoryDatabase(read_only=True)
    else:
        store = Database(filled(tmp_path / "s"), read_only=True)
    with store:
        assert {code_of(call) for call in writes(store)} == {"store_read_only"}
        store.snapshots.touch([digest("x")])
        store.snapshots.flush()
        if kind == "lmdb":
            assert [code_of(call) for call in reads(store)] == ["no error"] * len(reads(store))
            read_back(store, snapshot("x"))
            assert store.get_meta("key") == b"value"
            assert store.verify().ok


def test_read_only_opening_makes_nothing(tmp_path: Path) -> None:
    """Oracle: the folder listing before and after."""
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "absent", tmp_path / "empty"):
        with pytest.raises(StoreReadOnly, match="no store to read"):
            Database(path, read_only=True)
    assert not (tmp_path / "absent").exists()
    assert not list((tmp_path / "empty").glob("*/*"))


def test_a_file_is_no_store(tmp_path: Path) -> None:
    """Oracle: the error's type; the file keeps its bytes."""
    path = tmp_path / "file"
    path.write_bytes(b"precious")
    with pytest.raises(StoreDamaged, match="this is a file"):
        Database(path)
    assert path.read_bytes() == b"precious"
    with pytest.raises(StorageError):
        Database(path / "below")


@contextmanager
def read_only_mount(path: Path) -> Iterator[Path]:
    """`path` bound read-only onto itself; skips where mounting is not allowed."""
    target = path.with_name("mounted")
    target.mkdir()
    try:
        for arguments in (["--bind", str(path)], ["-o", "remount,ro,bind"]):
            subprocess.run(["mount", *arguments, str(target)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting is not allowed here: {error}")
    try:
        yield target
    finally:
        subprocess.run(["umount", str(target)], check=True)


def test_read_only_file_system(tmp_path: Path) -> None:
    """Oracle: what was written before the folder became read-only."""
    filled(tmp_path / "s")
    with read_only_mount(tmp_path / "s") as path:
        with pytest.raises(StoreReadOnly, match="read_only=True"):
            Database(path)
        with Database(path, read_only=True) as store:
            assert [node.id for node in store.sessions.path("s", 2)] == [1, 2]
            read_back(store, snapshot("x"))
            assert store.verify().ok


def as_nobody(action: Callable[[], str]) -> str:
    if os.getuid() != 0:
        pytest.skip("needs root to become another user")

    def drop_and_act() -> str:
        os.setgid(65534)
        os.setuid(65534)
        return action()

    return in_forked_child(drop_and_act)


def test_folder_of_another_user(tmp_path: Path) -> None:
    """Oracle: what root wrote; the other user may read it, and nobody may write meanwhile."""
    path = filled(tmp_path / "s")
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)

    def read_then_contend() -> str:
        with Database(path, read_only=True) as store:
            ids = [node.id for node in store.sessions.path("s", 2)]
            again = code_of(lambda: StoreLock(path, read_only=True).begin(0))
            return f"{ids} {again}"

    assert as_nobody(lambda: code_of(lambda: Database(path))) == "store_read_only"
    assert as_nobody(read_then_contend) == "[1, 2] store_locked"
    with Database(path):
        locked = as_nobody(lambda: code_of(lambda: Database(path, read_only=True)))
        assert locked == "store_locked"
    (path / "sessions" / "data.mdb").chmod(0o600)
    assert as_nobody(lambda: code_of(lambda: Database(path, read_only=True))) == "store_read_only"


def test_forked_handles_are_refused(tmp_path: Path) -> None:
    """Oracle: every call in the child says StoreForked, closing there is harmless, the child can
    open the store by itself, and the parent's handle goes on."""
    path = filled(tmp_path / "s")
    with Database(path) as store:
        calls = reads(store) + writes(store)

        def child() -> str:
            codes = {code_of(call) for call in calls}
            store.close()
            with Database(path) as own:
                grow(own, "c")
            return " ".join(codes)

        assert in_forked_child(child) == StoreForked.code
        assert [node.id for node in store.sessions.path("s", 3)] == [1, 2, 3]
        grow(store, "d")


def test_a_fork_inside_a_reader_leaves_the_parents_view_alone(tmp_path: Path) -> None:
    """Oracle: the parent still reads what was there when its reader began, although the child left
    the block and other writers reused every page they could."""
    path = filled(tmp_path / "s")
    with Database(path) as store:
        store.snapshots.put([snapshot("old", size_bytes=100_000)])

        def child() -> str:
            return " ".join(
                (code_of(lambda: reader.info(digest("old"))), code_of(lambda: Database(path)))
            )

        with store.snapshots.reader() as reader:
            assert in_forked_child(child) == "store_forked store_forked"
            store.snapshots.remove([digest("old")])
            for i in range(20):
                store.snapshots.put([snapshot(f"new {i}", size_bytes=100_000)])
            target = bytearray(100_000)
            reader.read_into(digest("old"), {"kv": memoryview(target)})
        assert bytes(target) == snapshot("old", size_bytes=100_000).buffers["kv"]


def test_a_forked_child_does_not_keep_the_locks(tmp_path: Path) -> None:
    """Oracle: `compact` reports that it was alone while a child of an earlier fork still lives."""
    path = filled(tmp_path / "s")
    with Database(path) as store:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(write_end)
            os.read(read_end, 1)  # returns when the parent has closed its end
            os._exit(0)
        assert store.compact()
        os.close(write_end)
        os.close(read_end)
        os.waitpid(pid, 0)


def test_locked_while_another_process_is_alone(tmp_path: Path) -> None:
    """Oracle: the error's type, the wait it names, and that the store opens afterwards."""
    path = filled(tmp_path / "s")
    lock = StoreLock(path, read_only=False)
    assert lock.begin(0)
    with pytest.raises(StoreLocked, match=r"waited 0\.05 s"):
        Database(path, open_timeout_s=0.05)
    lock.close()
    Database(path).close()


def test_alone_or_not(tmp_path: Path) -> None:
    """Oracle: who else holds the lock."""
    path = filled(tmp_path / "s")
    with held_by_another_process(path), Database(path) as store:
        assert store.compact() is False
        grow(store, "c")
        lock = StoreLock(path, read_only=False)
        assert lock.begin(1) is False
        lock.share()
        assert lock.try_alone() is False
        lock.close()
    with Database(path) as store:
        assert store.compact() is True


def test_failed_opening_leaves_nothing_behind(tmp_path: Path) -> None:
    """Oracle: the same path opens as soon as the cause is gone; no descriptor leaks."""
    path = filled(tmp_path / "s")
    data = path / "sessions" / "data.mdb"
    good = data.read_bytes()
    data.write_bytes(b"")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(StoreDamaged):
            Database(path)
    assert len(os.listdir("/proc/self/fd")) == before
    data.write_bytes(good)
    with Database(path) as store:
        assert len(store.sessions.path("s", 2)) == 2


def test_closing_waits_for_other_threads(tmp_path: Path) -> None:
    """Oracle: a reader that was inside finishes its copy; afterwards the store is closed."""
    store = Database(filled(tmp_path / "s"))
    inside, leave = threading.Event(), threading.Event()
    copied = bytearray(1000)

    def read() -> None:
        with store.snapshots.reader() as reader:
            inside.set()
            assert leave.wait(30)
            reader.read_into(digest("x"), {"kv": memoryview(copied)})

    reading = threading.Thread(target=read)
    reading.start()
    assert inside.wait(30)
    closing = threading.Thread(target=store.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive(), "close did not wait"
    leave.set()
    reading.join(30)
    closing.join(30)
    assert bytes(copied) == snapshot("x").buffers["kv"]
    with pytest.raises(StoreClosed):
        store.sessions.list()


def test_closing_inside_ones_own_reader_is_refused(tmp_path: Path) -> None:
    """Oracle: an error instead of a deadlock; the store goes on."""
    with Database(filled(tmp_path / "s")) as store:
        with store.snapshots.reader():
            for action in (store.close, store.compact):
                with pytest.raises(StoreLocked, match="reader"):
                    action()
            assert store.snapshots.contains(digest("x")), "nested reading must work"
        assert store.compact()


def test_gate_lets_a_thread_in_again_while_another_waits(tmp_path: Path) -> None:
    """Oracle: no deadlock, and the waiting thread is alone in the end."""
    gate = Gate()
    was_alone = threading.Event()

    def be_alone() -> None:
        with gate.alone():
            was_alone.set()

    with gate:
        waiting = threading.Thread(target=be_alone)
        waiting.start()
        waiting.join(0.05)
        with gate:
            assert not was_alone.is_set()
    waiting.join(30)
    assert was_alone.is_set()
    with gate.alone(closing=True):
        pass
    with pytest.raises(StoreClosed), gate:
        pass


def test_errors_say_what_value_limit_remedy() -> None:
    """Oracle: rule 13 of the API: one tree, stable codes, unique."""
    error = StoreFull("no room", value=5, limit=3, remedy="buy a disk")
    assert str(error) == "no room; got 5; limit: 3; remedy: buy a disk"
    assert (error.what, error.value, error.limit, error.remedy) == ("no room", 5, 3, "buy a disk")
    classes = StorageError.__subclasses__()
    codes = [cls.code for cls in classes if cls.__module__ == StorageError.__module__]
    assert len(set(codes)) == len(codes) >= 17
    assert InvalidRecord("x").code == "invalid_record"
    assert issubclass(StorageError, FreetokenError)


def test_values_of_meta_survive(tmp_path: Path) -> None:
    """Oracle: what was set before closing."""
    with Database(filled(tmp_path / "s")) as store:
        assert store.get_meta("key") == b"value"
        assert store.get_meta("other") is None
        store.sessions.commit(
            "s", "main", Changes(segments=[SegmentRecord("key", b"")]), expected_version=1
        )
        store.snapshots.put([Snapshot(digest("key"), None, {})])
        assert store.get_meta("key") == b"value"


def nowhere(folder: Path) -> dict[str, str]:
    """Paths at which no store can be, by what is wrong with them."""
    (folder / "file").write_bytes(b"precious")
    (folder / "dangling").symlink_to(folder / "absent")
    (folder / "loop").symlink_to(folder / "loop")
    return {
        "empty": "",
        "null byte": "\0",
        "null byte inside": f"{folder}/a\0b",
        "surrogate": f"{folder}/\ud800",
        "parent is a file": f"{folder}/file/below",
        "too long": f"{folder}/{'x' * 300}",
        "much too long": f"{folder}/{'x/' * 4000}",
        "dangling link": f"{folder}/dangling",
        "loop of links": f"{folder}/loop",
    }


def test_paths_that_cannot_be_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: an error of the store's own tree that says what, the path and what to do, whichever
    way it is opened; a report from `verify`; and the folder listing: nothing was made."""
    monkeypatch.chdir(tmp_path)
    paths = nowhere(tmp_path)
    before = sorted(entry.name for entry in tmp_path.iterdir())
    for wrong, path in paths.items():
        for read_only in (False, True):
            with pytest.raises(StorageError) as raised:
                Database(path, read_only=read_only)
            error = raised.value
            assert error.what and error.remedy, f"{wrong}: {error}"
            assert isinstance(error.value, str), f"{wrong}: {error}"
            assert error.value.rstrip("…") in path, f"{wrong}: {error}"
            assert len(str(error)) < 600
        report = verify_store(path)
        assert not report.ok and report.faults[0].what, wrong
    assert sorted(entry.name for entry in tmp_path.iterdir()) == before
    Database(Path(".")).close()


def test_a_folder_without_permission(tmp_path: Path) -> None:
    """Oracle: the error's code, and that it names the folder and a remedy that could work."""
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o700)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)

    def messages() -> str:
        found = []
        for path in (locked / "store", tmp_path / "new"):
            for read_only in (False, True):
                try:
                    Database(path, read_only=read_only)
                except StorageError as error:
                    assert str(path.name) in str(error.value) and error.remedy
                    found.append(error.code)
        return " ".join(found)

    assert as_nobody(messages) == " ".join(["store_read_only"] * 4)
