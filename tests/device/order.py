# SPDX-License-Identifier: Apache-2.0
"""Whether streams wait for each other where they must: found out without a device, by clocks.

Every stream counts what it was asked. A mark has the count of its stream and what that stream had
waited for, so that it is known of any two accesses whether one is sure to come before the other.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from freetoken_runtime.batch import Form
from freetoken_runtime.device.accelerator import HostAccelerator, Mark
from freetoken_runtime.device.mixture import DeviceExperts, Serving
from freetoken_runtime.device.slots import DeviceSlot, DeviceSlots

from .block import Place, Report, Shape, host_records, routes, rows_of, whole
from .placement import FixedSplit

Clock = dict[str, int]
_Access = tuple[str, int, bool]  # stream, its count, whether it writes


class ClockedAccelerator(HostAccelerator):
    """The CPU, with the clocks that two streams would have."""

    def __init__(self) -> None:
        self.stream = "main"
        self.clocks: dict[str, Clock] = {"main": {}, "copies": {}}

    def tick(self) -> Clock:
        clock = self.clocks[self.stream]
        clock[self.stream] = clock.get(self.stream, 0) + 1
        return clock

    def copying(self) -> AbstractContextManager[Any]:
        return self._copying()

    @contextmanager
    def _copying(self) -> Iterator[None]:
        self.stream = "copies"
        try:
            yield
        finally:
            self.stream = "main"

    def mark(self) -> Mark:
        return Mark(dict(self.tick()), super().mark().at_s)

    def wait(self, mark: Mark) -> None:
        clock = self.clocks[self.stream]
        for stream, count in mark.event.items():
            clock[stream] = max(clock.get(stream, 0), count)

    def finish(self) -> None:
        for stream in self.clocks:
            for other in self.clocks.values():
                self.clocks[stream] = {
                    name: max(self.clocks[stream].get(name, 0), other.get(name, 0))
                    for name in self.clocks
                }


class WatchedExperts(DeviceExperts):
    """Notes each access to a slot and those of another stream that it does not come after."""

    watched: ClockedAccelerator

    def _copy_records(self, slots: Sequence[DeviceSlot], size: int) -> None:
        for slot in slots:
            self.touch(slot, writes=True)
        super()._copy_records(slots, size)

    def _launch(self, work: Any, slots: Sequence[DeviceSlot]) -> None:
        # What it waits for, it waits for first; its mark comes last. In between it reads.
        before = [slot.key for slot in slots]
        super()._launch(work, slots)
        assert before == [slot.key for slot in slots]
        for slot in slots:
            self.touch(slot, writes=False)

    def touch(self, slot: DeviceSlot, *, writes: bool) -> None:
        clock = self.watched.clocks[self.watched.stream]
        now = clock.get(self.watched.stream, 0) + (1 if writes else 0)
        known = self.accesses.setdefault(slot.address, [])
        for stream, count, wrote in known:
            if (writes or wrote) and clock.get(stream, 0) < count:
                self.races.append(f"{self.watched.stream} beside {stream} at {slot.key}")
        known.append((self.watched.stream, now, writes))

    accesses: dict[int, list[_Access]]
    races: list[str]


def order(place: Place, report: Report) -> None:
    """Few slots and many, waves, whole layers ahead, hybrid: no copy into a slot that may be read
    yet, no read of one that may not have arrived. Each wait is left out once: then races show."""
    shape = Shape(3, 6, 2, 24, 20)
    for slots, streams, policy in ((2, False, None), (7, True, None), (4, False, FixedSplit(1))):
        races = _races(shape, slots, streams, policy, lambda clocked: None)
        report.check(f"{slots} slots: no races", not races, races[:3])
    for name, forget in (("arrivals", _forget_in("main")), ("uses", _forget_in("copies"))):
        races = _races(shape, 2, False, None, forget)
        report.check(f"without waiting for {name}: races", bool(races))


def _races(
    shape: Shape,
    slots: int,
    streams: bool,
    policy: FixedSplit | None,
    spoil: Callable[[ClockedAccelerator], None],
) -> list[str]:
    clocked = ClockedAccelerator()
    spoil(clocked)
    records = host_records(Place(clocked, True), shape, "float32")
    room = DeviceSlots(clocked, records.record_bytes, shape.layers, shape.experts, 1)
    room.resize(slots * records.record_bytes)
    experts = WatchedExperts(clocked, records, room, Serving(policy, streams=streams))
    experts.watched, experts.accesses, experts.races = clocked, {}, []
    for step, rows in enumerate((1, 12, 2)):
        for layer in range(shape.layers):
            x, routed = rows_of(shape, rows, step), routes(shape, rows, 5 * step + layer)
            experts.mix(layer, x, routed, whole(rows, Form.MANY if rows > 4 else Form.FEW))
        clocked.tick()
        for key in room.keys():  # as a graph does that finds experts through the table
            slot = room.find(key)
            assert slot is not None
            experts.touch(slot, writes=False)
    return experts.races


def _forget_in(stream: str) -> Callable[[ClockedAccelerator], None]:
    """Let waits asked of one stream be no waits."""

    def spoil(clocked: ClockedAccelerator) -> None:
        waits = clocked.wait

        def wait(mark: Mark) -> None:
            if clocked.stream != stream:
                waits(mark)

        clocked.wait = wait  # type: ignore[method-assign]

    return spoil
