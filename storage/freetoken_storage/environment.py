# SPDX-License-Identifier: Apache-2.0
"""One LMDB file as `transactions.Environment`: the only module that knows LMDB.

Its errors become ours here and nowhere else. No write-map: a page that cannot be written is an
error code, never a signal.
"""

import errno
import os
import resource
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import lmdb

from .audit import AT_OPENING, EVERYTHING, PageAudit
from .disk_errors import translated
from .errors import StorageError, StoreDamaged, StoreForked, StoreFull, StoreReadOnly, WriteFailed
from .locks import Gate
from .pages import read_header
from .transactions import Reader

DATA_FILE = "data.mdb"
LOCK_FILE = "lock.mdb"
MAP_BYTES = 1 << 40  # costs nothing; growing a map under an open reader is a crash
MAX_READERS = 510
LOCK_FILE_BYTES = 40_960  # 64 a reader, and a head
ALREADY_OPEN = "already open in this process"
AMPLE_BYTES = 64 << 20  # with more room than this nothing is reserved
RESERVE_BYTES = 128 << 10  # what a commit that deletes a snapshot writes, several times over
FULL_DISK_BYTES = 1 << 20  # with less than this free, an I/O error at a write is a full disk


class LmdbTransaction:
    """`transactions.Transaction` over one LMDB transaction."""

    def __init__(self, txn: Any, gate: Gate) -> None:
        self._txn = txn
        self._gate = gate

    def get(self, key: bytes) -> memoryview | None:
        self._gate.check()  # a forked child may have inherited us in the middle of a block
        value: memoryview | None = self._txn.get(key)
        return value

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, memoryview]]:
        self._gate.check()
        with self._txn.cursor() as cursor:
            if not (cursor.set_range(prefix) if prefix else cursor.first()):
                return
            for key, value in cursor:
                found = bytes(key)
                if not found.startswith(prefix):
                    return
                yield found, value

    def put(self, key: bytes, value: bytes) -> None:
        self._txn.put(key, value)

    def delete(self, key: bytes) -> bool:
        deleted: bool = self._txn.delete(key)
        return deleted

    def commit_number(self) -> int:
        """The number of the commit that this transaction sees (or will be)."""
        number: int = self._txn.id()
        return number

    def pages_in_use(self) -> int:
        tree = self._txn.stat()
        pages: int = tree["branch_pages"] + tree["leaf_pages"] + tree["overflow_pages"] + 2
        return pages


class LmdbEnvironment:
    """`transactions.Environment` over `folder`/data.mdb. Open until `close`.

    `sync_header`: whether a commit's header is synced too, so that it survives a power loss and not
    only a kill. `audit`: check the pages first; nobody else may have the file open. `table`: take
    part in LMDB's table of readers; without, nobody may write while it is open.
    """

    def __init__(
        self,
        folder: Path,
        gate: Gate,
        *,
        read_only: bool,
        sync_header: bool = True,
        audit: bool = False,
        table: bool = True,
    ) -> None:
        self.read_only = read_only
        self._folder = folder
        self._gate = gate
        self._sync_header = sync_header
        self._table = table
        self._env: Any = None
        self._panicked = False
        self.open(audit=audit)
        _opened.add(self)

    def open(self, *, audit: bool = False) -> None:
        """Check the file, then map it. StoreDamaged names the file."""
        data = self._folder / DATA_FILE
        if not data.exists():
            raise StoreDamaged(f"{data} is missing", remedy="restore it from a backup")
        header = read_header(data)
        if audit:
            PageAudit(data, header, AT_OPENING).run()
        if not self.read_only:
            _reserve_lock_file(self._folder)
        try:
            self._env = lmdb.open(
                str(self._folder),
                map_size=MAP_BYTES,
                max_readers=MAX_READERS,
                readonly=self.read_only,
                create=False,
                metasync=self._sync_header,
                lock=self._table,
                # A kept transaction would keep its slot in the table of readers, and closing the
                # environment in a forked child would then clear the parent's. None is faster, too.
                max_spare_txns=0,
            )
            self._panicked = False
            self.reap_readers()
        except lmdb.Error as error:
            if ALREADY_OPEN in str(error):
                raise StoreForked(
                    "the store was in use in the parent process at the moment of the fork()",
                    value=str(self._folder),
                    remedy="open it in a process that was started anew",
                ) from error
            raise self._translate(error) from error

    def close(self) -> None:
        """The caller sees to it that no thread is inside."""
        self._env.close()

    def close_inherited(self) -> None:
        """In a child that fork() made: give the file back, so that the child may open it. Not where
        a transaction was open at that moment: ending it here would end the parent's."""
        if self._gate.is_idle():
            self._env.close()

    @property
    def page_bytes(self) -> int:
        page_bytes: int = self._env.stat()["psize"]
        return page_bytes

    def file_bytes(self) -> int:
        with self._gate:
            last_page: int = self._env.info()["last_pgno"]
            return (last_page + 1) * self.page_bytes

    def room_bytes(self) -> int:
        """How much the file can still grow, as the disk and the process's limits allow."""
        disk = os.statvfs(self._folder)
        free_bytes = disk.f_bavail * disk.f_frsize
        limit_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if limit_bytes == resource.RLIM_INFINITY:
            return free_bytes
        return min(free_bytes, max(0, limit_bytes - self.file_bytes()))

    def reserve(self, growth_bytes: int) -> None:
        with self._gate:
            if self.room_bytes() > growth_bytes + AMPLE_BYTES:
                return
            data = self._folder / DATA_FILE
            # Without growth the reserve is only wished for: the free pages of the file may do.
            tolerated = nullcontext() if growth_bytes else suppress(StoreFull)
            with tolerated, translated(self._folder), data.open("r+b") as file:
                allocated_bytes = os.fstat(file.fileno()).st_size
                missing_bytes = self.file_bytes() + growth_bytes + RESERVE_BYTES - allocated_bytes
                if missing_bytes > 0:
                    os.posix_fallocate(file.fileno(), allocated_bytes, missing_bytes)

    def sync(self) -> None:
        with self._gate, self._translating():
            if not self.read_only:
                self._env.sync(True)

    def reap_readers(self) -> None:
        """Forget readers of killed processes: they keep old pages from being reused."""
        if not self.read_only:
            self._env.reader_check()

    def readers(self) -> list[Reader]:
        with self._gate:
            # One line each: process, thread, and the commit or "-" where nothing is open.
            lines = [line.split() for line in self._env.readers().splitlines()]
        slots = [line for line in lines if len(line) == 3 and line[0].isdigit()]
        return [Reader(int(pid), int(commit)) for pid, _, commit in slots if commit != "-"]

    def reusable_bytes(self, readers: Sequence[Reader]) -> int:
        data = self._folder / DATA_FILE
        header = read_header(data)
        oldest = min([header.txn_id, *(reader.commit for reader in readers)])
        return PageAudit(data, header, EVERYTHING).free_pages(before=oldest) * header.page_bytes

    @contextmanager
    def read(self) -> Iterator[LmdbTransaction]:
        with self._gate, self._translating():
            txn = self._env.begin(buffers=True)
            try:
                yield LmdbTransaction(txn, self._gate)
            finally:
                if not self._gate.inherited:
                    txn.abort()

    @contextmanager
    def write(self) -> Iterator[LmdbTransaction]:
        self._gate.check()
        if self.read_only:
            raise StoreReadOnly(
                "the store was opened for reading only",
                value=str(self._folder),
                remedy="open it without read_only=True",
            )
        if self._panicked:
            with self._gate.alone():
                self.close()
                self.open()
        with self._gate, self._translating():
            txn = self._env.begin(write=True, buffers=True)
            try:
                yield LmdbTransaction(txn, self._gate)
                self._gate.check()
            except BaseException:
                if not self._gate.inherited:
                    txn.abort()
                raise
            txn.commit()

    @contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except lmdb.Error as error:
            raise self._translate(error) from error

    def _translate(self, error: Exception) -> StorageError:
        """LMDB's errors as ours."""
        what = f"{self._folder}: {error}"
        if isinstance(error, lmdb.PanicError):
            self._panicked = True  # a header could not be written: the next write opens it anew
        if isinstance(error, lmdb.MapFullError) or self._disk_is_full(error):
            return StoreFull(
                f"no room to write to {self._folder}",
                value=str(error),
                remedy="free disk space; everything acknowledged before is kept",
            )
        if isinstance(error, (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError)):
            return StoreDamaged(what, remedy="run verify, or restore it from a backup")
        if isinstance(error, lmdb.ReadersFullError):
            return StorageError(what, limit=f"{MAX_READERS} readers", remedy="close some of them")
        return WriteFailed(what, remedy="check the disk; everything acknowledged before is kept")

    def _disk_is_full(self, error: Exception) -> bool:
        text = str(error)
        if any(os.strerror(code) in text for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)):
            return True
        # LMDB calls any write that was cut short an I/O error.
        return os.strerror(errno.EIO) in text and self.room_bytes() < FULL_DISK_BYTES


def create_file(folder: Path) -> None:
    """Make a folder with an empty database file in it."""
    folder.mkdir()
    _reserve_lock_file(folder)
    lmdb.open(str(folder), map_size=MAP_BYTES, max_readers=MAX_READERS).close()


def _reserve_lock_file(folder: Path) -> None:
    """Have the blocks of the lock file allocated before LMDB maps it: it would only extend it, and
    a full disk would then answer the first access with SIGBUS. Nobody in this process may have it
    open (closing it would drop LMDB's locks)."""
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if os.fstat(descriptor).st_blocks * 512 < LOCK_FILE_BYTES:
            os.posix_fallocate(descriptor, 0, LOCK_FILE_BYTES)
    finally:
        os.close(descriptor)


_opened: weakref.WeakSet[LmdbEnvironment] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for environment in list(_opened):
        environment.close_inherited()


os.register_at_fork(after_in_child=_after_fork_in_child)
