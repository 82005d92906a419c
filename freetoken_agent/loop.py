# SPDX-License-Identifier: Apache-2.0
"""A run of an agent: model, tools, model, …, until the model answers.

    preamble, user message
        │
        ▼             calls               all decided?  ── no ──▶ pending
    model call ──────────────▶ tools ──▶ results ──▶ model call …
        │ answer
        ▼
    output, checked by its type

The stream is pulled: nothing runs ahead of its reader, except tools and the model call in progress.
What has been reported is durable.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, get_args

from . import events
from .agent import Agent, Decision, Result, StepRequest
from .errors import (
    InvalidAgent,
    InvalidOutput,
    ModelRetry,
    PromptDiffers,
    RunLimit,
    RunUnfinished,
)
from .events import RunEvent, RunFinishReason
from .generation import Generation
from .model_calls.generate_options import GenerateOptions
from .model_calls.model_step import ModelStep
from .runs.agent_checks import check_choice, check_schemas
from .runs.blocking import in_thread
from .runs.hooks import call_hook
from .runs.run_context import RunContext
from .runs.run_limits import LimitWatch, Reached
from .runs.run_rules import RuleStage
from .runs.run_tools import ToolStage, check_decisions
from .runs.shared_models import session_in_memory
from .segments import Content, Reply, Segment, Usage, as_text
from .tooling.toolsets import Toolbox, listed_tools
from .tracing import RunTrace

if TYPE_CHECKING:
    from .session import Session

Output = TypeVar("Output")

CancelMode = Literal["immediate", "after_step"]
_NOTHING = Usage(input_tokens=0, reused_tokens=0, prefill_tokens=0)


@dataclass(frozen=True)
class RunOptions:
    """What a run was asked for. `decisions` is None unless it resumes."""

    content: Content | None
    session: "Session | None"
    deps: Any
    allowed_tools: Sequence[str] | None
    tool_choice: str
    decisions: Mapping[str, Decision] | None = None


class Run(Generic[Output]):
    """A run in progress: an async context manager and an async iterator of events; `result`
    afterwards. One task pulls it. Leaving it early ends the model call and the tools; what they had
    finished is kept."""

    def __init__(self, agent: Agent[Any, Output], options: RunOptions) -> None:
        self._agent = agent
        self._options = options
        self._events: AsyncGenerator[RunEvent, None] | None = None
        self._generation: Generation | None = None
        self._trace = RunTrace(agent.name, content=agent.trace_content)
        self._rules = RuleStage(agent, self._trace, self._add_usage)
        self._stage: ToolStage | None = None
        self._alone = ExitStack()  # keeps other runs off the branch
        self._cancelled: CancelMode | None = None
        self._result: Result[Output] | None = None
        self._usage = _NOTHING
        self._steps = 0
        self._retries: dict[str, int] = {}
        self._output_retries = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._events is not None:
            await self._events.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RunEvent:
        if self._events is None:
            self._events = self._drive()
        return await anext(self._events)

    @property
    def result(self) -> Result[Output]:
        """How the run ended. RunUnfinished before that."""
        if self._result is None:
            raise RunUnfinished(
                "the run has not ended", remedy="pull its events to the end, or cancel it"
            )
        return self._result

    def cancel(self, mode: CancelMode = "immediate") -> None:
        """End the run: now, keeping what was written and leaving open calls open, or after the
        step in progress with its tools. The events up to the end still come. Any thread.
        InvalidAgent for another mode."""
        if mode not in get_args(CancelMode):
            modes = " or ".join(get_args(CancelMode))
            raise InvalidAgent("a run is cancelled in another way", value=mode, limit=modes)
        self._cancelled = mode
        if mode == "immediate":
            if self._generation is not None:
                self._generation.cancel()
            self._rules.cancel()
            if self._stage is not None:
                self._stage.cancel()

    async def _drive(self) -> AsyncGenerator[RunEvent, None]:
        content = self._options.content
        with self._trace.run(None if content is None else as_text(content)), self._alone:
            async with aclosing(self._go()) as run:
                async for event in run:
                    yield event

    async def _go(self) -> AsyncGenerator[RunEvent, None]:
        self._limits = LimitWatch(self._agent.limits)
        await self._open()
        async with aclosing(self._begin()) as begun:
            async for event in begun:
                yield event
        finish: RunFinishReason | None = None
        while finish is None:
            async with aclosing(self._step()) as step:
                async for event in step:
                    yield event
            finish = self._finish
        if self._result is None:
            self._result = self._ended(finish, None)
        self._trace.finished(finish)
        yield events.RunFinished(**self._place(), finish_reason=finish, usage=self._usage)

    async def _open(self) -> None:
        agent, options = self._agent, self._options
        tools = await listed_tools(agent.tools, agent.toolsets)
        check_schemas(tools)
        allowed = None if options.allowed_tools is None else frozenset(options.allowed_tools)
        self._toolbox = Toolbox(tools, agent.result_limit, allowed)
        check_choice(options.tool_choice, self._toolbox)
        if options.session is not None:
            self._session = options.session
        else:
            self._session = await in_thread(partial(session_in_memory, agent.name, agent.model))
        self._trace.opened(self._session)
        self._writer = self._session.begin_run(f"run {agent.name}")
        self._alone.enter_context(self._writer.alone())
        path = self._session.path()
        check_decisions(options.decisions or {}, path, self._writer)
        self._before = {segment.id for segment in path}
        self._finish: RunFinishReason | None = None
        self._choice = options.tool_choice
        self._last_answer = False

    async def _begin(self) -> AsyncGenerator[RunEvent, None]:
        """The preamble and the user's message; what a resumed run finds open."""
        async with aclosing(self._set_preamble()) as edited:
            async for event in edited:
                yield event
        if self._options.content is not None:
            await in_thread(partial(self._writer.append_user, as_text(self._options.content)))

    async def _set_preamble(self) -> AsyncGenerator[RunEvent, None]:
        agent, writer = self._agent, self._writer
        if self._options.decisions is not None or agent.prompt_policy == "keep":
            return
        system = agent.instructions
        if callable(system):
            system = await call_hook(system, self._context())
            if not isinstance(system, str | None):
                raise InvalidAgent("the function of the instructions returns no text", value=system)
        schemas = self._toolbox.schemas
        refused = agent.prompt_policy == "error" and bool(self._before)
        edit = await in_thread(partial(writer.set_preamble, system, schemas, dry_run=refused))
        if not edit:
            return
        if refused:
            raise PromptDiffers(
                "the session's instructions or tools are not the agent's",
                value=self._session.name,
                remedy="use prompt_policy='replace' or 'keep', or another session",
            )
        if self._before:
            self._trace.edited("preamble", edit)
            await call_hook(agent.hooks.on_edit, self._context(), edit)
            yield events.ContextEdited(**self._place(), reason="preamble", edit=edit)

    async def _step(self) -> AsyncGenerator[RunEvent, None]:
        """Open calls, or else a model call and what follows from it."""
        calls = self._writer.open_calls()
        if not calls:
            if self._cancelled:
                self._finish = "cancelled"
                return
            request = await self._request()
            async with aclosing(self._edit_context(request)) as edited:
                async for event in edited:
                    yield event
            if self._cancelled == "immediate":
                self._finish = "cancelled"
                return
            async with aclosing(self._model_call(request)) as generated:
                async for event in generated:
                    yield event
            calls = self._writer.open_calls()
        if calls and self._finish is None:
            async with aclosing(self._tool_calls_of(calls)) as ran:
                async for event in ran:
                    yield event
        if self._steps and self._finish != "pending":
            yield events.StepFinished(**self._place(), reply=self._reply)
        if self._cancelled and self._finish is None:
            self._finish = "cancelled"

    def _edit_context(self, request: StepRequest) -> AsyncGenerator[RunEvent, None]:
        """What the context rules do before the model call."""
        context = replace(self._context(), step=self._steps)
        place: events.Place = {**self._place(), "step": self._steps}
        thinking = self._options_of(request).get("thinking")
        return self._rules.run(self._writer, context, place, thinking)

    async def _model_call(self, request: StepRequest) -> AsyncGenerator[RunEvent, None]:
        step = ModelStep(
            self._session,
            replace(
                GenerateOptions.parse(self._options_of(request)),
                checked_after=self._toolbox.checked_after,
            ),
            index=self._steps,
            group=self._writer.group,
        )
        self._steps += 1
        with self._trace.model_call(self._steps - 1) as replied:
            async with Generation(step) as generation:
                self._generation = generation
                try:
                    async for event in generation:
                        yield event
                finally:
                    self._generation = None
            self._reply = generation.reply
            replied(self._reply)
        self._add_usage(self._reply.usage)
        await call_hook(self._agent.hooks.after_model, self._context(), self._reply)
        await self._take_reply(self._reply)

    def _add_usage(self, usage: Usage) -> None:
        self._usage = usage if self._usage is _NOTHING else self._usage + usage
        self._trace.used(self._usage)

    async def _request(self) -> StepRequest:
        """What the next model call is asked. RunLimit."""
        self._reach(self._limits.before_step(self._steps, self._usage.output_tokens))
        allowed = self._options.allowed_tools
        last = self._last_answer and bool(self._toolbox.tools)
        request = StepRequest(
            tool_choice="none" if last else self._choice,
            allowed_tools=None if allowed is None else tuple(allowed),
        )
        self._choice = "auto"
        context = replace(self._context(), step=self._steps)
        changed = await call_hook(self._agent.hooks.before_model, context, request)
        if changed is None:
            return request
        if not isinstance(changed, StepRequest):
            raise InvalidAgent("before_model returns a StepRequest, or None", value=changed)
        return replace(changed, tool_choice="none") if last else changed

    def _options_of(self, request: StepRequest) -> dict[str, Any]:
        options: dict[str, Any] = {**self._agent.sampling, "tool_choice": request.tool_choice}
        if request.allowed_tools is not None and request.tool_choice != "none":
            options["allowed_tools"] = request.allowed_tools
        if request.thinking is not None:
            options["thinking"] = request.thinking
        if request.max_tokens is not None:
            options["max_tokens"] = request.max_tokens
        if self._agent.output.schema is not None:
            options["output_schema"] = self._agent.output.schema
        return options

    def _reach(self, reached: Reached | None) -> None:
        """RunLimit, unless nothing was reached or the model may still answer without tools."""
        if reached is None:
            return
        if self._agent.limits.on_limit == "raise" or self._last_answer:
            result = self._ended("limit", None)
            raise RunLimit(f"the run reached {reached.name}", result=result, value=reached.limit)
        self._last_answer = True

    async def _take_reply(self, reply: Reply) -> None:
        """Whether the run ends with this reply, and how."""
        if reply.finish_reason == "cancelled":
            self._finish = "cancelled"
        elif reply.calls and reply.finish_reason == "tool_calls":
            return
        elif reply.finish_reason == "length" and not self._writer.open_calls():
            self._finish = "length"
            self._result = self._ended("length", self._cut_answer(reply))
        elif not self._writer.open_calls():
            await self._answer(reply)

    def _cut_answer(self, reply: Reply) -> Output | None:
        """A text that was cut is one; a value is not. A call that was cut is no answer."""
        if self._agent.output.schema is not None or any(
            "cut_call" in s.meta for s in reply.segments
        ):
            return None
        return self._agent.output.validate(reply.text)  # type: ignore[no-any-return]

    async def _answer(self, reply: Reply) -> None:
        agent = self._agent
        try:
            value = agent.output.validate(reply.text)
        except ModelRetry as refused:
            self._output_retries += 1
            if self._output_retries > agent.limits.output_retries:
                raise InvalidOutput(
                    "the answer is not of the output type",
                    result=self._ended("stop", None),
                    value=str(refused),
                    limit=f"{agent.limits.output_retries} more attempts",
                ) from refused
            await in_thread(partial(self._writer.append_user, str(refused)))
            return
        self._finish = "limit" if self._last_answer else "stop"
        self._result = self._ended(self._finish, value)

    async def _tool_calls_of(self, calls: Sequence[Segment]) -> AsyncGenerator[RunEvent, None]:
        stage = ToolStage(
            self._agent, self._toolbox, self._writer, self._session, self._context(), calls
        )
        of_earlier_run = self._steps == 0
        decisions = self._options.decisions if of_earlier_run else None
        self._reach(self._limits.before_calls(len(calls)))
        if self._last_answer:  # nothing may run any more
            stage.refuse()
        pending = await stage.decide(decisions or {})
        for call in pending:
            yield events.ApprovalRequest(**self._place(), call=call)
        if pending:
            self._finish = "pending"
            return
        self._stage = stage
        if self._cancelled == "immediate":
            stage.cancel()
        try:
            async with aclosing(stage.run(self._place(), self._retries, self._trace)) as ran:
                async for event in ran:
                    yield event
        finally:
            self._stage = None
        self._limits.count_calls(len(calls))
        self._retries = stage.retries
        if stage.cancelled:
            self._finish = "cancelled"

    def _context(self) -> RunContext[Any]:
        step = max(0, self._steps - 1)
        return RunContext(self._options.deps, self._session, self._usage, step)

    def _ended(self, reason: RunFinishReason, output: Output | None) -> Result[Output]:
        added = [s for s in self._session.path() if s.id not in self._before]
        pending = tuple(self._writer.open_calls()) if reason == "pending" else ()
        return Result(
            output, self._usage, self._session, tuple(added), pending, reason, self._steps
        )

    def _place(self) -> events.Place:
        return {
            "session": self._session.name,
            "branch": self._session.branch,
            "step": max(0, self._steps - 1),
        }
