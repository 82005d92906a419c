# SPDX-License-Identifier: Apache-2.0
"""Where the missing experts of a layer are computed: fetched into slots, or where they lie.

Link and workers run at once. With m missing experts of one size, the link at B_p bytes/s and the
workers at B_c, both end together when

    q* = m · B_p / (B_p + B_c)      are fetched and m - q* computed where they lie.

Experts come whole and serve different numbers of rows: those with most rows are fetched, as a row
costs the link nothing, and whole numbers around the balance are compared by their predicted time.

A prediction knows neither every cost of handing over nor what fewer fetched experts do to later
hits. So `PlacementPolicy` fetches plainly until a trial of whole steps shows that splitting wins,
and keeps checking: each way's trials are short, are broken off when they go badly, and pause while
what they lost exceeds a share of the time spent.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from .rates import Costs, ExpertRates

Way = Literal["plain", "split"]


@dataclass(frozen=True)
class Split:
    """Which of a layer's missing experts go where, as indices, ascending. `plain_s`: what fetching
    all of them is predicted to take."""

    fetched: tuple[int, ...]
    computed: tuple[int, ...]
    predicted_s: float
    plain_s: float


def split(
    rows: Sequence[int],
    size_bytes: int,
    costs: Costs,
    *,
    plain: Costs | None = None,
    least_computed: int = 0,
) -> Split:
    """The split of least predicted time; of equals the one that fetches more, since what is fetched
    stays. rows[i] >= 1: how many rows missing expert i serves; `plain`: costs while nothing is
    computed (default: the same); `least_computed`: for a trial, which must see both rates."""
    order = sorted(range(len(rows)), key=lambda i: (-rows[i], i))
    sizes = [rows[i] for i in order]
    most = max(0, len(rows) - least_computed)

    def computing(count: int) -> float:
        return costs.compute_s(sizes[count:], size_bytes)

    def seconds(count: int) -> float:
        if count == len(rows):
            return plain_s
        return max(costs.fetch_s(count, size_bytes), computing(count))

    plain_s = (plain or costs).fetch_s(len(rows), size_bytes)
    # Fetching takes longer with each expert, computing never does: the best is where they cross.
    crossing = bisect_left(
        range(most), True, key=lambda count: costs.fetch_s(count, size_bytes) >= computing(count)
    )
    around = {max(0, crossing - 1), crossing, most}
    best = min(around, key=lambda count: (seconds(count), -count))
    return Split(
        fetched=tuple(sorted(order[:best])),
        computed=tuple(sorted(order[best:])),
        predicted_s=seconds(best),
        plain_s=plain_s,
    )


@dataclass(frozen=True)
class TrialSettings:
    """`settle` steps of a trial are not compared: slots and caches are still those of the other
    way. `budget`: what trials and wrong decisions may have cost so far, of all time, before another
    trial begins. `margin`: how much shorter steps must be for splitting to begin. A trial is broken
    off at `abandon` times the usual time, and due early when that has changed `news` times."""

    settle: int = 2
    measure: int = 4
    first_interval: int = 8
    longest_interval: int = 512
    margin: float = 0.03
    budget: float = 0.02
    abandon: float = 2.0
    news: float = 1.5

    @property
    def steps(self) -> int:
        return self.settle + self.measure


class PlacementPolicy:
    """Decides for each layer of each step. Mutable; owner thread only. Call `begin_step`, for each
    layer with missing experts `split` and what it took, then `end_step`.

    Steps are compared with those of about as many rows: what pays for one row may not for thirty.
    """

    def __init__(self, rates: ExpertRates, settings: TrialSettings | None = None) -> None:
        self.rates = rates
        self._settings = settings or TrialSettings()
        self._trials: dict[int, _Trials] = {}
        self._current: _Trials | None = None
        self._way: Way = "plain"
        self._beside = False
        self._explores = False
        self._predicted_s = self._plain_s = 0.0

    def begin_step(self, rows: int) -> Way:
        """A forward pass over so many rows begins. The way it will take, for the report."""
        size = rows.bit_length()
        self._current = self._trials.setdefault(size, _Trials(self._settings))
        self._way = self._current.begin()
        self._explores = self._current.explores
        self._predicted_s = self._plain_s = 0.0
        return self._way

    def split(self, rows: Sequence[int], size_bytes: int) -> Split:
        """rows[i]: how many rows the layer's missing expert i serves; all have `size_bytes`."""
        assert self._current is not None
        plain = self.rates.alone()
        if self._way == "plain":
            every = tuple(range(len(rows)))
            seconds = plain.fetch_s(len(rows), size_bytes)
            self._beside = False
            return Split(every, (), seconds, seconds)
        # What is believed to be slow would never be seen: one layer of a trial computes something.
        least = 1 if self._explores and len(rows) > 1 else 0
        made = split(rows, size_bytes, self.rates.beside(), plain=plain, least_computed=least)
        self._explores = self._explores and not made.computed
        self._beside = bool(made.computed)
        self._predicted_s += made.predicted_s
        self._plain_s += made.plain_s
        return made

    def fetched(self, experts: int, size_bytes: int, seconds: float) -> None:
        """Of the layer split last: until what the last fetched expert computes was there."""
        self.rates.fetched(experts, size_bytes, seconds, beside=self._beside)

    def computed(self, rows: Sequence[int], size_bytes: int, seconds: float) -> None:
        """Of the layer split last: until what was computed in place was handed back."""
        self.rates.computed(rows, size_bytes, seconds)

    def end_step(self, seconds: float, pairs: int) -> None:
        """The whole step took this long for so many (row, expert) pairs, missing or not: the
        measure of its work must not depend on what is in slots."""
        assert self._current is not None and pairs > 0
        hopeless = self._predicted_s > (1 - self._settings.margin) * self._plain_s
        self._current.end(self._way, seconds, pairs, hopeless=hopeless)
        self._current = None

    def way(self, rows: int) -> Way:
        """What passes over so many rows do outside trials."""
        trials = self._trials.get(rows.bit_length())
        return "plain" if trials is None else trials.active


class _Trials:
    """Which way the steps of one size take. Mutable.

    Outside trials all steps go the active way; after an interval a trial of the other one runs and
    the medians of seconds per pair decide. Intervals double while nothing changes.
    """

    def __init__(self, settings: TrialSettings) -> None:
        self.active: Way = "plain"
        self._settings = settings
        kept = 4 * settings.measure
        self._recent: dict[Way, deque[float]] = {
            "plain": deque(maxlen=kept),
            "split": deque(maxlen=kept),
        }
        self._interval = settings.first_interval
        self._since = 0  # steps since the last trial, or within one
        self._pairs_since = 0
        self._trying = False
        self._spent_s = self._lost_s = 0.0
        self._decided_at = 0.0  # score of the active way at the end of the last trial
        self._owed: tuple[int, float] | None = None  # pairs served by splitting, and their score

    @property
    def explores(self) -> bool:
        """A trial of splitting begins: something is to be computed, whatever is predicted."""
        return self._trying and self.active == "plain" and self._since == 0

    def begin(self) -> Way:
        if not self._trying and self._due():
            self._trying, self._since = True, 0
            self._recent[_other(self.active)].clear()
        return _other(self.active) if self._trying else self.active

    def end(self, way: Way, seconds: float, pairs: int, *, hopeless: bool) -> None:
        score = seconds / pairs
        self._spent_s += seconds
        self._since += 1
        if self._trying:
            self._tried(way, score, pairs, hopeless=hopeless)
            return
        self._pairs_since += pairs
        if self._since > self._settings.settle:
            self._recent[way].append(score)
        if not self._decided_at and self._full(way):
            self._decided_at = self._score(way)
        if self.active == "plain":
            self._pay()
        elif self._disappoints():
            self._owe()
            self._recent["plain"].clear()
            self._settle_on("plain", 2 * self._interval)

    def _due(self) -> bool:
        settings = self._settings
        if self._since < settings.first_interval or not self._full(self.active):
            return False
        if self._lost_s > settings.budget * self._spent_s:
            return False
        return self._since >= self._interval or self._is_news(self._score(self.active))

    def _is_news(self, score: float) -> bool:
        """What the last trial decided was decided at another speed."""
        if not self._decided_at:
            return False
        slower, faster = self._settings.news * self._decided_at, score * self._settings.news
        return score > slower or faster < self._decided_at

    def _tried(self, way: Way, score: float, pairs: int, *, hopeless: bool) -> None:
        usual = self._score(self.active)
        if way == "split":
            self._lost_s += pairs * max(0.0, score - usual)
        if self._since > self._settings.settle:
            self._recent[way].append(score)
        if way == "split" and self._since > 1 and hopeless:
            self._settle_on(self.active, 2 * self._interval)
        elif score > self._settings.abandon * usual:
            self._settle_on(self.active, 2 * self._interval)
        elif self._since == self._settings.steps:
            self._decide(way)

    def _decide(self, way: Way) -> None:
        needed = 1.0 - self._settings.margin if way == "split" else 1.0
        if self._score(way) >= needed * self._score(self.active):
            self._settle_on(self.active, 2 * self._interval)
            return
        if way == "plain":
            self._owe()
            self._pay()
        self._settle_on(way, self._settings.first_interval)

    def _settle_on(self, way: Way, interval: int) -> None:
        if way != self.active:
            self._pairs_since = 0
        self.active = way
        self._interval = min(interval, self._settings.longest_interval)
        self._since = 0
        self._trying = False
        self._decided_at = self._score(way) if self._full(way) else 0.0

    def _disappoints(self) -> bool:
        """Steps are longer than plain ones were when they were last seen. Those may be of another
        time, so nothing is lost yet: plain steps are measured anew."""
        if not (self._full("plain") and self._full("split")):
            return False
        return self._score("split") > self._score("plain")

    def _owe(self) -> None:
        self._owed = (self._pairs_since, self._score("split"))

    def _pay(self) -> None:
        """What splitting turns out to have lost, once plain steps of the same time are known."""
        if self._owed is not None and self._full("plain"):
            pairs, score = self._owed
            self._lost_s += pairs * max(0.0, score - self._score("plain"))
            self._owed = None

    def _full(self, way: Way) -> bool:
        return len(self._recent[way]) >= self._settings.measure

    def _score(self, way: Way) -> float:
        """Seconds per pair."""
        return median(self._recent[way])


def _other(way: Way) -> Way:
    return "split" if way == "plain" else "plain"
