# SPDX-License-Identifier: Apache-2.0
"""A reader that stays open keeps every page that was freed since from being used again. The states'
file must not outgrow its budget for it: what finds no room is refused, by name, and nothing goes.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest

from freetoken_storage import Database
from freetoken_storage.audit import EVERYTHING, PageAudit
from freetoken_storage.errors import StoreFull
from freetoken_storage.pages import FIRST_PAGE, read_header
from freetoken_storage.snapshots import Evicted, StoredSnapshots
from freetoken_storage.testing import digest, file_size_limit, present, read_back, snapshot
from freetoken_storage.transactions import Reader

MIB = 1 << 20
BUDGET_BYTES = 24 * MIB
REASON = "a reader is holding old pages"

READER = (
    "import sys; from freetoken_storage import Database\n"
    "with Database(sys.argv[1]) as store, store.snapshots.reader():\n"
    "    print('reading', flush=True); sys.stdin.readline()\n"
)


@contextmanager
def reader_process(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process inside a reader() block, until the block here ends."""
    child = subprocess.Popen(
        [sys.executable, "-c", READER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "reading\n"
        yield child
    finally:
        child.communicate(timeout=30)


def states_bytes(path: Path) -> int:
    """The size of the file itself."""
    return (path / "states" / "data.mdb").stat().st_size


def fill(store: Database, count: int = 40) -> list[str]:
    """Put more than fits, so that every page of the budget is in use or free; the labels."""
    labels = [f"old{i}" for i in range(count)]
    for label in labels:
        store.snapshots.put([snapshot(label, size_bytes=MIB)])
    return labels


def rewrite(store: Database, count: int, prefix: str) -> tuple[int, list[StoreFull]]:
    """Put `count` new snapshots; how many were taken, and the refusals."""
    taken, refusals = 0, []
    for i in range(count):
        try:
            store.snapshots.put([snapshot(f"{prefix}{i}", size_bytes=MIB)])
            taken += 1
        except StoreFull as refusal:
            refusals.append(refusal)
    return taken, refusals


def test_a_held_reader_does_not_let_the_file_grow(tmp_path: Path) -> None:
    """Oracle: the size of the file, before, during and after 200 rewrites; the process that reads;
    and that each refusal changed nothing."""
    path = tmp_path / "store"
    with Database(path, disk_budget_bytes=BUDGET_BYTES) as store:
        labels = fill(store)
        with reader_process(path) as child:
            taken, refusals = rewrite(store, 200, "held")
            assert states_bytes(path) <= BUDGET_BYTES
            assert taken + len(refusals) == 200 and taken < 24
            last = refusals[-1]
            assert REASON in last.what and str(child.pid) in str(last)
            assert "1 reader:" in str(last) and last.remedy is not None
            new = [f"held{i}" for i in range(200)]
            before = present(store, labels + new)
            assert len(before) >= 14, "a refused put evicted something"
            size_bytes = states_bytes(path)
            assert rewrite(store, 5, "again")[0] == 0
            assert present(store, labels + new) == before
            assert states_bytes(path) == size_bytes, "a refused put grew the file"
            store.sessions.create("s", b"sessions go on")
        taken, refusals = rewrite(store, 60, "free")
        assert (taken, refusals) == (60, [])
        assert states_bytes(path) <= BUDGET_BYTES
        read_back(store, snapshot("free59", size_bytes=MIB))
        assert store.verify().ok


def test_a_reader_in_this_process_is_named(tmp_path: Path) -> None:
    """Oracle: this process's number, how many readers it opened, and that the reader's view stays
    what it was."""
    path = tmp_path / "store"
    with Database(path, disk_budget_bytes=BUDGET_BYTES) as store:
        newest = fill(store)[-1]
        with store.snapshots.reader() as reader, reader_process(path) as child:
            with pytest.raises(StoreFull) as raised:
                for i in range(200):
                    store.snapshots.put([snapshot(f"held{i}", size_bytes=MIB)])
            assert raised.value.code == "store_full"
            assert f"1 in this process {os.getpid()}" in str(raised.value)
            assert f"1 in process {child.pid}" in str(raised.value)
            assert "2 readers" in str(raised.value)
            target = bytearray(MIB)
            reader.read_into(digest(newest), {"kv": memoryview(target)})
            assert bytes(target) == snapshot(newest, size_bytes=MIB).buffers["kv"]
        for i in range(3):  # larger than what the file may still grow by
            store.snapshots.put([snapshot(f"free{i}", size_bytes=3 * MIB)])


def test_a_killed_reader_is_forgotten(tmp_path: Path) -> None:
    """Oracle: no refusal at all once the reader was killed, though its entry was never taken
    back."""
    path = tmp_path / "store"
    with Database(path, disk_budget_bytes=BUDGET_BYTES) as store:
        fill(store)
        with reader_process(path) as child:
            assert rewrite(store, 60, "held")[1]
            child.kill()
            child.wait(30)
            assert rewrite(store, 60, "free") == (60, [])
        assert states_bytes(path) <= BUDGET_BYTES


def test_pages_that_were_free_before_the_reader_can_be_used(tmp_path: Path) -> None:
    """Oracle: ten snapshots went before the reader began, so three of three times the size fit
    beside it, in a file that hardly grows; then they are refused."""
    path = tmp_path / "store"
    with Database(path, disk_budget_bytes=BUDGET_BYTES) as store:
        labels = present(store, fill(store))
        assert store.snapshots.remove([digest(label) for label in labels[:10]]) == 10
        size_bytes = states_bytes(path)
        with reader_process(path):
            for i in range(3):
                store.snapshots.put([snapshot(f"fits{i}", size_bytes=3 * MIB)])
            assert states_bytes(path) <= size_bytes + MIB
            assert present(store, labels) == labels[10:]
            assert rewrite(store, 60, "more")[1]
            assert states_bytes(path) <= BUDGET_BYTES


def test_a_refused_large_snapshot_leaves_nothing(tmp_path: Path) -> None:
    """Oracle: what was in use before; a snapshot of several transactions is refused before the
    first of them."""
    path = tmp_path / "store"
    with Database(path, disk_budget_bytes=BUDGET_BYTES) as store:
        labels = fill(store)
        before = present(store, labels)
        used_bytes, size_bytes = store.snapshots.size_bytes(), states_bytes(path)
        with reader_process(path):
            for _ in range(5):
                with pytest.raises(StoreFull, match=REASON):
                    store.snapshots.put([snapshot("large", size_bytes=12 * MIB)])
            assert store.snapshots.size_bytes() == used_bytes
            assert states_bytes(path) == size_bytes
            assert present(store, labels) == before
        store.snapshots.put([snapshot("large", size_bytes=12 * MIB)])
        read_back(store, snapshot("large", size_bytes=12 * MIB))


def test_a_reader_that_begins_beside_an_eviction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the size of the file. The reader comes after the put was found to fit and before the
    eviction that makes the room, so that the freed pages cannot be used after all."""
    path = tmp_path / "store"
    reader = ExitStack()
    with Database(path, disk_budget_bytes=BUDGET_BYTES) as store, reader:
        fill(store)
        evict = StoredSnapshots._evict

        def begin_and_evict(self: StoredSnapshots, *args: Any, **kwargs: Any) -> Evicted:
            reader.enter_context(store.snapshots.reader())
            return evict(self, *args, **kwargs)

        monkeypatch.setattr(StoredSnapshots, "_evict", begin_and_evict)
        with pytest.raises(StoreFull, match=REASON):
            store.snapshots.put([snapshot("new", size_bytes=5 * MIB)])
        assert states_bytes(path) <= BUDGET_BYTES
        reader.close()
        store.snapshots.put([snapshot("new", size_bytes=5 * MIB)])
        read_back(store, snapshot("new", size_bytes=5 * MIB))


def test_the_order_of_use_does_not_let_the_file_grow(tmp_path: Path) -> None:
    """Oracle: the size of the file after 300 flushes beside a reader; what was touched meanwhile
    still counts as used when the reader has ended."""
    path = tmp_path / "store"
    with Database(path, disk_budget_bytes=BUDGET_BYTES) as store:
        fill(store)
        with reader_process(path):
            rewrite(store, 60, "held")
            labels = present(store, [f"held{i}" for i in range(60)])
            for _ in range(300):
                store.snapshots.touch([digest(labels[0])])
                store.snapshots.flush()
            assert states_bytes(path) <= BUDGET_BYTES
        assert len(labels) > 1
        while present(store, labels[-1:]):
            assert rewrite(store, 1, os.urandom(8).hex()) == (1, [])
        assert present(store, labels) == labels[:1]


def test_a_full_disk_and_a_reader_lose_nothing(tmp_path: Path) -> None:
    """Oracle: what was there before. A limit on file sizes stands for the disk: beside a reader an
    eviction would make no room, so none is tried; afterwards it is."""
    path = tmp_path / "store"
    with Database(path) as store:
        labels = fill(store, 12)
        with file_size_limit(states_bytes(path) + MIB // 2):
            with reader_process(path):
                for _ in range(5):
                    with pytest.raises(StoreFull):
                        store.snapshots.put([snapshot("new", size_bytes=2 * MIB)])
                assert present(store, labels) == labels
            store.snapshots.put([snapshot("new", size_bytes=2 * MIB)])
            read_back(store, snapshot("new", size_bytes=2 * MIB))


def test_who_counts_as_a_reader(tmp_path: Path) -> None:
    """Oracle: who is inside a block now, and LMDB's own table, which goes on listing a transaction
    that has ended."""
    path = tmp_path / "store"
    with Database(path) as store:
        store.snapshots.put([snapshot("a")])
        states, seen = store._states, read_header(path / "states" / "data.mdb").txn_id
        assert states is not None and states.readers() == []
        with store.snapshots.reader(), reader_process(path) as child:
            store.snapshots.put([snapshot("b")])
            found = sorted(states.readers(), key=lambda reader: reader.pid)
            assert found == [Reader(pid, seen) for pid in sorted((os.getpid(), child.pid))]
        ended = states._env.begin()
        ended.abort()
        assert f"{os.getpid()}" in states._env.readers()
        assert states.readers() == []


def test_free_pages_are_counted_as_lmdb_counts_them(tmp_path: Path) -> None:
    """Oracle: LMDB's totals (every page is a header, in use, in the free list's own tree or free),
    and for each commit the pages that it freed."""
    file = tmp_path / "db" / "data.mdb"
    with lmdb.open(str(tmp_path / "db"), map_size=1 << 30, sync=False) as env:
        with env.begin(write=True) as txn:
            for i in range(400):
                txn.put(b"%03d" % i, bytes(40_000))
        freed = {}
        with env.begin():  # keeps what is freed from being used, so that the list only grows
            for i in range(100):
                with env.begin(write=True) as txn:
                    txn.delete(b"%03d" % i)
                    if i == 50:
                        for j in range(200, 400):  # more than a page of the list can hold
                            txn.delete(b"%03d" % j)
                    commit = txn.id()
                header = read_header(file)
                own = header.free.branch_pages + header.free.leaf_pages
                own += header.free.overflow_pages
                main = header.main.branch_pages + header.main.leaf_pages
                main += header.main.overflow_pages
                total = env.info()["last_pgno"] + 1 - main - own - FIRST_PAGE
                audit = PageAudit(file, header, EVERYTHING)
                assert audit.free_pages(before=commit + 1) == total
                freed[commit] = total
                assert PageAudit(file, header, EVERYTHING).free_pages(before=commit) == freed.get(
                    commit - 1, 0
                )
        assert header.free.overflow_pages, "no entry was long: the test proves too little"
