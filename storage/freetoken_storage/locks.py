# SPDX-License-Identifier: Apache-2.0
"""Who may touch a store: processes among each other, openings inside one process, and threads.

    store.lock     flock, shared, for as long as a process has the store open
    opening.lock   flock, exclusive, while a process opens the store or works on it alone

Only a holder of opening.lock may ask for store.lock exclusively. flock drops the shared lock when
it fails to raise it, so without that rule another process could slip in between.
"""

import errno
import fcntl
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from .errors import StoreAlreadyOpen, StoreClosed, StoreForked, StoreLocked, StoreReadOnly

PRESENCE_FILE = "store.lock"
OPENING_FILE = "opening.lock"
POLL_S = 0.01


class StoreLock:
    """Both lock files of one store folder, held by one opening. Not thread-safe by itself."""

    def __init__(self, folder: Path, *, read_only: bool) -> None:
        self._presence = _open_lock_file(folder / PRESENCE_FILE, read_only)
        try:
            self._opening = _open_lock_file(folder / OPENING_FILE, read_only)
        except BaseException:
            _close_file(self._presence)
            raise
        self._folder = folder
        _inherited.add(self)

    def begin(self, timeout_s: float) -> bool:
        """Start opening: wait for opening.lock, then try to be alone. True if no other process has
        the store open; then it stays so until `share`. StoreLocked after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while not _try_exclusive(self._opening):
            if time.monotonic() >= deadline_s:
                raise StoreLocked(
                    "another process is working on the store alone",
                    value=str(self._folder),
                    limit=f"waited {timeout_s:g} s",
                    remedy="try again when it has finished",
                )
            time.sleep(POLL_S)
        return self._raise()

    def share(self) -> None:
        """End opening, or the work alone: hold the store shared."""
        _lock(self._presence, fcntl.LOCK_SH)
        _lock(self._opening, fcntl.LOCK_UN)

    def try_alone(self) -> bool:
        """From shared to alone, if no other process has the store open or is opening it. On False
        the shared lock is still held; after True call `share`."""
        if not _try_exclusive(self._opening):
            return False
        if self._raise():
            return True
        self.share()
        return False

    def _raise(self) -> bool:
        if _try_exclusive(self._presence):
            return True
        _lock(self._presence, fcntl.LOCK_SH)  # cannot wait: exclusive holders hold opening.lock
        return False

    def close(self) -> None:
        """Let go of both. Closing the last descriptor releases a lock."""
        _close_file(self._presence)
        _close_file(self._opening)
        self._presence = self._opening = None


def _open_lock_file(path: Path, read_only: bool) -> int | None:
    """A descriptor, or None where a read-only opening finds no lock file and can make none."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        if not read_only:
            raise StoreReadOnly(
                "the store's folder cannot be written",
                value=str(path.parent),
                remedy="open it with read_only=True, or change its permissions",
            ) from error
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None


def _close_file(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


def _lock(descriptor: int | None, operation: int) -> None:
    if descriptor is not None:
        fcntl.flock(descriptor, operation)


def _try_exclusive(descriptor: int | None) -> bool:
    try:
        _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Registration:
    """This process's claim on a store folder, by device and inode: LMDB must not have one file open
    twice in a process (its file locks belong to the process, and closing either drops both)."""

    def __init__(self, folder: Path) -> None:
        status = os.stat(folder)
        self._key = (status.st_dev, status.st_ino)
        with _registry_lock:
            if self._key in _registry:
                raise StoreAlreadyOpen(
                    "this process has the store open already",
                    value=str(folder),
                    remedy="use that handle, or close it first",
                )
            _registry.add(self._key)

    def release(self) -> None:
        with _registry_lock:
            _registry.discard(self._key)


class Gate:
    """Threads inside, and the one that must be alone (closing, rewriting the files).

    Entering is refused after `close` and in a process that inherited the gate through fork().
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._condition = threading.Condition()
        self._inside: dict[int, int] = {}  # thread -> how often it is inside
        self._alone: int | None = None
        self._closed = False

    def enter(self) -> None:
        """Come in, waiting for a thread that is alone. StoreClosed, StoreForked."""
        thread = threading.get_ident()
        self.check()
        with self._condition:
            # A thread that is inside comes in again at once: the one waiting to be alone waits for
            # it to leave.
            while self._alone not in (None, thread) and thread not in self._inside:
                self._condition.wait()
            self.check()
            self._inside[thread] = self._inside.get(thread, 0) + 1

    def leave(self) -> None:
        if self.inherited:
            return
        thread = threading.get_ident()
        with self._condition:
            self._inside[thread] -= 1
            if not self._inside[thread]:
                del self._inside[thread]
                self._condition.notify_all()

    @property
    def inherited(self) -> bool:
        """Whether this process got the gate through fork()."""
        return os.getpid() != self._pid

    def is_idle(self) -> bool:
        """Whether nobody is inside or alone; takes no lock, for use in a forked child."""
        return not self._inside and self._alone is None

    def check(self) -> None:
        """StoreForked, StoreClosed."""
        if self.inherited:
            raise StoreForked(
                "the store was opened by another process and inherited through fork()",
                value=f"process {os.getpid()}",
                limit=f"process {self._pid}",
                remedy="open it in this process",
            )
        if self._closed:
            raise StoreClosed("the store is closed", remedy="open it again")

    @contextmanager
    def alone(self, *, closing: bool = False) -> Iterator[None]:
        """Wait until every other thread has left and keep them out; with `closing`, for ever."""
        thread = threading.get_ident()
        with self._condition:
            self.check()
            if thread in self._inside:
                raise StoreLocked(
                    "this thread still reads from the store",
                    remedy="leave its reader() block first",
                )
            while self._alone is not None:
                self._condition.wait()
            self._alone = thread
            while self._inside:
                self._condition.wait()
        try:
            yield
        finally:
            with self._condition:
                self._alone = None
                self._closed = self._closed or closing
                self._condition.notify_all()

    def __enter__(self) -> Self:
        self.enter()
        return self

    def __exit__(self, *exception: object) -> None:
        self.leave()


# The process-wide facts that no object of ours can own: which folders this process has open, and
# which lock descriptors a forked child must let go of (it would keep the parent's locks alive).
_registry: set[tuple[int, int]] = set()
_registry_lock = threading.Lock()
_inherited: weakref.WeakSet[StoreLock] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    global _registry_lock
    _registry_lock = threading.Lock()
    _registry.clear()
    for lock in list(_inherited):
        lock.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
