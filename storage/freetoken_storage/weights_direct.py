# SPDX-License-Identifier: Apache-2.0
"""Reads past the page cache: any stretch of any file, many at once, into memory of the caller's.

    wanted          |     offset ........ offset + length        |
    read            | block | block | block | block | block | block |     blocks of 4,096 bytes
    pieces            whole blocks of at least 1 MiB each, so that one large read runs several deep

Reads are `preadv` in threads that hold no lock of the interpreter. A short read is completed or is
an error. Memory that was touched before takes no page faults.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Self

from .weights import RECORD_ALIGNMENT, aligned, readable, truncated

PIECE_BYTES = 1 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux only; elsewhere every read is buffered
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)  # a file system without direct reads

# (descriptor, buffers, offset) -> bytes read; `os.preadv`.
Preadv = Callable[[int, Sequence[memoryview], int], int]


@dataclass(frozen=True)
class Extent:
    """A stretch of a file."""

    path: Path
    offset: int
    length: int

    @property
    def start(self) -> int:
        """Where the blocks begin that hold it."""
        return self.offset - self.offset % RECORD_ALIGNMENT

    @property
    def room(self) -> int:
        """Bytes of those blocks: what a buffer for it must hold."""
        return aligned(self.offset + self.length, RECORD_ALIGNMENT) - self.start


class AlignedBuffer:
    """Anonymous memory on page boundaries, touched once so that reads into it fault no more. Freed
    when the last view of it is gone."""

    def __init__(self, size_bytes: int) -> None:
        size = aligned(max(1, size_bytes), RECORD_ALIGNMENT)
        self.view = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self.view[::RECORD_ALIGNMENT] = bytes(size // RECORD_ALIGNMENT)


class Pending:
    """A read under way into memory that must not be used before `result`."""

    def __init__(self, pieces: Sequence[Future[None]], view: memoryview) -> None:
        self._pieces = pieces
        self._view = view

    def result(self) -> memoryview:
        """The bytes asked for, a view into the caller's buffer; waits for them. FtwTruncated."""
        error: BaseException | None = None
        for piece in self._pieces:  # all of them: none may write into the buffer later
            error = piece.exception() or error
        if error is not None:
            raise error
        return self._view


class DirectReader:
    """Reads with up to `depth` requests at the disk. Thread-safe; a context manager.

    `buffered`: files whose file system refuses direct reads; they go through the page cache.
    """

    def __init__(
        self, depth: int = 4, *, piece_bytes: int = PIECE_BYTES, preadv: Preadv = os.preadv
    ) -> None:
        self.depth = depth
        self.buffered: frozenset[Path] = frozenset()
        self._piece_bytes = aligned(piece_bytes, RECORD_ALIGNMENT)
        self._preadv = preadv
        self._pool = ThreadPoolExecutor(depth, "weights")
        self._descriptors: dict[Path, int] = {}
        self._closed = False
        self._lock = Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait for what is under way; then nothing can be submitted."""
        self._pool.shutdown()
        with self._lock:
            self._closed = True
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors = {}

    def submit(self, extent: Extent, into: memoryview) -> Pending:
        """Begin to read; `into` begins on a page boundary and has the extent's `room`. FtwTruncated
        if the file is absent."""
        jobs, view = self._jobs(extent, into)
        return Pending([self._pool.submit(job) for job in jobs], view)

    def read(self, extent: Extent, into: memoryview) -> memoryview:
        """`submit`, and wait; but this thread reads one of the pieces, for handing it to another
        takes a tenth of the time that a disk needs for it."""
        jobs, view = self._jobs(extent, into)
        own, *others = jobs
        pending = Pending([self._pool.submit(job) for job in others], view)
        try:
            own()
        finally:
            view = pending.result()
        return view

    def _jobs(
        self, extent: Extent, into: memoryview
    ) -> tuple[list[Callable[[], None]], memoryview]:
        """The reads of an extent's pieces, and where in `into` its bytes will be."""
        assert into.format == "B" and len(into) >= extent.room, (into.format, len(into), extent)
        assert _address(into) % RECORD_ALIGNMENT == 0, "the buffer is not on a page boundary"
        descriptor = self._open(extent.path)
        size = extent.room
        count = max(1, min(self.depth, size // self._piece_bytes))
        step = aligned(-(-size // count), RECORD_ALIGNMENT)
        jobs: list[Callable[[], None]] = []
        for begin in range(0, size, step):
            end = min(begin + step, size)
            # Behind the extent's own bytes the file may end.
            needed = min(end, extent.offset + extent.length - extent.start) - begin
            job = (descriptor, into[begin:end], extent.start + begin, needed, extent.path)
            jobs.append(partial(self._read, *job))
        first = extent.offset - extent.start
        return jobs, into[first : first + extent.length]

    def _read(
        self, descriptor: int, buffer: memoryview, offset: int, needed: int, path: Path
    ) -> None:
        done = 0
        while done < needed:
            start = done - done % RECORD_ALIGNMENT  # a direct read goes on from a whole block
            with readable(path):
                count = self._preadv(descriptor, [buffer[start:]], offset + start)
            if start + count <= done:
                raise truncated(path, offset + done, offset + needed)
            done = start + count

    def _open(self, path: Path) -> int:
        with self._lock:
            if self._closed:
                raise RuntimeError("the reader is closed")
            if path not in self._descriptors:
                self._descriptors[path] = self._descriptor(path)
            return self._descriptors[path]

    def _descriptor(self, path: Path) -> int:
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
        with readable(path):
            try:
                return os.open(path, flags | _DIRECT)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
            self.buffered |= {path}
            return os.open(path, flags)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
