# SPDX-License-Identifier: Apache-2.0
"""The reading half of a session. Nothing here needs a model, except prices."""

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from freetoken_storage.errors import StoreDamaged

from ..errors import InvalidEdit
from ..messages import MessageFormat, emit_messages
from ..model import Model, ModelClosed
from ..model_calls.generate_options import GenerateKwargs, GenerateOptions
from ..segments import BranchInfo, Diff, ReusePlan, Segment, Tree, TreeNode, Turn
from ..tooling.json_values import thawed
from . import codec, lookups, views
from .binding import Binding
from .branch import Branch
from .handle import Context, Handle, plan_of
from .path import Path


class SessionReader:
    """What every handle can do, also a read-only one. Readers never wait for a writer."""

    def __init__(self, context: Context, branch: Branch) -> None:
        self._handle = Handle(context, branch)
        self._cached: tuple[Path, Sequence[int], list[Segment]] | None = None

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"{kind}({self.name!r}, branch={self.branch!r}, version={self.version})"

    @property
    def name(self) -> str:
        """The session's name in its store."""
        return self._handle.context.name

    @property
    def branch(self) -> str:
        """The branch this handle is on."""
        return self._handle.branch.name

    @property
    def version(self) -> int:
        """Grows by one with each commit on the branch, as far as this handle knows."""
        return self._handle.branch.version

    @property
    def meta(self) -> Mapping[str, Any]:
        """What the creator attached to the session; a copy."""
        return dict(thawed(self._handle.context.body.meta))

    @property
    def model(self) -> Model:
        """The model it was opened with. SessionReadOnly without one that fits."""
        return self._handle.bound()[0]

    @property
    def binding(self) -> Binding:
        """How the session and the model it was opened with fit: bound, cold or read-only."""
        return self._handle.context.binding

    @property
    def history_thinking(self) -> str:
        """`keep` or `template`, as fixed at creation."""
        return self._handle.context.body.history_thinking

    def path(self, frames: bool = False) -> list[Segment]:
        """The segments from the root to the head; with `frames` also the gaps before them."""
        path = self._handle.path
        found = self._segments(path)
        if not frames:
            return list(found)
        out: list[Segment] = []
        for place, segment in zip(path.places, found, strict=True):
            if place.gap_ids:
                out.append(views.frame(place, segment.turn))
            out.append(segment)
        return out

    def turns(self) -> list[Turn]:
        """The path by turns. What precedes the first user message is in none."""
        return views.turns(self.path())

    def find(
        self,
        *,
        kind: str | None = None,
        tool: str | None = None,
        origin: Segment | str | None = None,
    ) -> list[Segment]:
        """Segments of the path that match all of what is given. `assistant` means text."""
        line = None if origin is None else lookups.known_body(self._handle, origin).origin
        return [
            segment
            for segment in self.path()
            if kind in (None, segment.kind) or views.kind_of(kind or "") == segment.kind
            if tool in (None, segment.tool)
            if line in (None, segment.origin)
        ]

    def versions(self, segment: Segment | str) -> list[Segment]:
        """Every stored version of a segment, oldest first, on whatever branch."""
        origin = lookups.known_body(self._handle, segment).origin
        context, path = self._handle.context, self._handle.path
        nodes = lookups.nodes_by_segment(context)
        line = [body for body in lookups.all_bodies(context) if body.origin == origin]
        line.sort(key=lambda body: nodes.get(body.id, [0])[0])
        on_path = {s.id: s for s in self._segments(path) if s.origin == origin}
        stored = {body.id for body in line}
        found = [on_path.get(body.id) or views.segment(body) for body in line]
        return found + [s for s in on_path.values() if s.id not in stored]

    def tree(self) -> Tree:
        """Every place that is still stored. StoreDamaged if one of its segments is not."""
        context = self._handle.context
        heads: dict[int, list[str]] = {}
        for record in context.sessions.branches(self.name):
            heads.setdefault(record.head, []).append(record.name)
        stored = list(context.sessions.nodes(self.name))  # before the segments: none is missing
        bodies = {body.id: body for body in lookups.all_bodies(context)}
        on_path = {place.node for place in self._handle.branch.path.places}
        index: dict[int, int] = {}
        turns: dict[int, int | None] = {}
        nodes: list[TreeNode] = []
        for node in stored:
            body = bodies.get(node.segment_id)
            if body is None:
                raise StoreDamaged(
                    f"a segment of session {self.name!r} is missing", value=node.segment_id
                )
            place = codec.unpack_node(node.body, body, node.id)
            turn = turns.get(node.parent)
            turns[node.id] = (-1 if turn is None else turn) + 1 if body.kind == "user" else turn
            index[node.id] = len(nodes)
            nodes.append(
                TreeNode(
                    segment=views.segment(body, place=place, turn=turns[node.id]),
                    parent=index.get(node.parent),
                    branches=tuple(heads.get(node.id, ())),
                    on_path=node.id in on_path,
                )
            )
        return Tree(nodes=tuple(nodes), empty_branches=tuple(heads.get(0, ())))

    def branches(self) -> list[BranchInfo]:
        """The session's branches as stored now, by name."""
        context = self._handle.context
        segments = {node.id: node.segment_id for node in context.sessions.nodes(self.name)}
        return [
            BranchInfo(
                name=record.name,
                version=record.version,
                num_segments=record.node_count,
                head=segments.get(record.head),
                current=record.name == self.branch,
            )
            for record in context.sessions.branches(self.name)
        ]

    def ids(self) -> list[int]:
        """The token path, without the generation opener."""
        return list(self._handle.path.ids)

    def render(self) -> str:
        """The text of `ids()`. Without a model it is put together from the stored texts, in which
        a character that two segments share is shown as U+FFFD."""
        path, layout = self._handle.path, self._handle.context.layout
        if layout is not None:
            return layout.tokenizer.decode(path.ids)
        return "".join(place.gap_text + place.body.text for place in path.places)

    def to_messages(self, format: MessageFormat) -> list[dict[str, Any]]:
        """The path as an `openai` or `anthropic` message list."""
        return emit_messages(self._handle.path.items(), format)

    def plan(self, **options: Unpack[GenerateKwargs]) -> ReusePlan:
        """What `generate` with these options would cost now; at a closed head, what `warm` would.
        Never waits for a forward pass. SessionReadOnly without a model."""
        model, layout = self._handle.bound()
        parsed = GenerateOptions.parse(options)
        handle = self._handle
        return plan_of(model, layout, handle.path, handle.earlier(), parsed.thinking)

    def diff(self, other: "SessionReader | Segment | str") -> Diff:
        """How another path differs from this one. `other`: a handle on this session, the name of a
        branch, or a segment: then the path up to it, against this one up to its version here."""
        path, context = self._handle.path, self._handle.context
        if isinstance(other, SessionReader):
            if other.name != self.name:
                raise InvalidEdit("the handles are on different sessions", value=other.name)
            return views.diff(path, other._handle.path)
        if isinstance(other, str):
            names = {record.name for record in context.sessions.branches(self.name)}
            if other in names:
                branch = Branch.load(context.sessions, self.name, other, context.bodies)
                return views.diff(path, branch.path)
        body = lookups.known_body(self._handle, other)
        there = lookups.path_to(self._handle, path, body)
        if body.origin in path.origins:
            path = path.cut(path.origins[body.origin] + 1)
        return views.diff(path, there)

    def reload(self) -> None:
        """Read the branch again as it is stored, after a SessionConflict or to see what another
        process wrote."""
        with self._handle.lock:
            self._handle.outside_batch("reload()")
            self._handle.branch.reload()

    def _segments(self, path: Path) -> list[Segment]:
        """Snapshots of a path, cached while neither the path nor its anchors change."""
        anchors = self._anchors(path)
        cached = self._cached
        if cached is not None and cached[0] is path and cached[1] == anchors:
            return cached[2]
        known = () if cached is None else cached[2]
        found = views.segments(path, anchors=anchors, known={s.id: s for s in known})
        self._cached = (path, anchors, found)
        return found

    def _anchors(self, path: Path) -> Sequence[int]:
        context = self._handle.context
        if context.model is None or context.layout is None or not path.ids:
            return ()
        try:
            return context.model.anchors(path.ids[: context.model.context_limit])
        except ModelClosed:  # the session outlives its model; no state can be restored
            return ()
