# SPDX-License-Identifier: Apache-2.0
"""Where the experts of all layers come from, and who brings them: what every pass works with."""

import time
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial

from ..errors import WeightsTimeout
from ..reports import Offload
from .fetch import Fetcher
from .slots import Key, Slot, SlotPool
from .tally import Tally
from .tiers import DirectTier, Tier
from .waiting import Changes

FETCH_THREADS = 2


@dataclass(frozen=True)
class StoreLayer:
    """`top_k`: experts per row."""

    tier: Tier
    pool: SlotPool
    num_experts: int
    top_k: int

    @cached_property
    def direct(self) -> DirectTier | None:
        """The tier, if its experts need no slots."""
        return self.tier if isinstance(self.tier, DirectTier) else None

    def coverage(self, rows: int) -> float:
        """The part of the experts that so many rows want, if they choose evenly:
        1 - (1 - k / E)^T."""
        return float(1.0 - (1.0 - self.top_k / self.num_experts) ** rows)


class Supply:
    """Used by the thread that serves, but for what `changes` and `tally` allow."""

    def __init__(self, level: Offload, timeout_s: float) -> None:
        self.layers: list[StoreLayer] = []
        self.changes = Changes()
        self.tally = Tally(level)
        self.fetcher = Fetcher(FETCH_THREADS)
        self.timeout_s = timeout_s

    def begin(self, key: Key, slot: Slot) -> Future[None]:
        """Begin to fill a slot that was claimed for this expert."""
        slot.began_s = slot.filled_s = 0.0
        job = partial(self._load, self.layers[key[0]].tier, key[1], slot)
        slot.filling = filling = self.fetcher.submit(job)
        filling.add_done_callback(self.changes.tell)
        return filling

    def begin_to_see(self, tier: DirectTier, expert: int) -> Future[None]:
        """Begin to verify what lies in place."""

        def see() -> None:
            tier.in_place(expert)

        seeing = self.fetcher.submit(see)
        seeing.add_done_callback(self.changes.tell)
        return seeing

    def filled(self, pool: SlotPool, slot: Slot) -> bool:
        """Whether a slot can be used. What failed leaves it to others, and is raised."""
        if slot.filling is None:
            return True
        if not slot.filling.done():
            return False
        try:
            slot.filling.result()
        except BaseException:
            pool.drop(slot)
            raise
        slot.filling = None
        return True

    def wait(self, seen: int, what: str, remedy: str) -> float:
        """Until something changes; see `Changes.wait`. WeightsTimeout."""
        idle_s = self.changes.wait(seen, self.timeout_s)
        if idle_s is None:
            raise WeightsTimeout(what, value=f"{self.timeout_s} s", remedy=remedy)
        return idle_s

    def _load(self, tier: Tier, expert: int, slot: Slot) -> None:
        """In a fetching thread."""
        slot.began_s = time.perf_counter()
        read = tier.load(expert, slot.memory)
        slot.filled_s = time.perf_counter()
        self.tally.add(fetched=1, read_bytes=read)
