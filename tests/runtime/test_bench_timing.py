# SPDX-License-Identifier: Apache-2.0
"""How figures are made: turns, medians, targets. Oracles are worked out by hand."""

import os
import time
from collections.abc import Callable

import pytest

from freetoken_runtime.bench import timing
from freetoken_runtime.bench.timing import (
    Figure,
    Target,
    Turn,
    busy_process,
    interleave,
    paired_ratio,
    percentile,
    rate,
)


@pytest.fixture(autouse=True)
def no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_SETTLE_S", 0.0)


def test_contestants_take_turns_and_the_first_round_does_not_count() -> None:
    """Three contestants, two rounds: everyone once per round, the order rotates."""
    seen: list[tuple[str, int]] = []

    def taker(name: str) -> Callable[[int], Turn]:
        def take(number: int) -> Turn:
            seen.append((name, number))
            return Turn(1.0, 1.0)

        return take

    reported: list[tuple[int, int]] = []
    turns = interleave(
        {name: taker(name) for name in "abc"},
        2,
        on_turn=lambda done, total: reported.append((done, total)),
    )
    assert [number for _, number in seen] == [-1] * 3 + [0] * 3 + [1] * 3
    assert [name for name, _ in seen[3:]] == list("abcbca")
    assert {name: len(own) for name, own in turns.items()} == {"a": 2, "b": 2, "c": 2}
    assert reported == [(i, 9) for i in range(1, 10)]


def test_a_rate_is_the_median_of_rates() -> None:
    """10, 20 and 1000 per second: the middle one."""
    assert rate([Turn(1.0, 10), Turn(0.5, 10), Turn(0.01, 10)]) == 20


def test_a_paired_ratio_cancels_what_slowed_a_round() -> None:
    """The second round was ten times slower for both: each round says 2."""
    ours = [Turn(1.0, 20), Turn(10.0, 20), Turn(1.0, 20)]
    theirs = [Turn(1.0, 10), Turn(10.0, 10), Turn(1.0, 10)]
    assert paired_ratio(ours, theirs) == 2


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([5], 95, 5), (range(1, 101), 95, 95), (range(1, 21), 95, 19), ([3, 1, 2], 50, 2)],
)
def test_percentile(values: list[float], percent: float, expected: float) -> None:
    """The smallest value that at least that share does not exceed (nearest rank)."""
    assert percentile(list(values), percent) == expected


@pytest.mark.parametrize(
    ("figure", "met"),
    [
        (Figure("f", 5, "ms"), None),
        (Figure("f", 5, "ms", target=Target("at_most", 5)), True),
        (Figure("f", 5.1, "ms", target=Target("at_most", 5)), False),
        (Figure("f", 1, "rows", target=Target("equal", 0)), False),
        (Figure("f", 1, "t/s", baseline=2, ratio=0.5, target=Target("at_least", 0.4)), True),
        (Figure("f", 9, "t/s", baseline=9, ratio=0.3, target=Target("at_least", 0.4)), False),
    ],
)
def test_a_target_judges_the_ratio_where_there_is_one(figure: Figure, met: bool | None) -> None:
    """By the definition of the field."""
    assert figure.met is met


def test_the_busy_process_is_busy_and_ends() -> None:
    """Oracle: the children's processor time, which the system adds up when they end."""
    before = os.times()
    with busy_process():
        time.sleep(0.4)
    after = os.times()
    assert after.children_user - before.children_user > 0.15
