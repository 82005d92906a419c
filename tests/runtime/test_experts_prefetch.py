# SPDX-License-Identifier: Apache-2.0
"""Guesses at what the next layer wants, by themselves: tiers without a disk, seconds that the test
makes up. Oracles: what was wanted; the settings of trials; the slots."""

import random
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import wait
from threading import Event

import pytest
import torch

from freetoken_runtime.experts.fetch import unfinished
from freetoken_runtime.experts.prefetch import Prefetch
from freetoken_runtime.experts.records import ExpertForm
from freetoken_runtime.experts.slots import Key, SlotPool
from freetoken_runtime.experts.store import ExpertStore, LayerExperts
from freetoken_runtime.experts.supply import FETCH_THREADS
from freetoken_runtime.experts.trials import TrialSettings
from freetoken_runtime.kernels.experts.cpu import Demand
from freetoken_runtime.specs.moe import ExpertSpec

FORM = ExpertForm.of(ExpertSpec(4), 4, None, torch.float32, 32)
LAYERS, EXPERTS, TOP_K = 3, 24, 2
NAN = b"\xff" * 64


class GatedTier:
    """Loads when its gate is open. Mutable: `loads`, in order."""

    form = FORM
    near = False
    held_bytes = 0
    scratch_bytes = 0

    def __init__(self) -> None:
        self.gate = Event()
        self.gate.set()
        self.loads: list[int] = []

    def load(self, expert: int, memory: memoryview) -> int:
        assert self.gate.wait(10.0)
        self.loads.append(expert)
        memory[:] = bytes(len(memory))
        return len(memory)


class Model:
    """A store of three layers, whose decoder guesses as it is told to."""

    def __init__(self, slots: int) -> None:
        self.store = ExpertStore("disk", timeout_s=10.0)
        self.tiers = [GatedTier() for _ in range(LAYERS)]
        self.layers: list[LayerExperts] = [self.store.add(t, EXPERTS, TOP_K) for t in self.tiers]
        self.store.resize([slots])
        self.prefetch = Always(self.store)
        self.store.prefetch = self.prefetch

    def run(self, wanted: Sequence[Sequence[int]], guesses: Sequence[Sequence[int]]) -> None:
        """One pass; `guesses[i]`: at what layer i + 1 will want, known when layer i begins."""
        for number, layer in enumerate(self.layers):
            if number + 1 < LAYERS and self.layers[number + 1].foresees(1):
                self.layers[number + 1].likely(guesses[number])
            for served in layer.serve([Demand(expert, 1) for expert in wanted[number]], 1):
                served.release()
            wait(unfinished(slot.filling for slot in self.pool.slots()))

    @property
    def pool(self) -> SlotPool:
        return self.store._layers[0].pool


class Always(Prefetch):
    """Guesses in every pass; outside the trials of the base class."""

    def __init__(self, store: ExpertStore) -> None:
        super().__init__(store._supply)

    def begin_step(self, rows: int) -> None:
        super().begin_step(rows)
        self._on = True

    def active(self, rows: int) -> bool:
        return True


@pytest.fixture
def model() -> Iterator[Model]:
    made = Model(slots=9)
    yield made
    for tier in made.tiers:
        tier.gate.set()
    made.store.close()


def test_right_guesses_are_hits_and_wrong_ones_are_counted(model: Model) -> None:
    """Oracle: arithmetic. Of the two guesses at each layer one is right: it is no miss."""
    wanted = [[0, 1], [2, 3], [4, 5]]
    model.run(wanted, [[2, 9], [4, 9]])
    counts = model.store.counts
    assert (counts.prefetched, counts.prefetched_used, counts.prefetch_precision) == (4, 2, 0.5)
    assert (counts.hits, counts.misses) == (2, 4)
    assert counts.prefetch_saved_s > 0.0
    assert sorted(model.tiers[1].loads)[:2] == [2, 3] and 4 in model.tiers[2].loads


def test_m15_wrong_guesses_that_wait_are_not_read_and_leave_poison() -> None:
    """Two reads are under way and stand still; of the guesses behind them the wrong ones are taken
    back when the layer asks. Oracle: the loads; and NaN in every slot that nobody has."""
    store = ExpertStore("disk", timeout_s=10.0)
    tiers = [GatedTier(), GatedTier()]
    layers = [store.add(tier, EXPERTS, 5) for tier in tiers]
    store.resize([20], poison=True)
    prefetch, pool = Always(store), store._layers[0].pool
    store.prefetch = prefetch
    layers[1].likely([5, 6, 7, 8, 9])
    tiers[1].gate.clear()
    for served in layers[0].serve([Demand(0, 1)], 1):
        served.release()
    while sum(slot.began_s > 0.0 and not slot.filled_s for slot in pool.slots()) < FETCH_THREADS:
        time.sleep(0.001)
    asked = prefetch.asked

    def opening(number: int, keys: Collection[Key]) -> None:
        asked(number, keys)
        tiers[1].gate.set()

    prefetch.asked = opening  # type: ignore[method-assign]
    for served in layers[1].serve([Demand(5, 1), Demand(8, 1)], 1):
        served.release()
    wait(unfinished(slot.filling for slot in pool.slots()))
    assert sorted(tiers[1].loads) == [5, 6, 8]
    assert {slot.key for slot in pool.slots()} == {(0, 0), (1, 5), (1, 6), (1, 8)}
    assert (store.counts.prefetched, store.counts.prefetched_used) == (5, 2)
    assert len(pool._free) == 16 and {bytes(slot.memory[:64]) for slot in pool._free} == {NAN}
    store.close()


def test_guesses_take_no_slot_that_is_held_and_few_that_have_settled(model: Model) -> None:
    """Oracle: the slots. Nine slots hold nine settled experts; a pass of six that guesses wildly
    keeps all it uses, and displaces no more than one row's guesses."""
    random.seed(3)
    wanted = [[0, 1], [2, 3], [4, 5]]
    for filler in ([6, 7], [8, 9]):
        model.run([filler, filler, filler], [[], []])
    model.run(wanted, [[], []])
    for _ in range(10):
        wild = [random.sample(range(10, EXPERTS), 8) for _ in range(LAYERS - 1)]
        model.run(wanted, wild)
        there = {slot.key for slot in model.pool.slots()}
        assert {(n, e) for n, of in enumerate(wanted) for e in of} <= there
        assert model.pool.passing <= TOP_K
    assert model.store.counts.misses == 3 * 2 * 3


def test_a_guess_does_not_displace_another(model: Model) -> None:
    """Oracle: the limit. However long the disk rests, there are no more guesses than a row has
    experts until the layer has asked."""
    for filler in ([0, 1], [2, 3]):
        model.run([filler, filler, filler], [[], []])
    model.prefetch.begin_step(1)
    model.layers[1].likely(list(range(10, 20)))
    for _ in range(5):
        model.prefetch.fetch(0)
        wait(unfinished(slot.filling for slot in model.pool.slots()))
    assert model.tiers[1].loads[4:] == [10, 11] or model.tiers[1].loads[4:] == [11, 10]
    assert model.store.counts.prefetched == TOP_K


def test_crowded_slots_are_left_to_what_earned_them() -> None:
    """Oracle: the settled experts. Where not even one pass fits, guesses pass through."""
    model = Model(slots=4)
    wanted = [[0, 1], [2, 3], [4, 5]]
    for _ in range(6):
        model.run(wanted, [[], []])
    settled = set(model.pool._settled)
    assert settled
    for seed in range(10):
        wild = [random.Random(seed).sample(range(10, EXPERTS), 8) for _ in range(LAYERS - 1)]
        model.run(wanted, wild)
        assert settled <= set(model.pool._settled)
    model.store.close()


def test_a_pass_that_ends_early_lets_guesses_go(model: Model) -> None:
    """Oracle: the next pass, which needs every slot."""
    model.store.resize([TOP_K])
    model.layers[1].likely([3, 4])
    for served in model.layers[0].serve([Demand(0, 1), Demand(1, 1)], 1):
        served.release()
    model.run([[5, 6], [7, 8], [9, 10]], [[], []])


def steps(prefetch: Prefetch, count: int, plain_s: float, other_s: float) -> list[bool]:
    """Which of so many steps guessed, if they take so long."""
    ways = []
    for _ in range(count):
        prefetch.begin_step(1)
        ways.append(prefetch._on)
        prefetch.end_step(other_s if prefetch._on else plain_s, 10)
    return ways


def test_guessing_begins_when_steps_become_shorter_and_ends_when_they_do_not() -> None:
    """Oracle: the settings. Plain at first; on after a trial that wins; off again, but for trials,
    when it costs; on later when it pays again."""
    store = ExpertStore("disk")
    store.add(GatedTier(), EXPERTS, TOP_K)
    prefetch, settings = store.prefetch, TrialSettings()
    assert prefetch is not None
    ways = steps(prefetch, 60, 1.0, 0.8)
    assert not any(ways[: settings.first_interval]) and sum(ways[-30:]) >= 20
    assert prefetch.active(1) and not prefetch.active(16)
    assert store.counts.ways == ("prefetch",)
    ways = steps(prefetch, 200, 1.0, 1.3)
    assert not prefetch.active(1) and sum(ways[-100:]) <= 2 * settings.steps
    assert sum(steps(prefetch, 2000, 1.0, 0.7)[-40:]) >= 30


def test_wrong_guesses_end_a_trial_at_once_and_stop_what_had_begun(model: Model) -> None:
    """Oracle: the seconds of reading. Steps are shorter, but guesses read for longer than they
    save: that is chance, and ends."""
    prefetch = Prefetch(model.store._supply)
    steps(prefetch, 60, 1.0, 0.8)
    assert prefetch.active(1)
    prefetch._judged, prefetch._saved_s, prefetch._wasted_s = 20, 1.0, 2.0
    steps(prefetch, 1, 1.0, 0.8)
    assert not prefetch.active(1)
    prefetch._judged, prefetch._saved_s, prefetch._wasted_s = 0, 0.0, 0.0
    steps(prefetch, 200, 1.0, 0.8)
    assert prefetch.active(1)


def test_m18_a_suffix_of_ten_rows_makes_no_guesses(model: Model) -> None:
    """Oracle: the count of guesses, even from a guesser that always would."""
    model.layers[1].likely([10, 11])
    for served in model.layers[0].serve([Demand(0, 10), Demand(1, 10)], 10):
        served.release()
    assert model.store.counts.prefetched == 0 and not Prefetch(model.store._supply).active(10)


def test_layers_in_memory_are_not_guessed_at() -> None:
    """Oracle: the store's own answers, where one layer's experts lie in RAM."""
    store = ExpertStore("ram")
    near = GatedTier()
    near.near = True
    layers = [store.add(GatedTier(), EXPERTS, TOP_K), store.add(near, EXPERTS, TOP_K)]
    store.prefetch = Always(store)
    assert not any(layer.foresees(1) for layer in layers)
    assert store.placement is not None and store.counts.ways == ()
