# SPDX-License-Identifier: Apache-2.0
"""Routing traces: the wanted hit rate, and eviction against naive implementations."""

from functools import cache
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken_runtime.experts.traces import (
    Key,
    Trace,
    TraceShape,
    best_hit_rate,
    calibrated,
    generate,
    lru_hit_rate,
)

SHAPES = {
    "six layers of Qwen3-30B-A3B": TraceShape(6, 128, 8),
    "64 experts": TraceShape(4, 64, 8),
    "Mixtral's": TraceShape(30, 8, 2),
    "12 experts": TraceShape(6, 12, 2),
}


def naive_lru(trace: Trace, slots: int, start: int) -> float:
    """A list, the least recent first."""
    held: list[Key] = []
    outcome = []
    for index, step in enumerate(trace.steps):
        for layer, experts in enumerate(step):
            for expert in experts:
                key = (layer, expert)
                if index >= start:
                    outcome.append(key in held)
                if key in held:
                    held.remove(key)
                held = [*held, key][-slots:] if slots else []
    return sum(outcome) / len(outcome)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_quarter_of_the_experts_serves_60_percent(shape: TraceShape, seed: int) -> None:
    """Oracle: a naive LRU, 60 +- 5 %; and the shape: k distinct experts per layer and step."""
    trace = calibrated(shape, 120, seed=seed)
    assert abs(naive_lru(trace, shape.slots(0.25), 30) - 0.6) <= 0.05
    assert len(trace.steps) == 120
    for step in trace.steps:
        assert len(step) == shape.layers
        for experts in step:
            assert len(set(experts)) == shape.top_k == len(experts)
            assert set(experts) <= set(range(shape.experts))


def test_a_trace_is_its_seed() -> None:
    """Equal seeds, equal traces; other seeds, other ones."""
    shape = SHAPES["64 experts"]
    assert calibrated(shape, 60, seed=3) == calibrated(shape, 60, seed=3)
    assert calibrated(shape, 60, seed=3) != calibrated(shape, 60, seed=4)


def test_popularity_is_uneven_and_locality_brings_experts_back() -> None:
    """Oracle: counting. The most wanted eighth of the experts gets over twice its share, and with
    more locality a step shares more experts with the step before."""
    shape = TraceShape(1, 64, 8)
    trace = generate(shape, 4000, seed=0, locality=0.5)
    counts = sorted(map([e for _, e in trace.accesses()].count, range(64)), reverse=True)
    assert sum(counts[:8]) > 2 * sum(counts) / 8

    def shared(locality: float) -> int:
        steps = generate(shape, 500, seed=0, locality=locality).steps
        pairs = zip(steps, steps[1:], strict=False)
        return sum(len(set(a) & set(b)) for (a,), (b,) in pairs)

    assert shared(0.0) < shared(0.5) < shared(0.9)


def test_a_hit_rate_out_of_reach_is_refused() -> None:
    """Popularity alone hits more than this."""
    with pytest.raises(ValueError, match="no locality hits 10%"):
        calibrated(SHAPES["64 experts"], 100, seed=0, hit_rate=0.1)


small_traces = st.integers(1, 3).flatmap(
    lambda layers: st.lists(
        st.tuples(*[st.permutations(range(3)).map(lambda p: tuple(p[:1]))] * layers),
        min_size=1,
        max_size=9 // layers,
    ).map(lambda steps: Trace(TraceShape(layers, 3, 1), tuple(steps)))
)


@given(small_traces, st.integers(0, 10), st.data())
def test_lru_equals_a_naive_list(trace: Trace, slots: int, data: st.DataObject) -> None:
    """Oracle: the list, from any step on and with any number of slots."""
    start = data.draw(st.integers(0, len(trace.steps) - 1))
    assert lru_hit_rate(trace, slots, start=start) == naive_lru(trace, slots, start)


def most_hits(accesses: list[Key], slots: int, held: frozenset[Key]) -> int:
    """Every choice of what to keep, tried."""

    @cache
    def most(index: int, held: frozenset[Key]) -> int:
        if index == len(accesses):
            return 0
        key = accesses[index]
        wider = held | {key}
        kept = [wider] if len(wider) <= slots else [wider - {gone} for gone in wider]
        return (key in held) + max(most(index + 1, one) for one in kept)

    return most(0, held)


@given(small_traces, st.integers(0, 4))
def test_the_bound_is_the_best_of_all_choices(trace: Trace, slots: int) -> None:
    """Oracle: exhaustive search over what is evicted, or not taken in at all."""
    accesses = list(trace.accesses())
    best = most_hits(accesses, slots, frozenset()) / len(accesses)
    assert best_hit_rate(trace, slots) == pytest.approx(best)


@given(small_traces, st.integers(0, 4), st.data())
def test_no_history_beats_the_bound_of_the_rest(
    trace: Trace, slots: int, data: st.DataObject
) -> None:
    """Oracle: exhaustive search from every content that the slots may have had at `start`."""
    start = data.draw(st.integers(0, len(trace.steps) - 1))
    accesses = list(trace.accesses(start))
    contents = combinations(set(accesses), min(slots, len(set(accesses))))
    best = max(most_hits(accesses, slots, frozenset(held)) for held in contents) / len(accesses)
    bound = best_hit_rate(trace, slots, start=start)
    if start:
        assert bound == pytest.approx(best)
    assert bound >= lru_hit_rate(trace, slots, start=start) - 1e-12


@pytest.mark.parametrize("share", [0.05, 0.1, 0.25, 0.5, 1.0])
def test_the_bound_lies_above_lru_and_below_one(share: float) -> None:
    """On a real trace, at every number of slots; slots for all of it serve all that was seen."""
    shape = SHAPES["64 experts"]
    trace = calibrated(shape, 120, seed=0)
    slots = shape.slots(share)
    lru, bound = lru_hit_rate(trace, slots, start=30), best_hit_rate(trace, slots, start=30)
    assert lru <= bound <= 1.0
    if share == 1.0:
        assert bound == 1.0
        whole = lru_hit_rate(trace, slots)
        assert whole == 1 - len(set(trace.accesses())) / len(list(trace.accesses()))
        assert best_hit_rate(trace, slots) == pytest.approx(whole)
