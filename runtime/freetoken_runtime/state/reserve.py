# SPDX-License-Identifier: Apache-2.0
"""Memory for KV rows that is mapped and touched while the weights load.

The first touch of a page costs a fault, and in a virtual machine whose host takes free pages back
about 1.2 ms per MiB: more than reading the rows from disk. Restoring a session is the one moment
when many fresh pages are needed at once and somebody waits (docs/decisions/0050-reserve.md).
"""

import mmap
import threading

import numpy as np

HUGE_PAGE_BYTES = 2 << 20
_PAGE_BYTES = 4096


def map_private(size_bytes: int) -> mmap.mmap:
    """A mapping of its own, so that it returns to the system with its last view; malloc keeps
    freed blocks of up to 32 MiB. Untouched pages cost nothing."""
    arena = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size_bytes >= 2 * HUGE_PAGE_BYTES:
        arena.madvise(mmap.MADV_HUGEPAGE)
    return arena


class Reserve:
    """One mapping of `rows` rows, touched by a thread of its own from the start."""

    def __init__(self, rows: int, row_bytes: int) -> None:
        self.rows = rows
        self.size_bytes = rows * row_bytes
        self._arena = map_private(self.size_bytes)
        self._thread = threading.Thread(target=self._touch, name="freetoken-reserve", daemon=True)
        self._thread.start()

    def take(self) -> mmap.mmap:
        """The touched mapping, zero-filled; waits for the thread. Call it once."""
        self._thread.join()
        return self._arena

    def _touch(self) -> None:
        np.frombuffer(self._arena, dtype=np.uint8)[::_PAGE_BYTES] = 0
