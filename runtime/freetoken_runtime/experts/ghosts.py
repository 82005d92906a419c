# SPDX-License-Identifier: Apache-2.0
"""How many askings for experts would hit with more slots, or with fewer.

    asked     …  3  7  9  7  3      between two askings for 3 lie 7 and 9: with three slots or more
                 └────────┘         that are filled by recency the second one hits

The number of different experts between two askings (their stack distance; Mattson and others 1970)
tells for every number of slots at once. Of large pools only some experts are followed, the same
ones always, and their distances scaled (spatial sampling, SHARDS; Waldspurger and others 2015).
"""

from collections.abc import Sequence

TRACKED = 192  # experts followed per pool, about; finding one costs about a microsecond
_BUCKETS = 32
_MEMORY = 16  # askings per expert of the pool, after which all counts are halved
_SPREAD = 0x9E3779B1  # multiplied by it, neighbouring numbers lie far apart modulo 2^32
_MAX_EXPERTS = 1 << 16  # of a layer


class HitCurve:
    """Of one pool. Mutable: `ask` is told every asking, `elapsed` the time that went by."""

    def __init__(self, experts: int) -> None:
        """`experts`: how many share the pool."""
        self._experts = max(1, experts)
        self._rate = min(1.0, TRACKED / self._experts)
        self._keys: dict[int, dict[int, int]] = {}  # layer -> expert -> see `_key`
        self._recent: list[int] = []  # the most recent first
        self._hits = [0.0] * _BUCKETS  # by distance
        self._asked = self._followed = self._seconds = 0.0

    def ask(self, layer: int, wanted: Sequence[int]) -> None:
        """A pass wants these experts of a layer."""
        recent, keys = self._recent, self._keys.setdefault(layer, {})
        self._asked += len(wanted)
        for expert in wanted:
            key = keys.get(expert)
            if key is None:
                key = keys[expert] = self._key(layer, expert)
            if key < 0:
                continue
            self._followed += 1
            try:
                distance = recent.index(key)
            except ValueError:
                recent.insert(0, key)
                continue
            bucket = int(distance / self._rate) * _BUCKETS // self._experts
            self._hits[min(bucket, _BUCKETS - 1)] += 1.0
            if distance:
                del recent[distance]
                recent.insert(0, key)

    def _key(self, layer: int, expert: int) -> int:
        """A number of its own for one that is followed, -1 for others."""
        key = layer * _MAX_EXPERTS + expert
        return key if key * _SPREAD % (1 << 32) < self._rate * (1 << 32) else -1

    def elapsed(self, seconds: float) -> None:
        """So long did it take since the last call."""
        self._seconds += seconds
        if self._asked > _MEMORY * self._experts:
            self._hits = [hits / 2 for hits in self._hits]
            self._asked /= 2
            self._followed /= 2
            self._seconds /= 2

    def points(self) -> list[tuple[float, float]]:
        """(slots, hits per second) of plain recency, ascending."""
        if self._seconds <= 0.0 or not self._followed:
            return []
        per_hit = self._asked / self._followed / self._seconds
        points, hits = [], 0.0
        for bucket, count in enumerate(self._hits, 1):
            hits += count
            points.append((bucket * self._experts / _BUCKETS, hits * per_hit))
        return points


class HitCurves:
    """Those of all pools. `ask` is called by who serves, layer by layer."""

    def __init__(self, experts: Sequence[int], layers: Sequence[int | None]) -> None:
        """`experts`: how many share each pool; `layers`: the pool of each layer, if it has one."""
        self.pools = [HitCurve(count) for count in experts]
        self._of_layer = [None if pool is None else self.pools[pool] for pool in layers]

    def ask(self, layer: int, wanted: Sequence[int]) -> None:
        curve = self._of_layer[layer]
        if curve is not None:
            curve.ask(layer, wanted)

    def elapsed(self, seconds: float) -> None:
        for curve in self.pools:
            curve.elapsed(seconds)
