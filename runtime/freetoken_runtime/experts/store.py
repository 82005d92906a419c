# SPDX-License-Identifier: Apache-2.0
"""The experts of a model that live in slots: who asks, who waits, who is fetched ahead.

    a layer wants 3, 7, 9, 11      7 and 11 have slots          they are handed out at once
                                   3 and 9 have none            they are fetched meanwhile, each
                                                                into a slot nobody waits for
    more experts than slots        waves: a slot that was used takes the next one
    a long pass                    the next layer's missing experts arrive while this one computes

What is computed does not depend on any of it: experts' outputs are summed in the router's order.
"""

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from weakref import finalize

from ..errors import WeightsTimeout
from ..kernels.experts.cpu import Demand
from ..layers.expert import Served
from ..plan import SlotDemand
from ..reports import ExpertStats, Offload
from .fetch import Disk, Fetcher, unfinished
from .passes import Pass, PassPlan
from .placement import PlacementPolicy
from .prefetch import MOST_ROWS, Prefetch
from .rates import ExpertRates
from .slots import SCRATCHES, SlotPool
from .step import Judge, Step
from .supply import FETCH_THREADS, StoreLayer, Supply
from .tiers import DirectTier, Tier

Serving = Generator[Served, None, None]
TIMEOUT_S = 60.0  # a disk answers in milliseconds; one that has to spin up, in seconds
CLOSING_S = 5.0  # that closing waits for reads under way; then their files stay open
STREAMED_COVERAGE = 0.9  # of a layer's experts that a pass is expected to want


class ExpertStore:
    """Layers are added while a model is built; then one thread at a time serves, layer by layer in
    each pass. What is handed out may be released by any thread; `counts` may be read by any.
    `streams`: whether long passes fetch ahead. `placement`: where missing experts are computed, if
    there is a choice. `prefetch`: whether short passes guess what the next layer wants. `watch`:
    told what every layer wants, by number, before slots are asked."""

    def __init__(
        self, level: Offload, disk: Disk | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        """`level`: the lowest tier, for reports. `disk`: what the tiers read through. `timeout_s`:
        after which a layer that nothing happens for is an error."""
        self.level: Offload = level
        self.disk = Disk() if disk is None else disk
        self.streams = True
        self.placement: PlacementPolicy | None = None
        self.prefetch: Prefetch | None = None
        self.watch: Callable[[int, Sequence[int]], None] | None = None
        self._supply = Supply(level, timeout_s)
        self._pools: dict[object, SlotPool] = {}
        self._serving = Lock()
        self._pass: Pass | None = None
        finalize(self, _end, os.getpid(), self._supply.fetcher, self.disk)

    @property
    def timeout_s(self) -> float:
        return self._supply.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._supply.timeout_s = timeout_s

    @property
    def _layers(self) -> list[StoreLayer]:
        return self._supply.layers

    # -- building

    def add(self, tier: Tier, num_experts: int, top_k: int) -> "LayerExperts":
        """One more layer, whose experts share slots with those of the same form."""
        pool = SlotPool(tier.form)
        if not isinstance(tier, DirectTier):
            pool = self._pools.setdefault(tier.form, pool)
            if tier.near:
                self.placement = self.placement or PlacementPolicy(ExpertRates())
            else:
                self.prefetch = self.prefetch or Prefetch(self._supply)
        self._layers.append(StoreLayer(tier, pool, num_experts, top_k))
        return LayerExperts(self, len(self._layers) - 1)

    @property
    def serves(self) -> bool:
        """Whether any layer's experts come from here."""
        return bool(self._layers)

    def demands(self) -> tuple[SlotDemand, ...]:
        """What each pool could use. Layers whose experts need no slots have none."""
        demands = []
        for pool in self._pools.values():
            layers = [layer for layer in self._layers if layer.pool is pool]
            experts = sum(layer.num_experts for layer in layers)
            least = max(layer.top_k for layer in layers)
            demands.append(SlotDemand(pool.slot_bytes, experts, least))
        return tuple(demands)

    @property
    def pool_numbers(self) -> tuple[int | None, ...]:
        """Of each layer its pool's place in `demands`; None if it needs none."""
        places = {pool: place for place, pool in enumerate(self._pools.values())}
        return tuple(places.get(layer.pool) for layer in self._layers)

    @property
    def fixed_bytes(self) -> int:
        """In memory whatever the number of slots: tiers in RAM, and what threads work in."""
        held = sum(layer.tier.held_bytes for layer in self._layers)
        working = max((layer.tier.scratch_bytes for layer in self._layers), default=0)
        near = {layer.pool for layer in self._layers if layer.tier.near and not layer.direct}
        scratches = SCRATCHES * sum(pool.slot_bytes for pool in near)
        threads = FETCH_THREADS + (SCRATCHES if near else 0)
        return held + threads * working + scratches

    def resize(self, counts: Sequence[int], *, poison: bool = False) -> None:
        """Set the number of slots of each pool, in the order of `demands`. Between two passes.
        `poison`: free slots are filled with NaN, now and before each pass; for tests."""
        pools = list(zip(self._pools.values(), counts, strict=True))
        with self._alone():
            if all(len(pool) == count for pool, count in pools) and not poison:
                return
            self._end_pass()
            for pool, count in pools:
                pool.poison = pool.poison or poison
                pool.resize(count)
                if len(pool) > count:  # those that are left are being filled
                    wait(unfinished(slot.filling for slot in pool.slots()), self.timeout_s)
                    pool.resize(count)
                if pool.poison:
                    pool.spoil_free()

    def close(self) -> None:
        """End the threads and close the files; the next pass opens them again."""
        with self._alone():
            _close(self._supply.fetcher, self.disk)

    @property
    def counts(self) -> ExpertStats:
        ways, rates = [], None
        if self.placement is not None:
            rates = self.placement.rates.beside()
            ways += ["split"] if self.placement.way(1) == "split" else []
        elif self.prefetch is not None:
            ways += ["prefetch"] if self.prefetch.active(1) else []
        return replace(
            self._supply.tally.stats(),
            slots=sum(len(pool) for pool in self._pools.values()),
            slot_bytes=sum(len(pool) * pool.slot_bytes for pool in self._pools.values()),
            evictions=sum(pool.evictions for pool in self._pools.values()),
            ways=tuple(ways),
            link_bytes_per_s=None if rates is None else rates.link_bytes_per_s,
            compute_bytes_per_s=None if rates is None else rates.compute_bytes_per_s,
        )

    # -- serving

    def serve(self, number: int, wanted: Sequence[Demand], rows: int) -> Serving:
        """See `layers.expert.Experts`. What was handed out lasts until it is released, or until the
        next layer is served. What a tier raised, or WeightsTimeout, ends the pass; the next one
        starts afresh."""
        with self._alone():
            if self.watch is not None:
                self.watch(number, [demand.expert for demand in wanted])
            turn = self._enter(number, rows).turn(number, wanted)
            try:
                yield from turn.serve()
            finally:
                turn.leave()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """An iterator that was neither ended nor closed must not stop others for ever."""
        if not self._serving.acquire(timeout=self.timeout_s):
            raise WeightsTimeout(
                "another layer is still being served",
                value=f"{self.timeout_s} s",
                remedy="take its experts to the end, or close the iterator",
            )
        try:
            yield
        finally:
            self._serving.release()

    def guesses(self, number: int, rows: int) -> bool:
        """Whether passes over so many rows guess what this layer will want."""
        if self.prefetch is None or self.placement is not None or self._layers[number].tier.near:
            return False
        return self.prefetch.active(rows)

    def _enter(self, number: int, rows: int) -> Pass:
        """Layers come in ascending order, so that any other order begins a pass."""
        going = self._pass
        if going is None or number <= going.layer:
            self._end_pass()
            for pool in self._pools.values():
                if pool.poison:
                    pool.spoil_free()
            going = self._pass = Pass(self._supply, self._plan(number, rows))
        return going

    def _plan(self, number: int, rows: int) -> PassPlan:
        """Where there is a choice of places there is no slow link that guesses would help."""
        if self.streams and self._layers[number].coverage(rows) >= STREAMED_COVERAGE:
            return PassPlan(streams=True)
        placement = self.placement
        guesses = placement is None and rows <= MOST_ROWS
        prefetch = self.prefetch if guesses else None
        judges: list[Judge] = [judge for judge in (placement, prefetch) if judge is not None]
        step = Step(judges, rows, last=len(self._layers) - 1) if judges else None
        return PassPlan(step=step, placement=placement, prefetch=prefetch)

    def _end_pass(self) -> None:
        if self._pass is not None:
            self._pass.end()
            for pool in self._pools.values():
                pool.demand = self._pass.wanted.get(pool, 0)
            self._pass = None


@dataclass(frozen=True)
class LayerExperts:
    """`layers.moe.Experts` of one layer of a store."""

    store: ExpertStore
    number: int

    def serve(self, wanted: Sequence[Demand], rows: int) -> Serving:
        return self.store.serve(self.number, wanted, rows)

    def foresees(self, rows: int) -> bool:
        """`layers.moe.Foresight`."""
        return self.store.guesses(self.number, rows)

    def likely(self, experts: Sequence[int]) -> None:
        """`layers.moe.Foresight`."""
        if self.store.prefetch is not None:
            self.store.prefetch.likely(self.number, experts)

    @property
    def size_bytes(self) -> int:
        """Nothing: slots are the store's."""
        return 0


def _close(fetcher: Fetcher, disk: Disk) -> None:
    if fetcher.close(CLOSING_S):
        disk.close()


def _end(pid: int, fetcher: Fetcher, disk: Disk) -> None:
    """For a store that was left open. A child that fork() made has neither threads nor locks."""
    if os.getpid() == pid:
        _close(fetcher, disk)
