# SPDX-License-Identifier: Apache-2.0
"""Database: a store folder with two LMDB environments.

folder/
    sessions/data.mdb    the truth; each commit is synchronous
    states/data.mdb      disposable; the data of a commit is synced, its header is not
    store.lock  opening.lock  scrub.pending
"""

import logging
import os
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from . import keys, values
from .budgets import DiskBudget
from .compaction import is_pending, mark_pending, replace_file, unmark_pending
from .disk_errors import shown, store_path, translated
from .environment import LOCK_FILE, LmdbEnvironment, create_file
from .errors import StorageError, StoreDamaged, StoreLocked, StoreReadOnly
from .folders import sync_folder
from .life import Life
from .locks import Gate, Registration, StoreLock
from .memory_snapshots import MemorySnapshots
from .meta import check_meta
from .migrations import SESSIONS, STATES, Format, upgrade
from .records import Sessions, Snapshots
from .sessions import StoredSessions
from .snapshots import StoredSnapshots
from .verification import KINDS, VerifyReport, verify_store

OPEN_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


class Database:
    """An open store. Thread-safe; a context manager. One per store and process.

    `sessions`, `snapshots`: the two halves. `notices`: sentences about what was repaired or given
    up since it was opened, oldest first, each once. `path`: its folder. `read_only`: nothing can be
    written (StoreReadOnly).
    """

    sessions: Sessions
    snapshots: Snapshots

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        read_only: bool = False,
        disk_budget_bytes: int | None = None,
        open_timeout_s: float = OPEN_TIMEOUT_S,
    ) -> None:
        """`disk_budget_bytes` counts both files; states are evicted to stay inside it, sessions
        never. `open_timeout_s`: how long to wait for a process that works on the store alone."""
        self.path = store_path(path)
        self.read_only = read_only
        self.notices: list[str] = []
        self._gate = Gate()
        self._resources: ExitStack | None = None
        with translated(self.path), ExitStack() as stack:
            self._prepare_folder()
            stack.callback(Registration(self.path).release)
            self._lock = StoreLock(self.path, read_only=read_only)
            stack.callback(self._lock.close)
            alone = self._lock.begin(open_timeout_s)
            if alone and not read_only and is_pending(self.path):
                self._finish_scrub()
            self._table = self._can_join_table(alone)
            self._sessions = self._open_sessions(alone)
            stack.callback(self._sessions.close)
            self.sessions = StoredSessions(self._sessions)
            self._states = self._open_states(alone)
            if self._states is not None:
                stack.callback(self._states.close)
            self.snapshots = self._open_snapshots(alone, disk_budget_bytes)
            if self._table:
                self._lock.share()
            self._resources = stack.pop_all()

    def _prepare_folder(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise StoreDamaged(
                "a store is a folder, this is a file",
                value=shown(str(self.path)),
                remedy="name a folder",
            )
        if self.path.is_symlink() and not self.path.exists():
            raise StorageError(
                "the path of the store is a link that leads nowhere",
                value=shown(str(self.path)),
                remedy="remove the link, or create what it points to",
            )
        if not self.read_only:
            missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            for folder in missing:
                with suppress(PermissionError):  # a folder that may be written, but not read
                    sync_folder(folder.parent)
        elif not self.path.is_dir():
            raise _nothing_to_read(self.path)

    def _can_join_table(self, alone: bool) -> bool:
        """Whether LMDB's table of readers can be written. If the permissions forbid it, the store
        stays locked for everyone else while it is open: a writer would not see us read."""
        lock_file = self.path / "sessions" / LOCK_FILE
        if not self.read_only or not lock_file.exists() or os.access(lock_file, os.W_OK):
            return True
        if os.statvfs(lock_file).f_flag & os.ST_RDONLY:
            return True  # nobody can write there, and LMDB does without
        if not alone:
            raise StoreLocked(
                "another process has the store open, and this user may not write its lock table",
                value=str(lock_file),
                remedy="close the other process, or grant write permission",
            )
        return False

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
                    f"{folder} is missing", remedy="restore it from a backup, or delete the store"
                )
            self._create(folder, SESSIONS)
        return self._open_environment(folder, SESSIONS, alone)

    def _open_states(self, alone: bool) -> LmdbEnvironment | None:
        """The states; recreated empty if they are damaged, None if that cannot be done now."""
        folder = self.path / "states"
        try:
            if not folder.exists():
                self._create(folder, STATES)
            return self._open_environment(folder, STATES, alone)
        except StoreDamaged as damage:
            if self.read_only or not alone:
                self._notify(f"the states are damaged and not used: {damage}")
                return None
            shutil.rmtree(folder)
            self._notify(f"the states were damaged and have been discarded: {damage}")
        self._create(folder, STATES)
        return self._open_environment(folder, STATES, alone)

    def _open_environment(self, folder: Path, form: Format, alone: bool) -> LmdbEnvironment:
        environment = LmdbEnvironment(
            folder,
            self._gate,
            read_only=self.read_only,
            sync_header=form is not STATES,
            audit=alone,
            table=self._table,
        )
        try:
            upgrade(environment, form, alone=alone)
        except BaseException:
            environment.close()
            raise
        return environment

    def _create(self, folder: Path, form: Format) -> None:
        """Make an empty database that appears whole or not at all."""
        if self.read_only:
            raise _nothing_to_read(folder)
        temporary = folder.with_name(folder.name + ".new")
        shutil.rmtree(temporary, ignore_errors=True)
        create_file(temporary)
        environment = LmdbEnvironment(temporary, Gate(), read_only=False)
        upgrade(environment, form, alone=True)
        environment.close()
        sync_folder(temporary)
        temporary.rename(folder)
        sync_folder(self.path)

    def _open_snapshots(self, alone: bool, budget_bytes: int | None) -> Snapshots:
        if self._states is None:
            return MemorySnapshots(Life(read_only=True))
        budget = DiskBudget(self.path, budget_bytes, self._sessions, self._states)
        snapshots = StoredSnapshots(self._states, budget, self._notify)
        if alone and not self.read_only:
            with suppress(StorageError):  # a full disk must not keep a store from opening
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

    def verify(self) -> VerifyReport:
        """Read every page and value, in a child process. See `verify_store`."""
        self._gate.check()
        return verify_store(self.path)

    def sizes(self) -> dict[str, int]:
        """Bytes of the files: `sessions`, `states`."""
        states_bytes = 0 if self._states is None else self._states.file_bytes()
        return {"sessions": self._sessions.file_bytes(), "states": states_bytes}

    def compact(self) -> bool:
        """Rewrite both files, so that deleted bytes leave them. False if another process has the
        store open: then the next opening that is alone does it. It keeps other threads out while
        it runs, and needs as much free disk as the files hold; StoreFull and StoreDamaged leave
        them as they were."""
        self._gate.check()
        if self.read_only:
            raise StoreReadOnly("a store opened for reading cannot be compacted")
        if isinstance(self.snapshots, StoredSnapshots):
            self.snapshots.write_touches()
        with translated(self.path), self._gate.alone():
            mark_pending(self.path)
            if not self._lock.try_alone():
                return False
            try:
                self._replace_file(self._sessions, "sessions")
                if self._states is not None:
                    self._replace_file(self._states, "states")
                else:  # damaged, and not in use
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
        """Wait for other threads' transactions, then close. Closing twice is allowed, and so is
        closing what came through fork(): that process owns nothing of it."""
        if self._resources is None or self._gate.inherited:
            return
        if isinstance(self.snapshots, StoredSnapshots):
            with suppress(StorageError):  # the order of use is not worth an error
                self.snapshots.write_touches()
        with self._gate.alone(closing=True):
            resources, self._resources = self._resources, None
            resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _nothing_to_read(path: Path) -> StoreReadOnly:
    return StoreReadOnly(
        "there is no store to read, and a read-only opening makes none",
        value=shown(str(path)),
        remedy="create it first",
    )
