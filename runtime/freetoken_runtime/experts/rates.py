# SPDX-License-Identifier: Apache-2.0
"""What fetching and computing missing experts costs here, fitted to the steps themselves.

    fetching     latency + bytes · s                     one after another over the link
    computing    hand-over + Σ bytes · (a + b · rows)    the busiest of the workers counts

Bytes are those of the experts' records, so that both rates compare: B_p = 1 / s of the link, and
B_c = workers / (a + b · rows). Neither torch nor a clock: whoever works tells how long it took.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

_MEMORY = 0.9  # weight of the past at each new observation
_INERTIA = 0.02  # pull towards the present coefficients, where observations do not tell them apart
_SWEEPS = 12
_SURPRISE = 2.0  # an observation this many times off is a stall, or news,
_NEWS = 3  # which so many of them in a row are


class LinearRate:
    """seconds ≈ Σ coefficient · feature, no coefficient below 0. Mutable: `observe` refits.

    Decayed least squares of relative errors: a stalled observation weighs little. After three in a
    row that are twice off, the past is forgotten: something changed, or the prior was wrong.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        size = len(prior)
        self._coefficients = tuple(prior)
        self._squares = [[0.0] * size for _ in range(size)]  # decayed sums of feature · feature
        self._products = [0.0] * size  # decayed sums of feature · seconds
        self._surprises = 0
        self.observations = 0

    @property
    def coefficients(self) -> tuple[float, ...]:
        return self._coefficients

    def copy(self) -> "LinearRate":
        other = LinearRate(self._coefficients)
        other._squares = [list(row) for row in self._squares]
        other._products = list(self._products)
        other.observations = self.observations
        return other

    def predict(self, features: Sequence[float]) -> float:
        return sum(c * f for c, f in zip(self._coefficients, features, strict=True))

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """What had these features took this long. Times of 0 say nothing and are left out."""
        if seconds <= 0.0 or not any(features):
            return
        self.observations += 1
        memory = self._memory(self.predict(features) / seconds)
        weight = 1.0 / (seconds * seconds)
        for i, feature in enumerate(features):
            row = self._squares[i]
            for j, other in enumerate(features):
                row[j] = memory * row[j] + weight * feature * other
            self._products[i] = memory * self._products[i] + weight * feature * seconds
        self._fit()

    def _memory(self, ratio: float) -> float:
        if 1.0 / _SURPRISE <= ratio <= _SURPRISE:
            self._surprises = 0
            return _MEMORY
        self._surprises += 1
        if self._surprises < _NEWS:
            return _MEMORY
        self._surprises = 0
        return 0.0

    def _fit(self) -> None:
        """First all coefficients by one factor, so that a prior of the right shape is right at
        once; then one coordinate after another, each kept at or above 0."""
        now = list(self._coefficients)
        indices = range(len(now))
        images = [sum(row[j] * now[j] for j in indices) for row in self._squares]
        norm = sum(now[i] * images[i] for i in indices)
        if norm > 0.0:
            factor = sum(now[i] * self._products[i] for i in indices) / norm
            now = [factor * c for c in now]
        start = tuple(now)
        for _ in range(_SWEEPS):
            for i in indices:
                square = self._squares[i][i]
                if square > 0.0:
                    rest = sum(self._squares[i][j] * now[j] for j in indices if j != i)
                    wanted = self._products[i] - rest + _INERTIA * square * start[i]
                    now[i] = max(0.0, wanted / (square * (1.0 + _INERTIA)))
        self._coefficients = tuple(now)


@dataclass(frozen=True)
class Load:
    """What the busiest worker does: so many experts, so many rows in all of them."""

    experts: int
    rows: int


@dataclass(frozen=True)
class Costs:
    """Predicted seconds. `workers` compute at once, each with the rate that it has beside the
    others and beside the link."""

    link_latency_s: float
    link_s_per_byte: float
    handover_s: float
    compute_s_per_byte: float
    compute_s_per_row_byte: float
    workers: int = 1

    @property
    def link_bytes_per_s(self) -> float | None:
        """B_p; None where it is not known to take any time."""
        return 1.0 / self.link_s_per_byte if self.link_s_per_byte else None

    @property
    def compute_bytes_per_s(self) -> float | None:
        """B_c, for one row."""
        per_byte = self.compute_s_per_byte + self.compute_s_per_row_byte
        return self.workers / per_byte if per_byte else None

    def fetch_s(self, experts: int, size_bytes: int) -> float:
        """Bringing so many experts of `size_bytes` each."""
        if experts == 0:
            return 0.0
        return self.link_latency_s + experts * size_bytes * self.link_s_per_byte

    def compute_s(self, rows: Sequence[int], size_bytes: int) -> float:
        """Computing one expert for each entry, for that many rows."""
        if not rows:
            return 0.0
        load = self.busiest(rows)
        per_byte = load.experts * self.compute_s_per_byte + load.rows * self.compute_s_per_row_byte
        return self.handover_s + size_bytes * per_byte

    def busiest(self, rows: Sequence[int]) -> Load:
        """Of the workers, each of which takes the largest expert left when it becomes free."""
        if self.workers == 1:
            return Load(len(rows), sum(rows))
        workers = [(0.0, 0, 0) for _ in range(min(self.workers, len(rows)))]
        for count in sorted(rows, reverse=True):
            until, experts, total = workers[0]
            until += self.compute_s_per_byte + count * self.compute_s_per_row_byte
            heapq.heapreplace(workers, (until, experts + 1, total + count))
        _, experts, total = max(workers)
        return Load(experts, total)


class ExpertRates:
    """The rates of one machine and model, from real steps. Mutable; owner thread only.

    The link is fitted twice: by itself, as plain fetching has it, and beside computing, which may
    take memory bandwidth from it. The priors are only where the search starts.
    """

    def __init__(
        self,
        workers: int = 1,
        *,
        link_bytes_per_s: float = 2e9,
        compute_bytes_per_s: float = 2e9,
    ) -> None:
        self.workers = workers
        self._alone = LinearRate((1e-5, 1.0 / link_bytes_per_s))
        self._beside: LinearRate | None = None
        per_byte = workers / compute_bytes_per_s
        self._compute = LinearRate((1e-5, 0.8 * per_byte, 0.2 * per_byte))

    def fetched(self, experts: int, size_bytes: int, seconds: float, *, beside: bool) -> None:
        """`beside`: others were computed meanwhile."""
        rate = self._alone
        if beside:
            if self._beside is None:
                self._beside = self._alone.copy()
            rate = self._beside
        if experts:
            rate.observe((1.0, float(experts * size_bytes)), seconds)

    def computed(self, rows: Sequence[int], size_bytes: int, seconds: float) -> None:
        """One expert for each entry, for that many rows; `seconds` includes the hand-over."""
        if rows:
            load = self.beside().busiest(rows)
            features = (1.0, float(load.experts * size_bytes), float(load.rows * size_bytes))
            self._compute.observe(features, seconds)

    def alone(self) -> Costs:
        """With nothing but the link at work."""
        return self._costs(self._alone)

    def beside(self) -> Costs:
        """With link and workers at work at once."""
        return self._costs(self._alone if self._beside is None else self._beside)

    def _costs(self, link: LinearRate) -> Costs:
        latency_s, link_s_per_byte = link.coefficients
        handover_s, per_byte, per_row_byte = self._compute.coefficients
        return Costs(latency_s, link_s_per_byte, handover_s, per_byte, per_row_byte, self.workers)
