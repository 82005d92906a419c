# SPDX-License-Identifier: Apache-2.0
"""Reads past the page cache: any stretch of any file, many at once, into memory of the caller's.

    wanted          |     offset ........ offset + length        |
    read            | block | block | block | block | block | block |     blocks of 4,096 bytes
    pieces            whole blocks of at least 1 MiB each, so that one large read runs several deep

Reads are `preadv` in threads that hold no lock of the interpreter. A short read is completed or is
an error. Memory that was touched before takes no page faults.
"""

import contextlib
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
HUGE_PAGE_BYTES = 2 << 20  # of x86-64, and of others where pages have 4,096 bytes
_MAX_GROUP = 16
_MAX_MAPPING = 64 << 20
_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux
_COLLAPSE = None if _HUGE is None else 25  # MADV_COLLAPSE, Linux 6.1; older ones refuse it
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
    when the last view of it is gone. As much of it as whole huge pages hold lies in such."""

    def __init__(self, size_bytes: int) -> None:
        size = aligned(max(1, size_bytes), RECORD_ALIGNMENT)
        _, whole = _mapped(size, size // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
        self.view = whole
        _touch(self.view)


class Buffers:
    """Buffers of one size, several to a mapping, so that nearly all of each lies in huge pages.
    Mutable; used by one thread at a time.

        mapping   | buffer | buffer | buffer | buffer | buffer |
        pages     | huge  | huge  | huge  | huge  | huge  |small

    A disk takes a request in so many segments (often 254), and memory of many small pages is one
    segment per page: reads then run at 1.2 GB/s where huge pages let them run at 3.1.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = aligned(max(1, size_bytes), RECORD_ALIGNMENT)
        self._group = _group(self.size_bytes)
        self._mappings: list[_Mapping] = []

    def take(self) -> memoryview:
        """One that is nobody's, touched; its content is undefined."""
        mapping = next((mapping for mapping in self._mappings if mapping.free), None)
        if mapping is None:
            mapping = _Mapping(self.size_bytes, self._group)
            self._mappings.append(mapping)
        return mapping.take()

    def give(self, buffer: memoryview) -> None:
        """A buffer that was taken: its memory goes back to the system at once, so nobody may use it
        any more; the address space, when the last view of the whole mapping is gone."""
        address = _address(buffer)
        mapping = next(mapping for mapping in self._mappings if address in mapping.addresses)
        mapping.give(address)
        if len(mapping.free) == self._group:
            self._mappings.remove(mapping)


class _Mapping:
    """`group` buffers in one piece. Mutable: `free` are the numbers of those that are nobody's."""

    def __init__(self, size_bytes: int, group: int) -> None:
        self._size = size_bytes
        self._huge = group * size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        self._memory, self._whole = _mapped(group * size_bytes, self._huge)
        self._first = _address(self._whole) - _address(memoryview(self._memory))
        self._split = False  # whether memory was given back in between, which splits huge pages
        self.free = list(range(group))[::-1]
        start = _address(self._whole)
        self.addresses = range(start, start + group * size_bytes, size_bytes)

    def take(self) -> memoryview:
        number = self.free.pop()
        view = self._whole[number * self._size : (number + 1) * self._size]
        _touch(view)
        if self._split and not self.free and _COLLAPSE is not None:
            with contextlib.suppress(OSError):  # there may be no huge page to be had
                self._memory.madvise(_COLLAPSE, self._first, self._huge)
            self._split = False
        return view

    def give(self, address: int) -> None:
        number = self.addresses.index(address)
        assert number not in self.free, number
        self._memory.madvise(mmap.MADV_DONTNEED, self._first + number * self._size, self._size)
        self._split = True
        self.free.append(number)


def _group(size_bytes: int) -> int:
    """How many buffers share a mapping: so many that what is left behind whole huge pages is least
    for each, but not more than shrinking step by step can bear."""
    sizes = [count for count in range(1, _MAX_GROUP + 1) if count * size_bytes <= _MAX_MAPPING]
    return min(sizes or [1], key=lambda count: count * size_bytes % HUGE_PAGE_BYTES / count)


def _mapped(size_bytes: int, huge_bytes: int) -> tuple[mmap.mmap, memoryview]:
    """Untouched memory, and the part of it that begins on a boundary of huge pages."""
    room = HUGE_PAGE_BYTES if huge_bytes else 0
    memory = mmap.mmap(-1, size_bytes + room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = memoryview(memory)
    first = -_address(view) % HUGE_PAGE_BYTES if huge_bytes else 0
    if huge_bytes and _HUGE is not None:
        with contextlib.suppress(OSError):  # a system that was built without them
            memory.madvise(_HUGE, first, huge_bytes)
    return memory, view[first : first + size_bytes]


def _touch(view: memoryview) -> None:
    view[::RECORD_ALIGNMENT] = bytes(len(view) // RECORD_ALIGNMENT)


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
