# SPDX-License-Identifier: Apache-2.0
"""What an agent's run writes through: all of it is one undo step, and nothing that a tool did is
lost.

    before a tool starts      its call is marked as running        no undo step
    when it has ended         its result is marked as finished     outside the path
    when its turn has come    the result enters the path           in call order

What was marked survives a kill, and edits of other segments; `rewind`, `undo` and `redo` forget it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from ..branches import edits, lookups, pairing, views
from ..branches.branch import StepGroup
from ..branches.codec import CallMark
from ..branches.handle import Handle
from ..branches.path import New, Path
from ..chat_templates.layout import Layout
from ..segments import Edit, Segment
from ..tooling.tool_schemas import ToolLike, tools_text
from .changes import Change, rewritten


class RunWriter:
    """Belongs to one run. Its methods block for a commit; any thread may call them, one at a
    time."""

    def __init__(self, handle: Handle, label: str) -> None:
        self._handle = handle
        self.group = StepGroup(label)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other runs off the branch. SessionBusy if there is one. Edits stay possible."""
        context, branch = self._handle.context, self._handle.branch.name
        context.busy.enter_run(context.name, branch)
        try:
            yield
        finally:
            context.busy.leave_run(context.name, branch)

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
        text = tools_text(tools)

        def rewrite(layout: Layout, path: Path) -> Path:
            if system is not None:
                path = edits.set_preamble(layout, path, "system", system)
            return edits.set_preamble(layout, path, "tools", text)

        return self._edit(rewrite, dry_run=dry_run)

    def apply_changes(self, changes: Sequence[Change], *, thinking: bool | None = None) -> Edit:
        """`Session.apply_changes` within the run's undo step."""
        return self._edit(partial(rewritten, self._handle, changes=changes), thinking=thinking)

    def append_user(self, text: str) -> Segment:
        """Add the user's message; open calls get the results they have, or are interrupted."""
        handle = self._handle
        with handle.lock:
            _, layout = handle.writable()
            for call in self.open_calls():
                self._close(call)
            user = New("user", text)
            self._commit(edits.append(layout, handle.path, [user], closing=handle.closing()))
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
            self._commit(after)
            if live is not None and live != text:
                result = pairing.result_of(handle.path, index)
                assert result is not None, "it was just added"
                self._commit(edits.replace_text(layout, handle.path, result, live))
            return self._result(call)

    def interrupt(self, call: Segment) -> Segment:
        """Close a call that was started and never ended."""
        handle = self._handle
        with handle.lock:
            _, layout = handle.writable()
            path = handle.path
            place = path.places[lookups.place_of(handle, path, call)]
            self._commit(edits.append(layout, path, [pairing.interrupted(place)]))
            return self._result(call)

    def _edit(
        self,
        rewrite: Callable[[Layout, Path], Path],
        *,
        thinking: bool | None = None,
        dry_run: bool = False,
    ) -> Edit:
        return self._handle.edited(rewrite, self._commit, thinking=thinking, dry_run=dry_run)

    def _close(self, call: Segment) -> None:
        mark = self.mark_of(call)
        if mark is not None and mark.state in ("finished", "denied"):
            self.append_result(call, mark.text, error=mark.error, live=mark.live)
        else:
            self.interrupt(call)

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

    def _commit(self, after: Path) -> int | None:
        handle = self._handle
        if after is handle.branch.path:
            return None
        log_id = handle.branch.commit(
            after, self.group.label, group=self.group, calls=handle.kept_calls(after)
        )
        handle.refresh_pins()
        return log_id
