# SPDX-License-Identifier: Apache-2.0
"""Database: a store folder with two LMDB environments. The only module that knows LMDB.

folder/
    sessions/data.mdb    the truth; each commit is synchronous
    states/data.mdb      disposable; the data of a commit is synced, its header is not
    store.lock  opening.lock
"""

import errno
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import lmdb

from . import keys, values
from .budgets import DiskBudget
from .compaction import (
    is_pending,
    mark_pending,
    replace_file,
    sync_folder,
    unmark_pending,
)
from .errors import (
    StorageError,
    StoreDamaged,
    StoreFull,
    StoreReadOnly,
    WriteFailed,
)
from .life import Life
from .locks import Gate, Registration, StoreLock
from .memory_snapshots import MemorySnapshots
from .meta import check_meta
from .migrations import SESSIONS, STATES, Format, upgrade
from .pages import read_header
from .records import Sessions, Snapshots
from .sessions import StoredSessions
from .snapshots import StoredSnapshots

MAP_BYTES = 1 << 40  # costs nothing; growing a map under an open reader is a crash
MAX_READERS = 510
FULL_DISK_BYTES = 1 << 20  # with less than this free, any failed commit is a full disk
OPEN_TIMEOUT_S = 10.0
KINDS = ("sessions", "states")

logger = logging.getLogger(__name__)


class LmdbTransaction:
    """`transactions.Transaction` over one LMDB transaction."""

    def __init__(self, txn: Any) -> None:
        self._txn = txn

    def get(self, key: bytes) -> memoryview | None:
        value: memoryview | None = self._txn.get(key)
        return value

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, memoryview]]:
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

    def pages_in_use(self) -> int:
        tree = self._txn.stat()
        pages: int = tree["branch_pages"] + tree["leaf_pages"] + tree["overflow_pages"] + 2
        return pages


class LmdbEnvironment:
    """`transactions.Environment` over one LMDB file. Open until `close`."""

    def __init__(self, folder: Path, gate: Gate, *, read_only: bool, sync_header: bool) -> None:
        self.read_only = read_only
        self._folder = folder
        self._gate = gate
        self._sync_header = sync_header
        self._env: Any = None
        self.open()

    def open(self) -> None:
        """Check the file and map it. StoreDamaged names the file."""
        data = self._folder / "data.mdb"
        if not data.exists():
            raise StoreDamaged(f"{data} is missing", remedy="restore it from a backup")
        read_header(data)
        try:
            self._env = _open_lmdb(self._folder, self.read_only, self._sync_header)
            info = self._env.info()
            promised_bytes = (info["last_pgno"] + 1) * self.page_bytes
            if promised_bytes > data.stat().st_size:
                self.close()
                raise StoreDamaged(f"{data} is truncated", limit=f"{promised_bytes} bytes")
            self._env.reader_check()
        except lmdb.Error as error:
            raise self._translate(error) from error

    def close(self) -> None:
        if self._env is not None:
            self._env.close()

    @property
    def page_bytes(self) -> int:
        page_bytes: int = self._env.stat()["psize"]
        return page_bytes

    def file_bytes(self) -> int:
        with self._gate:
            last_page: int = self._env.info()["last_pgno"]
            return (last_page + 1) * self.page_bytes

    def sync(self) -> None:
        with self._gate:
            if not self.read_only:
                try:
                    self._env.sync(True)
                except lmdb.Error as error:
                    raise self._translate(error) from error

    @contextmanager
    def read(self) -> Iterator[LmdbTransaction]:
        with self._gate:
            try:
                with self._env.begin(buffers=True) as txn:
                    yield LmdbTransaction(txn)
            except lmdb.Error as error:
                raise self._translate(error) from error

    @contextmanager
    def write(self) -> Iterator[LmdbTransaction]:
        if self.read_only:
            self._gate.check()
            raise StoreReadOnly(
                "the store was opened for reading only",
                value=str(self._folder),
                remedy="open it without read_only=True",
            )
        with self._gate:
            try:
                with self._env.begin(write=True, buffers=True) as txn:
                    yield LmdbTransaction(txn)
            except lmdb.Error as error:
                raise self._translate(error) from error

    def _translate(self, error: Exception) -> StorageError:
        """LMDB's errors as ours: the one place where foreign errors are named."""
        what = f"{self._folder}: {error}"
        if isinstance(error, lmdb.MapFullError) or self._disk_is_full(error):
            return StoreFull(
                f"no room to write to {self._folder}",
                value=str(error),
                remedy="free disk space; everything acknowledged before is kept",
            )
        if isinstance(error, (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError)):
            return StoreDamaged(what, remedy="run verify, or restore it from a backup")
        if isinstance(error, lmdb.ReadonlyError):
            return StoreReadOnly(what)
        return WriteFailed(what, remedy="check the disk; everything acknowledged before is kept")

    def _disk_is_full(self, error: Exception) -> bool:
        text = str(error)
        if any(os.strerror(code) in text for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)):
            return True
        disk = os.statvfs(self._folder)
        return os.strerror(errno.EIO) in text and disk.f_bavail * disk.f_frsize < FULL_DISK_BYTES


def _open_lmdb(folder: Path, read_only: bool, sync_header: bool) -> Any:
    return lmdb.open(
        str(folder),
        map_size=MAP_BYTES,
        max_readers=MAX_READERS,
        readonly=read_only,
        create=not read_only,
        metasync=sync_header,
    )


def create_file(folder: Path) -> None:
    """Make a folder with an empty database file in it."""
    folder.mkdir()
    _open_lmdb(folder, read_only=False, sync_header=True).close()


def _create(folder: Path, form: Format) -> None:
    """Make an empty database that appears whole or not at all."""
    temporary = folder.with_name(folder.name + ".new")
    shutil.rmtree(temporary, ignore_errors=True)
    create_file(temporary)
    environment = LmdbEnvironment(temporary, Gate(), read_only=False, sync_header=True)
    upgrade(environment, form, alone=True)
    environment.close()
    temporary.rename(folder)
    sync_folder(folder.parent)


class Database:
    """An open store. Thread-safe; a context manager. One per store and process.

    `sessions`, `snapshots`: the two halves. `notices`: sentences about what was repaired or given
    up since it was opened, oldest first.
    """

    sessions: Sessions
    snapshots: Snapshots

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        read_only: bool = False,
        disk_budget_bytes: int | None = None,
    ) -> None:
        self.path = Path(path)
        self.read_only = read_only
        self.notices: list[str] = []
        self._gate = Gate()
        self._budget_bytes = disk_budget_bytes
        with ExitStack() as stack:
            self._prepare_folder()
            stack.callback(Registration(self.path).release)
            self._lock = StoreLock(self.path, read_only=read_only)
            stack.callback(self._lock.close)
            alone = self._lock.begin(OPEN_TIMEOUT_S)
            if alone and not read_only and is_pending(self.path):
                self._finish_scrub()
            self._sessions = self._open_sessions(alone)
            stack.callback(self._sessions.close)
            self.sessions = StoredSessions(self._sessions)
            self._states = self._open_states(alone)
            if self._states is not None:
                stack.callback(self._states.close)
            self.snapshots = self._open_snapshots(alone)
            self._lock.share()
            self._resources: ExitStack | None = stack.pop_all()

    def _prepare_folder(self) -> None:
        try:
            if not self.read_only:
                self.path.mkdir(parents=True, exist_ok=True)
            if not self.path.is_dir():
                raise StoreReadOnly(
                    "there is no store to read", value=str(self.path), remedy="create it first"
                )
        except FileExistsError as error:
            raise StoreDamaged(
                "a store is a folder, this is a file", value=str(self.path)
            ) from error
        except PermissionError as error:
            raise StoreReadOnly(
                "the store's folder cannot be made", value=str(self.path)
            ) from error

    def _finish_scrub(self) -> None:
        """Do what a `compact` could not do while another process had the store open."""
        try:
            for kind in KINDS:
                if (self.path / kind).exists():
                    replace_file(self.path / kind, kind)
            unmark_pending(self.path)
        except StorageError as error:
            self._notify(f"deleted bytes could not leave the files yet: {error}")

    def _open_sessions(self, alone: bool) -> LmdbEnvironment:
        folder = self.path / "sessions"
        if not folder.exists():
            if (self.path / "states").exists():
                raise StoreDamaged(
                    f"{folder} is missing", remedy="restore it from a backup, or delete the folder"
                )
            self._create(folder, SESSIONS)
        environment = LmdbEnvironment(
            folder, self._gate, read_only=self.read_only, sync_header=True
        )
        _upgrade_or_close(environment, SESSIONS, alone)
        return environment

    def _open_states(self, alone: bool) -> LmdbEnvironment | None:
        """The states; recreated empty if they are damaged, None if that cannot be done now."""
        folder = self.path / "states"
        try:
            if not folder.exists():
                self._create(folder, STATES)
            return self._open_states_as_they_are(folder, alone)
        except StoreDamaged as damage:
            if self.read_only or not alone:
                self._notify(f"the states are damaged and not used: {damage}")
                return None
            shutil.rmtree(folder)
            self._notify(f"the states were damaged and have been discarded: {damage}")
        self._create(folder, STATES)
        return self._open_states_as_they_are(folder, alone)

    def _open_states_as_they_are(self, folder: Path, alone: bool) -> LmdbEnvironment:
        environment = LmdbEnvironment(
            folder, self._gate, read_only=self.read_only, sync_header=False
        )
        _upgrade_or_close(environment, STATES, alone)
        return environment

    def _create(self, folder: Path, form: Format) -> None:
        if self.read_only:
            raise StoreReadOnly(
                "there is no store to read", value=str(folder), remedy="create it first"
            )
        _create(folder, form)

    def _open_snapshots(self, alone: bool) -> Snapshots:
        if self._states is None:
            return MemorySnapshots(Life(read_only=True))
        budget = DiskBudget(self.path, self._budget_bytes, self._sessions, self._states)
        snapshots = StoredSnapshots(self._states, budget, self._notify)
        if alone and not self.read_only:
            snapshots.sweep()
        return snapshots

    def _notify(self, notice: str) -> None:
        if notice not in self.notices:
            self.notices.append(notice)
        logger.warning("%s: %s", self.path, notice)

    def get_meta(self, key: str) -> bytes | None:
        """A small value of the layer above (its binding to a model), or None."""
        with self._sessions.read() as txn:
            return values.load(txn, keys.meta(check_meta(key).encode()), f"the value {key!r}")

    def set_meta(self, key: str, value: bytes) -> None:
        """Durable when it returns. At most values.PAYLOAD_BYTES."""
        with self._sessions.write() as txn:
            values.save(txn, keys.meta(check_meta(key, value).encode()), value)

    def sizes(self) -> dict[str, int]:
        """Bytes of the files: `sessions`, `states`."""
        states_bytes = 0 if self._states is None else self._states.file_bytes()
        return {"sessions": self._sessions.file_bytes(), "states": states_bytes}

    def compact(self) -> bool:
        """Rewrite both files, so that deleted bytes leave them. False if another process has the
        store open: then the next opening that is alone does it. It keeps other threads out while
        it runs, and needs as much free disk as the files hold; StoreFull, StoreDamaged leave them
        as they were."""
        if self.read_only:
            raise StoreReadOnly("a store opened for reading cannot be compacted")
        if isinstance(self.snapshots, StoredSnapshots):
            self.snapshots.write_touches()
        with self._gate.alone():
            mark_pending(self.path)
            if not self._lock.try_alone():
                return False
            try:
                self._replace_file(self._sessions, "sessions")
                if self._states is not None:
                    self._replace_file(self._states, "states")
                else:  # damaged and not in use
                    shutil.rmtree(self.path / "states", ignore_errors=True)
                unmark_pending(self.path)
            finally:
                self._lock.share()
        return True

    def _replace_file(self, environment: LmdbEnvironment, kind: str) -> None:
        environment.close()
        try:
            replace_file(self.path / kind, kind)
        finally:
            environment.open()

    def close(self) -> None:
        """Wait for other threads' transactions, then close. Closing twice is allowed."""
        if self._resources is None:
            return
        if isinstance(self.snapshots, StoredSnapshots):
            self.snapshots.write_touches()
        with self._gate.alone(closing=True):
            resources, self._resources = self._resources, None
            resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _upgrade_or_close(environment: LmdbEnvironment, form: Format, alone: bool) -> None:
    try:
        upgrade(environment, form, alone=alone)
    except BaseException:
        environment.close()
        raise
