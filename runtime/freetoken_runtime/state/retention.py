# SPDX-License-Identifier: Apache-2.0
"""Lets anchors of residents go. Owner thread only; `anchors` has the policy."""

from collections.abc import Iterable
from weakref import finalize

from .anchors import MAX_ANCHORS, Anchor, AnchoredPath, retained, thinned
from .buffers import Meter
from .prefix import Resident
from .sequence import Sequence


def counted(anchor: Anchor, meter: Meter) -> Anchor:
    """Count an anchor until its last holder lets go of it, be it a path or the writer."""
    meter.fold()
    meter.take(anchor.size_bytes)
    finalize(anchor, meter.give_back, anchor.size_bytes).atexit = False
    return anchor


def held_bytes(residents: Iterable[Resident]) -> int:
    """What the anchors of these paths take; shared ones count once."""
    anchors = (anchor for r in residents for anchor in r.sequence.anchors.values())
    return sum({id(anchor): anchor.size_bytes for anchor in anchors}.values())


def retain(residents: Iterable[Resident], limit_bytes: int) -> None:
    """Let anchors of these paths go until they take no more than this, the least valuable first."""
    used = sorted(residents, key=lambda r: r.last_used)
    paths = [
        AnchoredPath(r.sequence.anchors, r.sequence.length, lasting=bool(r.pinned_by)) for r in used
    ]
    for resident, kept in zip(used, retained(paths, limit_bytes), strict=True):
        _keep_only(resident.sequence, kept)


def thin(sequence: Sequence) -> None:
    """Keep the number of a path's anchors within bounds, whatever their bytes."""
    step, kept = 1, set(sequence.anchors)
    while len(kept) > MAX_ANCHORS:
        kept = thinned(sequence.anchors, sequence.length, step)
        step *= 2
    _keep_only(sequence, kept)


def merge(gone: Sequence, kept: Sequence) -> None:
    """One path takes over the anchors of another; of two in one place the higher rank."""
    higher = {
        position: anchor
        for position, anchor in gone.anchors.items()
        if (known := kept.anchors.get(position)) is None or known.rank < anchor.rank
    }
    kept.anchors = {**kept.anchors, **higher}
    kept.dropped = (kept.dropped | gone.dropped) - kept.anchors.keys()


def _keep_only(sequence: Sequence, kept: set[int]) -> None:
    gone = sequence.anchors.keys() - kept
    if gone:
        sequence.dropped = sequence.dropped | gone
        sequence.anchors = {p: sequence.anchors[p] for p in sorted(kept)}
