# SPDX-License-Identifier: Apache-2.0
"""One budget for weights, expert slots, KV rows, anchors and working memory.

It counts and judges. Making room among states (tightening, evicting) is the keeper's work; moving
bytes between slots and states is `balance.Balance`'s.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Protocol

from .kernels import working_memory
from .plan import MemoryPlan
from .state.buffers import Meter
from .weight_memory import trim_malloc


class Lender(Protocol):
    """Who has bytes that states may take."""

    def lend(self, wanted_bytes: int, worth: float) -> bool: ...


class MemoryBudget:
    """What is used of a MemoryPlan. `home` is the division that was planned, `plan` the one of
    now: slots may have given to states, or taken from them. Both change in the owner thread; any
    thread may read."""

    def __init__(self, plan: MemoryPlan, meter: Meter) -> None:
        self.home = plan
        self.plan = plan
        self._meter = meter
        self.anchors = Meter()  # the keeper's
        self.lender: Lender | None = None

    def divide(self, slots: Sequence[int], slots_bytes: int) -> None:
        """From now on there are so many slots; what they leave is for states."""
        self.plan = replace(self.plan, slots=tuple(slots), slots_bytes=slots_bytes)

    @property
    def states_bytes(self) -> int:
        """Bytes of KV allocations and of anchors, once each."""
        return self._meter.used_bytes + self.anchors.used_bytes

    @property
    def free_bytes(self) -> int:
        """What states could take without anything going; below 0 where too much is taken."""
        return self.plan.states_bytes - self.states_bytes

    @property
    def anchor_limit_bytes(self) -> int:
        """What anchors may take: half of what is there for states, so that a path's rows are not
        crowded out by copies of its past. What slots borrowed counts: it can be had back."""
        return max(self.plan.states_bytes, self.home.states_bytes) // 2

    def missing(self, size_bytes: int) -> int:
        """Bytes that must go before `size_bytes` more fit; 0 if they fit now."""
        return max(0, size_bytes - self.free_bytes)

    def lend(self, size_bytes: int, worth: float) -> bool:
        """Let slots make room for `size_bytes` more of states, a byte of which saves `worth`
        seconds per second; within what was planned for states they have to. True if they gave
        anything: ask again what is missing."""
        missing = self.missing(size_bytes)
        if missing == 0 or self.lender is None:
            return False
        due = self.states_bytes + size_bytes <= self.home.states_bytes
        return self.lender.lend(missing, inf if due else worth)


def return_freed_memory() -> None:
    """To the system: what passes and malloc hold and nobody uses."""
    working_memory.release()
    trim_malloc()
