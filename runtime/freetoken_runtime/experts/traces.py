# SPDX-License-Identifier: Apache-2.0
"""Routing traces with a known hit rate, for benches and tests, and the bound of any eviction.

Each layer has popular experts (Zipf-like, another order in every layer) and a mood that drifts from
token to token; a token takes the k experts where both together are highest. The stronger the
drift, the fewer experts come again soon. `calibrated` finds the drift that gives a wanted hit
rate. Pure numbers from a seed: no weights, no torch.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

Key = tuple[int, int]  # layer, expert

_SKEW = 0.5  # popularity falls as rank ** -skew


@dataclass(frozen=True)
class TraceShape:
    layers: int
    experts: int
    top_k: int

    def slots(self, share: float) -> int:
        """Slots for that share of all experts of all layers."""
        return round(share * self.layers * self.experts)


@dataclass(frozen=True)
class Trace:
    """One row per step: `steps[t][layer]` are its k distinct experts, the most wanted first."""

    shape: TraceShape
    steps: tuple[tuple[tuple[int, ...], ...], ...]

    def accesses(self, start: int = 0) -> Iterator[Key]:
        """In the order in which a forward pass needs them, from step `start` on."""
        for step in self.steps[start:]:
            for layer, experts in enumerate(step):
                for expert in experts:
                    yield layer, expert


def generate(
    shape: TraceShape, num_steps: int, *, seed: int, locality: float, skew: float = _SKEW
) -> Trace:
    """`locality` in [0, 1): how much of a token's mood is that of the token before; 0: none."""
    random = np.random.default_rng(seed)
    size = (shape.layers, shape.experts)
    ranks = np.stack([random.permutation(shape.experts) + 1 for _ in range(shape.layers)])
    popularity = -skew * np.log(ranks)
    mood = random.standard_normal(size)
    steps = []
    for _ in range(num_steps):
        wanted = np.argsort(-(popularity + mood), axis=1, kind="stable")[:, : shape.top_k]
        steps.append(tuple(tuple(row) for row in wanted.tolist()))
        mood = locality * mood + (1 - locality**2) ** 0.5 * random.standard_normal(size)
    return Trace(shape, tuple(steps))


def calibrated(
    shape: TraceShape,
    num_steps: int,
    *,
    seed: int,
    hit_rate: float = 0.6,
    slot_share: float = 0.25,
    skew: float = _SKEW,
) -> Trace:
    """A trace whose LRU hit rate with slots for `slot_share` of the experts is the wanted one, the
    first quarter of the steps aside. ValueError if no locality gives it within 2 %: the trace is
    too short, or popularity alone hits more often."""
    slots, start = shape.slots(slot_share), num_steps // 4
    low, high = 0.0, 1.0
    for _ in range(12):
        locality = (low + high) / 2
        trace = generate(shape, num_steps, seed=seed, locality=locality, skew=skew)
        found = lru_hit_rate(trace, slots, start=start)
        if abs(found - hit_rate) <= 0.005:
            return trace
        low, high = (locality, high) if found < hit_rate else (low, locality)
    if abs(found - hit_rate) > 0.02:
        raise ValueError(f"no locality hits {hit_rate:.0%} of accesses: {found:.1%} is closest")
    return trace


def lru_hit_rate(trace: Trace, slots: int, *, start: int = 0) -> float:
    """Of the accesses from step `start` on, with one least-recently-used order for all layers. The
    steps before fill the slots, which are empty at first."""
    held: OrderedDict[Key, None] = OrderedDict()
    hits = total = 0
    for index, step in enumerate(trace.steps):
        for key in ((layer, expert) for layer, of in enumerate(step) for expert in of):
            hit = key in held
            if hit:
                held.move_to_end(key)
            elif slots:
                if len(held) == slots:
                    held.popitem(last=False)
                held[key] = None
            if index >= start:
                hits, total = hits + hit, total + 1
    return hits / total


def best_hit_rate(trace: Trace, slots: int, *, start: int = 0) -> float:
    """What no eviction can exceed from step `start` on, whatever it held then (Belady's rule: what
    is needed last goes, or is not kept at all). With `start` 0 the slots are empty at first."""
    accesses = list(trace.accesses(start))
    # At the start, what is needed first is held: no other content serves more.
    held = set() if start == 0 else _first_distinct(accesses, slots)
    return _best_hits(accesses, slots, held) / len(accesses)


def _first_distinct(accesses: Sequence[Key], count: int) -> set[Key]:
    return set(list(dict.fromkeys(accesses))[:count])


def _best_hits(accesses: Sequence[Key], slots: int, held: set[Key]) -> int:
    """Hits of Belady's rule with bypassing. Changes `held`."""
    never = len(accesses)
    later = [never] * len(accesses)  # when what is accessed now is accessed again
    seen: dict[Key, int] = {}
    for index in range(len(accesses) - 1, -1, -1):
        later[index] = seen.get(accesses[index], never)
        seen[accesses[index]] = index
    # By next access, the last first. An entry of a former access lies in the past, so it surfaces
    # after those of all that is held.
    heap = [(-seen.get(key, never), key) for key in held]
    heapq.heapify(heap)
    hits = 0
    for index, key in enumerate(accesses):
        hits += key in held
        held.add(key)
        heapq.heappush(heap, (-later[index], key))
        if len(held) > slots:
            held.remove(heapq.heappop(heap)[1])
    return hits
