# SPDX-License-Identifier: Apache-2.0
"""Session: a handle on one branch of a stored conversation.

Structural edits are synchronous and durable when they return; each is one commit and one undo step
(`batch()` makes several of them one). Generating, warming and purging are async.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Unpack, cast

from freetoken_storage.records import MAIN

from .branches import edits, forks, lookups, purging
from .branches.branch import Branch, StepGroup
from .branches.handle import Batch, describe, plan_of
from .branches.path import New, Path
from .branches.session_reader import SessionReader
from .branches.views import kind_of
from .chat_templates.items import Kind
from .chat_templates.layout import Layout, new_call_id
from .chat_templates.rerendering import rerender
from .errors import InvalidEdit, PairingError
from .generation import Generation, generate_sync, reply
from .messages import MessageFormat, parse_messages
from .model import Model
from .model_calls.draft import Draft
from .model_calls.generate_options import GenerateKwargs, GenerateOptions
from .model_calls.model_step import ModelStep
from .model_calls.warming import warm
from .runs.changes import Change, rewritten
from .runs.run_writer import RunWriter
from .segments import Content, Edit, PurgeReport, Reply, Segment, Usage, as_text
from .tooling.json_values import plain
from .tooling.tool_schemas import ToolLike, tools_text

Rewrite = Callable[[Layout, Path], Path]


class Session(SessionReader):
    """A handle on one branch, made by `Store.create`, `Store.open`, `open_branch` and `fork`. Any
    thread may use it; writers take turns. It stays valid until its store is closed.

    A segment that is not on the path: SegmentReplaced or SegmentNotFound. Edits also: SessionBusy,
    SessionConflict, SessionReadOnly, InvalidEdit, PairingError, TemplateUnsupported."""

    def append(
        self,
        kind: str,
        content: Content,
        *,
        open: bool = False,
        meta: Mapping[str, Any] | None = None,
    ) -> Segment:
        """Add a content: system, user, assistant (= text) or thinking. `open` leaves it unfinished,
        so that `generate` continues it. Open calls get their stored results, or are interrupted."""
        new = _new(kind, content, meta)
        if open and new.kind not in ("text", "thinking"):
            raise InvalidEdit("only an assistant's text or thought can be open", value=kind)
        tail = edits.tail_after(new.kind, open=open)

        def rewrite(layout: Layout, path: Path) -> Path:
            if new.kind == "system" and edits.starts_preamble(path):
                return edits.set_preamble(layout, path, "system", new.text, meta=new.meta)
            return edits.append(layout, path, [new], tail=tail, closing=self._handle.closing())

        return self._handle.write(f"append {new.kind}", rewrite)

    def append_call(
        self, name: str, arguments: Mapping[str, Any], *, id: str | None = None
    ) -> Segment:
        """Add a tool call, parallel to one directly before it. Its id is generated if not given."""
        return self._handle.write(
            "append_call",
            lambda layout, path: edits.append(layout, path, [_call(path, name, arguments, id)]),
        )

    def append_result(
        self, call: Segment | str, content: Content, *, error: bool = False
    ) -> Segment:
        """Answer an open call (a segment, its id or its call id). Results keep call order."""
        text = as_text(content)

        def rewrite(layout: Layout, path: Path) -> Path:
            index = lookups.call_of(self._handle, path, call)
            return edits.append_result(layout, path, index, text, error=error)

        return self._handle.write("append_result", rewrite)

    def append_messages(
        self, msgs: Sequence[Mapping[str, Any]], format: MessageFormat, *, dry_run: bool = False
    ) -> Edit:
        """Add a message list, laid out in one run. Its system message and tools must come first."""
        items = parse_messages(msgs, format)
        return self._edit(
            "append_messages",
            lambda layout, path: edits.append_items(layout, path, items, self._handle.closing()),
            dry_run,
        )

    def sync_messages(
        self, msgs: Sequence[Mapping[str, Any]], format: MessageFormat, *, dry_run: bool = False
    ) -> Edit:
        """Make the path say what the list says, with one edit behind the longest history that
        matches. What matches keeps its stored ids, whatever spelling the list resends."""
        items = parse_messages(msgs, format)
        return self._edit(
            "sync_messages",
            lambda layout, path: edits.sync_items(layout, path, items, self._handle.closing()),
            dry_run,
        )

    def set_system(self, content: Content | None, *, dry_run: bool = False) -> Edit:
        """Replace, add or (None) remove the system text of the preamble."""
        text = None if content is None else as_text(content)
        return self._preamble("system", text, dry_run)

    def set_tools(self, tools: Sequence[ToolLike], *, dry_run: bool = False) -> Edit:
        """Replace the tools of the preamble; an empty list removes them."""
        return self._preamble("tools", tools_text(tools), dry_run)

    def replace(
        self,
        segment: Segment | str,
        content: Content | None = None,
        *,
        arguments: Mapping[str, Any] | None = None,
        dry_run: bool = False,
    ) -> Edit:
        """Give a segment another content, or a call other arguments (its result becomes stale).
        Equal content is no edit."""
        if (content is None) == (arguments is None):
            raise InvalidEdit("give either the new content or the new arguments")
        text = None if content is None else as_text(content)

        def rewrite(layout: Layout, path: Path) -> Path:
            index = lookups.place_of(self._handle, path, segment)
            if path.places[index].kind == "tools":
                raise InvalidEdit("a tool list is not text", remedy="use set_tools()")
            if arguments is not None:
                return edits.replace_arguments(layout, path, index, plain(arguments))
            assert text is not None
            return edits.replace_text(layout, path, index, text)

        return self._edit("replace", rewrite, dry_run)

    def insert(
        self,
        *,
        kind: str,
        content: Content,
        after: Segment | str | None = None,
        before: Segment | str | None = None,
        dry_run: bool = False,
    ) -> Edit:
        """Put a content into the path. PairingError between a call and its result."""
        new = _new(kind, content, None)
        return self._edit(
            "insert",
            lambda layout, path: edits.insert(
                layout, path, self._position(path, after=after, before=before), new
            ),
            dry_run,
        )

    def insert_call(
        self,
        name: str,
        arguments: Mapping[str, Any],
        result: Content,
        *,
        after: Segment | str | None = None,
        before: Segment | str | None = None,
        dry_run: bool = False,
    ) -> Edit:
        """Put a call with its result into the path."""
        text = as_text(result)

        def rewrite(layout: Layout, path: Path) -> Path:
            position = self._position(path, after=after, before=before)
            return edits.insert_call(
                layout, path, position, _call(path, name, arguments, None), text
            )

        return self._edit("insert_call", rewrite, dry_run)

    def delete(self, *segments: Segment | str, dry_run: bool = False) -> Edit:
        """Remove segments, in one step; of a call and its result both."""
        return self._edit(
            "delete",
            lambda layout, path: edits.delete(
                layout, path, {lookups.place_of(self._handle, path, s) for s in segments}
            ),
            dry_run,
        )

    def drop(self, *, kind: str, keep_turns: int = 0, dry_run: bool = False) -> Edit:
        """Remove all segments of a kind, except those of the last `keep_turns` turns."""
        return self._edit(
            "drop",
            lambda layout, path: edits.drop(layout, path, kind_of(kind), keep_turns),
            dry_run,
        )

    def rewind(
        self,
        *,
        turns: int | None = None,
        to: Segment | str | None = None,
        before: Segment | str | None = None,
        dry_run: bool = False,
    ) -> Edit:
        """Cut the path: the last `turns` turns, behind `to`, or before `before`. Calls open there
        count as new: neither approved nor started."""
        if [turns, to, before].count(None) != 2:
            raise InvalidEdit("give exactly one of turns=, to= and before=")

        def rewrite(layout: Layout, path: Path) -> Path:
            if turns is not None:
                return edits.cut(layout, path, edits.turns_start(path, turns))
            return edits.cut(layout, path, self._position(path, after=to, before=before))

        made = self._edit("rewind", rewrite, dry_run)
        return made if dry_run else self._handle.forgetting_calls(made)

    def apply_changes(
        self,
        changes: Sequence[Change],
        *,
        label: str = "apply_changes",
        thinking: bool | None = None,
        dry_run: bool = False,
    ) -> Edit:
        """Make several changes that are given as data, in one edit. `thinking`: as the next
        generation will ask, for the price."""
        rewrite = partial(rewritten, self._handle, changes=changes)
        return self._handle.edit(label, rewrite, thinking=thinking, dry_run=dry_run)

    def undo(self, n: int = 1, *, dry_run: bool = False) -> Edit:
        """Take back the last `n` steps of this branch. NothingToUndo changes nothing."""
        return self._move(-edits.whole("n", n, least=1), dry_run)

    def redo(self, n: int = 1, *, dry_run: bool = False) -> Edit:
        """Do `n` undone steps again. NothingToRedo changes nothing."""
        return self._move(edits.whole("n", n, least=1), dry_run)

    def batch(self, label: str = "") -> AbstractContextManager[Batch]:
        """`with s.batch():` makes the edits inside one commit and one undo step. They are visible
        to this handle at once; an exception drops them all."""
        return self._handle.batch(label)

    def fork(
        self,
        *,
        at: Segment | str | None = None,
        before: Segment | str | None = None,
        name: str | None = None,
    ) -> "Session":
        """A new branch from the head, or from behind `at`, or from before `before`. Nothing is
        copied. Legal during a generation, and at an open call."""
        handle = self._handle
        _, layout = handle.bound()
        handle.outside_batch("fork()")
        path = handle.branch.path
        if at is not None or before is not None:
            path = edits.cut(layout, path, self._position(path, after=at, before=before))
        return Session(handle.context, forks.fork(handle.context, path, name))

    def open_branch(self, name: str) -> "Session":
        """A handle on another branch. BranchNotFound."""
        context = self._handle.context
        return Session(context, Branch.load(context.sessions, self.name, name, context.bodies))

    def delete_branch(self, name: str) -> None:
        """Forget a branch and its undo log; its segments stay until a purge. `main` stays as long
        as the session does."""
        self._handle.bound()
        if name == self.branch:
            raise InvalidEdit("a handle cannot delete its own branch", value=name)
        self._handle.context.busy.check(self.name, name)
        if name == MAIN:
            raise InvalidEdit(
                "the first branch cannot be deleted", value=name, remedy="rewind() it"
            )
        self._handle.context.sessions.delete_branch(self.name, name)

    def rerender(self, model: Model, name: str) -> "Session":
        """Copy the path into a new session, laid out by another model's template and tokenizer.
        Every segment gets a new id."""
        return rerender(self._handle, model, name)

    def pin(self, segment: Segment | str) -> None:
        """Protect the model state at the end of a segment from eviction."""
        lookups.place_of(self._handle, self._handle.path, segment)
        self._handle.pin(lookups.id_of(segment), pinned=True)

    def unpin(self, segment: Segment | str) -> None:
        """Let go of a pinned state."""
        self._handle.pin(lookups.id_of(segment), pinned=False)

    def restore_pins(self) -> None:
        """Tell the model again what this branch protects, after an opening."""
        self._handle.refresh_pins()

    async def warm(self) -> Usage:
        """Bring the head's state up to date now, the last row included."""
        return await warm(self._handle)

    async def purge(self, segment: Segment | str) -> PurgeReport:
        """Remove a segment for good: every node below it, every state at or after it, every undo
        step that mentions them; the bytes leave the files. SegmentInUse while a path holds it."""
        return await purging.purge(self._handle, segment)

    def generate(self, **options: Unpack[GenerateKwargs]) -> Generation:
        """Let the model write; events come as they are pulled."""
        return Generation(ModelStep(self, GenerateOptions.parse(options)))

    async def reply(self, **options: Unpack[GenerateKwargs]) -> Reply:
        """Generate to the end."""
        return await reply(self, **options)

    def generate_sync(self, **options: Unpack[GenerateKwargs]) -> Reply:
        """Generate to the end, in the calling thread."""
        return generate_sync(self, **options)

    def begin_generation(
        self, *, thinking: bool | None = None, group: StepGroup | None = None
    ) -> Draft:
        """What a generation writes through; the branch is busy until it is released."""
        return Draft(self._handle, thinking=thinking, group=group)

    def begin_run(self, label: str = "run") -> RunWriter:
        """What an agent's run writes through: one undo step."""
        return RunWriter(self._handle, label)

    def _edit(self, label: str, rewrite: Rewrite, dry_run: bool) -> Edit:
        return self._handle.edit(label, rewrite, dry_run=dry_run)

    def _preamble(self, kind: Kind, text: str | None, dry_run: bool) -> Edit:
        return self._edit(
            f"set_{kind}",
            lambda layout, path: edits.set_preamble(layout, path, kind, text),
            dry_run,
        )

    def _position(
        self, path: Path, *, after: Segment | str | None, before: Segment | str | None
    ) -> int:
        """The number of places before a position."""
        if after is not None and before is None:
            return lookups.place_of(self._handle, path, after) + 1
        if before is not None and after is None:
            return lookups.place_of(self._handle, path, before)
        raise InvalidEdit("name one position: behind a segment, or before one")

    def _move(self, steps: int, dry_run: bool) -> Edit:
        handle = self._handle
        with handle.lock:
            model, layout = handle.writable()
            handle.outside_batch("undo() and redo()")
            branch = handle.branch
            before = branch.path
            after = branch.undone(-steps) if steps < 0 else branch.redone(steps)
            made = describe(before, after, plan_of(model, layout, after, handle.earlier(before)))
            if dry_run:
                return made
            log_id = branch.move(steps, after)
            handle.refresh_pins()
            return made.model_copy(update={"log_id": log_id})


def _new(kind: str, content: Content, meta: Mapping[str, Any] | None) -> New:
    name = kind_of(kind)
    if name in ("tool_call", "tool_result"):
        raise PairingError(
            "calls and results are not plain contents",
            value=kind,
            remedy="append_call() and append_result(), or insert_call()",
        )
    if name not in ("system", "user", "text", "thinking"):
        raise InvalidEdit(
            "no such kind of content", value=kind, limit="system, user, assistant, thinking"
        )
    return New(cast(Kind, name), as_text(content), meta=plain(meta or {}))


def _call(path: Path, name: str, arguments: Mapping[str, Any], call_id: str | None) -> New:
    if not isinstance(name, str) or not name:
        raise InvalidEdit("a tool call needs the name of its tool", value=name)
    if call_id is not None and not isinstance(call_id, str):
        raise InvalidEdit("the id of a call is a text", value=call_id, remedy="leave the id out")
    taken = {place.call_id for place in path.places if place.kind == "tool_call"}
    if call_id is not None and (not call_id or call_id in taken):
        raise InvalidEdit(
            "a call of that id is on the path", value=call_id, remedy="leave the id out"
        )
    while call_id is None or call_id in taken:
        call_id = new_call_id()
    return New("tool_call", name=name, arguments=plain(arguments), call_id=call_id)
