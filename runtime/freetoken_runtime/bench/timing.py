# SPDX-License-Identifier: Apache-2.0
"""How figures are made: contestants take turns in one run, medians are compared, targets are
attached to the figure that they judge.

Absolute times of a shared or throttled machine mean little; ratios of neighbours in time travel.
"""

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

# OpenMP workers spin for up to 200 ms after their last region; the next contestant must not pay.
_SETTLE_S = 0.25

OnTurn = Callable[[int, int], None]  # turns taken, turns in total

Sense = Literal["at_least", "at_most", "equal"]


@dataclass(frozen=True)
class Target:
    """What a figure must reach."""

    sense: Sense
    value: float

    def met(self, value: float) -> bool:
        match self.sense:
            case "at_least":
                return value >= self.value
            case "at_most":
                return value <= self.value
            case "equal":
                return value == self.value


@dataclass(frozen=True)
class Figure:
    """One measured value, and what it was held against. `baseline` has the unit of `value`;
    the target judges `ratio` where there is one, else `value`."""

    name: str
    value: float
    unit: str
    baseline: float | None = None
    ratio: float | None = None
    target: Target | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """None without a target, or when the baseline that it needs was not measured."""
        if self.target is None:
            return None
        judged = self.ratio if self.ratio is not None else self.value
        return self.target.met(judged)


@dataclass(frozen=True)
class Turn:
    """What one contestant did in one round."""

    seconds: float
    amount: float  # tokens, rows, calls: whatever the rate counts


def interleave(
    contestants: Mapping[str, Callable[[int], Turn]],
    rounds: int,
    *,
    on_turn: OnTurn | None = None,
) -> dict[str, list[Turn]]:
    """Run every contestant once per round, in an order that rotates, after one unmeasured round.

    Each is called with the round's number (-1: unmeasured) and times itself, so that it may
    prepare outside its clock.
    """
    names = list(contestants)
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    total = (rounds + 1) * len(names)
    done = 0
    for number in range(-1, rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            time.sleep(_SETTLE_S)
            turn = contestants[name](number)
            if number >= 0:
                turns[name].append(turn)
            done += 1
            if on_turn is not None:
                on_turn(done, total)
    return turns


def rate(turns: Sequence[Turn]) -> float:
    """Median amount per second."""
    return statistics.median(turn.amount / turn.seconds for turn in turns)


def paired_ratio(ours: Sequence[Turn], theirs: Sequence[Turn]) -> float:
    """Median over rounds of the ratio of the two rates: what slowed a whole round cancels."""
    return statistics.median(
        (a.amount / a.seconds) / (b.amount / b.seconds) for a, b in zip(ours, theirs, strict=True)
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed."""
    ordered = sorted(values)
    rank = max(1, -(-len(ordered) * percent // 100))
    return ordered[int(rank) - 1]


@contextlib.contextmanager
def busy_process() -> Iterator[None]:
    """Another process that keeps one CPU busy while the block runs."""
    code = "print('', flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE) as hog:
        try:
            assert hog.stdout is not None
            hog.stdout.readline()  # it runs
            yield
        finally:
            hog.kill()
