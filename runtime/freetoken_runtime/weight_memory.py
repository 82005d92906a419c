# SPDX-License-Identifier: Apache-2.0
"""Memory for weights that stay, apart from what loading needs for moments.

Where both come from malloc, a matrix takes most of a hole that freed slices have left, the rest is
too small for the next slice, and the process grows by about a slice with each matrix. Here weights
lie one after another in mappings of their own, and malloc gives back what it holds freed each time
that MAPPING_BYTES were handed out: how far it can grow in between does not depend on the model
(docs/decisions/0098-weight-memory.md).

    mapping   | values | scales | values | scales | …  untouched pages, which take no memory
"""

import ctypes
import mmap
from math import prod

import torch

MAPPING_BYTES = 32 << 20
_ALIGNMENT = 64  # a cache line, and what torch asks of malloc
_LARGE_BYTES = MAPPING_BYTES // 8  # has a mapping of its own: little address space is left over


class WeightMemory:
    """Hands out memory that returns to the system, a mapping at a time, with the last tensor that
    lies in it. Mutable; for one thread."""

    def __init__(self) -> None:
        self._mapping = memoryview(b"")
        self._used = 0
        self._mapped = 0  # since freed memory was given back

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros whose pages are not touched yet."""
        count = prod(shape)
        size = count * dtype.itemsize
        if size >= _LARGE_BYTES:
            return torch.frombuffer(self._map(size), dtype=dtype, count=count).view(shape)
        start = self._used + -self._used % _ALIGNMENT
        if start + size > len(self._mapping):
            self._mapping, start = self._map(MAPPING_BYTES), 0
        self._used = start + size
        flat = torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=start)
        return flat.view(shape)

    def _map(self, size_bytes: int) -> memoryview:
        self._mapped += size_bytes
        if self._mapped >= MAPPING_BYTES:
            trim_malloc()
            self._mapped = 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return memoryview(mmap.mmap(-1, size_bytes, flags=flags))


def trim_malloc() -> None:
    """Ask malloc to give its free pages back to the system; a no-op where it cannot."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
