# SPDX-License-Identifier: Apache-2.0
"""What people pass for tools, and what tools do that they should not: each has an error that helps,
or a result."""

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Optional, Self

import anyio
import pytest
from pydantic import BaseModel

from freetoken_agent import Agent, InvalidTool, ModelRetry, RunContext, ToolList, tool
from freetoken_agent.testing import Call, ScriptedModel, Step
from freetoken_agent.tool_testing import call_tool


class Meter:
    def __init__(self, unit: str) -> None:
        self.unit = unit

    @tool
    def generic(me: Self, x: int) -> str:
        return f"{x} {me.unit}"

    @tool
    def quoted(me: "Meter", x: int) -> str:
        return f"{x} {me.unit}"

    @tool
    def of_run(context: RunContext[str], x: int) -> str:
        return f"{x} {context.deps}"


@pytest.mark.parametrize("name", ["generic", "quoted"])
async def test_an_instance_may_have_any_name(name: str) -> None:
    """Oracle: the instance's state; it is no parameter."""
    made = getattr(Meter("km"), name)
    assert list(made.parameters["properties"]) == ["x"]
    assert (await call_tool(made, {"x": 3})).text == "3 km"


async def test_a_context_is_no_instance() -> None:
    """A function in a class that takes a context only is like a static one."""
    assert (await call_tool(Meter.of_run, {"x": 3}, deps="m")).text == "3 m"


def one(x: int) -> Iterator[int]:
    yield x


class Streams:
    def __call__(self, x: int) -> Iterator[int]:
        yield x


class Kind(RunContext[int]):
    """Nobody makes one."""


def optional(context: Optional[RunContext[int]], x: int) -> str:  # noqa: UP045
    return ""


def either(context: RunContext[int] | None, x: int) -> str:
    return ""


def listed(x: list[RunContext[int]]) -> str:
    return ""


def derived(context: Kind, x: int) -> str:
    return ""


def itself(x: "list[Self]") -> str:  # type: ignore[misc]
    return ""


class Undefined(BaseModel):
    other: "Nowhere"  # type: ignore[name-defined]  # noqa: F821


def undefined(x: list[Undefined]) -> str:
    return ""


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (functools.partial(one), "one result, not a stream"),
        (Streams(), "one result, not a stream"),
        ("read", r"write @tool\(name='read'\)"),
        (ToolList([]), "pass it as one of toolsets="),
        ({"type": "function"}, "Tool.from_schema"),
        (None, "pass a function"),
        (Meter, "pass a function"),
        (optional, "RunContext in the wrong place; got 'context'.*alone"),
        (either, "RunContext in the wrong place; got 'context'"),
        (listed, "RunContext in the wrong place; got 'x'"),
        (derived, "RunContext in the wrong place; got 'context'"),
        (itself, "parameter 'x' of tool 'itself'.*Self"),
        (undefined, "'Nowhere' is not defined.*define Nowhere before the tool"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value)[:20],
)
def test_the_remedy_says_what_to_write(thing: Any, message: str) -> None:
    """Oracle: the documented error, with what helps in this case."""
    with pytest.raises(InvalidTool, match=message):
        Agent(tools=[thing])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": one}, "tools are a list"),
        ({"tools": None}, "tools are a list"),
        ({"tools": "read"}, "tools are a list"),
        ({"tools": (each for each in [optional])}, "tools are a list"),
        ({"toolsets": ToolList([])}, "toolsets are a list"),
        ({"toolsets": [len]}, "this is no toolset.*tools="),
    ],
)
def test_lists_of_an_agent_are_lists(fields: dict[str, Any], message: str) -> None:
    """A generator would be read once, and the agent be without tools."""
    with pytest.raises(InvalidTool, match=message):
        Agent(**fields)


def test_a_local_type_of_a_plain_function_is_explained() -> None:
    """An agent cannot see the names of the function that made it; `@tool` can."""

    class Local(BaseModel):
        x: int

    def take(x: "Local") -> int:
        return x.x

    with pytest.raises(InvalidTool, match="write @tool there"):
        Agent(tools=[take])
    assert Agent(tools=[tool(take)]).known_tools[0].name == "take"


def numbers(stop: int) -> Iterator[int]:
    yield from range(stop)
    raise ModelRetry("Ask for fewer.")


async def later() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("make", "status", "text"),
    [
        (lambda: map(str, range(3)), "ok", '["0","1","2"]'),
        (lambda: (n * n for n in range(3)), "ok", "[0,1,4]"),
        (lambda: numbers(2), "retry", "Ask for fewer."),
        (lambda: (1 // n for n in range(2)), "raised", "ZeroDivisionError: "),
        (lambda: later(), "raised", "InvalidToolResult: a tool returned async_generator"),
    ],
)
async def test_an_iterator_is_read_where_the_tool_runs(
    make: Callable[[], Any], status: str, text: str
) -> None:
    """Oracle: its items; what it raises counts like what the tool raises."""
    outcome = await call_tool(tool(make, name="it"), {})
    assert (outcome.status, outcome.text[: len(text)]) == (status, text)


async def test_an_iterator_without_an_end_is_late_like_a_tool() -> None:
    """Oracle: the timeout; the event loop goes on meanwhile, which the sleep needs."""
    done = False

    def items() -> Iterator[int]:
        for _ in itertools.count():
            if done:
                return
            yield 0

    endless = tool(items_of(items), name="endless", timeout=0.2)
    async with anyio.create_task_group() as group:
        group.start_soon(anyio.sleep, 0.01)
        outcome = await call_tool(endless, {})
        done = True
    assert outcome.status == "timeout"


def items_of(make: Callable[[], Iterator[int]]) -> Callable[[], Iterator[int]]:
    def produce() -> Iterator[int]:
        return (item for item in make() if item)

    return produce


async def test_what_a_tool_waits_for_may_be_cancelled() -> None:
    """Only a cancel of the call itself ends a run: here the run goes on. Oracle: the result."""

    async def wait() -> str:
        """Wait for another task, which somebody cancels."""
        other = asyncio.ensure_future(asyncio.sleep(60))
        asyncio.get_running_loop().call_soon(other.cancel)
        await other
        return "never"

    def fail() -> str:
        """Pass such an error on."""
        raise asyncio.CancelledError

    script: list[Step] = [[Call("wait", {}), Call("fail", {})], "done"]
    result = await Agent(ScriptedModel(script), tools=[wait, fail]).run("go")
    assert result.output == "done"
    texts = [segment.content for segment in result.session.find(kind="tool_result")]
    assert texts == ["CancelledError: what it waited for was cancelled"] * 2


async def test_a_cancel_of_the_call_still_ends_it() -> None:
    """Oracle: CancelledError, as asyncio has it."""

    async def wait() -> None:
        await asyncio.sleep(60)

    flying = asyncio.create_task(call_tool(wait, {}))
    await asyncio.sleep(0.01)
    flying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await flying


async def test_a_method_is_tested_with_its_instance() -> None:
    """Oracle: the documented error, as an agent has it, not one of Python's from inside."""
    with pytest.raises(InvalidTool, match=r"method without its instance.*instance\.generic"):
        await call_tool(Meter.generic, {"x": 1})
