# SPDX-License-Identifier: Apache-2.0
"""The next layer's likely experts, fetched while the disk has nothing else to do.

    layer i     its experts compute; all that it missed has arrived
    layer i+1   its router, on the rows that layer i began with, says what it will probably choose

A guess that is right saves part of a wait; a wrong one costs a read, and time of whoever shares the
machine with it. So short passes begin to guess when `trials` of whole steps say that it pays, and
stop when wrong guesses read for longer than right ones save. Guesses take slots that are free or
hold what has not settled, or the one that the next missing expert would take, a few at a time. No
bit depends on them.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .slots import Key, Slot, SlotPool
from .supply import FETCH_THREADS, Supply
from .trials import Trials, TrialSettings

_MEMORY = 0.98  # weight of the past at each guess
MOST_ROWS = 8  # of a pass that guesses: those that decode; a suffix reads what it chooses, no more
_ENOUGH = 8  # guesses that tell whether they pay


@dataclass(frozen=True)
class _Guess:
    layer: int
    pool: SlotPool
    slot: Slot


class Prefetch:
    """Whether to guess, and what. Mutable; used by the thread that serves. A `step.Judge`."""

    def __init__(self, supply: Supply, settings: TrialSettings | None = None) -> None:
        self._supply = supply
        self._settings = settings or TrialSettings()
        self._trials: dict[int, Trials] = {}
        self._current: Trials | None = None
        self._on = False
        self._likely: tuple[int, list[int]] = (0, [])  # a layer, and what it may choose
        self._guesses: list[_Guess] = []  # of layers that have not asked yet
        self._judged = 0  # guesses since they were last begun with
        self._saved_s = self._wasted_s = 0.0  # by these, of late

    def begin_step(self, rows: int) -> None:
        self._current = self._of(rows)
        on = self._current.begin() == "other"
        if on and not self._on:
            self._judged, self._saved_s, self._wasted_s = 0, 0.0, 0.0
        self._on = on

    def end_step(self, seconds: float, pairs: int) -> None:
        assert self._current is not None
        hopeless = self._judged >= _ENOUGH and self._saved_s < self._wasted_s
        self._current.end(seconds, pairs, hopeless=hopeless)
        if hopeless and self._on:
            self._current.give_up()

    def active(self, rows: int) -> bool:
        """Whether the next pass over so many rows guesses."""
        return rows <= MOST_ROWS and self._of(rows).way == "other"

    def likely(self, layer: int, experts: Sequence[int]) -> None:
        """What a layer will probably choose, the likeliest first."""
        self._likely = layer, list(experts)

    def fetch(self, now: int) -> None:
        """Layer `now` waits for nothing any more: begin what is likely after it."""
        number, experts = self._likely
        if not self._on or number <= now:
            return
        layer = self._supply.layers[number]
        limit = max(FETCH_THREADS, layer.top_k)
        while experts:
            key = (number, experts[0])
            if layer.pool.find(key) is None:
                slot = layer.pool.claim_guess(key, limit)
                if slot is None:
                    return
                slot.held = True
                self._supply.begin(key, slot)
                self._guesses.append(_Guess(number, layer.pool, slot))
                self._supply.tally.add(prefetched=1)
            del experts[0]

    def asked(self, number: int, keys: Collection[Key]) -> None:
        """This is what layer `number` wants: guesses are right or wrong now. Wrong ones whose
        reading has not begun are taken back."""
        later = [guess for guess in self._guesses if guess.layer > number]
        for guess in self._guesses:
            if guess.layer <= number:
                self._judge(guess, right=guess.slot.key in keys)
        self._guesses = later

    def let_go(self) -> None:
        """The pass is over, whether all layers have asked or not."""
        self.asked(len(self._supply.layers), ())

    def _judge(self, guess: "_Guess", *, right: bool) -> None:
        slot = guess.slot
        slot.held = False
        until_s = slot.filled_s or time.perf_counter()
        read_s = until_s - slot.began_s if slot.began_s else 0.0
        self._judged += 1
        self._saved_s *= _MEMORY
        self._wasted_s *= _MEMORY
        if right:
            self._saved_s += read_s
            self._supply.tally.add(prefetched_used=1, prefetch_saved_s=read_s)
            return
        self._wasted_s += read_s
        if slot.filling is not None and slot.filling.cancel():
            guess.pool.drop(slot)

    def _of(self, rows: int) -> Trials:
        """Passes of about as many rows are compared with each other."""
        return self._trials.setdefault(rows.bit_length(), Trials(self._settings))
