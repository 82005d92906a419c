# SPDX-License-Identifier: Apache-2.0
"""Runs calls of tools: whatever a tool does, its call has an outcome, and the run goes on.

    arguments --read--> function --result_text--> cut ---> ToolOutcome
        |                  |           |
        +-- not valid      +-- raises, is late         each of them a text for the model

Only what ends a run passes through: a cancel, KeyboardInterrupt, SystemExit.
"""

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import anyio
import anyio.to_thread

from ..errors import ModelRetry, ToolFailed
from ..runs.hooks import call_hook
from ..runs.run_context import RunContext
from ..segments import Segment
from ..tools import AnyTool
from .coercion import coerce
from .tool_results import ResultLimit, result_text, whole_text
from .tool_signature import as_object
from .toolsets import Toolbox

_log = logging.getLogger(__name__)

Status = Literal["ok", "retry", "exhausted", "failed", "raised", "timeout", "unknown", "denied"]
"""retry      arguments not valid, or ModelRetry; the model may call again
exhausted  the same, and no attempt is left
failed     ToolFailed
raised     any other exception, or a result without a text
timeout    it took too long; a thread goes on by itself
unknown    there is no such tool, or it may not be called in this run
denied     nobody approved it; only the caller says so"""


@dataclass(frozen=True)
class ToolCall:
    """A call as the model wrote it. `arguments` is the raw text where it was no JSON object."""

    id: str  # what the result refers to
    name: str  # as written; there may be no such tool
    arguments: Mapping[str, Any] | str

    @classmethod
    def of(cls, segment: Segment) -> "ToolCall":
        """The call of a `tool_call` segment."""
        assert segment.kind == "tool_call", segment.kind
        arguments = segment.text if segment.arguments is None else segment.arguments
        return cls(segment.call_id or segment.id, segment.tool or "", arguments)


@dataclass(frozen=True)
class ToolOutcome:
    """What became of a call. `text` is for the model. `retry` is the `RunContext.retry` of the next
    call of this tool. `cut_chars` of the result were left out of the text. `exception` is what the
    tool raised, for hooks and logs."""

    call: ToolCall  # what was asked
    text: str
    status: Status = "ok"  # `ok`, or what went wrong
    retry: int = 0
    elapsed_s: float = 0.0  # how long the tool ran
    cut_chars: int = 0
    exception: Exception | None = None

    @property
    def is_error(self) -> bool:
        """Whether the model is told that the call failed."""
        return self.status != "ok"


async def execute(
    tool: AnyTool, call: ToolCall, context: RunContext[Any], limit: ResultLimit | None = None
) -> ToolOutcome:
    """Run one call. A plain function runs in a thread, which a cancel or a timeout leaves behind:
    it goes on until it returns, and its result is dropped."""
    started = time.perf_counter()
    limit = tool.result_limit or limit or ResultLimit()
    own = replace(context, call_id=call.id, tool_name=tool.name, max_retries=tool.retries)
    outcome = await _outcome(tool, call, own)
    text, cut_chars = limit.cut(outcome.text)
    elapsed_s = time.perf_counter() - started
    return replace(outcome, text=text, cut_chars=cut_chars, elapsed_s=elapsed_s)


async def asks_for_approval(tool: AnyTool, call: ToolCall, context: RunContext[Any]) -> bool:
    """Whether somebody must decide about a call before it runs. A rule sees the arguments as the
    schema has them; a call with others does not run anyway. What a rule raises ends the run."""
    rule = tool.needs_approval
    if isinstance(rule, bool):
        return rule
    try:
        tool.reader.read(tool.name, call.arguments)
    except ModelRetry:
        return False
    except Exception:  # noqa: BLE001 - a user's validator may raise anything: a rule cannot be asked
        return True
    arguments = coerce(as_object(tool.name, call.arguments), tool.parameters, tool.parameters)
    own = replace(context, call_id=call.id, tool_name=tool.name, max_retries=tool.retries)
    return bool(await call_hook(rule, own, arguments))


async def run_call(toolbox: Toolbox, call: ToolCall, context: RunContext[Any]) -> ToolOutcome:
    """Run a call of one of these tools; a name that is none of theirs is an error result."""
    tool = toolbox.get(call.name)
    if tool is not None:
        return await execute(tool, call, context, toolbox.result_limit)
    names = ", ".join(toolbox.names)
    reason = f"There is no tool {call.name!r} to call."
    text = f"{reason} Call one of these: {names}." if names else f"{reason} There is none at all."
    return ToolOutcome(call, text, "unknown")


async def run_calls(
    toolbox: Toolbox,
    calls: Sequence[ToolCall],
    context: RunContext[Any],
    *,
    retries: Mapping[str, int] | None = None,
    on_start: Callable[[ToolCall], Awaitable[None]] | None = None,
    on_finish: Callable[[ToolOutcome], Awaitable[None]] | None = None,
) -> tuple[ToolOutcome, ...]:
    """Run calls at the same time; outcomes in the order of the calls. `retries`: by tool, the
    attempts so far. `on_start` is awaited before a tool starts, `on_finish` as soon as it has
    ended, in any order; what they raise cancels the other calls."""
    outcomes: dict[int, ToolOutcome] = {}

    async def run(number: int, call: ToolCall) -> None:
        if on_start is not None:
            await on_start(call)
        retry = (retries or {}).get(call.name, 0)
        outcomes[number] = await run_call(toolbox, call, replace(context, retry=retry))
        if on_finish is not None:
            await on_finish(outcomes[number])

    try:
        async with anyio.create_task_group() as group:
            for number, call in enumerate(calls):
                group.start_soon(run, number, call)
    except ExceptionGroup as raised:
        raise raised.exceptions[0] from raised  # of on_start or on_finish: tools raise nothing
    return tuple(outcomes[number] for number in range(len(calls)))


def next_retries(retries: Mapping[str, int], outcomes: Sequence[ToolOutcome]) -> dict[str, int]:
    """Attempts in a row by tool, after a step: one more at most, and none once a call went well."""
    after = dict(retries)
    for name in dict.fromkeys(outcome.call.name for outcome in outcomes):
        after[name] = min(o.retry for o in outcomes if o.call.name == name)
    return after


async def _outcome(tool: AnyTool, call: ToolCall, context: RunContext[Any]) -> ToolOutcome:
    try:
        positional, named = tool.reader.read(tool.name, call.arguments)
        if tool.takes_context:
            positional = [context, *positional]
        text = ""
        with anyio.move_on_after(tool.timeout) as scope:
            text = await _call(partial(tool.function, *positional, **named))
        if scope.cancelled_caught:
            late = f"{tool.name} did not end within {tool.timeout:g} s; it may have had effects."
            return ToolOutcome(call, late, "timeout")
        return ToolOutcome(call, text)
    except ModelRetry as error:
        return _retried(call, context, error)
    except ToolFailed as error:
        return ToolOutcome(call, whole_text(str(error)), "failed", exception=error)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        _log.warning("tool %s waited for what was cancelled", tool.name, exc_info=error)
        return ToolOutcome(call, "CancelledError: what it waited for was cancelled", "raised")
    except Exception as error:  # noqa: BLE001 - a user's tool may raise anything; the run goes on
        _log.warning("tool %s raised %s", tool.name, type(error).__name__, exc_info=error)
        return ToolOutcome(call, _named(error), "raised", exception=error)


def _named(error: Exception) -> str:
    try:
        said = str(error)
    except Exception:  # noqa: BLE001 - its class may be as faulty as the tool
        said = ""
    return whole_text(f"{type(error).__name__}: {said}" if said else type(error).__name__)


def _retried(call: ToolCall, context: RunContext[Any], error: ModelRetry) -> ToolOutcome:
    text, retry = whole_text(str(error)), context.retry + 1
    if retry <= context.max_retries:
        return ToolOutcome(call, text, "retry", retry, exception=error)
    text += f"\nNo attempt is left: do not call {call.name} again."
    return ToolOutcome(call, text, "exhausted", retry, exception=error)


async def _call(function: "partial[Any]") -> str:
    """The text of what it returns."""
    if _is_async(function.func):
        return result_text(await function())
    own = anyio.CapacityLimiter(1)  # no tool waits for a thread that another one holds
    text = await anyio.to_thread.run_sync(
        partial(_text_of, function), abandon_on_cancel=True, limiter=own
    )
    return text if isinstance(text, str) else result_text(await text)


def _text_of(function: Callable[[], Any]) -> str | Awaitable[Any]:
    """The text of what it returns, made in the same thread: a large value takes time, and an
    iterator works only now. A plain function may hand out a coroutine, as a lambda around an async
    one does."""
    value = function()
    return value if inspect.isawaitable(value) else result_text(value)


def _is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004 - of its class, as Python calls it
    )
