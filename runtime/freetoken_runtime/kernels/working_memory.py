# SPDX-License-Identifier: Apache-2.0
"""Memory for matrices that live for moments, from pages that are kept.

Memory of some megabytes comes from the system anew each time, page by page, which takes longer than
filling it. Here it comes from blocks in huge pages, each of which is handed out again once nobody
holds what lay in it.

    empty      the smallest free block that is not half empty, else a new one; small: from torch
    in use     by whoever holds the tensor or a view of it, in any thread
    free       kept for the next one, up to a limit; beyond it those go that were free for longest
"""

from math import prod
from threading import RLock
from weakref import finalize

import numpy as np
import torch

from freetoken_storage.weights_direct import HUGE_PAGE_BYTES, AlignedBuffer

SMALLEST_BYTES = 1 << 20  # below, malloc has it at hand
KEPT_BYTES = 256 << 20
_STEP_BYTES = HUGE_PAGE_BYTES  # blocks are whole huge pages


class WorkingMemory:
    """Thread-safe; a tensor may be let go in any thread, also while another is being made."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._free: list[memoryview] = []  # the one that was free for longest first
        self._lock = RLock()  # collecting garbage may give back while one is being taken

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor with anything in it."""
        count = prod(shape)
        size_bytes = count * dtype.itemsize
        if size_bytes < SMALLEST_BYTES:
            return torch.empty(shape, dtype=dtype)
        block = self._take(size_bytes)
        array = np.frombuffer(block, np.uint8)
        finalize(array, self._give, block).atexit = False
        return torch.from_numpy(array)[:size_bytes].view(dtype).view(shape)

    def release(self) -> None:
        """Blocks that are free go back to the system."""
        with self._lock:
            self._free.clear()

    @property
    def free_bytes(self) -> int:
        with self._lock:
            return sum(map(len, self._free))

    def _take(self, size_bytes: int) -> memoryview:
        with self._lock:
            fitting = [x for x in self._free if size_bytes <= len(x) < 2 * size_bytes + _STEP_BYTES]
            if fitting:
                block = min(reversed(fitting), key=len)  # of equal ones the one used last
                self._free = [free for free in self._free if free is not block]
                return block
        return AlignedBuffer(-(-size_bytes // _STEP_BYTES) * _STEP_BYTES).view

    def _give(self, block: memoryview) -> None:
        with self._lock:
            self._free.append(block)
            while self.free_bytes > self._kept_bytes:
                del self._free[0]


_memory = WorkingMemory()
empty = _memory.empty
release = _memory.release
