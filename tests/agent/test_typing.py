# SPDX-License-Identifier: Apache-2.0
"""What type checkers say of a user's program, beside what happens: `assert_type` and the comments
that silence an error are checked by mypy --strict, as for every file; the last test runs it without
the settings of this repository, as a user would."""

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, assert_never, assert_type, cast

import pytest
from pydantic import BaseModel

from freetoken_agent import (
    Agent,
    ApprovalRequest,
    ContextEdited,
    Edit,
    Hooks,
    InvalidDecision,
    InvalidTool,
    MCPServer,
    ModelRetry,
    PlanReady,
    PrefillProgress,
    Reply,
    ReplyFinished,
    Result,
    RunContext,
    RunEvent,
    RunFinished,
    Segment,
    SegmentFinished,
    StepFinished,
    StepRequest,
    Store,
    TextDelta,
    ThinkingDelta,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolCallReady,
    ToolCallStarted,
    ToolFinished,
    ToolList,
    ToolOutcome,
    Toolset,
    tool,
)
from freetoken_agent.testing import Call, Raw, Request, ScriptedModel, Think
from freetoken_agent.tool_testing import call_tool


@dataclass
class Home:
    town: str


class City(BaseModel):
    name: str


@tool
def add(a: int, b: int = 1) -> int:
    """Add."""
    return a + b


@tool(timeout=3, retries=2)
async def look_up(name: str, *, deep: bool = False) -> float:
    """Look up."""
    return 1.0


@tool
def town(context: RunContext[Home], suffix: str) -> str:
    """Where home is."""
    assert_type(context.deps, Home)
    return context.deps.town + suffix


class Counter:
    def __init__(self) -> None:
        self.count = 0

    @tool
    def step(self, by: int) -> int:
        """Count on."""
        self.count += by
        return self.count

    @staticmethod
    @tool
    def double(x: int) -> int:
        """Double it."""
        return 2 * x

    @classmethod
    @tool
    def made(cls, start: int) -> Self:
        """Make one."""
        return cls()


async def test_tools_keep_the_signatures_of_their_functions() -> None:
    """At run time: the functions' own results; wrong calls fail as they would without `@tool`."""
    assert assert_type(add(1), int) == 2
    assert assert_type(await look_up("x", deep=True), float) == 1.0
    assert assert_type(Counter().step(2), int) == 2
    assert assert_type(Counter.double(2), int) == 4
    with pytest.raises(TypeError):
        add("1")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        await look_up("x", True)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Counter().step("2")  # type: ignore[arg-type]
    with pytest.raises(InvalidTool):
        tool(nam="x")(len)  # type: ignore[call-overload]
    assert_type(await call_tool(add, {"a": 1}), ToolOutcome)


def test_an_agent_knows_the_type_of_its_answers() -> None:
    """At run time: values of these types."""
    model = ScriptedModel(['{"name": "Oslo"}', '{"result": [{"name": "Oslo"}]}', "text"])
    one = Agent(model, output_type=City, deps_type=Home, tools=[town])
    assert_type(one, Agent[Home, City])
    result = one.run_sync("go", deps=Home("Oslo"))
    assert_type(result, Result[City])
    assert assert_type(result.output, City | None) == City(name="Oslo")
    assert_type(one.replace(name="other"), Agent[Home, City])
    several = Agent(model, output_type=list[City])
    assert assert_type(several.run_sync("go").output, list[City] | None) == [City(name="Oslo")]
    text = Agent(model)
    assert assert_type(text.run_sync("go").output, str | None) == "text"


def test_deps_are_those_of_the_agent() -> None:
    """At run time nobody checks them: a tool gets what the run was given."""
    agent = Agent(ScriptedModel(["done"]), deps_type=Home)
    assert agent.run_sync("go", deps=3).output == "done"  # type: ignore[arg-type]


def test_a_union_is_a_type_by_a_cast() -> None:
    """mypy has no type for the value `City | int`; the cast says which it is."""
    model = ScriptedModel(['{"result": 5}'])
    agent = Agent(model, output_type=cast("type[City | int]", City | int))
    assert assert_type(agent.run_sync("go").output, City | int | None) == 5


def described(event: RunEvent) -> str:
    """Every event of a run has a case."""
    match event:
        case PlanReady(plan=plan):
            return str(plan.prefill_tokens)
        case ThinkingDelta(text=text) | TextDelta(text=text):
            return text
        case ToolCallStarted(name=name):
            return assert_type(name, str | None) or ""
        case ToolCallReady(call=call) | ApprovalRequest(call=call):
            return assert_type(call, Segment).text
        case SegmentFinished(segment=segment):
            return segment.kind
        case ReplyFinished(reply=reply) | StepFinished(reply=reply):
            return assert_type(reply, Reply).text
        case ToolFinished(status=status):
            return status
        case ContextEdited(edit=edit):
            return str(assert_type(edit, Edit).plan)
        case PrefillProgress() | ToolCallDelta() | RunFinished():
            return event.type
        case _:
            assert_never(event)


def forgetful(event: RunEvent) -> str:
    match event:
        case TextDelta():
            return event.text
        case _:
            assert_never(event)  # type: ignore[arg-type]


def by_type(event: RunEvent) -> str:
    if event.type == "text_delta":
        return assert_type(event, TextDelta).text
    return event.status if event.type == "tool_finished" else ""


async def test_a_stream_has_events_of_known_types() -> None:
    """At run time: what happens in a run with a tool is described, and what was forgotten fails."""
    model = ScriptedModel([Call("add", {"a": 1}), "two"])
    agent = Agent(model, tools=[add])
    seen: list[RunEvent] = []
    async with agent.run_stream("go") as run:
        async for event in run:
            seen.append(event)
        assert_type(run.result, Result[str])
    assert {"ok", "two", "text", "tool_call"} <= {described(event) for event in seen}
    assert "".join(map(by_type, seen)) == "oktwo"
    with pytest.raises(AssertionError):
        forgetful(seen[0])


def before_model(context: RunContext[Home], request: StepRequest) -> StepRequest | None:
    return None


async def before_model_later(context: RunContext[Home], request: StepRequest) -> StepRequest | None:
    return StepRequest(tool_choice="none")


async def before_tool(context: RunContext[Home], call: ToolCall) -> None:
    if call.name == "add":
        raise ModelRetry("Not now.")


def after_tool(context: RunContext[Home], call: ToolCall, outcome: ToolOutcome) -> str | None:
    return outcome.text[:10]


def after_model(context: RunContext[Home], reply: Reply) -> None: ...


def on_edit(context: RunContext[Home], edit: Edit) -> None: ...


def wrong(number: int) -> int:
    return number


async def test_hooks_are_functions_of_what_they_are_called_with() -> None:
    """At run time they are called so."""
    hooks = Hooks(
        before_model=before_model,
        after_model=after_model,
        before_tool=before_tool,
        after_tool=after_tool,
        on_edit=on_edit,
    )
    Hooks(before_model=before_model_later, after_tool=lambda context, call, outcome: None)
    agent = Agent(ScriptedModel([Call("add", {"a": 1}), "done"]), tools=[add], hooks=hooks)
    assert (await agent.run("go")).session.find(kind="tool_result")[0].content == "Not now."
    broken = agent.replace(hooks=Hooks(before_model=wrong))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        await broken.run("go")


class Own:
    """A toolset of a user's."""

    @property
    def known_tools(self) -> Sequence[Tool[..., Any]] | None:
        return None

    async def list_tools(self) -> Sequence[Tool[..., Any]]:
        return [Tool.from_schema("echo", {"type": "object"}, lambda given: given)]


async def test_toolsets_and_instructions_of_ones_own() -> None:
    """At run time: each gives its tools."""

    async def instructions(context: RunContext[Home]) -> str:
        return f"You live in {context.deps.town}."

    own: Toolset = Own()
    model = ScriptedModel([[Call("echo", {"x": 1}), Call("my_add", {"a": 1})], "done"])
    agent = Agent(
        model,
        instructions=instructions,
        tools=[Counter().step, Counter.made, len_of],
        toolsets=[own, ToolList([add], prefix="my")],
        deps_type=Home,
    )
    result = await agent.run("go", deps=Home("Oslo"))
    assert [s.content for s in result.session.find(kind="tool_result")] == ['{"x":1}', "2"]
    assert "Oslo" in result.session.render()
    with pytest.raises(InvalidTool):
        MCPServer.stdio("server", timout=3)  # type: ignore[call-arg]


def len_of(text: str) -> int:
    """How long a text is."""
    return len(text)


def scripted(request: Request) -> list[str | Call]:
    assert_type(request.ids, tuple[int, ...])
    return ["text", Call("add", {"a": 1})]


async def test_scripts_and_resuming() -> None:
    """At run time: each kind of step of a script is played."""
    model = ScriptedModel(
        ["text", Call("add", {}), [Think("hm"), "text"], ValueError(), scripted, Raw("half")]
    )
    assert_type(model.requests, list[Request])
    agent = Agent(ScriptedModel([scripted, "two"]), tools=[add])
    with Store(":memory:") as store:
        session = store.create("s", agent.model)  # type: ignore[arg-type]  # it may be a name
        assert (await agent.run("go", session=session)).output == "two"
        with pytest.raises(InvalidDecision):
            assert_type(await agent.resume(session, {"abc": True, "def": "no"}), Result[str])


def test_mypy_agrees_without_the_settings_of_the_repository(tmp_path: Path) -> None:
    """Oracle: mypy --strict; it also refuses a comment that silences nothing."""
    root = Path(__file__).resolve().parents[2]
    program = tmp_path / "program.py"
    text = Path(__file__).read_text()
    program.write_text(text)
    assert len(re.findall(r"# type: ignore\[", text)) > 8
    cache = root / ".mypy_cache" / "programs"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(cache), str(program)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout
