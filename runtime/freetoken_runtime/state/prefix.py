# SPDX-License-Identifier: Apache-2.0
"""Which paths are in RAM, and the longest one that a new path shares.

The index has its own lock and touches no tensor, so that planning never waits for a forward pass.
The sequences in it are changed by the owner thread only; their ids are read here.
"""

import threading
from collections.abc import Iterator
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


@dataclass(frozen=True)
class RamMatch:
    """The best resident for a path: `rows` leading rows are shared; `row_known`: the hidden row at
    the path's own end is there; `goes_on`: a resident continues with other ids from there."""

    resident: Resident | None
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
        """The resident that shares most of `ids`; among equals one that knows the last row."""
        with self._lock:
            residents = list(self._residents)
        best: Resident | None = None
        best_key = (0, False, False)
        goes_on = False
        for resident in residents:
            known = resident.sequence.ids
            rows = shared_rows(known, ids)
            row_known = rows == len(ids) and rows in resident.sequence.anchors
            key = (rows, row_known, rows == len(known) and not resident.running)
            continues = rows < len(known) and rows < len(ids)
            goes_on = (
                continues if rows > best_key[0] else goes_on or (continues and rows == best_key[0])
            )
            if key > best_key:
                best, best_key = resident, key
        return RamMatch(best, best_key[0], best_key[1], goes_on)

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
