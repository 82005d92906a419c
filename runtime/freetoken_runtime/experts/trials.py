# SPDX-License-Identifier: Apache-2.0
"""Whether another way of doing the same is faster here: found out by trying it on whole steps.

Predictions do not know every cost. So everything starts the plain way, the other one is tried now
and then, and seconds per piece of work decide, end to end. Trials are short, are broken off when
they go badly, and pause while what they lost exceeds a share of the time spent; and the plain way
is tried as well while the other one is the usual.
"""

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Literal

Way = Literal["plain", "other"]


@dataclass(frozen=True)
class TrialSettings:
    """`settle` steps of a trial are not compared: slots and caches are still those of the other
    way. `budget`: what trials and wrong decisions may have cost so far, of all time, before another
    trial begins. `margin`: how much shorter steps must be for the other way to begin. A trial is
    broken off at `abandon` times the usual time, and due early when that has changed `news`
    times."""

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


class Trials:
    """Which way the steps of one kind take. Mutable: `begin`, the step, `end`.

    Outside trials all steps go the active way; after an interval a trial of the other one runs and
    the medians of seconds per pair decide. Intervals double while nothing changes.
    """

    def __init__(self, settings: TrialSettings) -> None:
        self.active: Way = "plain"
        self._settings = settings
        kept = 4 * settings.measure
        self._recent: dict[Way, deque[float]] = {
            "plain": deque(maxlen=kept),
            "other": deque(maxlen=kept),
        }
        self._interval = settings.first_interval
        self._since = 0  # steps since the last trial, or within one
        self._pairs_since = 0
        self._trying = False
        self._spent_s = self._lost_s = 0.0
        self._decided_at = 0.0  # score of the active way at the end of the last trial
        self._owed: tuple[int, float] | None = None  # pairs served the other way, and their score

    @property
    def way(self) -> Way:
        """Of the present step, or of the next one unless a trial begins with it."""
        return _other(self.active) if self._trying else self.active

    @property
    def explores(self) -> bool:
        """A trial of the other way begins."""
        return self._trying and self.active == "plain" and self._since == 0

    def begin(self) -> Way:
        if not self._trying and self._due():
            self._trying, self._since = True, 0
            self._recent[_other(self.active)].clear()
        return self.way

    def end(self, seconds: float, pairs: int, *, hopeless: bool) -> None:
        """The step took so long for so much work. `hopeless`: the other way, if this was it, has
        shown already that it cannot win."""
        way, score = self.way, seconds / pairs
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

    def give_up(self) -> None:
        """The other way is known not to pay, for now."""
        if self.active == "other" or self._trying:
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
        if way == "other":
            self._lost_s += pairs * max(0.0, score - usual)
        if self._since > self._settings.settle:
            self._recent[way].append(score)
        if way == "other" and self._since > 1 and hopeless:
            self._settle_on(self.active, 2 * self._interval)
        elif score > self._settings.abandon * usual:
            self._settle_on(self.active, 2 * self._interval)
        elif self._since == self._settings.steps:
            self._decide(way)

    def _decide(self, way: Way) -> None:
        needed = 1.0 - self._settings.margin if way == "other" else 1.0
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
        if not (self._full("plain") and self._full("other")):
            return False
        return self._score("other") > self._score("plain")

    def _owe(self) -> None:
        self._owed = (self._pairs_since, self._score("other"))

    def _pay(self) -> None:
        """What the other way turns out to have lost, once plain steps of its time are known."""
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
    return "other" if way == "plain" else "plain"
