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
from .disk import NOTHING, DiskMatch, DiskStates
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
    `disk`; `reused` rows in all. With `row_from` set nothing needs to be forwarded."""

    resident: Resident | None
    ram_rows: int
    disk: DiskMatch
    reused: int
    row_from: Literal["ram", "disk"] | None
    source: Literal["ram", "disk", "none"]
    miss: PathMiss | None


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
        reused = _reusable(ram.rows, total, ram.row_known)
        route = Route(
            resident=ram.resident if reused else None,
            ram_rows=reused,
            disk=NOTHING,
            reused=reused,
            row_from="ram" if reused == total else None,
            source="ram" if reused else "none",
            miss=None,
        )
        disk = self.disk
        stored = NOTHING
        if disk is not None and reused < total:
            stored = disk.match(ids, floor=ram.rows)
            route = _through_disk(route, ram, stored, total)
        if route.reused == total:
            return route
        return replace(route, miss=self._miss(ids, ram, stored, disk, route.reused))

    def known_rows(self, ids: Ids) -> int:
        """How many leading rows of the path are in RAM or on disk."""
        rows = self._index.match(ids).rows
        if self.disk is not None and rows < len(ids):
            rows = max(rows, self.disk.match(ids).position)
        return rows

    def _miss(
        self, ids: Ids, ram: RamMatch, stored: DiskMatch, disk: DiskStates | None, reused: int
    ) -> PathMiss:
        total = len(ids)
        rows = max(ram.rows, stored.position)
        if rows == total:
            return PathMiss(total - 1, "no_anchor", 1)
        names = chain(self.root, ids)
        wanted = {digest_at(names, ids, total)}
        boundary = rows - rows % BLOCK + BLOCK
        if boundary <= total:
            wanted.add(names[boundary // BLOCK])
        goes_on = (ram.goes_on and ram.rows == rows) or (stored.goes_on and stored.position == rows)
        foreign = disk.foreign(ids) if disk is not None and rows < BLOCK else None
        if disk is not None and any(disk.was_damaged(name) for name in wanted):
            cause = "damaged"
        elif any(name in self._history for name in wanted):
            cause = "evicted"
        elif foreign is not None:
            cause = foreign
        else:
            cause = "different_ids" if goes_on else "never_computed"
        return PathMiss(rows, cause, total - reused)


def _reusable(rows: int, total: int, row_known: bool) -> int:
    """The last position is of use only with its hidden row; else it is forwarded once more."""
    return total if rows == total and row_known else min(rows, total - 1)


def _through_disk(route: Route, ram: RamMatch, stored: DiskMatch, total: int) -> Route:
    """The route with the store's pieces, if they reach further."""
    row_from: Literal["ram", "disk"] | None = None
    if max(ram.rows, stored.position) == total:
        row_from = "ram" if ram.row_known else "disk" if stored.row_known else None
    reused = _reusable(max(ram.rows, stored.position), total, row_from is not None)
    if reused <= route.reused:
        return route
    pieces = tuple(
        replace(piece, rows=min(piece.rows, reused - piece.start))
        for piece in stored.pieces
        if piece.start < reused
    )
    base = min(ram.rows, reused)
    return replace(
        route,
        resident=ram.resident if base else None,
        ram_rows=base,
        disk=replace(stored, pieces=pieces if reused > base else ()),
        reused=reused,
        row_from=row_from,
        source="disk",
    )
