# SPDX-License-Identifier: Apache-2.0
"""A store by itself, over tiers that write a number of their own into every weight, slowly or not
at all. Oracle: that number, for each expert that is handed out, at the moment when it is."""

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Event, Lock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken_runtime.errors import WeightsDamaged, WeightsTimeout
from freetoken_runtime.experts.placement import PlacementPolicy, Split
from freetoken_runtime.experts.rates import ExpertRates
from freetoken_runtime.experts.records import ExpertForm
from freetoken_runtime.experts.store import ExpertStore, LayerExperts
from freetoken_runtime.kernels.experts.cpu import Demand
from freetoken_runtime.layers.expert import Expert, Served
from freetoken_runtime.specs.moe import ExpertSpec

WIDE = ExpertForm.of(ExpertSpec(4), 4, None, torch.float32, 32)
NARROW = ExpertForm.of(ExpertSpec(2), 4, None, torch.float32, 32)
EXPERTS, TOP_K = 6, 2


@dataclass
class NumberTier:
    """Fills a slot with `layer * 100 + expert`. Mutable: `failing` experts cannot be loaded."""

    form: ExpertForm
    layer: int
    rng: random.Random
    failing: frozenset[int] = frozenset()
    near: bool = False

    held_bytes = 0
    scratch_bytes = 0

    def load(self, expert: int, memory: memoryview) -> int:
        half = self.rng.random() < 0.3
        for tensor in self.form.tensors(memory).values():
            tensor.fill_(-1.0)
            if half:
                time.sleep(0.0005)
            if expert in self.failing:
                raise WeightsDamaged("cannot be loaded", value=expert)
            tensor.fill_(self.layer * 100 + expert)
        return self.form.layout.size_bytes


def number_of(expert: Expert) -> set[float]:
    """All weights that computing with it would meet."""
    ones, zeros = torch.eye(expert.up.inputs), torch.eye(expert.down.inputs)
    return set(expert.up.many(ones).flatten().tolist() + expert.down.many(zeros).flatten().tolist())


@pytest.fixture(scope="module")
def workers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as pool:
        yield pool


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_random_passes_get_what_they_want(workers: ThreadPoolExecutor, data: st.DataObject) -> None:
    """Layers of two forms, from disk and from memory, any slots, long passes and short ones,
    computed here or by threads, failures and resizing between passes: each wanted expert once, with
    its own weights all the time; a failure ends that pass."""
    rng = random.Random(data.draw(st.integers(0, 1 << 30)))
    near = data.draw(st.booleans())
    store = ExpertStore("disk", timeout_s=20.0)
    tiers = [NumberTier(NARROW if n == 1 else WIDE, n, rng, near=near and n < 3) for n in range(4)]
    layers = [store.add(tier, EXPERTS, TOP_K) for tier in tiers]
    if store.placement is not None:
        store.placement = EagerPolicy(rng)

    def resize() -> None:
        counts = [rng.randint(x.least, x.experts) for x in store.demands()]
        store.resize(counts, poison=True)
        assert store.counts.slots <= sum(counts)

    resize()
    for _ in range(data.draw(st.integers(1, 12))):
        action = rng.random()
        if action < 0.15:
            resize()
        elif action < 0.2:
            store.close()
        for tier in tiers:
            tier.failing = frozenset({rng.randrange(EXPERTS)} if rng.random() < 0.05 else ())
        rows = rng.choice([1, 2, 30])
        try:
            for tier, layer in zip(tiers, layers, strict=True):
                if rng.random() < 0.5:
                    _serve(tier, layer, rng, rows, workers)
                else:
                    _serve(tier, layer, rng, rows, None)
        except WeightsDamaged as error:
            assert any(error.value in tier.failing for tier in tiers)
    counts = store.counts
    assert counts.fetched * NARROW.layout.size_bytes <= counts.read_bytes
    assert counts.in_place == 0 or near
    store.close()


class EagerPolicy(PlacementPolicy):
    """Computes some of what is missing in place from the beginning."""

    def __init__(self, rng: random.Random, fetches: float = 0.5) -> None:
        super().__init__(ExpertRates())
        self._rng = rng
        self._fetches = fetches

    def split(self, rows: Sequence[int], size_bytes: int) -> Split:
        fetched = tuple(i for i in range(len(rows)) if self._rng.random() < self._fetches)
        computed = tuple(i for i in range(len(rows)) if i not in fetched)
        return Split(fetched, computed, 1.0, 1.0)


def _serve(
    tier: NumberTier,
    layer: LayerExperts,
    rng: random.Random,
    rows: int,
    workers: ThreadPoolExecutor | None,
) -> None:
    most = EXPERTS if rows > 2 else TOP_K * rows
    wanted = sorted(rng.sample(range(EXPERTS), rng.randint(1, most)))

    def compute(now: Served, pauses: Sequence[float]) -> None:
        if now.prepare is not None:
            now.prepare()
        for pause in pauses:
            assert number_of(now.expert) == {float(tier.layer * 100 + now.index)}
            time.sleep(pause)
        now.release()

    served, jobs = [], []
    try:
        for now in layer.serve(demands(wanted), rows):
            pauses = (rng.choice([0.0, 0.0, 0.0005]), 0.0)
            served.append(now.index)
            if workers is None:
                compute(now, pauses)
            else:
                jobs.append(workers.submit(compute, now, pauses))
    finally:
        wait(jobs)
    for job in jobs:
        job.result()
    assert sorted(served) == wanted


def demands(wanted: Sequence[int]) -> list[Demand]:
    return [Demand(expert, 1) for expert in wanted]


def pass_over(layer: LayerExperts, wanted: Sequence[int]) -> list[int]:
    """What was served, each released at once."""
    found = []
    for served in layer.serve(demands(wanted), 1):
        found.append(served.index)
        if served.prepare is not None:
            served.prepare()
        served.release()
    return sorted(found)


def test_a_pass_that_is_left_in_the_middle_holds_nothing() -> None:
    """Oracle: the next pass, which needs every slot."""
    store = ExpertStore("disk")
    layer = store.add(NumberTier(WIDE, 0, random.Random(0)), EXPERTS, TOP_K)
    store.resize([TOP_K])
    for served in layer.serve(demands([0, 1, 2]), 1):
        assert served.index < 3
        break
    assert pass_over(layer, [4, 5]) == [4, 5]
    store.close()


def store_of(*experts_of: int, near: bool = False) -> tuple[ExpertStore, list[LayerExperts]]:
    """One layer for each number of experts, two of them for a row, two slots for all."""
    store = ExpertStore("disk", timeout_s=10.0)
    tiers = [NumberTier(WIDE, n, random.Random(n), near=near) for n in range(len(experts_of))]
    layers = [store.add(tier, count, TOP_K) for tier, count in zip(tiers, experts_of, strict=True)]
    store.resize([TOP_K], poison=True)
    return store, layers


def test_m17_waves_go_on_when_another_thread_releases() -> None:
    """Two slots for six experts, released late by somebody else: the iterator waits for it, and
    meanwhile both that are out keep their weights. Oracle: the tiers' numbers."""
    store, (layer,) = store_of(EXPERTS)
    found, most, out = [], 0, 0
    lock = Lock()

    def compute(served: Served) -> None:
        nonlocal most, out
        with lock:
            out += 1
            most = max(most, out)
        time.sleep(0.01)
        assert number_of(served.expert) == {float(served.index)}
        with lock:
            out -= 1
        served.release()

    with ThreadPoolExecutor(2) as workers:
        jobs = []
        for served in layer.serve(demands(range(EXPERTS)), 1):
            found.append(served.index)
            jobs.append(workers.submit(compute, served))
        for job in jobs:
            job.result()
    assert sorted(found) == list(range(EXPERTS)) and most == TOP_K
    store.close()


def test_what_is_at_hand_comes_first_and_what_arrived_before_what_did_not() -> None:
    """Oracle: what had slots; and a gate that lets the second of two fetches pass the first."""
    store, (layer,) = store_of(EXPERTS)
    store.resize([4])
    pass_over(layer, [1, 3])
    tier, gate = store._layers[0].tier, Event()
    load = tier.load

    def gated(expert: int, memory: memoryview) -> int:
        assert expert != 0 or gate.wait(10.0)
        return load(expert, memory)

    tier.load = gated  # type: ignore[method-assign]
    order = []
    for served in layer.serve(demands([0, 1, 3, 5]), 1):
        order.append(served.index)
        if served.index == 5:
            gate.set()
        served.release()
    assert order == [1, 3, 5, 0]
    store.close()


def test_late_and_double_releases_free_nothing_of_others() -> None:
    """Oracle: the second pass' expert, while the first pass' releases come in."""
    store, (layer,) = store_of(EXPERTS)
    first = list(layer.serve(demands([0, 1]), 1))
    for served in first:
        served.release()
    again = layer.serve(demands([2, 3, 4]), 1)
    held = [next(again), next(again)]
    numbers = [number_of(served.expert) for served in held]
    for served in first * 2:
        served.release()
    assert not any(slot.evictable for slot in store._layers[0].pool.slots())
    assert [number_of(served.expert) for served in held] == numbers
    held[0].release()
    assert next(again).index == 4
    again.close()
    store.close()


def test_m21_an_iterator_that_is_left_open_is_an_error_in_time() -> None:
    """Oracle: the error's text; closed, it hands out nothing and stops nobody."""
    store, (layer,) = store_of(EXPERTS)
    left = layer.serve(demands([0, 1]), 1)
    next(left)
    store.timeout_s = 0.1
    with pytest.raises(WeightsTimeout, match=r"still being served.*remedy: take its experts"):
        pass_over(layer, [2])
    left.close()
    assert pass_over(layer, [2, 3, 4]) == [2, 3, 4]
    store.close()


@pytest.mark.parametrize("near", [False, True])
def test_m21_a_worker_that_never_releases_is_an_error_in_time(near: bool) -> None:
    """Slots, or scratches, that stay out: the iterator raises in time and says why; when they came
    back, and also when they never do, the next pass gets what it wants."""
    store, (layer, _) = store_of(EXPERTS, EXPERTS, near=near)
    if near:
        store.placement = EagerPolicy(random.Random(0), fetches=0.0)
    store.timeout_s = 0.2
    for comes_back in (True, False):
        kept = []
        with pytest.raises(
            WeightsTimeout, match=r"are not released; got '0\.2 s'; remedy: release"
        ):
            for served in layer.serve(demands(range(EXPERTS)), 1):
                kept.append(served)
        assert len(kept) == TOP_K
        if comes_back:
            for served in kept:
                served.release()
        assert pass_over(layer, [3, 4, 5]) == [3, 4, 5]
    store.close()


def test_m15_scratches_are_poisoned_between_experts() -> None:
    """What was computed in place is NaN as soon as it is released, and before it is written."""
    store, (layer, _) = store_of(EXPERTS, EXPERTS, near=True)
    store.placement = EagerPolicy(random.Random(0), fetches=0.0)
    for served in layer.serve(demands([0, 1, 2]), 1):
        assert served.prepare is not None and number_of_is_nan(served.expert)
        served.prepare()
        served.prepare()
        assert number_of(served.expert) == {float(served.index)}
        served.release()
        assert number_of_is_nan(served.expert)
    assert (store.counts.in_place, store.counts.fetched) == (3, 0)
    store.close()


def number_of_is_nan(expert: Expert) -> bool:
    return all(number != number for number in number_of(expert))


def test_counts_are_those_of_a_plain_model() -> None:
    """Oracle: counting by hand. Two slots, experts 0 and 1, then 1 and 2, then all six."""
    store = ExpertStore("disk")
    layer = store.add(NumberTier(WIDE, 0, random.Random(0)), EXPERTS, TOP_K)
    store.resize([TOP_K])
    seen = []
    for wanted in ([0, 1], [1, 2], [0, 1, 2, 3, 4, 5]):
        assert pass_over(layer, wanted) == wanted
        counts = store.counts
        seen.append((counts.hits, counts.misses, counts.fetched, counts.waves, counts.evictions))
    assert seen == [(0, 2, 2, 1, 0), (1, 3, 3, 2, 1), (3, 7, 7, 5, 5)]
    assert store.counts.read_bytes == 7 * WIDE.layout.size_bytes
    store.close()


def test_a_pool_without_room_for_a_row_is_never_made() -> None:
    """Oracle: the demand, of which the plan makes a lower bound."""
    store = ExpertStore("ram")
    store.add(NumberTier(WIDE, 0, random.Random(0)), EXPERTS, TOP_K)
    store.add(NumberTier(NARROW, 1, random.Random(0)), EXPERTS, 3)
    assert [(x.experts, x.least) for x in store.demands()] == [(6, 2), (6, 3)]
    with pytest.raises(ValueError, match="zip"):
        store.resize([3])
