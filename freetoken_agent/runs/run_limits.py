# SPDX-License-Identifier: Apache-2.0
"""What a run has used of what it may use."""

from dataclasses import dataclass
from time import monotonic

from ..agent import Limits


@dataclass(frozen=True)
class Reached:
    """A limit that a run has reached, by its name."""

    name: str
    limit: float


class LimitWatch:
    """Belongs to one run; the clock starts when it is made."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._started_s = monotonic()
        self._tool_calls = 0

    def before_step(self, steps: int, output_tokens: int) -> Reached | None:
        """What stands in the way of another model call after so many."""
        limits = self._limits
        elapsed_s = monotonic() - self._started_s
        if limits.max_steps is not None and steps >= limits.max_steps:
            return Reached("max_steps", limits.max_steps)
        if limits.output_tokens is not None and output_tokens >= limits.output_tokens:
            return Reached("output_tokens", limits.output_tokens)
        if limits.timeout_s is not None and elapsed_s >= limits.timeout_s:
            return Reached("timeout_s", limits.timeout_s)
        return None

    def before_calls(self, count: int) -> Reached | None:
        """What stands in the way of so many calls more; then none of them may run."""
        most = self._limits.max_tool_calls
        if most is None or self._tool_calls + count <= most:
            return None
        return Reached("max_tool_calls", most)

    def count_calls(self, count: int) -> None:
        self._tool_calls += count
