# SPDX-License-Identifier: Apache-2.0
"""Which paths are in RAM, and the longest one that a new path shares.

The index has its own lock and touches no tensor, so that planning never waits for a forward pass.
The sequences in it are changed by the owner thread only; their ids are read here.
"""

import threading
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from .digest import Ids
from .sequence import Sequence

_FIRST_LOOK = 256  # ids compared before the whole path is


def shared_rows(known: Ids, ids: Ids) -> int:
    """How many leading ids two paths have in common."""
    count = min(len(known), len(ids))
    look = min(count, _FIRST_LOOK)
    while True:
        differing = np.flatnonzero(known[:look] != ids[:look])
        if len(differing):
            return int(differing[0])
        if look == count:
            return count
        look = min(count, look * 16)


@dataclass(eq=False)
class Resident:
    """A path in RAM. Changed by the owner thread, under the index's lock."""

    sequence: Sequence
    last_used: int = 0
    running: bool = False  # a request is growing it
    persisted_rows: int = 0  # rows known to be on disk
    pinned_by: set[str] = field(default_factory=set)
    forget_from: int | None = None  # rows from here on go when the request ends

    def mark_pins(self, pins: Mapping[str, SequenceOf[Ids]]) -> None:
        """Note who pins the path. The last id of a pinned path may not have been forwarded yet."""
        known = self.sequence.ids
        self.pinned_by = {
            owner
            for owner, paths in pins.items()
            if any(shared_rows(known, path) >= max(1, len(path) - 1) for path in paths)
        }


@dataclass(frozen=True)
class RamMatch:
    """What RAM holds of a path. `resident` can be restored at `usable`, the deepest such position;
    `deepest` shares the most rows with the path, `rows`, restorable there or not. `row_known`: the
    hidden row at the path's own end is there, too; `goes_on`: a path in RAM continues with other
    ids where the shared rows end."""

    resident: Resident | None
    usable: int
    deepest: Resident | None
    rows: int
    row_known: bool
    goes_on: bool


class PrefixIndex:
    """The residents of an engine. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._residents: list[Resident] = []
        self._clock = 0

    def __len__(self) -> int:
        return len(self._residents)

    def __iter__(self) -> Iterator[Resident]:
        with self._lock:
            return iter(list(self._residents))

    def match(self, ids: Ids) -> RamMatch:
        """The residents that serve `ids` best; among equals an idle one that ends there."""
        with self._lock:
            residents = list(self._residents)
        best: Resident | None = None
        deepest: Resident | None = None
        best_key = (0, False)
        deepest_key = (0, False)
        row_known = goes_on = False
        for resident in residents:
            known = resident.sequence.ids
            rows = shared_rows(known, ids)
            whole = rows == len(ids) and rows in resident.sequence.anchors
            usable = rows if whole else resident.sequence.restorable(min(rows, len(ids) - 1))
            ends_there = rows == len(known) and not resident.running
            continues = rows < len(known) and rows < len(ids)
            if rows >= deepest_key[0]:
                goes_on = continues or (goes_on and rows == deepest_key[0])
            if (rows, ends_there) > deepest_key:
                deepest, deepest_key = resident, (rows, ends_there)
            if (usable, ends_there) > best_key:
                best, best_key = resident, (usable, ends_there)
                row_known = row_known or whole
        return RamMatch(best, best_key[0], deepest, deepest_key[0], row_known, goes_on)

    def positions(self, ids: Ids) -> set[int]:
        """Where the path can be restored from RAM: at its anchors, and at the deepest position of
        each resident (0 where that is none)."""
        found: set[int] = set()
        for resident in self:
            sequence = resident.sequence
            rows = shared_rows(sequence.ids, ids)
            found.update(p for p in list(sequence.anchors) if p <= rows)
            found.add(sequence.restorable(rows))
        return found

    def add(self, resident: Resident) -> None:
        """Owner thread. A running path is visible at once: others may share its rows."""
        with self._lock:
            self._residents.append(resident)
            self._touch(resident)

    def remove(self, resident: Resident) -> None:
        with self._lock:
            self._residents.remove(resident)

    def touch(self, resident: Resident) -> None:
        """Mark as used now."""
        with self._lock:
            self._touch(resident)

    def _touch(self, resident: Resident) -> None:
        self._clock += 1
        resident.last_used = self._clock

    def subsumed_by(self, resident: Resident) -> list[Resident]:
        """Idle residents whose whole path is a prefix of this one's: they hold nothing more but
        perhaps anchors."""
        ids = resident.sequence.ids
        found = []
        for other in self:
            known = other.sequence.ids
            if other is resident or other.running or len(known) > len(ids):
                continue
            if shared_rows(known, ids) == len(known):
                found.append(other)
        return found

    def victims(self) -> list[Resident]:
        """Idle, unpinned residents, the least valuable first: those on disk before those that are
        not, then the least recently used."""
        idle = [r for r in self if not r.running and not r.pinned_by]
        return sorted(idle, key=lambda r: (r.persisted_rows < r.sequence.length, r.last_used))
