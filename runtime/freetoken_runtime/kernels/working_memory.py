# SPDX-License-Identifier: Apache-2.0
"""Memory that a thread computes in again and again.

A matrix of some megabytes that is made anew for every GEMM comes from the system each time, page by
page: that took longer than filling it.
"""

from threading import local

import torch


class _Floats(local):
    """What one thread has; it ends with the thread."""

    buffer: torch.Tensor | None = None


_floats = _Floats()


def floats(rows: int, columns: int) -> torch.Tensor:
    """[rows, columns] fp32 with anything in it, this thread's until it asks again."""
    count = rows * columns
    if _floats.buffer is None or len(_floats.buffer) < count:
        _floats.buffer = None  # before the larger one is there
        with torch.inference_mode(False):  # a tensor for passes and for those who differentiate
            _floats.buffer = torch.empty(count)
    return _floats.buffer[:count].view(rows, columns)
