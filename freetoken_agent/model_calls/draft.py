# SPDX-License-Identifier: Apache-2.0
"""What a generation writes through: the branch is busy while a draft exists, and every segment that
`write` returned is durable. All of them together are one undo step."""

from collections.abc import Mapping
from functools import cached_property
from types import TracebackType
from typing import Any, Literal, Self

from freetoken_storage.errors import BranchNotFound, SessionConflict

from ..branches import views
from ..branches.branch import Branch, StepGroup
from ..branches.codec import BranchBody, pack_branch
from ..branches.forks import create_named
from ..branches.handle import Handle, why_closed
from ..branches.pairing import open_calls
from ..branches.path import Body, Path, Place, Tail
from ..branches.prices import Pricing
from ..chat_templates.dialect import parse_tools
from ..chat_templates.layout import Layout, ids_before, new_call_id, new_segment_id
from ..errors import GenerationConflict, NothingToGenerate
from ..grammar import Place as Beginning
from ..model import Model, PathPlan, PathUsage
from ..parsing import SegmentDone
from ..segments import ReusePlan, Segment, Usage
from ..tooling import json_values
from ..tooling.coercion import coerce


class Draft:
    """The assistant turn that a model is writing. Belongs to one generation; not thread-safe."""

    def __init__(
        self, handle: Handle, *, thinking: bool | None = None, group: StepGroup | None = None
    ) -> None:
        """`group`: the undo step that it is part of. SessionBusy, SessionReadOnly,
        NothingToGenerate, TemplateUnsupported."""
        self._handle = handle
        with handle.lock:
            self.model: Model
            self._layout: Layout
            self.model, self._layout = handle.writable()
            handle.outside_batch("generating")
            path = handle.branch.path
            reason = why_closed(path)
            if reason is not None:
                raise NothingToGenerate(
                    f"the model has nothing to write: {reason}",
                    value=None if path.last is None else path.last.body.id,
                    remedy="append a user message or the results, or rewind into the turn",
                )
            opener = self._layout.opener(path, thinking)
            handle.context.busy.enter(handle.context.name, handle.branch.name)
        self._branch = handle.branch
        self._head = handle.branch.head
        self._busy = True
        self._group = group or StepGroup("generate")
        self._base = path
        self._path = path
        self._joins = path.tail != "closed"
        self._opener: tuple[int, ...] = opener.ids
        self.kind: Literal["thinking", "text"] = opener.kind
        self.ids: tuple[int, ...] = (*path.ids, *opener.ids)
        self._pricing = Pricing(self.model, path, self.ids, handle.earlier())
        self.conflict: GenerationConflict | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    @property
    def session(self) -> str:
        return self._handle.context.name

    @property
    def branch(self) -> str:
        """The branch that is written: another one than it began on after a conflict."""
        return self._branch.name

    @cached_property
    def tools(self) -> list[dict[str, Any]]:
        """The tool schemas that the path offers."""
        found = [place.body.content for place in self._base.places if place.kind == "tools"]
        return parse_tools(found[0]) if found else []

    @property
    def place(self) -> Beginning:
        """Where the model begins to write: at the start of its turn or behind a thought, inside a
        thought, or in a text that goes on."""
        if self.kind == "thinking":
            return "thinking"
        last = self._base.last
        goes_on = self._joins and last is not None and last.kind == "text"
        return "text" if goes_on else "start"

    @property
    def anchors(self) -> tuple[int, ...]:
        """Where to keep states of `ids` for later edits."""
        return self._base.anchors

    @property
    def lasting_anchors(self) -> tuple[int, ...]:
        """Those that other paths will go on from."""
        return self._base.lasting_anchors

    def plan(self) -> tuple[ReusePlan, PathPlan | None]:
        """The price of `ids`, and the model's own form of it, if it can forward them."""
        return self._pricing.plans()

    def paid(self, usage: PathUsage, announced: ReusePlan, thinking_tokens: int) -> Usage:
        """The model's counts, with the reason for what it forwarded."""
        return self._pricing.paid(usage, announced, thinking_tokens=thinking_tokens)

    def _new_call_id(self) -> str:
        """9 alphanumerics that no call of the path has."""
        taken = {place.call_id for place in self._path.places}
        while (fresh := new_call_id()) in taken:
            pass
        return fresh

    def write(
        self, done: SegmentDone, *, tail: Tail = "closed", meta: Mapping[str, Any] | None = None
    ) -> Segment:
        """Store a finished segment exactly as it was sampled; the opener goes before its gap.

        `tail`: how the turn stands behind it. After a conflict with another writer it goes to a
        branch of its own, see `conflict`.
        """
        gap = (*self._opener, *done.gap_ids)
        before = ids_before(self._path.places)
        fresh = new_segment_id()
        is_call = done.kind == "tool_call"
        arguments, repaired = self._arguments(done)
        note = "repaired" if repaired else done.note
        body = Body(
            id=fresh,
            kind=done.kind,
            content="" if is_call else done.text,
            text=self._layout.text_of(done.ids, (*before, *gap)),
            ids=tuple(done.ids),
            origin=fresh,
            name=done.name,
            arguments=arguments,
            call_id=self._call_id(done.call_id) if is_call else None,
            source="model",
            meta={**(meta or {}), **({note: True} if note else {})},
        )
        place = Place(body, gap, self._layout.text_of(gap, before), joins=self._joins)
        self._store(self._path.extended([place], tail))
        self._opener, self._joins = (), True
        return views.segments(self._path, [len(self._path.places) - 1])[0]

    def _arguments(self, done: SegmentDone) -> tuple[dict[str, Any] | None, bool]:
        """The arguments as the tool's schema wants them, as far as that is certain, and whether
        what was written says something else. Ids are never touched."""
        if done.arguments is None:
            return None, False
        written = dict(done.arguments)
        schema = self._parameters(done.name)
        if schema is None:
            return written, False
        if done.texts is not None:
            return dict(coerce(done.texts, schema, schema)), False
        made = coerce(written, schema, schema)
        return dict(made), not json_values.equal(made, written)

    def _parameters(self, name: str | None) -> Mapping[str, Any] | None:
        """The schema of a tool's arguments."""
        for tool in self.tools:
            function = tool.get("function", tool)
            schema = function.get("parameters")
            if function.get("name") == name and isinstance(schema, Mapping):
                return schema
        return None

    def _call_id(self, written: str | None) -> str:
        """The id the model wrote, unless an open call has it: results could not tell them apart."""
        places = self._path.places
        if written and all(places[i].call_id != written for i in open_calls(places)):
            return written
        return self._new_call_id()

    def finish(self) -> None:
        """Release the branch. Raises `conflict` if there was one."""
        self.release()
        if self.conflict is not None:
            raise self.conflict

    def release(self) -> None:
        """Release the branch, whatever happened. Does nothing the second time."""
        if self._busy:
            self._busy = False
            context = self._handle.context
            context.busy.leave(context.name, self._handle.branch.name)

    def _store(self, path: Path) -> None:
        assert self._busy, "the draft is finished"
        with self._handle.lock:
            try:
                self._check_head()
                self._branch.commit(path, self._group.label, group=self._group)
            except (SessionConflict, BranchNotFound) as error:
                self._divert(error)
                self._branch.commit(path, self._group.label, group=self._group)
            self._path, self._head = self._branch.path, self._branch.head

    def _check_head(self) -> None:
        """The handle may have been reloaded meanwhile, and then knows the newest version."""
        if self._branch.head != self._head:
            raise SessionConflict(f"branch {self._branch.name!r} was moved by another writer")

    def _divert(self, error: SessionConflict | BranchNotFound) -> None:
        """Go on on a new branch that starts where this generation's last commit ended."""
        context, path = self._handle.context, self._path
        record = create_named(
            context.sessions,
            context.name,
            "conflict",
            head=self._head.node,
            body=pack_branch(BranchBody(path.tail)),
        )
        self._branch = Branch(context.sessions, context.name, record, context.bodies)
        self._group = StepGroup(self._group.label)
        self.conflict = GenerationConflict(
            f"branch {self._handle.branch.name!r} moved during a generation, "
            "which was saved on a branch of its own",
            branch=record.name,
        )
        self.conflict.__cause__ = error
