# SPDX-License-Identifier: Apache-2.0
"""Keeps states: brings a path back from RAM and disk, and lets the least valuable go.

Everything here runs in the owner thread. Plans come from `lookup`, which has no part in it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf

import torch

from ..reports import PathMiss
from .anchors import Anchor, Rank
from .buffers import Fixed
from .digest import BLOCK, Ids, chain, digest_at
from .disk import DiskStates
from .forgetting import forget
from .lookup import History, Lookup, Route
from .prefix import PrefixIndex, Resident, shared_rows
from .restoring import restore
from .retention import counted, held_bytes, merge, retain, thin
from .roles import Budget, Writer
from .sequence import Sequence
from .spaces import Spaces
from .worth import Worth


@dataclass(frozen=True)
class Acquired:
    """A path made ready to be grown. `row`: the hidden row of its last position, if it is whole;
    `lost`: why less came back than the route promised."""

    resident: Resident
    route: Route
    reused: int
    row: torch.Tensor | None
    lost: str | None = None


class StateKeeper:
    """The residents of an engine, for the owner thread."""

    def __init__(
        self,
        spaces: Spaces,
        index: PrefixIndex,
        lookup: Lookup,
        history: History,
        budget: Budget,
        worth: Worth,
    ) -> None:
        self._spaces = spaces
        self._index = index
        self._lookup = lookup
        self._history = history
        self._budget = budget
        self._worth = worth
        self._pins: dict[str, list[Ids]] = {}
        self.writer: Writer | None = None
        self.on_restored: Callable[[int, float], None] = lambda size_bytes, seconds: None
        self.evicted = 0
        self.restored_bytes = 0

    # -- taking and giving back

    def acquire(self, ids: Ids, extra_rows: int) -> Acquired | None:
        """The state of the longest reusable part of `ids`, with room for the rest of it and
        `extra_rows` more. None if there is no room now. Where stored states turn out to be lost,
        the next best ones serve."""
        lost: str | None = None
        while True:
            acquired = self._acquire(ids, extra_rows)
            if acquired is None or acquired.lost is None:
                break
            lost = lost or acquired.lost
            better = self._lookup.route(ids).reused
            if not acquired.reused < better < acquired.route.reused:
                break
            self.release(acquired.resident)
        return acquired and replace(acquired, lost=lost)

    def _acquire(self, ids: Ids, extra_rows: int) -> Acquired | None:
        route = self._lookup.route(ids)
        while (grown := self._room_for(route, len(ids) + extra_rows)) is None:
            if route.resident is None or route.resident.sequence.length:
                return None
            route = self._lookup.route(ids)  # what it began with is gone
        resident = self._prepare(route, grown)
        try:
            resident.sequence.reserve(len(ids) - route.ram_rows + extra_rows)
            return self._restore(resident, route, ids)
        except BaseException:
            self.release(resident)
            raise

    def promote(self, resident: Resident, ranks: Mapping[int, Rank]) -> None:
        """Positions that have an anchor are wanted for more than it was taken for."""
        for position, rank in ranks.items():
            known = resident.sequence.anchors.get(position)
            if known is None or known.rank >= rank:
                continue
            anchor = counted(replace(known, rank=rank), self._budget.anchors)
            for other in self._index:  # whoever shares it
                if other.sequence.anchors.get(position) is known:
                    other.sequence.anchors[position] = anchor

    def why(self, ids: Ids, acquired: Acquired) -> PathMiss | None:
        """Why no more of a path came back; None if all of it did."""
        if acquired.reused == len(ids):
            return None
        if acquired.lost is not None:
            return PathMiss(acquired.reused, acquired.lost, len(ids) - acquired.reused)
        return self._lookup.miss(ids, acquired.route)

    def acquire_cold(self, rows: int) -> Resident | None:
        """An empty sequence that nobody else sees. None if there is no room now."""
        if not self.make_room(self._spaces.bytes_for(rows)):
            return None
        sequence = Sequence(self._spaces)
        sequence.reserve(rows)
        return self._worth.watched(Resident(sequence, running=True))

    def release(self, resident: Resident) -> None:
        """The request is over; its path stays as long as there is room."""
        sequence = resident.sequence
        resident.running = False
        if resident.forget_from is not None:
            sequence.truncate(sequence.restorable(resident.forget_from))
            self._unwritten(resident, resident.forget_from)
            resident.forget_from = None
        if sequence.length == 0:
            self._remove(resident)
            return
        sequence.settle()
        if not self._spaces.pool.layout.fixed_bytes:  # others are bounded by their bytes
            thin(sequence)
        resident.mark_pins(self._pins)
        self._merge(resident)

    def capture(
        self, resident: Resident, position: int, row: torch.Tensor, rank: Rank = Rank.NAMED
    ) -> None:
        """Make an anchor of a position, whose hidden row [H] this is; the last pass ended there or
        was cut there."""
        sequence = resident.sequence
        stale, known = bool(sequence.replay), sequence.anchors.get(position)
        if known is not None:
            if rank <= known.rank and (stale or not known.stale):
                return  # it says all that a new one would
            rank = max(rank, known.rank)
            known = None  # it counts as long as anyone holds it
        fixed = sequence.fixed_at(position)
        self._enter(resident, position, Anchor(row.clone(), fixed, rank, stale))

    def keep(self, resident: Resident, position: int, row: torch.Tensor, fixed: Fixed) -> None:
        """Make an anchor of a position that was passed a moment ago."""
        if position not in resident.sequence.anchors:
            self._enter(resident, position, Anchor(row.clone(), fixed))

    def _enter(self, resident: Resident, position: int, anchor: Anchor) -> None:
        resident.sequence.anchors[position] = counted(anchor, self._budget.anchors)
        limit_bytes = self._budget.anchor_limit_bytes
        spare_bytes = limit_bytes // 8  # so that not every anchor makes others go
        if self._budget.anchors.used_bytes > limit_bytes:
            self.persist(resident)
            self._retain(self._index, limit_bytes - spare_bytes)
        if self._budget.missing(0):
            self._budget.lend(0, self._worth.of_anchors(resident))
        if self._budget.missing(0):
            self.persist(resident)
            self._retain_for(spare_bytes, [resident])  # a path's past before its neighbours
            self.make_room(0)

    def persist(self, resident: Resident) -> None:
        """Hand the path to the writer, if there is one and it has not been told yet."""
        sequence = resident.sequence
        if self.writer is None or resident.forget_from is not None or not sequence.length:
            return
        self.writer.enqueue(resident, sequence.view(), dict(sequence.anchors))

    def persist_all(self) -> None:
        """Hand every idle path to the writer that is not on disk as a whole."""
        for resident in self._index:
            if not resident.running and resident.persisted_rows < resident.sequence.length:
                self.persist(resident)

    def forget_persisted(self) -> None:
        """The store is gone: nothing is on disk any more."""
        for resident in self._index:
            resident.persisted_rows = 0

    # -- room

    def make_room(self, size_bytes: int) -> bool:
        """Evict idle, unpinned paths until `size_bytes` more fit, or have slots give way that save
        less. False if they cannot."""
        if not self._budget.missing(size_bytes):
            return True
        if self._spaces.pool.drop_reserve() and not self._budget.missing(size_bytes):
            return True
        for resident in self._index.victims():
            resident.sequence.settle()
        drained, stored = self.writer is None, self.writer is not None
        while self._budget.missing(size_bytes):
            victims = self._index.victims()
            on_disk = bool(victims) and victims[0].persisted_rows == victims[0].sequence.length
            if self.writer is not None and not drained and not on_disk:
                self.writer.drain()  # what waits to be written holds memory, too
                drained = True
            elif self._budget.lend(size_bytes, self._worth.of_first(victims, stored=stored)):
                continue
            elif not victims:
                everyone = list(self._index)
                return self._retain_for(size_bytes, everyone) or self._budget.lend(size_bytes, inf)
            elif not self._retain_for(size_bytes, victims[:1]):
                self.evict(victims[0])
        return True

    def _retain_for(self, size_bytes: int, residents: list[Resident]) -> bool:
        """Make room by letting anchors of these paths go; whether that was enough."""
        if self._spaces.pool.layout.fixed_bytes:
            self._retain(residents, held_bytes(residents) - self._budget.missing(size_bytes))
        return not self._budget.missing(size_bytes)

    def evict(self, resident: Resident) -> None:
        """Let an idle path go, once it is on disk where a store is attached."""
        sequence = resident.sequence
        if self.writer is not None:
            if resident.persisted_rows < sequence.length:
                self.persist(resident)
            self.writer.drain(resident)
        self._history.remember(_names(self._lookup.root, sequence.ids))
        buffers = {span.buffer for span in sequence.spans}
        self._remove(resident)
        for buffer in buffers:
            self._spaces.tighten(buffer)
        self.evicted += 1

    def clear(self) -> None:
        """Let every path go: the engine closes."""
        for resident in self._index:
            self._remove(resident)

    # -- forgetting and pinning

    def forget(self, ids: Ids, start: int) -> int:
        """Drop every state of a path that begins with ids[: start + 1], at or after `start`."""
        stem = ids[: start + 1]
        dropped = 0
        if self.writer is not None:
            self.writer.cancel(stem)
        for resident in self._index:
            known = resident.sequence.ids
            if shared_rows(known, stem) < len(stem):
                continue
            self._history.forget(_names(self._lookup.root, known))
            dropped += 1
            if resident.running:
                resident.forget_from = start
                continue
            buffers = [span.buffer for span in resident.sequence.spans]
            resident.sequence.truncate(resident.sequence.restorable(start))
            self._unwritten(resident, start)
            if resident.sequence.length == 0:
                self._remove(resident)
            for buffer in buffers:
                self._spaces.tighten(buffer)
        disk = self._lookup.disk
        return dropped + (forget(disk, ids, start) if disk is not None else 0)

    def pin(self, owner: str, paths: list[Ids]) -> None:
        """Protect these paths from eviction for `owner`, instead of what it had pinned."""
        if paths:
            self._pins[owner] = paths
        else:
            self._pins.pop(owner, None)
        for resident in self._index:
            resident.mark_pins(self._pins)

    # -- inside

    def _takes_over(self, route: Route) -> bool:
        """Whether the request grows the resident itself: it is idle and wholly reused, its state at
        the end included."""
        parent = route.resident
        if parent is None or parent.running or route.ram_rows != parent.sequence.length:
            return False
        return self._spaces.pool.layout.sliceable or not route.disk.usable

    def _unwritten(self, resident: Resident, start: int) -> None:
        """The store forgot the block in which `start` lies: what is left of it is on no disk."""
        kept = min(start - start % BLOCK, resident.sequence.length)
        resident.persisted_rows = min(resident.persisted_rows, kept)

    def _room_for(self, route: Route, total_rows: int) -> Sequence | None:
        """The sequence that the path will grow, with room for what the route does not share; None
        if there is none. What the route builds on is spared, the anchor it begins at included; the
        path comes before what else an idle parent holds, and before the parent itself."""
        parent = route.resident
        rows = total_rows - route.ram_rows
        if parent is None:
            grown = Sequence(self._spaces)
            return grown if self.make_room(self._spaces.bytes_for(rows)) else None
        taken, running = self._takes_over(route), parent.running
        parent.running = True  # not a victim
        grown = parent.sequence if taken else parent.sequence.fork(route.ram_rows)
        try:
            if self.make_room(grown.room_needed(rows)):
                return grown
        finally:
            parent.running = running
        if not running and not parent.pinned_by:
            self.evict(parent)
            if not taken and self.make_room(grown.room_needed(rows)):
                return grown
        if not taken:
            grown.close()
        return None

    def _prepare(self, route: Route, grown: Sequence) -> Resident:
        """The resident that will hold the path, marked as running."""
        parent = route.resident
        if parent is not None:
            self._index.touch(parent)
            if grown is parent.sequence:
                parent.running = True
                return parent
        persisted_rows = 0 if parent is None else min(parent.persisted_rows, route.ram_rows)
        resident = Resident(grown, persisted_rows=persisted_rows, running=True)
        self._index.add(resident)
        return resident

    def _restore(self, resident: Resident, route: Route, ids: Ids) -> Acquired:
        """Append what the disk holds, and find the row at the end."""
        sequence, disk = resident.sequence, self._lookup.disk
        lost: str | None = None
        if disk is not None and route.source == "disk":
            lost = self._restore_from(disk, resident, route, ids)
        row: torch.Tensor | None = None
        if sequence.length == len(ids):
            anchor = sequence.anchors.get(len(ids))
            if anchor is None and route.resident is not None:
                anchor = route.resident.sequence.anchors.get(len(ids))
            if anchor is None:  # it was there when the route was found
                lost = lost or "evicted"
                sequence.truncate(sequence.restorable(len(ids) - 1))
            else:
                sequence.anchors[len(ids)] = anchor
                row = anchor.row
        return Acquired(resident, route, sequence.length - sequence.replay, row, lost)

    def _restore_from(
        self, disk: DiskStates, resident: Resident, route: Route, ids: Ids
    ) -> str | None:
        """Append what the disk holds; returns why it was not all, if it was not."""
        restored = restore(disk, resident.sequence, route, ids, self._budget.anchors)
        stored = resident.sequence.length if route.disk.pieces else resident.persisted_rows
        resident.persisted_rows = min(stored, resident.sequence.length)
        self.restored_bytes += restored.size_bytes
        self.on_restored(restored.size_bytes, restored.seconds)
        return restored.lost

    def _merge(self, resident: Resident) -> None:
        """Keep one of two paths when one is the beginning of the other."""
        for other in self._index.subsumed_by(resident):
            self._merge_into(resident, other)
        for other in self._index:
            if other is resident or other.running:
                continue
            known = other.sequence.ids
            if shared_rows(known, resident.sequence.ids) == resident.sequence.length:
                self._merge_into(other, resident)
                self._index.touch(other)
                return

    def _merge_into(self, resident: Resident, other: Resident) -> None:
        """One path takes over what another one knew, which goes."""
        merge(other.sequence, resident.sequence)
        if other.persisted_rows < other.sequence.length:  # its anchors may be on no disk yet
            resident.persisted_rows = min(resident.persisted_rows, other.persisted_rows)
        self._remove(other)

    def _retain(self, residents: Iterable[Resident], limit_bytes: int) -> None:
        """Let anchors go; where a store is attached, they are in it by then."""
        if self.writer is not None:
            self.writer.drain()
        retain(residents, limit_bytes)

    def _remove(self, resident: Resident) -> None:
        self._index.remove(resident)
        resident.sequence.close()


def _names(root: bytes, ids: Ids) -> list[bytes]:
    """The digests of a path's full blocks and of its end."""
    names = chain(root, ids)
    return [*names[1:], digest_at(names, ids, len(ids))]
