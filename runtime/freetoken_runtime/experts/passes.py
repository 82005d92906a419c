# SPDX-License-Identifier: Apache-2.0
"""One pass over the layers, and one layer's turn in it: what is wanted is handed out as it comes.

    at hand     had a slot                               first
    arriving    a slot is being filled with it           as soon as it is
    in place    is computed from where it lies           while others arrive
    missing     waits for a slot that can be given away  goes on to arriving
    unseen      lies where it computes, yet unverified   goes on to in place

Why so: docs/decisions/0078-where-experts-are-computed.md.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import islice

from ..kernels.experts.cpu import Demand
from ..layers.expert import Served
from .ahead import Ahead
from .beside import Beside
from .placement import PlacementPolicy
from .prefetch import Prefetch
from .scratch import Conversion
from .slots import Slot, SlotPool
from .step import Step
from .supply import FETCH_THREADS, StoreLayer, Supply
from .tiers import DirectTier
from .waiting import Lease


@dataclass(frozen=True)
class PassPlan:
    """How a pass goes. It `streams` whole layers; or it is a `step` that is timed, in which there
    may be a choice where what is missing is computed, or a guess at the next layer's experts."""

    streams: bool = False
    step: Step | None = None
    placement: PlacementPolicy | None = None
    prefetch: Prefetch | None = None


class Pass:
    """What is known of the pass that goes on. Mutable. `plan`: decided once, at its first layer."""

    def __init__(self, supply: Supply, plan: PassPlan) -> None:
        self.plan = plan
        self.layer = -1
        self.wanted: dict[SlotPool, int] = {}
        self.ahead = Ahead(supply)
        self._supply = supply
        self._turn: Turn | None = None

    def turn(self, layer: int, wanted: Sequence[Demand]) -> "Turn":
        """The next layer's; the one before is over."""
        self._end_turn()
        self.layer = layer
        self._turn = Turn(self._supply, self, wanted)
        return self._turn

    def end(self) -> None:
        """Nothing is held any more."""
        self._end_turn()
        self.ahead.let_go()
        if self.plan.prefetch is not None:
            self.plan.prefetch.let_go()

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._turn.end()
            self._turn = None


class Turn:
    """One layer of a pass. Mutable; used by one thread at a time, but for what it lends.

    `end` takes back what was lent and not released: not as soon as the last expert was handed out,
    for others may still compute with it, but before the next layer is served.
    """

    def __init__(self, supply: Supply, going: Pass, wanted: Sequence[Demand]) -> None:
        self._supply = supply
        self._going = going
        self._plan = going.plan
        self._number = going.layer
        self._layer: StoreLayer = supply.layers[going.layer]
        self._direct = self._layer.direct
        self._leases: list[Lease] = []
        self._at_hand: deque[tuple[Slot, Lease]] = deque()
        self._arriving: list[tuple[Slot, Lease]] = []
        self._beside = Beside()
        self._begun_s = time.perf_counter()
        self._fetched_s: list[float] = []  # after the begin; written by fetching threads
        self._missing: deque[Demand] = deque()
        self._unseen: deque[tuple[Future[None], Demand]] = deque()
        self._in_place: deque[Demand] = deque()
        self._find(wanted)

    def _find(self, wanted: Sequence[Demand]) -> None:
        """Where each expert is."""
        if self._plan.step is not None:
            self._plan.step.wants(wanted)
        if self._direct is not None:
            self._find_in_place(self._direct, wanted)
            return
        going, pool = self._going, self._layer.pool
        going.wanted[pool] = going.wanted.get(pool, 0) + len(wanted)
        pool.demand = max(pool.demand, going.wanted[pool])
        keys = [(self._number, demand.expert) for demand in wanted]
        if self._plan.prefetch is not None:
            self._plan.prefetch.asked(self._number, keys)
        slots = [pool.ask(key) for key in keys]
        going.ahead.let_go()  # of what was fetched ahead, that which is wanted is held from here on
        missing = [demand for demand, slot in zip(wanted, slots, strict=True) if slot is None]
        for slot in slots:
            if slot is not None:
                queue = self._at_hand if slot.filling is None else self._arriving
                queue.append((slot, self._hold(slot)))
        self._supply.tally.add(
            hits=len(wanted) - len(missing),
            misses=len(missing),
            waves=-(-len(wanted) // len(pool)),
        )
        self._place(missing)

    def _find_in_place(self, direct: DirectTier, wanted: Sequence[Demand]) -> None:
        for demand in wanted:
            if direct.seen(demand.expert):
                self._in_place.append(demand)
            else:
                seeing = self._supply.begin_to_see(direct, demand.expert)
                self._unseen.append((seeing, demand))

    def _place(self, missing: Sequence[Demand]) -> None:
        placement = self._plan.placement
        if placement is None or not missing or not self._layer.tier.near:
            self._missing.extend(missing)
            return
        split = placement.split([demand.rows for demand in missing], self._layer.pool.slot_bytes)
        self._missing.extend(missing[index] for index in split.fetched)
        self._in_place.extend(missing[index] for index in split.computed)

    def serve(self) -> Iterator[Served]:
        while self._goes_on:
            seen = self._supply.changes.count
            self._fetch()
            served = self._next()
            if not self._missing:
                self._use_the_link()
            if served is None:
                self._wait(seen)
            else:
                yield served

    @property
    def _goes_on(self) -> bool:
        at_hand = bool(self._at_hand or self._in_place)
        return at_hand or bool(self._arriving or self._unseen or self._missing)

    def leave(self) -> None:
        """Nothing more is handed out."""
        for lease in self._leases:
            if not lease.lent_s:
                lease.release()

    def end(self) -> None:
        """Nothing that was handed out is used any more."""
        for lease in self._leases:
            lease.release()
        placement = self._plan.placement
        if placement is not None and self._layer.tier.near and self._direct is None:
            size_bytes = self._layer.pool.slot_bytes
            if self._fetched_s:
                placement.fetched(len(self._fetched_s), size_bytes, max(self._fetched_s))
            if self._beside.rows:
                placement.computed(self._beside.rows, size_bytes, self._beside.seconds())
        if self._plan.step is not None:
            back_s = max((lease.back_s for lease in self._leases), default=0.0)
            self._plan.step.ended(self._number, back_s)

    def _hold(self, slot: Slot) -> Lease:
        slot.held = True
        lease = Lease(self._supply.changes, partial(setattr, slot, "held", False))
        self._leases.append(lease)
        return lease

    def _fetch(self) -> None:
        """Begin to fetch what there is room for. What a long pass brings passes through: read once,
        it leaves those slots alone that earned their experts."""
        pool, streams = self._layer.pool, self._plan.streams
        while self._missing:
            key = (self._number, self._missing[0].expert)
            sparing = streams and bool(self._at_hand or self._arriving)  # whose slots will be free
            slot = pool.claim(key, passing=streams, sparing=sparing)
            if slot is None:
                return
            self._missing.popleft()
            lease = self._hold(slot)
            self._supply.begin(key, slot).add_done_callback(self._filled)
            self._arriving.append((slot, lease))

    def _use_the_link(self) -> None:
        """All that is missing is on its way."""
        if self._plan.streams:
            self._going.ahead.fetch(self._number + 1)
        elif self._plan.prefetch is not None and not self._arriving:
            self._plan.prefetch.fetch(self._number)

    def _filled(self, filling: Future[None]) -> None:
        self._fetched_s.append(time.perf_counter() - self._begun_s)

    def _next(self) -> Served | None:
        """What can be computed now."""
        if self._at_hand:
            return self._served(*self._at_hand.popleft())
        # They are filled in the order of their beginning, a few at a time.
        for index, (slot, lease) in enumerate(islice(self._arriving, 2 * FETCH_THREADS)):
            if self._supply.filled(self._layer.pool, slot):
                del self._arriving[index]
                return self._served(slot, lease)
        while self._unseen and self._unseen[0][0].done():
            seeing, demand = self._unseen.popleft()
            seeing.result()
            self._in_place.append(demand)
        return self._computed_in_place()

    def _served(self, slot: Slot, lease: Lease) -> Served:
        assert slot.key is not None
        lease.lend()
        return Served(slot.key[1], slot.expert, lease.release)

    def _computed_in_place(self) -> Served | None:
        if not self._in_place:
            return None
        expert = self._in_place[0].expert
        if self._direct is not None:
            lease = Lease(self._supply.changes, _nothing)
            served = Served(expert, self._direct.in_place(expert), lease.release)
        else:
            scratches = self._layer.pool.scratches
            scratch = scratches.take()
            if scratch is None:
                return None  # until another one is done
            lease = Lease(self._supply.changes, partial(scratches.put, scratch))
            prepare = Conversion(self._layer.tier.load, expert, scratch)
            served = Served(expert, scratch.expert, lease.release, prepare)
        self._beside.add(self._in_place.popleft().rows, lease)
        self._leases.append(lease)
        self._supply.tally.add(in_place=1)
        lease.lend()
        return served

    def _wait(self, seen: int) -> None:
        if self._arriving or self._unseen:
            what = "an expert did not arrive from the disk"
            remedy = "check the disk; the request can be repeated"
        else:
            what = "nothing more can be handed out: the experts of a layer are not released"
            remedy = "release each expert when it has been computed"
        waited_s = self._supply.wait(seen, what, remedy)
        self._supply.tally.add(waited_s=waited_s)


def _nothing() -> None:
    """What lies where it is computed has nothing to give back."""
