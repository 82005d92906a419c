# SPDX-License-Identifier: Apache-2.0
"""From stored places to the public snapshots: segments, turns, diffs. Reads only."""

from collections.abc import Container, Iterable, Mapping, Sequence
from types import MappingProxyType

from ..segments import ROLES, Diff, Segment, Turn
from ..tooling.json_values import frozen
from .path import Body, Path, Place

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
