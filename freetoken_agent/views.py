# SPDX-License-Identifier: Apache-2.0
"""From stored places to the public snapshots: segments, turns, plans, diffs. Reads only."""

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from .json_values import frozen
from .model import ContextOverflow, Model, PathPlan
from .path import Body, Path, Place
from .segments import ROLES, Diff, Miss, ReusePlan, Segment, Turn

FRAME_SUFFIX = ".frame"


def kind_of(name: str) -> str:
    """`assistant` means a text of the assistant."""
    return "text" if name == "assistant" else name


def segment(
    body: Body,
    *,
    place: Place | None = None,
    turn: int | None = None,
    anchored: bool = False,
) -> Segment:
    """A snapshot of a segment, at a place where there is one."""
    return Segment.model_construct(
        id=body.id,
        kind=body.kind,
        role=ROLES[body.kind],
        content=body.content,
        text=body.text,
        turn=turn,
        tool=body.name,
        call_id=body.call_id,
        arguments=None if body.arguments is None else frozen(body.arguments),
        error=body.error,
        num_tokens=len(body.ids),
        frame_tokens=0 if place is None else len(place.gap_ids),
        origin=body.origin,
        replaces=body.replaces,
        stale=False if place is None else place.stale,
        source=body.source,
        meta=frozen(body.meta),
        anchored=anchored,
    )


def frame(place: Place, turn: int | None) -> Segment:
    """The gap before a place, for `path(frames=True)`."""
    return Segment.model_construct(
        id=place.body.id + FRAME_SUFFIX,
        kind="frame",
        role=ROLES[place.kind],
        content=place.gap_text,
        text=place.gap_text,
        turn=turn,
        tool=None,
        call_id=None,
        arguments=None,
        error=False,
        num_tokens=len(place.gap_ids),
        frame_tokens=0,
        origin=place.body.id + FRAME_SUFFIX,
        replaces=None,
        stale=False,
        source="caller",
        meta=frozen({}),
        anchored=False,
    )


def segments(
    path: Path,
    indices: Iterable[int] | None = None,
    *,
    anchors: Container[int] = (),
    known: Mapping[str, Segment] = MappingProxyType({}),
) -> list[Segment]:
    """Snapshots of the named places, or of all. `anchors`: positions with a restorable state.
    `known`: earlier snapshots by id, used again where nothing about their place changed."""
    chosen = range(len(path.places)) if indices is None else indices
    places, turns, ends = path.places, path.turns, path.ends
    found = []
    for i in chosen:
        place, turn, anchored = places[i], turns[i], ends[i] in anchors
        old = known.get(place.body.id)
        if old is None or (old.turn, old.frame_tokens, old.stale, old.anchored, len(old.meta)) != (
            turn,
            len(place.gap_ids),
            place.stale,
            anchored,
            len(place.body.meta),  # a segment does not change, but a purge may take entries
        ):
            old = segment(place.body, place=place, turn=turn, anchored=anchored)
        found.append(old)
    return found


def turns(found: Sequence[Segment]) -> list[Turn]:
    """The segments by turn; what precedes the first user message belongs to none."""
    groups: dict[int, list[Segment]] = {}
    for item in found:
        if item.turn is not None:
            groups.setdefault(item.turn, []).append(item)
    return [Turn(index=i, segments=tuple(group)) for i, group in groups.items()]


def changes(before: Path, after: Path) -> tuple[list[Segment], list[Segment]]:
    """Segments that are only on `after`, and those only on `before`."""
    added = [i for i, place in enumerate(after.places) if place.body.id not in before.index]
    removed = [i for i, place in enumerate(before.places) if place.body.id not in after.index]
    return segments(after, added), segments(before, removed)


def price(model: Model, path: Path, ids: Sequence[int]) -> ReusePlan:
    """What forwarding `ids` (the path, perhaps with an opener) would cost."""
    return priced(model, path, ids)[0]


def priced(model: Model, path: Path, ids: Sequence[int]) -> tuple[ReusePlan, PathPlan | None]:
    """The same, with the plan as the model made it; None where it made none."""
    if not ids:
        nothing = ReusePlan(
            input_tokens=0,
            reused_tokens=0,
            prefill_tokens=0,
            source="none",
            anchor=None,
            miss=None,
            predicted_s=0.0,
        )
        return nothing, None
    try:
        made = model.plan(ids)
    except ContextOverflow:
        limit, total = model.context_limit, len(ids)
        overflow = ReusePlan(
            input_tokens=total,
            reused_tokens=0,
            prefill_tokens=total,
            source="none",
            anchor=None,
            miss=_miss(path, limit, "context_overflow", total - limit),
            predicted_s=math.inf,
        )
        return overflow, None
    return reuse_plan(made, path), made


def reuse_plan(plan: PathPlan, path: Path) -> ReusePlan:
    """A plan in token positions, with the segment of its miss named."""
    source: Literal["ram", "disk", "none"] = plan.source
    miss = plan.miss
    return ReusePlan(
        input_tokens=plan.input_tokens,
        reused_tokens=plan.reused_tokens,
        prefill_tokens=plan.prefill_tokens,
        source=source,
        anchor=plan.anchor,
        miss=None if miss is None else _miss(path, miss.position, miss.cause, miss.tokens),
        predicted_s=plan.predicted_s,
    )


def _miss(path: Path, position: int, cause: str, tokens: int) -> Miss:
    index = path.at(position)
    named = None if index is None else segments(path, [index])[0]
    return Miss(position=position, segment=named, cause=cause, tokens=tokens)


def diff(here: Path, there: Path) -> Diff:
    """How `there` differs from `here`."""
    common = 0
    for mine, other in zip(here.places, there.places, strict=False):
        if mine.body.id != other.body.id or mine.gap_ids != other.gap_ids:
            break
        common += 1
    added, removed = changes(here, there)
    versions = {item.origin: item for item in added}
    replaced = tuple((item, versions[item.origin]) for item in removed if item.origin in versions)
    paired = {item.id for pair in replaced for item in pair}
    return Diff(
        common_segments=common,
        common_tokens=here.ends[common - 1] if common else 0,
        added=tuple(item for item in added if item.id not in paired),
        removed=tuple(item for item in removed if item.id not in paired),
        replaced=replaced,
    )
