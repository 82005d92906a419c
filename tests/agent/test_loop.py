# SPDX-License-Identifier: Apache-2.0
"""Runs of an agent on a scripted model: steps, tools, ends, and what is left in the session."""

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel

from freetoken_agent import (
    Agent,
    Hooks,
    InvalidAgent,
    InvalidOutput,
    Limits,
    PromptDiffers,
    RunLimit,
    RunUnfinished,
    Session,
    Store,
)
from freetoken_agent.agent import StepRequest
from freetoken_agent.errors import ModelRetry, NothingToGenerate
from freetoken_agent.runs.run_context import RunContext
from freetoken_agent.testing import Call, ScriptedModel, Think
from freetoken_agent.tooling.tool_calls import ToolCall, ToolOutcome
from freetoken_agent.tools import AnyTool, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
async def wait(seconds: float, text: str) -> str:
    """Wait, then say the text."""
    await asyncio.sleep(seconds)
    return text


@tool
def fail(text: str) -> str:
    """Fail."""
    raise RuntimeError(text)


@tool(needs_approval=True)
def remove(path: str) -> str:
    """Remove a file."""
    return f"removed {path}"


TOOLS: list[AnyTool] = [add, wait, fail, remove]


def agent(*script: Any, **fields: Any) -> Agent[Any, Any]:
    return Agent(ScriptedModel(script), **{"tools": TOOLS, **fields})


def kinds(session: Session) -> list[str]:
    return [segment.kind for segment in session.path()]


def shape(session: Session) -> list[tuple[str, str]]:
    """A path without ids."""
    return [(s.kind, s.tool or s.content) for s in session.path()]


ADD = Call("add", {"a": 1, "b": 2})
PREAMBLE = ["system", "tools"]


async def test_a_run_goes_on_until_the_model_answers() -> None:
    """Oracle: the script; s42: text before a call ends nothing."""
    made = agent(["I add.", ADD], Call("add", {"a": 3, "b": 3}), "It is 6.", instructions="Add.")
    result = await made.run("What is (1 + 2) + 3?")
    assert result.output == "It is 6." and result.finish_reason == "stop" and result.steps == 3
    assert kinds(result.session) == [
        *PREAMBLE, "user", "text", "tool_call", "tool_result", "tool_call", "tool_result", "text",
    ]  # fmt: skip
    assert [s.content for s in result.session.find(kind="tool_result")] == ["3", "6"]
    assert result.usage.input_tokens == (result.usage.reused_tokens + result.usage.prefill_tokens)
    assert list(result.segments) == result.session.path()


def start(made: Agent[Any, Any], how: str, session: Session) -> Any:
    async def streamed() -> Any:
        async with made.run_stream("go", session=session) as run:
            async for _ in run:
                pass
            return run.result

    if how == "run_sync":
        return made.run_sync("go", session=session)
    return asyncio.run(made.run("go", session=session) if how == "run" else streamed())


def test_s17_all_ways_to_run_leave_the_same_tree() -> None:
    """Oracle: each other, on a script with a thought, text, parallel calls and an error."""
    seen = []
    for how in ("run", "run_sync", "run_stream"):
        script = [Think("hm"), "Two.", ADD, Call("fail", {"text": "no"})], "Done."
        made = agent(*script, instructions="Be brief.")
        with Store(":memory:") as store:
            session = store.create("s", made.model)  # type: ignore[arg-type]
            result = start(made, how, session)
            seen.append((shape(session), result.output, result.usage, len(session.tree().nodes)))
    for one in seen[1:]:
        assert one[0] == seen[0][0] and one[1] == seen[0][1] and one[3] == seen[0][3]


async def test_s47_three_parallel_calls_of_which_one_raises() -> None:
    """Oracle: the calls' order, though the first one ends last."""
    calls = [
        Call("wait", {"seconds": 0.05, "text": "late"}),
        Call("fail", {"text": "broken"}),
        Call("wait", {"seconds": 0.0, "text": "soon"}),
    ]
    result = await agent(calls, "ok").run("go")
    results = result.session.find(kind="tool_result")
    assert [r.content for r in results] == ["late", "RuntimeError: broken", "soon"]
    assert [r.error for r in results] == [False, True, False]


async def test_s36_an_unknown_tool_gets_a_result_that_lists_the_tools() -> None:
    """Oracle: the names."""
    result = await agent(Call("sub", {}), "sorry").run("go")
    [answer] = result.session.find(kind="tool_result")
    assert answer.error and all(one.name in answer.content for one in TOOLS)


def test_a_run_is_one_undo_step() -> None:
    """Oracle: the path before the run."""
    made = agent(ADD, "3", "again")
    with Store(":memory:") as store:
        session = store.create("s", made.model, system="old")  # type: ignore[arg-type]
        session.append("user", "before")
        before = session.ids()
        made.run_sync(session=session)
        session.undo()
        assert session.ids() == before
        session.redo()
        assert session.path()[-1].content == "3"


async def test_a_run_works_inside_a_running_loop() -> None:
    """Oracle: the answer; the loop of this test runs meanwhile."""
    assert agent("hi").run_sync("hello").output == "hi"


class City(BaseModel):
    name: str
    people: int


async def test_answers_are_of_the_output_type() -> None:
    """Oracle: pydantic; the first answer is refused and the model is told why."""
    made = agent("no json", '{"name": "Oslo", "people": 700000}', output_type=City)
    result = await made.run("Which city?")
    assert result.output == City(name="Oslo", people=700_000)
    assert "not valid" in result.session.find(kind="user")[-1].content


async def test_answers_of_another_type_end_the_run_when_no_attempt_is_left() -> None:
    """Oracle: the documented error with the partial result."""
    made = agent("no", "no", "no", output_type=City, limits=Limits(output_retries=1))
    with pytest.raises(InvalidOutput) as caught:
        await made.run("Which city?")
    assert caught.value.result.output is None
    assert [s.content for s in caught.value.result.session.find(kind="text")] == ["no", "no"]


async def test_a_limit_raises_with_what_there_is() -> None:
    """Oracle: the count of model calls."""
    made = agent(*[ADD] * 5, limits=Limits(max_steps=3))
    with pytest.raises(RunLimit, match="max_steps") as caught:
        await made.run("go")
    result = caught.value.result
    assert result.steps == 3 and len(result.session.find(kind="tool_result")) == 3


async def test_a_limit_may_ask_for_an_answer_without_tools() -> None:
    """Oracle: the script. What it asks, and its ids: test_loop_limits.py."""
    model = ScriptedModel([ADD, ADD, "So it is 3."])
    made = Agent(model, tools=TOOLS, limits=Limits(max_steps=2, on_limit="answer"))
    result = await made.run("go")
    assert (result.output, result.finish_reason, result.steps) == ("So it is 3.", "limit", 3)


@pytest.mark.parametrize("on_limit", ["raise", "answer"])
async def test_no_call_of_a_step_that_would_exceed_the_limit_runs(on_limit: Any) -> None:
    """Oracle: how often the tool ran; the run ends with the error, or with an answer."""
    ran: list[int] = []

    @tool
    def count(n: int) -> int:
        """Count."""
        ran.append(n)
        return n

    script: list[Any] = [
        Call("count", {"n": 0}),
        [Call("count", {"n": n}) for n in (1, 2)],
        "I know one.",
    ]
    limits = Limits(max_tool_calls=2, on_limit=on_limit)
    made = Agent(ScriptedModel(script), tools=[count], limits=limits)
    if on_limit == "raise":
        with pytest.raises(RunLimit, match="max_tool_calls") as caught:
            await made.run("go")
        result: Any = caught.value.result
        assert len(result.session.find(kind="tool_result")) == 1
    else:
        result = await made.run("go")
        assert result.output == "I know one." and result.finish_reason == "limit"
        assert [r.error for r in result.session.find(kind="tool_result")] == [False, True, True]
    assert ran == [0]


async def test_approval_stops_the_whole_step_until_everything_is_decided() -> None:
    """Oracle: no result until then; then all, in call order."""
    made = agent([Call("remove", {"path": "a"}), ADD], "done")
    result = await made.run("go")
    assert result.finish_reason == "pending" and result.output is None
    assert [call.tool for call in result.pending] == ["remove", "add"]
    session = result.session
    assert not session.find(kind="tool_result")
    still = await made.resume(session)
    assert still.finish_reason == "pending"
    call_id = result.pending[0].call_id or ""
    done = await made.resume(session, {call_id: True})
    assert done.output == "done"
    assert [r.content for r in session.find(kind="tool_result")] == ["removed a", "3"]


@pytest.mark.parametrize(("decision", "text"), [(False, "not allow"), ("Ask first.", "Ask first.")])
async def test_a_denied_call_gets_a_result_that_says_so(decision: bool | str, text: str) -> None:
    """Oracle: the text; the tool did not run."""
    made = agent(Call("remove", {"path": "a"}), "well")
    result = await made.run("go")
    done = await made.resume(result.session, {result.pending[0].call_id or "": decision})
    [answer] = result.session.find(kind="tool_result")
    assert text in answer.content and answer.error and done.output == "well"


async def test_hooks_see_and_change_what_happens() -> None:
    """Oracle: what each was called with, in order."""
    seen: list[str] = []

    async def before_model(ctx: RunContext[Any], request: StepRequest) -> StepRequest:
        seen.append(f"model {ctx.step} {request.tool_choice}")
        return StepRequest(max_tokens=500)

    def before_tool(ctx: RunContext[Any], call: ToolCall) -> None:
        seen.append(f"tool {call.name}")
        if call.name == "fail":
            raise ModelRetry("do not")

    def after_tool(ctx: RunContext[Any], call: ToolCall, outcome: ToolOutcome) -> str:
        return outcome.text[:2]

    hooks = Hooks(before_model=before_model, before_tool=before_tool, after_tool=after_tool)
    long = Call("wait", {"seconds": 0, "text": "abcdef"})
    model = ScriptedModel([[long, Call("fail", {"text": "x"})], "end"])
    result = await Agent(model, tools=TOOLS, hooks=hooks).run("go", tool_choice="required")
    assert seen == ["model 0 required", "tool wait", "tool fail", "model 1 auto"]
    short, refused = result.session.find(kind="tool_result")
    assert (short.content, refused.content) == ("ab", "do not")
    versions = result.session.versions(short)
    assert [version.content for version in versions] == ["abcdef", "ab"]
    forwarded = [model.tokenizer.decode(request.ids) for request in model.requests]
    assert not any("abcdef</" in text or "\nabcdef\n" in text for text in forwarded)
    assert {request.sampling.max_tokens for request in model.requests} == {500}


def test_a_preamble_that_differs_is_replaced_kept_or_an_error() -> None:
    """Oracle: the policy."""
    with Store(":memory:") as store:
        model = ScriptedModel(["a", "b"])
        made = Agent(model, instructions="new", tools=TOOLS)
        session = store.create("s", model, system="old")
        session.append("user", "hi")
        with pytest.raises(PromptDiffers):
            made.replace(prompt_policy="error").run_sync(session=session)
        made.replace(prompt_policy="keep").run_sync(session=session)
        assert session.path()[0].content == "old"
        made.run_sync("more", session=session)
        assert session.path()[0].content == "new" and session.path()[1].kind == "tools"


async def test_the_result_of_a_run_that_goes_on_is_an_error() -> None:
    """Oracle: the documented error; leaving early keeps what was finished."""
    made = agent(ADD, "3")
    async with made.run_stream("go") as run:
        async for event in run:
            if event.type == "tool_finished":
                break
        with pytest.raises(RunUnfinished):
            _ = run.result


async def test_an_agent_without_a_model_needs_a_session() -> None:
    """Oracle: the documented error."""
    with pytest.raises(NothingToGenerate, match="no model"):
        await Agent(tools=TOOLS).run("go")


async def test_what_no_type_checker_has_seen_is_told() -> None:
    """Oracle: the documented error."""
    answer: Any = 5
    with pytest.raises(InvalidAgent, match="no text"):
        await agent("never", instructions=lambda _: answer).run("go")
    mode: Any = "soon"
    async with agent("hi").run_stream("go") as run:
        with pytest.raises(InvalidAgent, match="immediate"):
            run.cancel(mode)
        async for _ in run:
            pass
    assert run.result.output == "hi"


EVENTS = ("plan_ready", "tool_call_ready", "tool_finished", "segment_finished", "step_finished")


@pytest.mark.parametrize("mode", ["immediate", "after_step"])
@pytest.mark.parametrize("at", EVENTS)
async def test_s11_a_run_cancelled_anywhere_can_be_followed_by_another(mode: Any, at: str) -> None:
    """Oracle: the next run answers; no call is left without a result."""
    calls = [Call("wait", {"seconds": 0.01, "text": "x"}), Call("add", {"a": 1, "b": 1})]
    model = ScriptedModel([calls, "first", "second", "third"])
    made = Agent(model, tools=TOOLS)
    async with made.run_stream("go") as run:
        async for event in run:
            if event.type == at:
                run.cancel(mode)
        result = run.result
    assert result.finish_reason in ("cancelled", "stop")
    later = await made.run("and now?", session=result.session)
    assert later.output in ("first", "second", "third")
    opened: list[str] = []
    for segment in result.session.path():
        if segment.kind == "tool_call":
            opened.append(segment.call_id or "")
        elif segment.kind == "tool_result":
            opened.remove(segment.call_id or "")
    assert not opened
