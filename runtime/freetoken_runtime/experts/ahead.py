# SPDX-License-Identifier: Apache-2.0
"""Long passes want most experts of every layer: the next one's arrive while this one computes."""

from collections import deque

from .slots import Key, Slot
from .supply import FETCH_THREADS, Supply


class Ahead:
    """What of the next layer was fetched ahead. Mutable; used by the thread that serves."""

    def __init__(self, supply: Supply) -> None:
        self._supply = supply
        self._held: list[Slot] = []  # slots of the next layer, which must stay
        self._absent: deque[Key] | None = None  # its experts without a slot; None: nobody looked

    def fetch(self, number: int) -> None:
        """Begin to fetch layer `number`, as far as there is room that is not the present one's."""
        if number >= len(self._supply.layers):
            return
        layer = self._supply.layers[number]
        if layer.direct is not None:
            return
        pool = layer.pool
        if self._absent is None:
            every = [(number, expert) for expert in range(layer.num_experts)]
            self._held = [slot for key in every if (slot := pool.find(key)) is not None]
            for slot in self._held:
                slot.held = True
            there = {slot.key for slot in self._held}
            self._absent = deque(key for key in every if key not in there)
        limit = max(FETCH_THREADS, min(layer.num_experts, len(pool) // 2))
        while self._absent and (pool.spare or pool.passing < limit):
            key = self._absent[0]
            slot = pool.claim(key, passing=True, sparing=pool.passing >= FETCH_THREADS)
            if slot is None:
                return
            self._absent.popleft()
            slot.held = True
            self._supply.begin(key, slot)
            self._held.append(slot)

    def let_go(self) -> None:
        for slot in self._held:
            slot.held = False
        self._held, self._absent = [], None
