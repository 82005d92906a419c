# SPDX-License-Identifier: Apache-2.0
"""The calls of one step: who decides about them, what runs, and how results get into the path.

decide     denied and interrupted ones are known; undecided ones stop the step
run        marked as running, run at the same time, marked as finished when they end
results    enter the path in call order, as soon as all before them are known
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from freetoken_storage.errors import FreetokenError

from .. import events
from ..agent import Agent, Decision
from ..branches.codec import CallMark
from ..errors import InvalidDecision, ModelRetry, ToolFailed
from ..events import RunEvent
from ..segments import Segment
from ..tooling.tool_calls import ToolCall, ToolOutcome, asks_for_approval, next_retries, run_calls
from ..tooling.tool_results import result_text
from ..tooling.toolsets import Toolbox
from ..tracing import RunTrace
from .blocking import in_thread
from .hooks import call_hook
from .run_context import RunContext
from .run_writer import RunWriter

if TYPE_CHECKING:
    from ..session import Session

DENIED = "The user did not allow this call."
TOO_MANY = "Not called: this run may make no more calls. Answer with what you know."
_log = logging.getLogger(__name__)


def check_decisions(
    decisions: Mapping[str, Decision], path: Sequence[Segment], writer: RunWriter
) -> None:
    """InvalidDecision unless each is about a call of the path, and denies none that has run. What
    was decided before may be said again, as a program does that was killed in between."""
    calls = {call.call_id: call for call in path if call.kind == "tool_call"}
    answers = {result.call_id: result for result in path if result.kind == "tool_result"}
    for call_id, decision in decisions.items():
        if call_id not in calls:
            waiting = ", ".join(str(call) for call in calls if call not in answers)
            raise InvalidDecision(
                "the session has no call of this id",
                value=call_id,
                limit=f"open calls: {waiting}" if waiting else "no call is open",
                remedy="take the call_id of the calls in result.pending",
            )
        if not isinstance(decision, bool | str):
            raise InvalidDecision(
                "a decision is True, False, or the text with which the call is denied",
                value=decision,
            )
        mark = writer.mark_of(calls[call_id])
        has_run = mark is not None and mark.state in ("ended", "finished")
        if call_id in answers:
            has_run = answers[call_id].content != _denial(decision)
        if decision is not True and has_run:
            raise InvalidDecision(
                "the call has been answered and cannot be denied any more", value=call_id
            )


def _denial(decision: Decision) -> str:
    return decision if isinstance(decision, str) else DENIED


class ToolStage:
    """One use: `decide`, then `run` unless something is pending."""

    def __init__(
        self,
        agent: Agent[Any, Any],
        toolbox: Toolbox,
        writer: RunWriter,
        session: "Session",
        context: RunContext[Any],
        calls: Sequence[Segment],
    ) -> None:
        self._agent = agent
        self._toolbox = toolbox
        self._writer = writer
        self._session = session
        self._context = context
        self._calls = list(calls)
        self._known: dict[str, ToolOutcome] = {}  # by segment: outcomes that need no run
        self._live: dict[str, str] = {}  # what a hook made of a result
        self._interrupted: set[str] = set()
        self._unseen: set[str] = set()  # known, but the hook that sees results has not spoken
        self._done: dict[str, ToolOutcome] = {}
        self._task: asyncio.Task[tuple[ToolOutcome, ...]] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.retries: dict[str, int] = {}
        self.cancelled = False

    async def decide(self, decisions: Mapping[str, Decision]) -> tuple[Segment, ...]:
        """Settle what is known of each call; returns those that somebody must decide about. What
        was decided is remembered with the session."""
        pending, decided = [], []
        for call in self._calls:
            if call.id in self._known:
                continue
            mark = self._writer.mark_of(call)
            decision = decisions.get(call.call_id or "")
            if mark is not None and mark.state in ("ended", "finished"):
                self._know(call, mark.text, "raised" if mark.error else "ok")
                if mark.state == "ended":
                    self._unseen.add(call.id)
                if mark.live is not None:
                    self._live[call.id] = mark.live
            elif mark is not None and mark.state == "running" and decision is not True:
                self._interrupted.add(call.id)
            elif decision is False or isinstance(decision, str):
                self._know(call, _denial(decision), "denied")
                decided.append(CallMark(call.id, "denied", _denial(decision), True))
            elif mark is not None and mark.state == "denied":
                self._know(call, mark.text, "denied")
            elif decision is True:
                decided.append(CallMark(call.id, "approved"))
            elif (mark is None or mark.state != "approved") and await self._needs_approval(call):
                pending.append(call)
        if decided:
            await in_thread(partial(self._writer.mark, *decided))
        return tuple(pending)

    def refuse(self) -> None:
        """None of the calls will run: the run may not make so many."""
        for call in self._calls:
            self._know(call, TOO_MANY, "denied")

    def cancel(self) -> None:
        """End the tools; what has finished is kept. Any thread."""
        self.cancelled = True
        task, loop = self._task, self._loop
        if task is not None and loop is not None:
            loop.call_soon_threadsafe(task.cancel)

    async def run(
        self, place: events.Place, retries: Mapping[str, int], trace: RunTrace
    ) -> AsyncGenerator[RunEvent, None]:
        """Run what is to run, and answer every call."""
        self._place, self.retries, self._trace = place, dict(retries), trace
        news: asyncio.Queue[tuple[Segment, ToolOutcome] | None] = asyncio.Queue()
        waiting = await self._waiting()
        if self.cancelled:
            return
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._run_all(waiting, retries, news))
        warm = asyncio.create_task(self._warm()) if waiting else None
        try:
            async with aclosing(self._flush()) as flushed:
                async for event in flushed:
                    yield event
            while (item := await news.get()) is not None:
                call, outcome = item
                yield events.ToolFinished(
                    **place,
                    call=call,
                    text=outcome.text,
                    status=outcome.status,
                    elapsed_s=outcome.elapsed_s,
                )
                async with aclosing(self._flush()) as flushed:
                    async for event in flushed:
                        yield event
            outcomes = await self._ended()
            if warm is not None and not self.cancelled:
                await warm
        finally:
            await _stop(self._task, warm)
        self.retries = next_retries(self.retries, outcomes)

    def _know(self, call: Segment, text: str, status: Any) -> None:
        self._known[call.id] = ToolOutcome(ToolCall.of(call), text, status)

    async def _needs_approval(self, call: Segment) -> bool:
        tool = self._toolbox.get(call.tool or "")
        if tool is None:
            return False
        return await asks_for_approval(tool, ToolCall.of(call), self._context)

    async def _waiting(self) -> list[Segment]:
        """The calls that will run. Hooks may refuse one, and see what an earlier run left them."""
        waiting = []
        for call in self._calls:
            if call.id in self._unseen:
                self._known[call.id] = await self._seen(call, self._known[call.id])
            if call.id in self._known or call.id in self._interrupted:
                continue
            try:
                await call_hook(self._agent.hooks.before_tool, self._context, ToolCall.of(call))
            except ModelRetry as refused:
                self._know(call, str(refused), "retry")
            except ToolFailed as refused:
                self._know(call, str(refused), "failed")
            else:
                waiting.append(call)
        return waiting

    async def _run_all(
        self,
        calls: Sequence[Segment],
        retries: Mapping[str, int],
        news: "asyncio.Queue[tuple[Segment, ToolOutcome] | None]",
    ) -> tuple[ToolOutcome, ...]:
        """In a task of its own; `news` ends with None."""
        ordered = [ToolCall.of(call) for call in calls]
        segments = {id(call): segment for call, segment in zip(ordered, calls, strict=True)}

        async def finished(outcome: ToolOutcome) -> None:
            call = segments[id(outcome.call)]
            self._trace.tool_ended(outcome)
            if self._agent.hooks.after_tool is not None:
                mark = CallMark(call.id, "ended", outcome.text, outcome.is_error)
                await in_thread(partial(self._writer.mark, mark))
            self._done[call.id] = outcome = await self._seen(call, outcome)
            news.put_nowait((call, outcome))

        try:
            marks = [CallMark(call.id, "running") for call in calls]
            if marks:
                await in_thread(partial(self._writer.mark, *marks))
            return await run_calls(
                self._toolbox,
                ordered,
                self._context,
                retries=retries,
                on_start=self._trace.tool_started,
                on_finish=finished,
            )
        finally:
            self._trace.tools_left()
            news.put_nowait(None)

    async def _seen(self, call: Segment, outcome: ToolOutcome) -> ToolOutcome:
        """Let the hook see the outcome, and remember both it and what the model sees instead."""
        hook, live = self._agent.hooks.after_tool, None
        made = await call_hook(hook, self._context, outcome.call, outcome)
        if isinstance(made, ToolOutcome):
            outcome, live = replace(outcome, status=made.status), made.text
        elif made is not None:
            live = result_text(made)
        mark = CallMark(call.id, "finished", outcome.text, outcome.is_error, live)
        await in_thread(partial(self._writer.mark, mark))
        if live is not None:
            self._live[call.id] = live
        return outcome

    async def _flush(self) -> AsyncGenerator[RunEvent, None]:
        """Move results into the path, up to the first call that has none. A call that an edit took
        away or answered meanwhile gets none."""
        while self._calls:
            call = self._calls[0]
            if all(call.id != waiting.id for waiting in self._writer.open_calls()):
                _log.info("call %s is not open any more: its result is dropped", call.call_id)
                self._calls.pop(0)
                continue
            outcome = self._known.get(call.id) or self._done.get(call.id)
            if call.id in self._interrupted:
                write = partial(self._writer.interrupt, call)
            elif outcome is None:
                return
            else:
                write = partial(
                    self._writer.append_result,
                    call,
                    outcome.text,
                    error=outcome.is_error,
                    live=self._live.get(call.id),
                )
            self._calls.pop(0)
            segment = await in_thread(write)
            yield events.SegmentFinished(**self._place, segment=segment, partial=False)

    async def _ended(self) -> tuple[ToolOutcome, ...]:
        """Raises what ended the tools, unless that was `cancel`."""
        assert self._task is not None
        try:
            return await self._task
        except asyncio.CancelledError:
            if not self.cancelled:
                raise
            return tuple(self._done.values())

    async def _warm(self) -> None:
        """Bring the state up to date while tools work, so that their results cost only
        themselves. It is no more than a help."""
        try:
            await self._session.warm()
        except FreetokenError as error:
            _log.info("the path could not be warmed: %s", error)


async def _stop(*tasks: "asyncio.Task[Any] | None") -> None:
    for task in tasks:
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task])
