# SPDX-License-Identifier: Apache-2.0
"""What a pass does about the placement of missing experts: asks the policy, and takes the times.

A step is a pass over all layers, from the first one's experts to when the last one's are released:
what mixers take in between is the same either way, what callers do between passes is not in it.
"""

import time
from collections.abc import Sequence

from ..layers.expert import Demand
from .placement import PlacementPolicy, Split
from .waiting import Lease


class Placing:
    """The placement of one pass. Mutable. `last`: number of the layer after which it is over."""

    def __init__(self, policy: PlacementPolicy, rows: int, last: int) -> None:
        self._policy = policy
        self._last = last
        self._pairs = 0
        self._begun_s = time.perf_counter()
        policy.begin_step(rows)

    def counted(self, wanted: Sequence[Demand]) -> None:
        """A layer wants these, missing or not."""
        self._pairs += sum(demand.rows for demand in wanted)

    def split(self, missing: Sequence[Demand], size_bytes: int) -> Split:
        return self._policy.split([demand.rows for demand in missing], size_bytes)

    def took(self, size_bytes: int, fetched_s: Sequence[float], beside: "Beside") -> None:
        """A layer is over. `fetched_s`: how long after its begin each fetched expert was there."""
        if fetched_s:
            self._policy.fetched(len(fetched_s), size_bytes, max(fetched_s))
        if beside.rows:
            self._policy.computed(beside.rows, size_bytes, beside.seconds())

    def ended(self, layer: int, at_s: float) -> None:
        """All that a layer lent is back."""
        if layer == self._last and self._pairs:
            self._policy.end_step(at_s - self._begun_s, self._pairs)


class Beside:
    """What was computed from where it lay: the rows of each expert, and its lease."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self._leases: list[Lease] = []

    def add(self, rows: int, lease: Lease) -> None:
        self.rows.append(rows)
        self._leases.append(lease)

    def seconds(self) -> float:
        """In which any of it was being computed: experts that several threads compute at once
        count once."""
        total = until = 0.0
        for lease in sorted(self._leases, key=lambda lease: lease.lent_s):
            total += max(0.0, lease.back_s - max(until, lease.lent_s))
            until = max(until, lease.back_s)
        return total
