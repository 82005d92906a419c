# SPDX-License-Identifier: Apache-2.0
"""Which bytes are worth more as expert slots and which as states. Pure policy: no tensor, no clock.

    slots     a pool saves `saved(n)` with n slots: misses avoided x seconds per miss
    states    an idle path saves its price x how likely it is wanted
    free      bytes that nobody uses save nothing

All values are predicted seconds saved per second of work, so a byte of the one compares with a byte
of the other. Curves are concave (see `concave`), so that taking the best next byte, one after
another, finds the best division up to one item.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

Point = tuple[float, float]  # slots, seconds saved per second


@dataclass(frozen=True)
class PoolValue:
    """Slots of one form. `saved`: ascending points of a concave curve, the first of them (0, 0);
    beyond the last it is flat. `least` and `most`: the bounds of `count`."""

    slot_bytes: int
    count: int
    least: int
    most: int
    saved: tuple[Point, ...] = ((0.0, 0.0),)

    def at(self, count: float) -> float:
        """Seconds saved per second with so many slots."""
        for (low, under), (high, over) in zip(self.saved, self.saved[1:], strict=False):
            if count <= high:
                return under + (over - under) * (count - low) / (high - low)
        return self.saved[-1][1]

    @property
    def below(self) -> float:
        """What a byte of the last slot saves."""
        return (self.at(self.count) - self.at(self.count - 1)) / self.slot_bytes

    @property
    def above(self) -> float:
        """What a byte of one more slot would save."""
        return (self.at(self.count + 1) - self.at(self.count)) / self.slot_bytes

    def lowered(self, wanted: int) -> "PoolValue":
        """With up to so many slots fewer, all of which save equally much per byte."""
        corners = [int(slots) for slots, _ in self.saved if slots < self.count]
        until = max([self.least, self.count - wanted, *corners])
        return replace(self, count=min(until, self.count - 1))

    def raised(self, wanted: int) -> "PoolValue":
        """With up to so many slots more, all of which save equally much per byte."""
        corners = [int(slots) for slots, _ in self.saved if slots >= self.count + 1]
        until = min([self.most, self.count + wanted, *corners])
        return replace(self, count=max(until, self.count + 1))


@dataclass(frozen=True)
class IdlePath:
    """States that could go. `saved`: seconds per second that they are expected to save."""

    size_bytes: int
    saved: float


@dataclass(frozen=True)
class Growth:
    """Slots of each pool; or the path, by its index, that goes first."""

    counts: tuple[int, ...]
    evicted: int | None = None


def concave(points: Sequence[Point]) -> tuple[Point, ...]:
    """The upper hull of ascending points, from (0, 0) on: what a policy reaches that keeps some
    experts for good where plain recency would lose them all."""
    hull: list[Point] = [(0.0, 0.0)]
    for x, y in points:
        if x <= hull[-1][0]:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], (x, y)):
            hull.pop()
        hull.append((x, y))
    return tuple(hull)


def bytes_of(pools: Sequence[PoolValue]) -> int:
    return sum(pool.count * pool.slot_bytes for pool in pools)


def give(pools: Sequence[PoolValue], wanted_bytes: int, worth: float) -> tuple[int, ...]:
    """The slots that are left when states take up to `wanted_bytes` of theirs, what saves least
    first, and only where a byte saves less than `worth`."""
    pools = list(pools)
    missing = wanted_bytes
    while missing > 0:
        givers = [i for i, pool in enumerate(pools) if pool.count > pool.least]
        if not givers:
            break
        index = min(givers, key=lambda i: pools[i].below)
        pool = pools[index]
        if not pool.below < worth:
            break
        pools[index] = pool.lowered(-(-missing // pool.slot_bytes))
        missing -= (pool.count - pools[index].count) * pool.slot_bytes
    return tuple(pool.count for pool in pools)


def grow(
    pools: Sequence[PoolValue],
    free_bytes: int,
    idle: Sequence[IdlePath] = (),
    *,
    limit_bytes: int,
    advantage: float = 1.0,
) -> Growth:
    """One step towards the best division: slots take free bytes, up to `limit_bytes`; or the idle
    path that saves least per byte makes room for them; or slots of other pools do. What is taken
    from somebody must save more than `advantage` times as much where it goes."""
    filled = _filled(pools, min(free_bytes, limit_bytes))
    if filled != list(pools):
        return Growth(_counts(filled))
    order = sorted(range(len(idle)), key=lambda i: idle[i].saved / idle[i].size_bytes)
    room, lost = free_bytes, 0.0
    for index in order:  # several only where one alone makes no room for a slot
        room, lost = room + idle[index].size_bytes, lost + idle[index].saved
        filled = _filled(pools, room)
        if _saved(filled) - _saved(pools) > advantage * lost:
            return Growth(_counts(pools), order[0])
        if filled != list(pools):
            break
    return Growth(_counts(_evened(pools, limit_bytes, advantage)))


def _filled(pools: Sequence[PoolValue], room: int) -> list[PoolValue]:
    """Pools that took what saves most, as far as there is room."""
    filled = list(pools)
    while True:
        takers = [
            i
            for i, pool in enumerate(filled)
            if pool.count < pool.most and pool.slot_bytes <= room and pool.above > 0.0
        ]
        if not takers:
            return filled
        index = max(takers, key=lambda i: filled[i].above)
        before = filled[index]
        filled[index] = before.raised(room // before.slot_bytes)
        room -= (filled[index].count - before.count) * before.slot_bytes


def _evened(pools: Sequence[PoolValue], limit: int, advantage: float) -> list[PoolValue]:
    """Pools after slots of others made room for more of the one that would save most by them."""
    evened = list(pools)
    takers = [i for i, pool in enumerate(evened) if pool.count < pool.most]
    best = max(takers, key=lambda i: evened[i].above, default=None)
    if best is None:
        return evened
    while limit > 0 and evened[best].count < evened[best].most:
        pool, others = evened[best], evened[:best] + evened[best + 1 :]
        counts = give(others, pool.slot_bytes, pool.above / advantage)
        lower = [replace(other, count=n) for other, n in zip(others, counts, strict=True)]
        raised = replace(pool, count=pool.count + 1)
        freed = bytes_of(others) - bytes_of(lower)
        gained, lost = _saved([raised]) - _saved([pool]), _saved(others) - _saved(lower)
        if freed < pool.slot_bytes or gained <= advantage * lost:
            break
        evened = [*lower[:best], raised, *lower[best:]]
        limit -= pool.slot_bytes
    return evened


def _counts(pools: Sequence[PoolValue]) -> tuple[int, ...]:
    return tuple(pool.count for pool in pools)


def _saved(pools: Sequence[PoolValue]) -> float:
    return sum(pool.at(pool.count) for pool in pools)


def _slope(a: Point, b: Point) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])
