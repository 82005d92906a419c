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
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from weakref import finalize

from ..errors import WeightsTimeout
from ..layers.expert import Demand, Served
from ..plan import SlotDemand
from ..reports import ExpertStats, Offload
from .fetch import Disk, Fetcher, finished, unfinished
from .slots import Key, Slot, SlotPool
from .tiers import Tier

FETCH_THREADS = 2
TIMEOUT_S = 60.0  # a disk answers in milliseconds; one that has to spin up, in seconds
CLOSING_S = 5.0  # that closing waits for reads under way; then their files stay open
STREAMED_COVERAGE = 0.9  # of a layer's experts that a pass is expected to want


@dataclass(frozen=True)
class StoreLayer:
    """`top_k`: experts per row."""

    tier: Tier
    pool: SlotPool
    num_experts: int
    top_k: int

    def coverage(self, rows: int) -> float:
        """The part of the experts that so many rows want, if they choose evenly:
        1 - (1 - k / E)^T."""
        return float(1.0 - (1.0 - self.top_k / self.num_experts) ** rows)


@dataclass
class _Pass:
    """What is known of the pass that goes on. Mutable. `streams`: decided once, at its first layer.
    `ahead`: slots of the next layer that must stay, `absent`: its experts without a slot, None
    until somebody looked."""

    streams: bool
    layer: int
    wanted: dict[SlotPool, int] = field(default_factory=dict)
    ahead: list[Slot] = field(default_factory=list)
    absent: deque[Key] | None = None

    def let_go(self) -> None:
        for slot in self.ahead:
            slot.held = False
        self.ahead, self.absent = [], None


class ExpertStore:
    """Layers are added while a model is built; then one thread at a time serves, layer by layer in
    each pass. `counts` may be read by any thread. `streams`: whether long passes fetch ahead."""

    def __init__(
        self, level: Offload, disk: Disk | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        """`level`: the lowest tier, for reports. `disk`: what the tiers read through."""
        self.level: Offload = level
        self.disk = Disk() if disk is None else disk
        self.timeout_s = timeout_s
        self.streams = True
        self._fetcher = Fetcher(FETCH_THREADS)
        self._layers: list[StoreLayer] = []
        self._pools: dict[object, SlotPool] = {}
        self._serving = Lock()
        self._counting = Lock()
        self._pass: _Pass | None = None
        self._counts = ExpertStats(level)
        finalize(self, _end, os.getpid(), self._fetcher, self.disk)

    # -- building

    def add(self, tier: Tier, num_experts: int, top_k: int) -> "LayerExperts":
        """One more layer, whose experts share slots with those of the same form."""
        pool = self._pools.setdefault(tier.form, SlotPool(tier.form))
        self._layers.append(StoreLayer(tier, pool, num_experts, top_k))
        return LayerExperts(self, len(self._layers) - 1)

    def demands(self) -> tuple[SlotDemand, ...]:
        """What each pool could use."""
        demands = []
        for pool in self._pools.values():
            layers = [layer for layer in self._layers if layer.pool is pool]
            experts = sum(layer.num_experts for layer in layers)
            least = max(layer.top_k for layer in layers)
            demands.append(SlotDemand(pool.slot_bytes, experts, least))
        return tuple(demands)

    @property
    def fixed_bytes(self) -> int:
        """In memory whatever the number of slots: tiers in RAM, and what threads work in."""
        held = sum(layer.tier.held_bytes for layer in self._layers)
        scratch = max((layer.tier.scratch_bytes for layer in self._layers), default=0)
        return held + FETCH_THREADS * scratch

    def resize(self, counts: Sequence[int], *, poison: bool = False) -> None:
        """Set the number of slots of each pool, in the order of `demands`. Between two passes.
        `poison`: free slots are filled with NaN, now and before each pass; for tests."""
        with self._serving:
            self._end_pass()
            for pool, count in zip(self._pools.values(), counts, strict=True):
                pool.poison = pool.poison or poison
                wait(unfinished(slot.filling for slot in pool.slots()), self.timeout_s)
                pool.resize(count)
                if pool.poison:
                    pool.spoil_free()

    def close(self) -> None:
        """End the threads and close the files; the next pass opens them again."""
        with self._serving:
            _close(self._fetcher, self.disk)

    @property
    def counts(self) -> ExpertStats:
        with self._counting:
            return replace(
                self._counts,
                slots=sum(len(pool) for pool in self._pools.values()),
                slot_bytes=sum(len(pool) * pool.slot_bytes for pool in self._pools.values()),
                evictions=sum(pool.evictions for pool in self._pools.values()),
            )

    # -- serving

    def serve(self, number: int, wanted: Sequence[Demand], rows: int) -> Iterator[Served]:
        """See `layers.moe.Experts`. What a tier raised, or WeightsTimeout, ends the pass; the next
        one starts afresh."""
        with self._serving:
            going = self._enter(number, rows)
            held: list[Slot] = []
            try:
                yield from self._serve(going, wanted, held)
            finally:
                for slot in held:
                    slot.held = False

    def _enter(self, number: int, rows: int) -> _Pass:
        """Layers come in ascending order, so that any other order begins a pass."""
        going = self._pass
        if going is None or number <= going.layer:
            self._end_pass()
            for pool in self._pools.values():
                if pool.poison:
                    pool.spoil_free()
            streams = self.streams and self._layers[number].coverage(rows) >= STREAMED_COVERAGE
            going = self._pass = _Pass(streams, number)
        going.layer = number
        return going

    def _end_pass(self) -> None:
        if self._pass is not None:
            for pool in self._pools.values():
                pool.demand = self._pass.wanted.get(pool, 0)
            self._pass.let_go()
            self._pass = None

    def _serve(self, going: _Pass, wanted: Sequence[Demand], held: list[Slot]) -> Iterator[Served]:
        number, pool = going.layer, self._layers[going.layer].pool
        going.wanted[pool] = going.wanted.get(pool, 0) + len(wanted)
        pool.demand = max(pool.demand, going.wanted[pool])
        found = {demand.expert: pool.ask((number, demand.expert)) for demand in wanted}
        going.let_go()  # of what was fetched ahead, that which is wanted is held from here on
        due: deque[Slot] = deque()
        for slot in found.values():
            if slot is not None:
                slot.held = True
                held.append(slot)
                due.append(slot)
        due = deque(sorted(due, key=lambda slot: slot.filling is not None))
        missing = deque(expert for expert, slot in found.items() if slot is None)
        self._note(pool, len(due), len(missing))
        while due or missing:
            self._fetch(going, missing, due, held)
            if not missing:
                self._fetch_ahead(going)
            if not due:
                self._wait_for_room(pool)
                continue
            slot = due.popleft()
            self._arrived(pool, slot)
            assert slot.key is not None
            yield Served(slot.key[1], slot.expert, partial(setattr, slot, "held", False))

    def _fetch(self, going: _Pass, missing: deque[int], due: deque[Slot], held: list[Slot]) -> None:
        """Begin to fetch what there is room for. What a long pass brings passes through: read once,
        it leaves those slots alone that earned their experts."""
        pool = self._layers[going.layer].pool
        while missing:
            sparing = going.streams and bool(due)  # whose slots will be free
            key = (going.layer, missing[0])
            slot = pool.claim(key, passing=going.streams, sparing=sparing)
            if slot is None:
                return
            self._begin(going.layer, missing.popleft(), slot)
            held.append(slot)
            due.append(slot)

    def _fetch_ahead(self, going: _Pass) -> None:
        """Begin to fetch the next layer, as far as there is room that is not this one's."""
        after = going.layer + 1
        if not going.streams or after >= len(self._layers):
            return
        layer = self._layers[after]
        pool = layer.pool
        if going.absent is None:
            every = [(after, expert) for expert in range(layer.num_experts)]
            slots = [slot for key in every if (slot := pool.find(key)) is not None]
            for slot in slots:
                slot.held = True
            there = {slot.key for slot in slots}
            going.ahead, going.absent = slots, deque(key for key in every if key not in there)
        limit = max(FETCH_THREADS, min(layer.num_experts, len(pool) // 2))
        while going.absent and (pool.spare or pool.passing < limit):
            key = going.absent[0]
            slot = pool.claim(key, passing=True, sparing=pool.passing >= FETCH_THREADS)
            if slot is None:
                return
            going.absent.popleft()
            self._begin(after, key[1], slot)
            going.ahead.append(slot)

    def _begin(self, number: int, expert: int, slot: Slot) -> None:
        slot.held = True
        job = partial(self._load, self._layers[number].tier, expert, slot.memory)
        slot.filling = self._fetcher.submit(job)

    def _load(self, tier: Tier, expert: int, memory: memoryview) -> None:
        """In a fetching thread."""
        read = tier.load(expert, memory)
        with self._counting:
            fetched, so_far = self._counts.fetched + 1, self._counts.read_bytes
            self._counts = replace(self._counts, fetched=fetched, read_bytes=so_far + read)

    def _arrived(self, pool: SlotPool, slot: Slot) -> None:
        """Wait for a slot to be filled. What failed leaves the slot to others."""
        if slot.filling is None:
            return
        try:
            finished(slot.filling, self.timeout_s)
        except WeightsTimeout:
            raise  # it is still being written to
        except BaseException:
            pool.drop(slot)
            raise
        slot.filling = None

    def _wait_for_room(self, pool: SlotPool) -> None:
        """Every slot is being filled for somebody: wait for one of them."""
        busy = unfinished(slot.filling for slot in pool.slots())
        if busy and not wait(busy, self.timeout_s, FIRST_COMPLETED).done:
            finished(busy[0], 0.0)
        assert any(slot.evictable for slot in pool.slots()), "no slot can be given away"

    def _note(self, pool: SlotPool, hits: int, misses: int) -> None:
        with self._counting:
            counts = self._counts
            self._counts = replace(
                counts,
                hits=counts.hits + hits,
                misses=counts.misses + misses,
                waves=counts.waves - (-(hits + misses) // len(pool)),
            )


@dataclass(frozen=True)
class LayerExperts:
    """`layers.moe.Experts` of one layer of a store."""

    store: ExpertStore
    number: int

    def serve(self, wanted: Sequence[Demand], rows: int) -> Iterator[Served]:
        return self.store.serve(self.number, wanted, rows)

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
