# SPDX-License-Identifier: Apache-2.0
"""Finding segments by id: on the path, or anywhere in the session; and why one is not there."""

from collections.abc import Sequence
from dataclasses import replace

from freetoken_storage.errors import InvalidName
from freetoken_storage.records import SegmentRecord

from ..errors import (
    FrameNotEditable,
    InvalidEdit,
    MissingReason,
    SegmentNotFound,
    SegmentReplaced,
)
from ..segments import Segment
from . import codec, views
from .branch import Branch
from .handle import Context, Handle
from .path import Body, Path

_REMEDIES: dict[MissingReason, str] = {
    "deleted": "undo() the deletion, or look at versions() and tree()",
    "other_branch": "open_branch() one that holds it",
    "purged": "nothing can bring it back",
    "unknown": "use an id that this session handed out",
}


def id_of(segment: Segment | str) -> str:
    """The id of a content segment. FrameNotEditable for a frame."""
    if not isinstance(segment, str | Segment):
        raise InvalidEdit("a segment is named by itself or by its id", value=type(segment).__name__)
    name = segment if isinstance(segment, str) else segment.id
    if name.endswith(views.FRAME_SUFFIX):
        raise FrameNotEditable(
            "a frame is not a position", value=name, remedy="name the segment behind it"
        )
    return name


def place_of(handle: Handle, path: Path, segment: Segment | str) -> int:
    """Where a segment stands on the path. SegmentReplaced, SegmentNotFound, FrameNotEditable."""
    name = id_of(segment)
    index = path.index.get(name)
    if index is not None:
        return index
    body = body_of(handle.context, name) or handle.dropped(name)
    if name in path.origins or (body is not None and body.origin in path.origins):
        origin = name if body is None else body.origin
        current = views.segments(path, [path.origins[origin]])[0]
        raise SegmentReplaced(
            "the segment was replaced on this path", segment=name, current=current
        )
    raise missing(handle, name, body)


def call_of(handle: Handle, path: Path, call: Segment | str) -> int:
    """Where a call stands, named by its segment or by its call id."""
    if isinstance(call, str) and call not in path.index:
        for index in range(len(path.places) - 1, -1, -1):
            place = path.places[index]
            if place.kind == "tool_call" and place.call_id == call:
                return index
    return place_of(handle, path, call)


def body_of(context: Context, name: str) -> Body | None:
    """A stored segment of the session, wherever it is used; None if unknown or purged."""
    known = context.bodies.get(name)
    if known is not None:
        return known
    record = _stored(context, name)
    return None if record is None else codec.unpack_segment(record.body)


def _stored(context: Context, name: str) -> SegmentRecord | None:
    try:
        return context.sessions.segments(context.name, [name]).get(name)
    except InvalidName:  # not even the form of an id
        return None


def known_body(handle: Handle, segment: Segment | str) -> Body:
    """Any segment of the session, also one that a batch of this handle made and removed. Of an
    origin that was never stored, as a batch replaced it, the oldest version. SegmentNotFound if it
    is unknown or purged."""
    name = id_of(segment)
    on_path = handle.path.index.get(name)
    if on_path is not None:
        return handle.path.places[on_path].body
    body = body_of(handle.context, name) or handle.dropped(name)
    if body is None and _stored(handle.context, name) is None:
        line = (other for other in all_bodies(handle.context) if other.origin == name)
        body = next(line, None)
    if body is None:
        raise missing(handle, name, None)
    return body


def nodes_by_segment(context: Context) -> dict[str, list[int]]:
    """Segment id -> the nodes that hold it, oldest first."""
    found: dict[str, list[int]] = {}
    for node in context.sessions.nodes(context.name):
        found.setdefault(node.segment_id, []).append(node.id)
    return found


def all_bodies(context: Context) -> list[Body]:
    """Every stored segment of the session that was not purged."""
    unpacked = (codec.unpack_segment(r.body) for r in context.sessions.all_segments(context.name))
    return [body for body in unpacked if body is not None]


def heads_holding(context: Context, nodes: Sequence[int]) -> tuple[str, ...]:
    """Branches whose path goes through one of these nodes."""
    parents = {node.id: node.parent for node in context.sessions.nodes(context.name)}
    wanted = set(nodes)
    return tuple(
        record.name
        for record in context.sessions.branches(context.name)
        if wanted & ancestors(parents, record.head)
    )


def ancestors(parents: dict[int, int], node: int) -> set[int]:
    """A node and everything above it."""
    seen: set[int] = set()
    while node in parents:
        seen.add(node)
        node = parents[node]
    return seen


def missing(handle: Handle, name: str, body: Body | None) -> SegmentNotFound:
    """The error that says why a segment is not on the path."""
    reason = _reason(handle, name, body)
    said = {
        "deleted": "the segment was deleted on this branch",
        "other_branch": "the segment is on another branch",
        "purged": "the segment was purged",
        "unknown": "the session has no such segment",
    }
    return SegmentNotFound(said[reason], segment=name, reason=reason, remedy=_REMEDIES[reason])


def _reason(handle: Handle, name: str, body: Body | None) -> MissingReason:
    context = handle.context
    if body is None:
        return "unknown" if _stored(context, name) is None else "purged"
    nodes = nodes_by_segment(context).get(name, [])
    if _was_on(handle.branch, context, nodes) or not heads_holding(context, nodes):
        return "deleted"
    return "other_branch"


def _was_on(branch: Branch, context: Context, nodes: Sequence[int]) -> bool:
    """Whether an earlier head of this branch, as its log knows them, held one of the nodes."""
    parents = {node.id: node.parent for node in context.sessions.nodes(context.name)}
    wanted = set(nodes)
    return any(wanted & ancestors(parents, head.node) for head in branch.past_heads())


def path_to(handle: Handle, path: Path, body: Body) -> Path:
    """The path up to a segment: on this one, else to the newest node that holds it; for what a
    batch passed through, on this one in the place of its version here. SegmentNotFound."""
    if body.id in path.index:
        return path.cut(path.index[body.id] + 1)
    nodes = nodes_by_segment(handle.context).get(body.id)
    if nodes:
        return handle.branch.path_to(nodes[-1])
    if body.origin not in path.origins:
        raise missing(handle, body.id, body)
    cut = path.cut(path.origins[body.origin] + 1)
    return Path((*cut.places[:-1], replace(cut.places[-1], body=body, node=None)), cut.tail)
