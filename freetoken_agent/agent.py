# SPDX-License-Identifier: Apache-2.0
"""Agent: what a model is told, what it may do, what it must answer. Data only; `loop` runs it.

Importing or making an agent loads no weights. It is frozen: `replace()` makes a variant.
"""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, Self

from typing_extensions import TypeVar  # with defaults: typing has them from Python 3.13 on

from .context_rules import ContextRule, Proposal
from .errors import InvalidAgent
from .events import RunFinishReason
from .model import Model
from .runs.blocking import wait_for
from .runs.run_context import RunContext
from .segments import Content, Edit, Reply, Segment, Usage
from .tooling.output_type import OutputType
from .tooling.tool_calls import ToolCall, ToolOutcome
from .tooling.tool_results import ResultLimit
from .tooling.toolsets import Toolset, as_tools, known_tools
from .tools import AnyTool, ToolFunction

if TYPE_CHECKING:
    from .loop import Run
    from .session import Session

Deps = TypeVar("Deps", default=Any)
Output = TypeVar("Output", default=str)

Decision = bool | str
"""True: run it. False or a text: it is denied, with that text."""
PromptPolicy = Literal["replace", "keep", "error"]
Instructions = str | Callable[[RunContext[Any]], str] | Callable[[RunContext[Any]], Awaitable[str]]


@dataclass(frozen=True)
class Limits:
    """What a run may use before it ends with `RunLimit`, or, with `on_limit="answer"`, with one
    more model call that may not call tools. None: no limit. `output_tokens` and `timeout_s` are
    looked at between steps; `output_retries` counts answers of the wrong type. InvalidAgent for a
    limit that is none."""

    max_steps: int | None = 20  # model calls
    max_tool_calls: int | None = None  # calls that a model made, parallel ones counted one by one
    output_tokens: int | None = None
    timeout_s: float | None = None
    output_retries: int = 1
    on_limit: Literal["raise", "answer"] = "raise"

    def __post_init__(self) -> None:
        for name in ("max_steps", "max_tool_calls", "output_tokens", "timeout_s"):
            value = getattr(self, name)
            if value is None:
                continue
            least = 0 if name == "max_tool_calls" else 1e-9
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or math.isnan(value) or value < least:
                raise InvalidAgent(
                    f"the limit {name} is none", value=value, limit="above 0, or None"
                )
        if not isinstance(self.output_retries, int) or self.output_retries < 0:
            raise InvalidAgent(
                "output_retries is no number of attempts", value=self.output_retries, limit=">= 0"
            )
        if self.on_limit not in ("raise", "answer"):
            raise InvalidAgent("on_limit is raise or answer", value=self.on_limit)


@dataclass(frozen=True)
class StepRequest:
    """What one model call is asked, as hooks see it and may change it."""

    tool_choice: str = "auto"  # auto, none, required, or the name of a tool
    allowed_tools: tuple[str, ...] | None = None  # None: all that the run allows
    thinking: bool | None = None  # None leaves it to the template
    max_tokens: int | None = None  # None leaves it to the agent's `sampling`


BeforeModel = Callable[
    [RunContext[Any], StepRequest], StepRequest | None | Awaitable[StepRequest | None]
]
AfterModel = Callable[[RunContext[Any], Reply], object]
BeforeTool = Callable[[RunContext[Any], ToolCall], object]
AfterTool = Callable[[RunContext[Any], ToolCall, ToolOutcome], object]
BeforeEdit = Callable[[RunContext[Any], Proposal], bool | None | Awaitable[bool | None]]
OnEdit = Callable[[RunContext[Any], Edit], object]


@dataclass(frozen=True)
class Hooks:
    """Functions, plain or async, that are called on the way of a run. What they raise ends the run.

    `before_model(ctx, StepRequest) -> StepRequest | None` may change the step. `after_model(ctx,
    Reply)`. `before_tool(ctx, ToolCall)` may raise ModelRetry or ToolFailed, and the call has that
    result. `after_tool(ctx, ToolCall, ToolOutcome) -> str | ToolOutcome | None`: what it returns
    becomes the live version of the result, the original its earlier version, never forwarded.
    `before_edit(ctx, Proposal) -> bool | None`: False leaves the edit of a context rule out, this
    time. `on_edit(ctx, Edit)`: the run edited its context. InvalidAgent for what cannot be called.
    """

    before_model: BeforeModel | None = None
    after_model: AfterModel | None = None
    before_tool: BeforeTool | None = None
    after_tool: AfterTool | None = None
    before_edit: BeforeEdit | None = None
    on_edit: OnEdit | None = None

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            hook = getattr(self, name)
            if hook is not None and not callable(hook):
                raise InvalidAgent(f"the hook {name} is no function", value=hook)


@dataclass(frozen=True)
class Result(Generic[Output]):
    """How a run ended. `output` is None unless the model answered; a text may have been cut
    (`finish_reason` "length"). `segments` are all that the run
    added, as they are on the path now. `pending`: calls that wait for a decision."""

    output: Output | None
    usage: Usage  # of all model calls of the run together
    session: "Session"  # the one it ran in
    segments: tuple[Segment, ...]
    pending: tuple[Segment, ...]
    finish_reason: RunFinishReason
    steps: int  # how many model calls it took


@dataclass(frozen=True, eq=False)
class Agent(Generic[Deps, Output]):
    """What a model is told, may do and must answer, as data.

    `model`: a model, the name of a pulled one (loaded at the first run and shared by all agents of
    the process), or None if every run brings a session: a session has a model of its own, and runs
    on that one. `instructions`: the system text, or a function of the `RunContext`; None leaves a
    session's as it is. `sampling`: options of `generate`, such as `temperature`. `context_rules`:
    what a run edits in its context before a model call, in this order. `prompt_policy`: what a run
    does with a session whose preamble differs. `trace_content`: whether spans of OpenTelemetry hold
    texts, arguments and results.

    InvalidAgent, ToolNameTaken, UnsupportedSchema, InvalidOutputType.
    """

    model: Model | str | None = None
    name: str = "agent"  # in traces and on the command line
    instructions: Instructions | None = None
    tools: Sequence[ToolFunction] = ()  # of `@tool`, or plain functions
    toolsets: Sequence[Toolset] = ()  # tools that come together, such as an `MCPServer`
    output_type: type[Output] = str  # type: ignore[assignment]  # what `Result.output` is; a text by default
    sampling: Mapping[str, Any] = field(default_factory=dict)
    limits: Limits = Limits()  # what a run may use
    hooks: Hooks = Hooks()  # functions that see or change what a run does
    context_rules: Sequence[ContextRule] = ()
    deps_type: type[Deps] | None = None  # of `deps`, for type checkers; never read
    prompt_policy: PromptPolicy = "replace"
    result_limit: ResultLimit = ResultLimit()  # for tools that have none of their own
    trace_content: bool = False
    _output: OutputType = field(init=False, repr=False)

    def __post_init__(self) -> None:
        from .runs.agent_checks import check_agent

        object.__setattr__(self, "_output", OutputType.of(self.output_type))
        object.__setattr__(self, "hooks", Hooks() if self.hooks is None else self.hooks)
        object.__setattr__(self, "tools", as_tools(self.tools))  # read once, not in each run
        check_agent(self)
        object.__setattr__(self, "toolsets", tuple(self.toolsets))
        object.__setattr__(self, "context_rules", tuple(self.context_rules))

    @property
    def output(self) -> OutputType:
        """How answers are read."""
        return self._output

    @property
    def known_tools(self) -> tuple[AnyTool, ...]:
        """The tools that are known without asking a server."""
        return known_tools(self.tools, self.toolsets)

    def replace(self, **fields: Any) -> Self:
        """A variant. InvalidAgent for a field that there is not."""
        for name in fields:
            if name not in _FIELDS:
                raise InvalidAgent(
                    f"an agent has no field {name!r}",
                    value=fields[name],
                    remedy=f"use one of {', '.join(sorted(_FIELDS))}",
                )
        return replace(self, **fields)

    async def run(
        self,
        content: Content | None = None,
        *,
        session: "Session | None" = None,
        deps: Deps | None = None,
        allowed_tools: Sequence[str] | None = None,
        tool_choice: str = "auto",
    ) -> Result[Output]:
        """Add a user's message, unless it is None, and go on until the model answers. Without a
        session, the conversation is kept in memory, in `result.session`. `tool_choice` binds the
        first step. RunLimit, with the partial result."""
        async with self.run_stream(
            content,
            session=session,
            deps=deps,
            allowed_tools=allowed_tools,
            tool_choice=tool_choice,
        ) as run:
            async for _ in run:
                pass
            return run.result

    def run_sync(
        self,
        content: Content | None = None,
        *,
        session: "Session | None" = None,
        deps: Deps | None = None,
        allowed_tools: Sequence[str] | None = None,
        tool_choice: str = "auto",
    ) -> Result[Output]:
        """The same, from plain code, also in a notebook or inside a running event loop."""
        return wait_for(
            lambda: self.run(
                content,
                session=session,
                deps=deps,
                allowed_tools=allowed_tools,
                tool_choice=tool_choice,
            )
        )

    def run_stream(
        self,
        content: Content | None = None,
        *,
        session: "Session | None" = None,
        deps: Deps | None = None,
        allowed_tools: Sequence[str] | None = None,
        tool_choice: str = "auto",
    ) -> "AbstractAsyncContextManager[Run[Output]]":
        """`async with agent.run_stream(…) as run: async for event in run: …`"""
        from .loop import Run, RunOptions

        options = RunOptions(content, session, deps, allowed_tools, tool_choice)
        return Run(self, options)

    async def resume(
        self,
        session: "Session",
        decisions: Mapping[str, Decision] | None = None,
        *,
        deps: Deps | None = None,
    ) -> Result[Output]:
        """Go on where a run of this session ended, in this process or another one: execute calls
        that were never started or have been approved, then let the model answer. A call that was
        started and never ended becomes `interrupted`, unless its decision is True. `decisions`:
        call id -> True, False, or the text with which the call is denied; calls that nobody decided
        about stay pending. InvalidDecision for a call that there is not, and
        for a denial that comes too late."""
        async with self.resume_stream(session, decisions, deps=deps) as run:
            async for _ in run:
                pass
            return run.result

    def resume_stream(
        self,
        session: "Session",
        decisions: Mapping[str, Decision] | None = None,
        *,
        deps: Deps | None = None,
    ) -> "AbstractAsyncContextManager[Run[Output]]":
        """`resume` as a stream of events."""
        from .loop import Run, RunOptions

        options = RunOptions(None, session, deps, None, "auto", dict(decisions or {}))
        return Run(self, options)


_FIELDS = frozenset(name for name in Agent.__dataclass_fields__ if not name.startswith("_"))
