# SPDX-License-Identifier: Apache-2.0
"""Where the missing experts of a layer are computed: fetched into slots, or where they lie.

Link and workers run at once. With m missing experts of one size, the link at B_p bytes/s and the
workers at B_c, both end together when

    q* = m · B_p / (B_p + B_c)      are fetched and m - q* computed where they lie.

Experts come whole and serve different numbers of rows: those with most rows are fetched, as a row
costs the link nothing, and whole numbers around the balance are compared by their predicted time.

A prediction knows neither every cost of handing over nor what fewer fetched experts do to later
hits. So `PlacementPolicy` fetches plainly until `trials` of whole steps show that splitting wins.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .rates import Costs, ExpertRates
from .trials import Trials, TrialSettings

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


class PlacementPolicy:
    """Decides for each layer of each step. Mutable; owner thread only. Call `begin_step`, for each
    layer with missing experts `split` and what it took, then `end_step`.

    Steps are compared with those of about as many rows: what pays for one row may not for thirty.
    """

    def __init__(self, rates: ExpertRates, settings: TrialSettings | None = None) -> None:
        self.rates = rates
        self._settings = settings or TrialSettings()
        self._trials: dict[int, Trials] = {}
        self._current: Trials | None = None
        self._splits = False
        self._beside = False
        self._explores = False
        self._predicted_s = self._plain_s = 0.0

    def begin_step(self, rows: int) -> Way:
        """A forward pass over so many rows begins. The way it will take, for the report."""
        size = rows.bit_length()
        self._current = self._trials.setdefault(size, Trials(self._settings))
        self._splits = self._current.begin() == "other"
        self._explores = self._current.explores
        self._predicted_s = self._plain_s = 0.0
        return "split" if self._splits else "plain"

    def split(self, rows: Sequence[int], size_bytes: int) -> Split:
        """rows[i]: how many rows the layer's missing expert i serves; all have `size_bytes`."""
        assert self._current is not None
        plain = self.rates.alone()
        if not self._splits:
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
        self._current.end(seconds, pairs, hopeless=hopeless)
        self._current = None

    def way(self, rows: int) -> Way:
        """What passes over so many rows do outside trials."""
        trials = self._trials.get(rows.bit_length())
        return "split" if trials is not None and trials.active == "other" else "plain"
