# SPDX-License-Identifier: Apache-2.0
"""Whatever a tool does, its call has an outcome: S36, S47, retries, timeouts, cancels."""

import asyncio
import contextvars
import functools
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any

import anyio
import anyio.to_thread
import pytest
from pydantic import BeforeValidator

from freetoken_agent import (
    ModelRetry,
    ResultLimit,
    RunContext,
    Store,
    Tool,
    ToolCall,
    ToolFailed,
    ToolOutcome,
    Usage,
    tool,
)
from freetoken_agent.testing import ScriptedModel
from freetoken_agent.tool_testing import call_tool
from freetoken_agent.tooling.tool_calls import execute, next_retries, run_call, run_calls
from freetoken_agent.tooling.toolsets import Toolbox


@pytest.fixture
def context(memory_store: Store) -> RunContext[str]:
    session = memory_store.create("s", ScriptedModel())
    usage = Usage(input_tokens=7, reused_tokens=0, prefill_tokens=7)
    return RunContext(deps="deps", session=session, usage=usage, step=4)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What blocked tools wait for; opened at the end, so that no thread outlives its test."""
    event = threading.Event()
    yield event
    event.set()


def call(name: str, number: int = 0, **arguments: Any) -> ToolCall:
    return ToolCall(f"call{number:05}", name, arguments)


async def test_a_tool_sees_its_run(context: RunContext[str]) -> None:
    """Oracle: the context that the run gave, with the call's own id, name and attempt."""
    seen: list[RunContext[str]] = []

    @tool(retries=3)
    def look(context: RunContext[str]) -> None:
        seen.append(context)

    outcome = await execute(look, call("look", 5), replace(context, retry=2))
    assert (outcome.status, outcome.text, outcome.retry) == ("ok", "null", 0)
    own = replace(context, call_id="call00005", tool_name="look", retry=2, max_retries=3)
    assert seen == [own]
    assert (seen[0].deps, seen[0].step, seen[0].usage.input_tokens) == ("deps", 4, 7)


async def test_sync_tools_run_in_threads_and_async_ones_in_the_loop() -> None:
    """Oracle: the thread's identity; a sync callable that hands out a coroutine is awaited here."""
    here = threading.get_ident()

    @tool
    def in_thread() -> bool:
        return threading.get_ident() == here

    @tool
    async def in_loop() -> bool:
        return threading.get_ident() == here and asyncio.current_task() is not None

    async def later(value: int) -> int:
        return value + 1

    class Object:
        async def __call__(self) -> bool:
            return threading.get_ident() == here

    texts = [
        (await call_tool(made, {})).text
        for made in (
            in_thread,
            in_loop,
            tool(Object(), name="object"),
            tool(functools.partial(later, 1)),
            tool(lambda: later(2), name="late"),
        )
    ]
    assert texts == ["false", "true", "true", "2", "3"]


async def test_threads_have_the_callers_context_variables() -> None:
    """So traces started around a run continue inside its tools."""
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("set by the run")

    @tool
    def read() -> str:
        return variable.get()

    assert (await call_tool(read, {})).text == "set by the run"


async def test_model_retry_asks_again_as_often_as_allowed() -> None:
    """Oracle: the documented count: two attempts more, then none is left."""

    @tool(retries=2)
    def picky() -> str:
        raise ModelRetry("Say please.")

    outcomes: list[ToolOutcome] = []
    for _ in range(4):
        retry = outcomes[-1].retry if outcomes else 0
        outcomes.append(await call_tool(picky, {}, retry=retry))
    assert [o.status for o in outcomes] == ["retry", "retry", "exhausted", "exhausted"]
    assert [o.retry for o in outcomes] == [1, 2, 3, 4]
    assert outcomes[0].text == "Say please."
    assert outcomes[2].text == "Say please.\nNo attempt is left: do not call picky again."


async def test_arguments_that_do_not_fit_count_as_attempts() -> None:
    """With `retries=0` the first one is the last; the tool is not called."""
    called: list[int] = []

    @tool(retries=0)
    def strict(n: int) -> None:
        called.append(n)

    outcome = await call_tool(strict, {"n": "x"})
    assert (outcome.status, called) == ("exhausted", [])
    assert "- n: should be a valid integer" in outcome.text


async def test_tool_failed_is_an_error_result() -> None:
    """The text as it was given; not an attempt, nothing is logged."""

    @tool
    async def fail() -> str:
        raise ToolFailed("The door is locked.")

    outcome = await call_tool(fail, {}, retry=1)
    assert (outcome.status, outcome.text, outcome.retry) == ("failed", "The door is locked.", 0)
    assert outcome.is_error


class Strange(Exception):
    def __str__(self) -> str:
        raise ValueError("not even this")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no such row"), "ValueError: no such row"),
        (KeyError("k"), "KeyError: 'k'"),
        (TimeoutError("socket"), "TimeoutError: socket"),
        (StopIteration(3), "RuntimeError: "),
        (Strange(), "Strange"),
        (ValueError(), "ValueError"),
        (ExceptionGroup("two", [ValueError("a")]), "ExceptionGroup: two (1 sub-exception)"),
        (OSError(2, "gone \ud800"), "FileNotFoundError: [Errno 2] gone \ufffd"),
        (RecursionError("deep"), "RecursionError: deep"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
@pytest.mark.parametrize("is_async", [False, True])
async def test_any_other_exception_is_an_error_result(
    error: Exception, text: str, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The model sees class and message; the traceback is in the log alone."""

    def fail() -> str:
        raise error

    async def fail_later() -> str:
        raise error

    made: Tool[..., Any] = tool(fail_later if is_async else fail, name="fail")
    with caplog.at_level(logging.WARNING, logger="freetoken_agent"):
        outcome = await call_tool(made, {})
    assert (outcome.status, outcome.is_error, outcome.retry) == ("raised", True, 0)
    assert outcome.text.startswith(text) and "Traceback" not in outcome.text
    assert "tool fail raised" in caplog.text and "Traceback" in caplog.text
    assert outcome.exception is error or isinstance(error, StopIteration)


@pytest.mark.parametrize("result", [b"raw", object(), {"a": bytearray(b"x")}, [{1: b"\xff"}]])
async def test_a_result_without_a_text_is_an_error_result(result: object) -> None:
    """It is the tool's fault, and named."""

    @tool
    def give() -> Any:
        return result

    outcome = await call_tool(give, {})
    assert outcome.status == "raised"
    assert outcome.text.startswith("InvalidToolResult: a tool returned ")


async def test_a_validator_that_breaks_is_an_error_result() -> None:
    """An exception of the user's own type, before the tool is called."""

    def breaks(value: object) -> object:
        raise LookupError("no table")

    @tool
    def take(n: Annotated[int, BeforeValidator(breaks)]) -> None: ...

    outcome = await call_tool(take, {"n": 1})
    assert (outcome.status, outcome.text) == ("raised", "LookupError: no table")


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_late_tool_is_an_error_result(is_async: bool, gate: threading.Event) -> None:
    """A thread is left behind; a coroutine is cancelled. The test would hang if they were waited
    for."""
    cancelled: list[bool] = []

    def wait() -> None:
        gate.wait()

    async def wait_async() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.append(True)

    made: Tool[..., Any] = tool(wait_async if is_async else wait, name="slow", timeout=0.05)
    outcome = await call_tool(made, {}, retry=1)
    assert (outcome.status, outcome.retry, outcome.is_error) == ("timeout", 0, True)
    assert outcome.text == "slow did not end within 0.05 s; it may have had effects."
    assert cancelled == [True] * is_async


async def test_s36_an_unknown_name_lists_the_tools(context: RunContext[str]) -> None:
    """Oracle: the names; a tool that this run may not use is unknown too."""

    @tool
    def read() -> str:
        return "text"

    @tool
    def write() -> str:
        return "written"

    box = Toolbox([read, write])
    outcome = await run_call(box, call("reed"), context)
    assert (outcome.status, outcome.is_error) == ("unknown", True)
    assert outcome.text == "There is no tool 'reed' to call. Call one of these: read, write."
    limited = replace(box, allowed=frozenset({"read"}))
    outcome = await run_call(limited, call("write"), context)
    assert outcome.text == "There is no tool 'write' to call. Call one of these: read."
    assert (await run_call(limited, call("read"), context)).text == "text"
    nothing = await run_call(Toolbox(), call("read"), context)
    assert nothing.text == "There is no tool 'read' to call. There is none at all."


async def test_s47_one_failure_among_parallel_calls_loses_nothing(context: RunContext[str]) -> None:
    """Three calls that all wait for one another, so they do run at once; the middle one raises.
    Three results, in call order, though they end in another."""
    started = asyncio.Event()
    running: list[str] = []
    ended: list[str] = []

    async def meet(name: str) -> None:
        running.append(name)
        if len(running) == 3:
            started.set()
        await started.wait()

    @tool
    async def first() -> str:
        await meet("first")
        await asyncio.sleep(0.02)
        return "one"

    @tool
    async def second() -> str:
        await meet("second")
        raise ValueError("two")

    @tool
    async def third() -> str:
        await meet("third")
        return "three"

    async def finished(outcome: ToolOutcome) -> None:
        ended.append(outcome.call.name)

    calls = [call("first", 0), call("second", 1), call("third", 2)]
    outcomes = await run_calls(Toolbox([first, second, third]), calls, context, on_finish=finished)
    assert [o.call for o in outcomes] == calls
    assert [o.text for o in outcomes] == ["one", "ValueError: two", "three"]
    assert [o.is_error for o in outcomes] == [False, True, False]
    assert sorted(ended) == ["first", "second", "third"]
    assert ended[-1] == "first"


async def test_threads_run_at_the_same_time(context: RunContext[str]) -> None:
    """Blocking tools that meet at a barrier, more than anyio's pool has threads; it would break if
    one waited for another."""
    barrier = threading.Barrier(45, timeout=30)

    @tool
    def meet(n: int) -> int:
        barrier.wait()
        return n

    calls = [call("meet", n, n=n) for n in range(45)]
    outcomes = await run_calls(Toolbox([meet]), calls, context)
    assert [o.text for o in outcomes] == [str(n) for n in range(45)]


async def test_each_call_is_announced_before_it_starts(context: RunContext[str]) -> None:
    """Oracle: the order of events; a call that is refused is announced too."""
    events: list[str] = []

    @tool
    def work(n: int) -> None:
        events.append(f"work {n}")

    async def start(one: ToolCall) -> None:
        events.append(f"start {one.id}")

    async def finish(outcome: ToolOutcome) -> None:
        events.append(f"finish {outcome.call.id} {outcome.status}")

    await run_calls(
        Toolbox([work]), [call("work", 1, n=1)], context, on_start=start, on_finish=finish
    )
    await run_calls(Toolbox([work]), [call("play", 2)], context, on_start=start, on_finish=finish)
    assert events == [
        "start call00001",
        "work 1",
        "finish call00001 ok",
        "start call00002",
        "finish call00002 unknown",
    ]


@pytest.mark.parametrize("when", ["on_start", "on_finish"])
async def test_what_a_callback_raises_ends_the_others(context: RunContext[str], when: str) -> None:
    """The error arrives as it is, not in a group; the other call is cancelled."""
    cancelled: list[bool] = []

    @tool
    async def wait() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.append(True)

    @tool
    async def quick() -> None:
        await asyncio.sleep(0.01)

    async def fail(given: ToolCall | ToolOutcome) -> None:
        await asyncio.sleep(0.01)
        name = given.name if isinstance(given, ToolCall) else given.call.name
        if name == "quick":
            raise LookupError("the store is full")

    callbacks: dict[str, Any] = {when: fail}
    with pytest.raises(LookupError, match="the store is full"):
        await run_calls(Toolbox([wait, quick]), [call("wait"), call("quick")], context, **callbacks)
    assert cancelled == [True] or when == "on_start"


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_cancel_does_not_wait_for_a_tool(
    context: RunContext[str], gate: threading.Event, is_async: bool
) -> None:
    """Task cancellation, while a thread is blocked or a coroutine sleeps; what had ended before is
    known by then."""
    started = threading.Event()
    quick_ended = asyncio.Event()
    known: list[str] = []

    def block() -> None:
        started.set()
        gate.wait()

    async def block_async() -> None:
        started.set()
        await anyio.sleep_forever()

    @tool
    def quick() -> str:
        return "done"

    async def finish(outcome: ToolOutcome) -> None:
        known.append(outcome.text)
        quick_ended.set()

    slow: Tool[..., Any] = tool(block_async if is_async else block, name="slow")
    calls = [call("slow"), call("quick", 1)]
    task = asyncio.create_task(run_calls(Toolbox([slow, quick]), calls, context, on_finish=finish))
    await quick_ended.wait()
    await anyio.to_thread.run_sync(started.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert known == ["done"]


def test_an_interrupt_in_a_thread_ends_the_run(memory_store: Store) -> None:
    """KeyboardInterrupt is no error of a tool."""

    @tool
    def interrupted() -> None:
        raise KeyboardInterrupt

    async def main() -> None:
        await call_tool(interrupted, {})

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())


async def test_results_are_cut_by_the_nearest_limit(context: RunContext[str]) -> None:
    """The tool's own limit, else the run's; error texts are cut too."""

    @tool
    def long() -> str:
        return "x" * 100

    @tool(result_limit=ResultLimit(5, keep="head", hint=""))
    def own() -> str:
        raise ToolFailed("y" * 100)

    box = Toolbox([long, own], result_limit=ResultLimit(10, keep="tail"))
    of_run = await run_call(box, call("long"), context)
    assert of_run.cut_chars == 90 and of_run.text.endswith("\n" + "x" * 10)
    of_tool = await run_call(box, call("own"), context)
    assert of_tool.cut_chars == 95
    assert of_tool.text == "yyyyy\n[95 of 100 characters were left out here.]"


def test_attempts_are_counted_by_step() -> None:
    """Two parallel failures are one attempt; one success forgets them; other tools keep theirs."""

    def outcome(name: str, retry: int) -> ToolOutcome:
        return ToolOutcome(call(name), "", "retry" if retry else "ok", retry)

    before = {"a": 1, "b": 1, "c": 1}
    after = next_retries(
        before, [outcome("a", 2), outcome("a", 2), outcome("b", 2), outcome("b", 0)]
    )
    assert after == {"a": 2, "b": 0, "c": 1}
    assert before == {"a": 1, "b": 1, "c": 1}


async def test_attempts_reach_the_tool_of_each_call(context: RunContext[str]) -> None:
    """`retries` is by tool; another tool starts at none."""

    @tool(retries=5)
    def one(context: RunContext[str]) -> int:
        return context.retry

    @tool
    def two(context: RunContext[str]) -> int:
        return context.retry

    outcomes = await run_calls(
        Toolbox([one, two]), [call("one"), call("two", 1)], context, retries={"one": 3}
    )
    assert [o.text for o in outcomes] == ["3", "0"]
