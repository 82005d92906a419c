# SPDX-License-Identifier: Apache-2.0
"""One budget for weights, KV rows, anchors and working memory.

It counts and judges; making room (tightening, evicting) is the keeper's work.
"""

import ctypes

from .plan import MemoryPlan
from .state.buffers import Meter


class MemoryBudget:
    """What is used of a MemoryPlan. `plan` changes with `set_budget`, in the owner thread; any
    thread may read."""

    def __init__(self, plan: MemoryPlan, meter: Meter) -> None:
        self.plan = plan
        self._meter = meter
        self.anchors = Meter()  # the keeper's

    @property
    def states_bytes(self) -> int:
        """Bytes of KV allocations and of anchors, once each."""
        return self._meter.used_bytes + self.anchors.used_bytes

    @property
    def anchor_limit_bytes(self) -> int:
        """What anchors may take: half of what is there for states, so that a path's rows are not
        crowded out by copies of its past."""
        return self.plan.states_bytes // 2

    def missing(self, size_bytes: int) -> int:
        """Bytes that must go before `size_bytes` more fit; 0 if they fit now."""
        return max(0, self.states_bytes + size_bytes - self.plan.states_bytes)


def return_freed_memory() -> None:
    """Ask malloc to give its free pages back to the system; a no-op where it cannot."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
