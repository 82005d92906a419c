# SPDX-License-Identifier: Apache-2.0
"""Room in memory for experts of one form: which of them is there, and which gives way.

    free        nobody's; NaN throughout, if poisoned
    settled     of experts that earned their place, the least recently used first
    passing     of experts that did not, and go first

As long as the experts of one pass fit, the least recently used one gives way and all are settled.
Where they do not, the plain rule would throw out each expert just before it is used again. Then an
expert settles only if it was asked for more often than the settled one that would go for it.
"""

from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice

from freetoken_storage.weights import RECORD_ALIGNMENT, aligned
from freetoken_storage.weights_direct import Buffers

from ..layers.expert import Expert
from .records import ExpertForm
from .scratch import POISON, Scratches

Key = tuple[int, int]  # number of the layer among those with experts, and of the expert in it
_AGING = 32  # askings per known expert, after which all counts are halved
SCRATCHES = 2  # of each form: as many as fetching threads


@dataclass(eq=False)
class Slot:
    """Room for one expert. Mutable, by its pool and by who serves. `expert` computes with what is
    in `memory`. `filling`: who is writing into it; `began_s`, `filled_s`: when that was begun and
    done, on the clock of `perf_counter`, 0 if not yet. `held`: it is yet to be used, and stays."""

    memory: memoryview
    expert: Expert
    key: Key | None = None
    filling: Future[None] | None = None
    held: bool = False
    began_s: float = 0.0
    filled_s: float = 0.0

    @property
    def evictable(self) -> bool:
        """A slot that is being written to is nobody's to give away, whatever became of the wish."""
        return not self.held and (self.filling is None or self.filling.done())


class SlotPool:
    """The slots of one form. Used by one thread at a time. `poison`: see above; for tests.
    `demand`: how many experts one pass asks for. `evictions` counts. `scratches`: room for experts
    that are computed without a slot."""

    def __init__(self, form: ExpertForm) -> None:
        self.form = form
        self.scratches = Scratches(form, SCRATCHES)
        self.demand = 0
        self.evictions = 0
        self._buffers = Buffers(form.layout.size_bytes)
        self._free: list[Slot] = []
        self._settled: OrderedDict[Key, Slot] = OrderedDict()
        self._passing: OrderedDict[Key, Slot] = OrderedDict()
        self._asked: dict[Key, int] = {}
        self._askings = 0

    @property
    def poison(self) -> bool:
        return self.scratches.poison

    @poison.setter
    def poison(self, poison: bool) -> None:
        self.scratches.poison = poison

    def __len__(self) -> int:
        return len(self._free) + len(self._settled) + len(self._passing)

    @property
    def slot_bytes(self) -> int:
        return aligned(self.form.layout.size_bytes, RECORD_ALIGNMENT)

    @property
    def passing(self) -> int:
        """Slots whose expert has not settled."""
        return len(self._passing)

    @property
    def spare(self) -> bool:
        """Whether a slot can be had without taking it from an expert that has settled."""
        return bool(self._free) or any(slot.evictable for slot in self._passing.values())

    def slots(self) -> Iterator[Slot]:
        """All that hold an expert."""
        yield from self._passing.values()
        yield from self._settled.values()

    def ask(self, key: Key) -> Slot | None:
        """The slot that holds an expert, or is being filled with it; counts as a use."""
        self._count(key)
        slot = self.find(key)
        if slot is None:
            return None
        if key in self._settled:
            self._settled.move_to_end(key)
        elif self._crowded:
            self._passing.move_to_end(key)
        else:
            self._settled[key] = self._passing.pop(key)
        return slot

    def find(self, key: Key) -> Slot | None:
        """The same without counting. A slot that could not be filled is freed."""
        slot = self._settled.get(key) or self._passing.get(key)
        if slot is None or slot.filling is None or not slot.filling.done():
            return slot
        if slot.filling.cancelled() or slot.filling.exception() is not None:
            self.drop(slot)
            return None
        slot.filling = None
        return slot

    def claim(self, key: Key, *, passing: bool = False, sparing: bool = False) -> Slot | None:
        """A slot for an expert that has none; None if none can be given away now. `passing`: it may
        not settle in place of another; `sparing`: nor displace one that was clearly asked for more
        often."""
        if self._free:
            return self._take(self._free.pop(), key, settled=True)
        spare = next((slot for slot in self._passing.values() if slot.evictable), None)
        oldest = next((slot for slot in self._settled.values() if slot.evictable), None)
        plain = not passing and not self._crowded
        settled = plain or (not passing and self._earns(key, spare, oldest))
        victim = spare or (oldest if plain else self._least_asked())
        if victim is None:
            return None
        if sparing and victim is not spare:
            if self._askings_of(victim.key) > self._askings_of(key) + 1:
                return None
        if settled and not plain:
            assert oldest is not None and oldest.key is not None
            self._passing[oldest.key] = self._settled.pop(oldest.key)
        self.evictions += 1
        self.drop(victim)
        return self._take(self._free.pop(), key, settled=settled)

    def claim_guess(self, key: Key, limit: int) -> Slot | None:
        """A slot for an expert that nobody has asked for yet: a free one, one whose expert has not
        settled, or, if no more than `limit` have not, the one that a missing expert would take
        next. Where a pass does not fit, `limit` others are left to what is missing. None if there
        is none."""
        spare = [slot for slot in self._passing.values() if slot.evictable]
        if self._crowded and len(self._free) + len(spare) <= limit:
            return None
        if not self._free:
            if not spare and len(self._passing) < limit:
                spare = [slot for slot in islice(self._settled.values(), limit) if slot.evictable]
            if not spare:
                return None
            self.evictions += 1
            self.drop(spare[0])
        return self._take(self._free.pop(), key, settled=False)

    def drop(self, slot: Slot) -> None:
        """Forget what a slot holds."""
        assert slot.key is not None and (slot.filling is None or slot.filling.done())
        (self._settled if slot.key in self._settled else self._passing).pop(slot.key)
        slot.key = slot.filling = None
        slot.held = False
        if self.poison:
            self._spoil(slot)
        self._free.append(slot)

    def spoil_free(self) -> None:
        """Fill every free slot with NaN, so that what reads it shows."""
        for slot in self._free:
            self._spoil(slot)

    def resize(self, count: int) -> None:
        """Make or free slots. Of those that hold experts the least valuable go first: what has not
        settled, then the least recently used; or, where fewer stay than a pass wants, the least
        asked for. What is held or being filled stays until it is done: then there may be more than
        `count` for a while."""
        while len(self) < count:
            memory = self._buffers.take()
            self._free.append(Slot(memory, self.form.expert(memory)))
        surplus = len(self) - count - len(self._free)
        for victim in self._least_valuable(count)[: max(0, surplus)]:
            self.evictions += 1
            self.drop(victim)
        while self._free and len(self) > count:
            self._buffers.give(self._free.pop().memory)

    def _least_valuable(self, count: int) -> list[Slot]:
        """All that can go, in the order in which they should if so many stay."""
        settled = list(self._settled.values())
        if self.demand > count:
            settled.sort(key=lambda slot: self._askings_of(slot.key))
        return [slot for slot in (*self._passing.values(), *settled) if slot.evictable]

    @property
    def _crowded(self) -> bool:
        return self.demand > len(self)

    def _earns(self, key: Key, spare: Slot | None, oldest: Slot | None) -> bool:
        """Whether an expert settles although not all do: only in place of one that was asked for
        less, and only if there is room for those that pass."""
        if spare is None or oldest is None:
            return False
        return self._askings_of(key) > self._askings_of(oldest.key)

    def _least_asked(self) -> Slot | None:
        """Of all that have settled; looked for only where nothing passes, so rarely."""
        every = [slot for slot in self._settled.values() if slot.evictable]
        return min(every, key=lambda slot: self._askings_of(slot.key), default=None)

    def _askings_of(self, key: Key | None) -> int:
        return 0 if key is None else self._asked.get(key, 0)

    def _take(self, slot: Slot, key: Key, *, settled: bool) -> Slot:
        slot.key = key
        (self._settled if settled else self._passing)[key] = slot
        return slot

    def _count(self, key: Key) -> None:
        self._asked[key] = self._asked.get(key, 0) + 1
        self._askings += 1
        if self._askings > _AGING * len(self._asked) and self._askings > 8 * len(self):
            self._asked = {other: count // 2 for other, count in self._asked.items() if count > 1}
            self._askings = sum(self._asked.values())

    @staticmethod
    def _spoil(slot: Slot) -> None:
        slot.memory[:] = POISON * len(slot.memory)
