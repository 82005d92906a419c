# SPDX-License-Identifier: Apache-2.0
"""The time of a pass, for those who try what makes it shorter.

A step is a pass over all layers with experts: from when the first one's are asked for to when the
last one's are released. What mixers take in between is the same either way, and what callers do
between passes is not in it.
"""

import time
from collections.abc import Sequence
from typing import Protocol

from ..kernels.experts.cpu import Demand


class Judge(Protocol):
    def begin_step(self, rows: int) -> object:
        """A pass over so many rows begins."""

    def end_step(self, seconds: float, pairs: int) -> None:
        """It took so long for so many (row, expert) pairs."""


class Step:
    """One pass, for its judges. A pass that fails is not told to them. `last`: number of the layer
    after which it is over."""

    def __init__(self, judges: Sequence[Judge], rows: int, last: int) -> None:
        self._judges = judges
        self._last = last
        self._pairs = 0
        self._begun_s = time.perf_counter()
        for judge in judges:
            judge.begin_step(rows)

    def wants(self, wanted: Sequence[Demand]) -> None:
        """One layer, missing or not: the measure of work must not depend on what is in slots."""
        self._pairs += sum(demand.rows for demand in wanted)

    def ended(self, layer: int, at_s: float) -> None:
        """All that a layer lent is back."""
        if layer == self._last and self._pairs and at_s > self._begun_s:
            for judge in self._judges:
                judge.end_step(at_s - self._begun_s, self._pairs)
