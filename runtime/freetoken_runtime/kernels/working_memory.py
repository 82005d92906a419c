# SPDX-License-Identifier: Apache-2.0
"""Memory that a thread computes in again and again.

A matrix of some megabytes that is made anew for every GEMM comes from the system each time, page by
page: that took longer than filling it.
"""

from math import prod
from threading import local

import torch


class _Rooms(local):
    """What one thread has; it ends with the thread."""

    def __init__(self) -> None:
        self.by_use: dict[tuple[str, torch.dtype], torch.Tensor] = {}


_rooms = _Rooms()


def room(*shape: int, dtype: torch.dtype = torch.float32, use: str = "weights") -> torch.Tensor:
    """A tensor with anything in it, this thread's until it asks for this use and dtype again."""
    count, key = prod(shape), (use, dtype)
    kept = _rooms.by_use.get(key)
    if kept is None or len(kept) < count:
        kept = _rooms.by_use[key] = torch.empty(0)  # the old one goes before the new one comes
        with torch.inference_mode(False):  # usable in passes and by those who differentiate
            kept = _rooms.by_use[key] = torch.empty(count, dtype=dtype)
    return kept[:count].view(shape)


def forget(use: str) -> None:
    """This thread's memory for a use goes as soon as nobody else holds it."""
    for key in [key for key in _rooms.by_use if key[0] == use]:
        del _rooms.by_use[key]
