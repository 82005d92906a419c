# SPDX-License-Identifier: Apache-2.0
"""What an agent's run writes through: all of it is one undo step, and nothing that a tool did is
lost.

    before a tool starts      its call is marked as running        no undo step
    when it has ended         its result is marked as finished     outside the path
    when its turn has come    the result enters the path           in call order

What was marked survives a kill. Any edit of the branch by somebody else forgets the marks.
"""

from collections.abc import Sequence

from . import edits, lookups, pairing, views
from .branch import StepGroup
from .codec import CallMark
from .handle import Handle, describe, plan_of
from .pairing import INTERRUPTED
from .path import New, Path
from .segments import Edit, Segment
from .tool_schemas import ToolLike, tools_text


class RunWriter:
    """Belongs to one run. Its methods block for a commit; any thread may call them, one at a
    time."""

    def __init__(self, handle: Handle, label: str) -> None:
        self._handle = handle
        self.group = StepGroup(label)

    def open_calls(self) -> list[Segment]:
        """The calls at the head that have no result, in order."""
        path = self._handle.path
        return views.segments(path, pairing.open_calls(path.places))

    def mark_of(self, call: Segment) -> CallMark | None:
        """How far an open call has come."""
        return next((m for m in self._handle.branch.calls if m.segment == call.id), None)

    def mark(self, *marks: CallMark) -> None:
        """Remember how far calls have come, durably."""
        handle = self._handle
        with handle.lock:
            handle.writable()
            handle.branch.mark_calls(self._merged(marks))

    def set_preamble(
        self, system: str | None, tools: Sequence[ToolLike], *, dry_run: bool = False
    ) -> Edit:
        """Make the preamble say this, in one edit; falsy if it does."""
        handle, text = self._handle, tools_text(tools)
        with handle.lock:
            model, layout = handle.writable()
            before = handle.path
            after = before
            if system is not None:
                after = edits.set_preamble(layout, after, "system", system)
            after = edits.set_preamble(layout, after, "tools", text)
            made = describe(before, after, plan_of(model, layout, after, handle.earlier(before)))
            if not made.changed or dry_run:
                return made
            return made.model_copy(update={"log_id": self._commit(after)})

    def append_user(self, text: str) -> Segment:
        """Add the user's message; open calls are closed as interrupted."""
        handle = self._handle
        with handle.lock:
            _, layout = handle.writable()
            path, drop = handle.path, handle.context.drop_thinking
            after = edits.append(layout, path, [New("user", text)], drop_thinking=drop)
            self._commit(after)
            return views.segments(handle.path, [len(handle.path.places) - 1])[0]

    def append_result(
        self, call: Segment, text: str, *, error: bool = False, live: str | None = None
    ) -> Segment:
        """Answer a call. `live`: what the model will see instead; `text` stays as the earlier
        version, and is never forwarded."""
        handle = self._handle
        with handle.lock:
            _, layout = handle.writable()
            path = handle.path
            index = lookups.place_of(handle, path, call)
            after = edits.append_result(layout, path, index, text, error=error)
            self._commit(after, keep_marks=True)
            if live is not None and live != text:
                result = pairing.result_of(handle.path, index)
                assert result is not None, "it was just added"
                self._commit(edits.replace_text(layout, handle.path, result, live), keep_marks=True)
            return self._result(call)

    def interrupt(self, call: Segment) -> Segment:
        """Close a call that was started and never ended."""
        handle = self._handle
        with handle.lock:
            _, layout = handle.writable()
            path = handle.path
            place = path.places[lookups.place_of(handle, path, call)]
            new = pairing.answer(place, INTERRUPTED, error=True, interrupted=True)
            self._commit(edits.append(layout, path, [new]), keep_marks=True)
            return self._result(call)

    def _result(self, call: Segment) -> Segment:
        path = self._handle.path
        result = pairing.result_of(path, path.index[call.id])
        assert result is not None, "it was just added"
        return views.segments(path, [result])[0]

    def _merged(self, marks: Sequence[CallMark]) -> list[CallMark]:
        """The marks with these in the place of older ones, of calls that are still open."""
        path = self._handle.path
        opened = {path.places[index].body.id for index in pairing.open_calls(path.places)}
        by_call = {mark.segment: mark for mark in (*self._handle.branch.calls, *marks)}
        return [mark for segment, mark in by_call.items() if segment in opened]

    def _commit(self, after: Path, *, keep_marks: bool = False) -> int | None:
        handle = self._handle
        if after is handle.branch.path:
            return None
        opened = {after.places[index].body.id for index in pairing.open_calls(after.places)}
        marks = [mark for mark in handle.branch.calls if mark.segment in opened]
        log_id = handle.branch.commit(
            after, self.group.label, group=self.group, calls=marks if keep_marks else ()
        )
        handle.refresh_pins()
        return log_id
