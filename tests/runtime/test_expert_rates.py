# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of placement: splits, costs and the fit of rates. Oracles: trying every number, a
plain schedule, the coefficients that made the times."""

import heapq
import random
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken_runtime.experts.placement import split
from freetoken_runtime.experts.rates import Costs, LinearRate

SIZE = 1 << 20  # bytes of an expert

positive = st.floats(1e-12, 1e-6)
costs = st.builds(
    Costs, st.floats(0, 1e-3), positive, st.floats(0, 1e-3), positive, positive, st.integers(1, 8)
)
some_rows = st.lists(st.integers(1, 40), max_size=40)


@given(some_rows, costs, st.integers(0, 3))
def test_a_split_is_a_partition_and_the_best_of_all_numbers(
    rows: list[int], costs: Costs, least: int
) -> None:
    """Oracle: every number of fetched experts, tried. Those with most rows are fetched."""
    made = split(rows, SIZE, costs, least_computed=least)
    assert sorted((*made.fetched, *made.computed)) == list(range(len(rows)))
    assert len(made.computed) >= min(least, len(rows))
    ranked = sorted(rows, reverse=True)
    count = len(made.fetched)
    assert sorted((rows[i] for i in made.fetched), reverse=True) == ranked[:count]
    times = [
        max(costs.fetch_s(q, SIZE), costs.compute_s(ranked[q:], SIZE))
        for q in range(max(0, len(rows) - least) + 1)
    ]
    assert made.predicted_s == min(times)
    assert all(seconds > made.predicted_s for seconds in times[count + 1 :])


@given(some_rows, costs, st.floats(1.0, 50.0))
def test_a_faster_side_gets_no_less(rows: list[int], costs: Costs, factor: float) -> None:
    """A faster link fetches no fewer, faster workers compute no fewer, and neither takes longer."""
    before = split(rows, SIZE, costs)
    faster_link = replace(
        costs,
        link_latency_s=costs.link_latency_s / factor,
        link_s_per_byte=costs.link_s_per_byte / factor,
    )
    faster_workers = replace(
        costs,
        handover_s=costs.handover_s / factor,
        compute_s_per_byte=costs.compute_s_per_byte / factor,
        compute_s_per_row_byte=costs.compute_s_per_row_byte / factor,
    )
    slack = 1 + 1e-9
    link, workers = split(rows, SIZE, faster_link), split(rows, SIZE, faster_workers)
    assert link.predicted_s <= before.predicted_s * slack
    assert workers.predicted_s <= before.predicted_s * slack
    if costs.workers == 1 and len(set(rows)) <= 1:
        assert len(link.fetched) >= len(before.fetched)
        assert len(workers.fetched) <= len(before.fetched)


@given(st.integers(0, 60), st.floats(1e8, 1e11), st.floats(1e8, 1e11))
def test_without_overheads_the_balance_is_the_formula(
    missing: int, link: float, workers: float
) -> None:
    """Oracle: q* = m B_p / (B_p + B_c), up to the whole expert."""
    made = split([1] * missing, SIZE, Costs(0.0, 1 / link, 0.0, 1 / workers, 0.0))
    assert abs(len(made.fetched) - missing * link / (link + workers)) <= 1


@given(some_rows, costs)
def test_the_busiest_worker_holds_its_share(rows: list[int], costs: Costs) -> None:
    """Oracle: a list of workers, each next expert to the one that is free first; and the bounds of
    any schedule."""
    load = costs.busiest(rows) if rows else None
    if load is None:
        return
    free = [0.0] * costs.workers
    for count in sorted(rows, reverse=True):
        heapq.heapreplace(
            free, free[0] + costs.compute_s_per_byte + count * costs.compute_s_per_row_byte
        )
    cost = load.experts * costs.compute_s_per_byte + load.rows * costs.compute_s_per_row_byte
    assert cost == pytest.approx(max(free))
    assert load.experts <= len(rows) and load.rows <= sum(rows)
    largest = costs.compute_s_per_byte + max(rows) * costs.compute_s_per_row_byte
    assert cost >= largest * (1 - 1e-9)


@given(
    st.tuples(*[st.floats(1e-3, 1e3)] * 3),
    st.tuples(*[st.floats(1e-3, 1e3)] * 3),
    st.integers(0, 2**32),
)
def test_a_rate_converges_to_what_it_sees(
    truth: tuple[float, ...], prior: tuple[float, ...], seed: int
) -> None:
    """Oracle: the coefficients that made the times. What matters is what is predicted for work like
    that which was seen: within 10 % after 60 observations, within 2 % on average."""
    shuffled = random.Random(seed)
    rate = LinearRate(prior)

    def work() -> list[float]:
        experts = shuffled.randint(1, 8)
        return [1.0, float(experts), float(sum(shuffled.randint(1, 6) for _ in range(experts)))]

    def seconds(features: list[float]) -> float:
        return sum(c * f for c, f in zip(truth, features, strict=True))

    for _ in range(60):
        features = work()
        rate.observe(features, seconds(features))
        assert min(rate.coefficients) >= 0.0
    off = [abs(rate.predict(f) / seconds(f) - 1) for f in (work() for _ in range(30))]
    assert max(off) <= 0.1 and fmean(off) <= 0.02, (off, rate.coefficients)


def test_one_stall_moves_a_rate_little_and_three_observations_of_news_move_it_at_once() -> None:
    """Oracle: the true seconds, before and after."""
    rate = LinearRate((0.0, 1.0))
    for _ in range(20):
        rate.observe((1.0, 4.0), 4.0)
    rate.observe((1.0, 4.0), 400.0)
    assert rate.predict((1.0, 4.0)) == pytest.approx(4.0, rel=0.05)
    for _ in range(3):
        rate.observe((1.0, 4.0), 112.0)
    assert rate.predict((1.0, 4.0)) == pytest.approx(112.0, rel=0.05)


def test_observations_without_time_or_work_are_left_out() -> None:
    """A clock that stood still must not make a rate infinite."""
    rate = LinearRate((0.5, 1.0))
    rate.observe((1.0, 2.0), 0.0)
    rate.observe((0.0, 0.0), 1.0)
    assert (rate.coefficients, rate.observations) == ((0.5, 1.0), 0)
