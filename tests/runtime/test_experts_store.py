# SPDX-License-Identifier: Apache-2.0
"""A store by itself, over tiers that write a number of their own into every weight, slowly or not
at all. Oracle: that number, for each expert that is handed out, at the moment when it is."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken_runtime.errors import WeightsDamaged
from freetoken_runtime.experts.records import ExpertForm
from freetoken_runtime.experts.store import ExpertStore, LayerExperts
from freetoken_runtime.layers.expert import Demand, Expert
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


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_random_passes_get_what_they_want(data: st.DataObject) -> None:
    """Layers of two forms, any slots, long passes and short ones, failures and resizing between
    them: each wanted expert once, with its own weights all the time; a failure ends that pass."""
    rng = random.Random(data.draw(st.integers(0, 1 << 30)))
    store = ExpertStore("disk")
    tiers = [NumberTier(NARROW if n == 1 else WIDE, n, rng) for n in range(4)]
    layers = [store.add(tier, EXPERTS, TOP_K) for tier in tiers]

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
                _serve(tier, layer, rng, rows)
        except WeightsDamaged as error:
            assert any(error.value in tier.failing for tier in tiers)
    counts = store.counts
    assert counts.fetched * NARROW.layout.size_bytes <= counts.read_bytes
    store.close()


def _serve(tier: NumberTier, layer: LayerExperts, rng: random.Random, rows: int) -> None:
    most = EXPERTS if rows > 2 else TOP_K * rows
    wanted = sorted(rng.sample(range(EXPERTS), rng.randint(1, most)))
    served = []
    for now in layer.serve(demands(wanted), rows):
        assert number_of(now.expert) == {float(tier.layer * 100 + now.index)}
        if rng.random() < 0.2:
            time.sleep(0.0005)
        assert number_of(now.expert) == {float(tier.layer * 100 + now.index)}
        served.append(now.index)
        now.release()
    assert sorted(served) == wanted


def demands(wanted: Sequence[int]) -> list[Demand]:
    return [Demand(expert, 1) for expert in wanted]


def pass_over(layer: LayerExperts, wanted: Sequence[int]) -> list[int]:
    """What was served, each released at once."""
    found = []
    for served in layer.serve(demands(wanted), 1):
        found.append(served.index)
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
