# SPDX-License-Identifier: Apache-2.0
"""Files out of the page cache, and how much of them is in it. The disk's own cache, or that of the
machine below a virtual one, is not reached. Linux; elsewhere nothing is dropped and None is told.
"""

import ctypes
import mmap
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path


def drop(files: Sequence[Path]) -> float | None:
    """Write the files to the disk and ask the system to forget them. Returns the part of their
    pages that is in the cache afterwards: mapped pages stay. None where that cannot be told."""
    if not hasattr(os, "posix_fadvise"):
        return None
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)  # dirty pages are not dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return resident(files)


def resident(files: Sequence[Path]) -> float | None:
    """The part of the files' pages that is in the page cache, by mincore(2)."""
    counts = [_pages(file) for file in files if file.stat().st_size]
    if not counts or any(count is None for count in counts):
        return None
    found = [count for count in counts if count is not None]
    return sum(there for there, _ in found) / sum(pages for _, pages in found)


def _pages(file: Path) -> tuple[int, int] | None:
    """Pages in the cache, and in all."""
    mincore = getattr(ctypes.CDLL(None), "mincore", None)
    if mincore is None:
        return None
    with file.open("rb") as stream:
        # Mapped privately, as only writable memory tells its address; nothing touches it.
        with closing(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)) as mapped:
            pages = -(-len(mapped) // mmap.PAGESIZE)
            states = (ctypes.c_ubyte * pages)()
            begin = ctypes.c_char.from_buffer(mapped)
            address = ctypes.c_void_p(ctypes.addressof(begin))
            failed = mincore(address, ctypes.c_size_t(len(mapped)), states)
            del begin  # it holds the mapping
            return None if failed else (sum(state & 1 for state in states), pages)
