# SPDX-License-Identifier: Apache-2.0
"""Brings the rows and the anchor of a route back from the store. Owner thread."""

import time
from dataclasses import dataclass

from .anchors import Anchor
from .buffers import Meter
from .digest import Ids
from .disk import DiskStates
from .lookup import Route
from .retention import counted
from .sequence import Sequence


@dataclass(frozen=True)
class Restored:
    """What came back, and how long it took; `lost`: why it was not all."""

    size_bytes: int
    seconds: float
    lost: str | None


def restore(
    disk: DiskStates, sequence: Sequence, route: Route, ids: Ids, anchors: Meter
) -> Restored:
    """Append the route's pieces and take up the anchor at their end. What is then left without its
    state goes."""
    started, size_bytes = time.perf_counter(), 0
    lost: str | None = None
    if route.disk.pieces:
        pieces = disk.restore(sequence, route.disk, ids)
        lost, size_bytes = pieces.lost, pieces.size_bytes
    if route.disk.anchored and sequence.length == route.restored:
        found = disk.restore_anchor(ids[: route.restored])
        if isinstance(found, Anchor):
            sequence.resume(counted(found, anchors))
            size_bytes += found.size_bytes
        else:
            lost = found
    sequence.shorten()
    return Restored(size_bytes, time.perf_counter() - started, lost)
