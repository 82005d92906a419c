# SPDX-License-Identifier: Apache-2.0
"""Plans and usages in terms of segments: what is reused, what is forwarded, and why not less.

The model speaks of positions. Which segment holds one, and what the session had there before, is
found here; see `Miss`.
"""

import math
from collections.abc import Sequence

from .earlier import EarlierPaths
from .model import ContextOverflow, Model, PathMiss, PathPlan, PathUsage
from .path import Path
from .segments import Change, Miss, MissPart, ReusePlan, Usage
from .views import segments

OTHER_IDS = "different_ids"


def price(model: Model, path: Path, ids: Sequence[int], earlier: EarlierPaths) -> ReusePlan:
    """What forwarding `ids` (the path, perhaps with an opener) would cost."""
    return priced(model, path, ids, earlier)[0]


def priced(
    model: Model, path: Path, ids: Sequence[int], earlier: EarlierPaths
) -> tuple[ReusePlan, PathPlan | None]:
    """The same, with the plan as the model made it; None where it made none."""
    if not ids:
        return _plan(PathPlan(0, 0, 0, "none", None, None, 0.0), None), None
    try:
        made = model.plan(ids)
    except ContextOverflow:
        limit, total = model.context_limit, len(ids)
        overflow = PathPlan(total, 0, total, "none", None, None, math.inf)
        beyond = PathMiss(limit, "context_overflow", total - limit)
        return _plan(overflow, explained(beyond, path, ids, None, earlier)), None
    miss = made.miss
    why = None if miss is None else explained(miss, path, ids, made.anchor, earlier)
    return _plan(made, why), made


def paid(
    usage: PathUsage,
    announced: ReusePlan,
    path: Path,
    ids: Sequence[int],
    earlier: EarlierPaths,
    *,
    thinking_tokens: int = 0,
) -> Usage:
    """A model's counts for `ids`, which had been priced as `announced`, with the reason for what
    was forwarded: the plan's own, unless something ran in between."""
    return Usage(
        input_tokens=usage.input_tokens,
        reused_tokens=usage.reused_tokens,
        prefill_tokens=usage.prefill_tokens,
        output_tokens=usage.output_tokens,
        thinking_tokens=thinking_tokens,
        ttft_s=usage.ttft_s,
        decode_s=usage.decode_s,
        changed=usage.changed,
        miss=_paid_miss(usage, announced, path, ids, earlier),
    )


def _paid_miss(
    usage: PathUsage,
    announced: ReusePlan,
    path: Path,
    ids: Sequence[int],
    earlier: EarlierPaths,
) -> Miss | None:
    reused = usage.reused_tokens
    if reused == usage.input_tokens:
        return None
    nothing_ran = not reused and not usage.prefill_tokens
    if reused == announced.reused_tokens or nothing_ran:
        return announced.miss
    # Of a model that does not say why, all that is certain is where the rest begins.
    told = usage.miss or PathMiss(reused, "never_computed", usage.input_tokens - reused)
    return explained(told, path, ids, reused or None, earlier)


def _plan(made: PathPlan, miss: Miss | None) -> ReusePlan:
    return ReusePlan(
        input_tokens=made.input_tokens,
        reused_tokens=made.reused_tokens,
        prefill_tokens=made.prefill_tokens,
        source=made.source,
        anchor=made.anchor,
        miss=miss,
        predicted_s=made.predicted_s,
    )


def explained(
    miss: PathMiss, path: Path, ids: Sequence[int], anchor: int | None, earlier: EarlierPaths
) -> Miss:
    """A miss in token positions, with its segment, and what stood there if other ids did."""
    index = path.at(miss.position)
    part: MissPart = "opener"
    if index is not None:
        part = "frame" if miss.position < path.content_start(index) else "content"
    other = None
    if miss.cause == OTHER_IDS:
        named = None if index is None else path.places[index].body.id
        other = earlier.going_on(ids, miss.position, named)
    there = None if other is None else _counterpart(path, index, other, miss.position)
    return Miss(
        position=miss.position,
        segment=None if index is None else segments(path, [index])[0],
        part=part,
        cause=miss.cause,
        change=None if other is None or there is None else _change(path, index, other, there),
        was=None if other is None or there is None else segments(other, [there])[0],
        tokens=miss.tokens,
        anchor=anchor,
        gap=miss.gap,
        dropped=miss.dropped,
    )


def _counterpart(path: Path, index: int | None, other: Path, position: int) -> int | None:
    """The place of `other` that stands where the one at `index` does. It may end before the
    position: a content that only grew holds all of the old one."""
    if index is not None:
        start = path.start(index)
        there = other.at(start)
        if there is not None and other.start(there) == start:
            return there
    return other.at(position)


def _change(path: Path, index: int | None, other: Path, there: int) -> Change:
    """How the segment at `index` came to stand where `other` has the one at `there`."""
    was = other.places[there].body
    if index is None:
        return "removed"
    now = path.places[index].body
    if now.id == was.id:
        return "framed"
    if now.origin == was.origin:
        return "edited"
    if was.id in path.index:
        return "inserted"
    return "removed" if now.id in other.index else "diverged"
