# SPDX-License-Identifier: Apache-2.0
"""Room for experts on a device: which of them is there, at which address, and which gives way.

    chunk     one allocation of `slots_per_chunk` records; it never moves
    slot      room for one record in a chunk
    table     [layers, experts] int64 on the device: where each lay when it was published, or 0

Memory grows and shrinks by chunks while a model is in use. What is worth keeping is moved out of a
chunk before it goes, and the table, which itself never moves, then has the new addresses: what
reads it, a captured graph too, stays valid.

Who gives way: first those that pass through, then the least recently used. Where one pass wants
more than there are slots, an expert settles only if it was asked for more often than the oldest.
`experts.slots.SlotPool` has the same rules over memory that CPUs compute in.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from ..errors import BudgetTooSmall
from ..experts.slots import Key
from .accelerator import Accelerator, Mark

_AGING = 32  # askings of one expert, after which all counts are halved


@dataclass(eq=False)
class DeviceSlot:
    """Room for one expert. Mutable, by its owner and by who serves. `held`: it is yet to be used.
    `used`: behind the last launch that read it, after which it may be overwritten;
    `arrived`: what is being copied into it is there."""

    memory: torch.Tensor  # [record] uint8
    key: Key | None = None
    held: bool = False
    used: Mark | None = None
    arrived: Mark | None = None

    @property
    def address(self) -> int:
        return self.memory.data_ptr()


class DeviceSlots:
    """The slots of one form. Used by one thread. `demand`: how many experts a pass asks for."""

    def __init__(
        self,
        accelerator: Accelerator,
        record_bytes: int,
        num_layers: int,
        num_experts: int,
        slots_per_chunk: int = 16,
    ) -> None:
        self.table = torch.zeros(
            num_layers, num_experts, dtype=torch.int64, device=accelerator.device
        )
        self.demand = 0
        self._accelerator = accelerator
        self._record_bytes = record_bytes
        self._per_chunk = slots_per_chunk
        self._chunks: list[list[DeviceSlot]] = []
        self._free: list[DeviceSlot] = []
        self._settled: OrderedDict[Key, DeviceSlot] = OrderedDict()
        self._passing: OrderedDict[Key, DeviceSlot] = OrderedDict()
        self._asked: dict[Key, int] = {}

    def __len__(self) -> int:
        return self._per_chunk * len(self._chunks)

    @property
    def chunk_bytes(self) -> int:
        return self._per_chunk * self._record_bytes

    @property
    def size_bytes(self) -> int:
        return len(self._chunks) * self.chunk_bytes

    def keys(self) -> Iterator[Key]:
        """Of the experts that are there, first those that would go first."""
        yield from self._passing
        yield from self._settled

    def ask(self, key: Key) -> DeviceSlot | None:
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

    def find(self, key: Key) -> DeviceSlot | None:
        """The same without counting."""
        return self._settled.get(key) or self._passing.get(key)

    def claim(self, key: Key, *, passing: bool = False) -> DeviceSlot | None:
        """A slot for an expert that has none; None if none can be given away now. `passing`: read
        once, it takes no place of those that settled if there is another. What it held may be in
        use until `used`, or, with None, until what the main stream was asked before this pass."""
        settles = not passing
        if not self._free:
            spare, oldest = _evictable(self._passing), _evictable(self._settled)
            victim = spare or oldest
            if victim is None:
                return None
            if settles and self._crowded:
                settles = oldest is not None and self._times(key) > self._times(oldest.key)
                if settles and spare is not None:
                    assert oldest is not None and oldest.key is not None
                    self._passing[oldest.key] = self._settled.pop(oldest.key)
            self.drop(victim)
        slot = self._free.pop()
        slot.key = key
        (self._settled if settles else self._passing)[key] = slot
        return slot

    def drop(self, slot: DeviceSlot) -> None:
        """Forget what a slot holds."""
        assert slot.key is not None and not slot.held, slot
        (self._settled if slot.key in self._settled else self._passing).pop(slot.key)
        slot.key = slot.arrived = None
        self._free.append(slot)

    def addresses(self, slots: Iterable[DeviceSlot]) -> torch.Tensor:
        """[E] int64 on the device: a row of the table that knows these slots of one layer only."""
        row = torch.zeros(self.table.shape[1], dtype=torch.int64)
        for slot in slots:
            assert slot.key is not None
            row[slot.key[1]] = slot.address
        return self._accelerator.upload(row)

    def publish(self) -> None:
        """Write the table anew, behind what the main stream was asked for. What was claimed before
        has to have arrived there for whoever reads the table."""
        table = torch.zeros(self.table.shape, dtype=torch.int64)
        for layer, expert in self.keys():
            slot = self.find((layer, expert))
            assert slot is not None
            table[layer, expert] = slot.address
            if slot.arrived is not None:
                self._accelerator.wait(slot.arrived)
        self.table.copy_(self._accelerator.upload(table))

    def resize(self, budget_bytes: int) -> None:
        """Have as many chunks as the budget holds, between two passes. What was used least goes.
        Waits for the device if chunks go. BudgetTooSmall if it holds none."""
        count = budget_bytes // self.chunk_bytes
        if count < 1:
            raise BudgetTooSmall(
                "the device's memory for experts holds no chunk of slots",
                value=budget_bytes,
                limit=f"at least {self.chunk_bytes} bytes",
                remedy="raise the budget, or compute on the CPU",
            )
        while len(self._chunks) < count:
            self._grow()
        if len(self._chunks) > count:
            self._accelerator.finish()
            while len(self._chunks) > count:
                self._shrink()
            self._accelerator.finish()  # nothing reads what is freed now
        self.publish()

    def _grow(self) -> None:
        memory = torch.empty(self.chunk_bytes, dtype=torch.uint8, device=self._accelerator.device)
        records = torch.split(memory, self._record_bytes)
        self._chunks.append([DeviceSlot(record) for record in records])
        self._free += self._chunks[-1]

    def _shrink(self) -> None:
        """Give up the chunk that holds least of what is kept. Nothing is under way."""
        every = list(self.keys())
        kept = set(every[-(len(self) - self._per_chunk) :])
        chunk = min(self._chunks, key=lambda slots: sum(slot.key in kept for slot in slots))
        self._chunks.remove(chunk)
        for key in every:
            slot = self.find(key)
            assert slot is not None
            if key not in kept:
                self.drop(slot)
        self._free = [slot for slot in self._free if slot not in chunk]
        for slot in chunk:
            if slot.key is not None:
                self._move(slot, self._free.pop())

    def _move(self, slot: DeviceSlot, target: DeviceSlot) -> None:
        assert slot.key is not None and not slot.held
        target.memory.copy_(slot.memory)
        target.key = slot.key
        (self._settled if slot.key in self._settled else self._passing)[slot.key] = target

    @property
    def _crowded(self) -> bool:
        return self.demand > len(self)

    def _times(self, key: Key | None) -> int:
        return 0 if key is None else self._asked.get(key, 0)

    def _count(self, key: Key) -> None:
        self._asked[key] = self._asked.get(key, 0) + 1
        if self._asked[key] > _AGING:
            self._asked = {other: count // 2 for other, count in self._asked.items() if count > 1}


def _evictable(slots: OrderedDict[Key, DeviceSlot]) -> DeviceSlot | None:
    return next((slot for slot in slots.values() if not slot.held), None)
