# SPDX-License-Identifier: Apache-2.0
"""How much of a path is at hand, where, and why not more: RAM, then disk, then the row at its end.

The same function prices a plan in the caller's thread and steers the restore in the owner's, so
that what was predicted is what happens unless something ran in between.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from ..reports import PathMiss
from .digest import BLOCK, Ids, chain, digest_at
from .disk import DiskStates
from .disk_match import NOTHING, DiskMatch
from .prefix import PrefixIndex, RamMatch, Resident

MAX_REMEMBERED = 16384


class History:
    """Digests of states that were once computed, so that a miss can be called an eviction.
    Bounded; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def remember(self, digests: Iterable[bytes]) -> None:
        with self._lock:
            for digest in digests:
                self._known[digest] = None
                self._known.move_to_end(digest)
            while len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)

    def forget(self, digests: Iterable[bytes]) -> None:
        with self._lock:
            for digest in digests:
                self._known.pop(digest, None)

    def __contains__(self, digest: bytes) -> bool:
        with self._lock:
            return digest in self._known


@dataclass(frozen=True)
class Route:
    """The restore that serves a path: `ram_rows` rows as views of `resident`, then the pieces of
    `disk`: the state at `restored`, of which `replay` rows are forwarded again. `ram` and `stored`:
    what was found on the way."""

    resident: Resident | None
    ram_rows: int
    disk: DiskMatch
    restored: int
    replay: int
    source: Literal["ram", "disk", "none"]
    ram: RamMatch
    stored: DiskMatch

    @property
    def reused(self) -> int:
        """Rows of the path that are not forwarded."""
        return self.restored - self.replay


class Lookup:
    """Finds routes. Thread-safe: `plan` calls it outside the owner thread."""

    def __init__(self, root: bytes, index: PrefixIndex, history: History) -> None:
        self.root = root
        self._index = index
        self._history = history
        self.disk: DiskStates | None = None  # set by attach and detach

    def route(self, ids: Ids) -> Route:
        """The cheapest way to the state at the end of `ids` (at least one id)."""
        total = len(ids)
        ram = self._index.match(ids)
        route = Route(
            resident=ram.resident if ram.usable else None,
            ram_rows=ram.usable,
            disk=NOTHING,
            restored=ram.usable,
            replay=ram.resident.sequence.replay_at(ram.usable) if ram.resident else 0,
            source="ram" if ram.usable else "none",
            ram=ram,
            stored=NOTHING,
        )
        disk = self.disk
        if disk is None or route.restored == total:
            return route
        stored = disk.match(ids, floor=ram.rows, base=ram.usable)
        return _through_disk(replace(route, stored=stored))

    def positions(self, ids: Ids) -> set[int]:
        """Where the path can be restored by an anchor, from RAM or disk, and the deepest position
        that can be restored without one."""
        found = self._index.positions(ids)
        disk = self.disk
        if disk is None:
            return found
        rows = self.known_rows(ids)
        return found | {position for position in disk.anchors(ids) if position <= rows}

    def known_rows(self, ids: Ids) -> int:
        """How many leading rows of the path are in RAM or on disk."""
        rows = self._index.match(ids).rows
        if self.disk is not None and rows < len(ids):
            rows = max(rows, self.disk.match(ids).position)
        return rows

    def miss(self, ids: Ids, route: Route) -> PathMiss | None:
        """Why the route reuses no more; None if it reuses all."""
        ram, stored, disk, reused = route.ram, route.stored, self.disk, route.reused
        if route.restored == len(ids):
            return None
        total = len(ids)
        rows = max(ram.rows, stored.position)
        sequence = ram.deepest.sequence if ram.deepest is not None else None
        reach = min(rows, total - 1)  # what anchors in every place would have reused
        gone = (
            [] if sequence is None else [p for p in list(sequence.dropped) if reused < p <= reach]
        )
        gap, dropped = reach - reused, max(gone, default=None)
        if rows == total:
            return PathMiss(total - 1, "no_anchor", total - reused, gap, dropped)
        names = chain(self.root, ids)
        wanted = {digest_at(names, ids, total)}
        boundary = rows - rows % BLOCK + BLOCK
        if boundary <= total:
            wanted.add(names[boundary // BLOCK])
        goes_on = (ram.goes_on and ram.rows == rows) or (stored.goes_on and stored.position == rows)
        foreign = disk.foreign(ids) if disk is not None and rows < BLOCK else None
        if disk is not None and any(disk.records.was_damaged(name) for name in wanted):
            cause = "damaged"
        elif any(name in self._history for name in wanted):
            cause = "evicted"
        elif foreign is not None:
            cause = foreign
        else:
            cause = "different_ids" if goes_on else "never_computed"
        return PathMiss(rows, cause, total - reused, gap, dropped)


def _through_disk(route: Route) -> Route:
    """The route with the store's pieces, if they reach further. Rows at hand are not read again,
    whichever path in RAM holds them."""
    ram, stored = route.ram, route.stored
    restored = stored.usable
    if restored <= route.restored:
        return route
    base = min(ram.rows, restored)
    pieces = tuple(
        replace(piece, rows=min(piece.rows, restored - piece.start))
        for piece in stored.pieces
        if base < restored and piece.start < restored
    )
    return replace(
        route,
        resident=ram.deepest if base else None,
        ram_rows=base,
        disk=replace(stored, pieces=pieces),
        restored=restored,
        replay=stored.replay,
        source="disk",
    )
