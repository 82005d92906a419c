# SPDX-License-Identifier: Apache-2.0
"""A run as a tree that grows: steps with their tokens, what the model says, its calls, results."""

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment as Piece
from rich.text import Text
from rich.tree import Tree

from freetoken_agent.events import (
    ApprovalRequest,
    ContextEdited,
    PlanReady,
    ReplyFinished,
    RunEvent,
    RunFinished,
    SegmentFinished,
    TextDelta,
    ThinkingDelta,
    ToolCallReady,
    ToolFinished,
)
from freetoken_agent.segments import Segment, visible

from .views import describe, usage_line

_WIDTH = 100


class RunView:
    """To be shown; `take` lets it grow. `calls`: those that were open before. While it `follows`,
    it shows no more than the terminal can, the newest lines."""

    def __init__(self, title: str, calls: Sequence[Segment] = ()) -> None:
        self.tree = Tree(Text(title, style="bold"))
        self.follows = True
        self._open = {call.call_id: call for call in calls}
        self._step = self.tree
        self._heading = Text()
        self._said: tuple[str, Text] | None = None  # what is being written, by its kind
        self._calls: dict[str | None, Tree] = {}
        self._answered: set[str | None] = set()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self.tree, options.update(height=None), pad=False)
        room = max(1, console.height - 1)
        if self.follows and console.is_terminal:
            lines = lines[-room:]
        for line in lines:
            yield from line
            yield Piece.line()

    def take(self, event: RunEvent) -> None:
        match event:
            case PlanReady():
                plan = event.plan
                self._heading = Text(
                    f"step {event.step} · to reuse {plan.reused_tokens} · "
                    f"to prefill {plan.prefill_tokens}",
                    style="dim",
                )
                self._step, self._said = self.tree.add(self._heading), None
            case TextDelta() | ThinkingDelta():
                self._say(event.type, event.text)
            case ToolCallReady():
                self._call(event.call)
            case ToolFinished():
                outcome = "" if event.status == "ok" else f"{event.status}: "
                self._call(event.call)
                self._answer(event.call.call_id, outcome + event.text, error=bool(outcome))
            case SegmentFinished(segment=segment):
                self._said = None
                if segment.kind == "tool_result" and segment.call_id not in self._answered:
                    self._answer(segment.call_id, segment.content, error=segment.error)
            case ReplyFinished(reply=reply):
                self._heading.plain = f"step {event.step} · {usage_line(reply.usage)}"
            case ApprovalRequest():
                self._call(event.call).add(Text("waits for approval", style="bold yellow"))
            case ContextEdited(edit=edit):
                counts = f"{len(edit.added)} added, {len(edit.removed)} removed"
                self.tree.add(Text(f"context edited by {event.reason}: {counts}", style="magenta"))
            case RunFinished():
                self.tree.add(Text(f"{event.finish_reason} · {usage_line(event.usage)}"))
            case _:
                pass

    def _say(self, kind: str, text: str) -> None:
        if self._said is None or self._said[0] != kind:
            said = Text(style="green" if kind == "text_delta" else "dim")
            self._said = kind, said
            self._step.add(said)
        self._said[1].append(visible(text))

    def _call(self, call: Segment) -> Tree:
        """Its place; a call of an earlier run gets one."""
        if call.call_id not in self._calls:
            line = Text(describe(call, _WIDTH), style="yellow")
            self._calls[call.call_id] = self._step.add(line)
        return self._calls[call.call_id]

    def _answer(self, call_id: str | None, text: str, *, error: bool) -> None:
        self._answered.add(call_id)
        line = " ".join(visible(text[: 2 * _WIDTH]).split())
        short = line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…"
        place = self._calls.get(call_id, self._step)
        if place is self._step and call_id in self._open:
            place = self._call(self._open[call_id])
        place.add(Text(f"→ {short}", style="red" if error else ""))
