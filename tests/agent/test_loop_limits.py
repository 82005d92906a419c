# SPDX-License-Identifier: Apache-2.0
"""Limits of runs, and what is left to the model when one is reached. Retries, allowed tools."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from freetoken_agent import (
    Agent,
    Hooks,
    InvalidAgent,
    InvalidSampling,
    Limits,
    RunLimit,
    StepRequest,
    Store,
)
from freetoken_agent.errors import InvalidTool, ModelRetry, ToolFailed
from freetoken_agent.runs import run_limits
from freetoken_agent.runs.run_context import RunContext
from freetoken_agent.testing import Call, Request, ScriptedModel, Step
from freetoken_agent.tools import tool

ran: list[str] = []  # what the tools have done; each second of the clock is one of these


@tool
async def work(name: str = "x") -> str:
    """Work."""
    ran.append(name)
    await asyncio.sleep(0.02)
    return f"worked on {name}"


@tool
def rest() -> str:
    """Rest."""
    ran.append("rest")
    return "rested"


@pytest.fixture(autouse=True)
def _nothing_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    ran.clear()
    monkeypatch.setattr(run_limits, "monotonic", lambda: float(len(ran)))


WORK = Call("work", {"name": "it"})
PAIR = [Call("work", {"name": "a"}), Call("work", {"name": "b"})]
# A limit, the script that reaches it, and how many model calls are made by then.
LIMITS: dict[str, tuple[Limits, list[Step], int]] = {
    "max_steps": (Limits(max_steps=2), [WORK, WORK], 2),
    "max_tool_calls": (Limits(max_tool_calls=2), [WORK, PAIR], 2),
    "output_tokens": (Limits(output_tokens=80), [WORK, WORK], 2),
    "timeout_s": (Limits(timeout_s=1.0), [WORK], 1),
}


@pytest.mark.parametrize("name", LIMITS)
async def test_every_limit_raises_with_the_partial_result(name: str) -> None:
    """Oracle: the script: what was done until then is in the result, and the session goes on."""
    limits, script, steps = LIMITS[name]
    model = ScriptedModel([*script, "never"])
    made: Agent[Any, str] = Agent(model, tools=[work], limits=limits)
    with pytest.raises(RunLimit, match=name) as caught:
        await made.run("go")
    result = caught.value.result
    assert caught.value.value == getattr(limits, name)
    assert (result.steps, result.finish_reason, result.output) == (steps, "limit", None)
    assert len(model.requests) == steps
    assert result.usage.input_tokens == sum(len(request.ids) for request in model.requests)
    calls = len(script) if name != "max_tool_calls" else 1
    assert len(ran) == len(result.session.find(kind="tool_result")) == calls
    later = await made.replace(limits=Limits()).run("and?", session=result.session)
    assert later.output == "never"


@pytest.mark.parametrize("name", LIMITS)
async def test_an_answer_at_the_limit_takes_one_step_and_changes_no_ids(name: str) -> None:
    """Oracle: the run without that step. Its ids are what the extra step goes on from, the tools
    among them; that none may be called is said by a grammar and by the request, not by ids."""
    limits, script, steps = LIMITS[name]
    choices: list[str] = []
    hooks = Hooks(before_model=lambda _, request: choices.append(request.tool_choice))
    plain, asked = ScriptedModel(script), ScriptedModel([*script, "So it is."])
    with Store(":memory:") as store:
        made: Agent[Any, str] = Agent(plain, tools=[work], limits=limits)
        without = store.create("without", plain, system="Be brief.")
        with pytest.raises(RunLimit):
            await made.run("go", session=without)
        answering = replace(limits, on_limit="answer")
        made = made.replace(model=asked, limits=answering, hooks=hooks)
        session = store.create("with", asked, system="Be brief.")
        result = await made.run("go", session=session)
        assert (result.output, result.finish_reason) == ("So it is.", "limit")
        assert result.steps == steps + 1 and choices == ["auto"] * steps + ["none"]
        extra = asked.requests[-1]
        assert session.ids()[: len(without.ids())] == without.ids()
        assert list(extra.ids[: len(without.ids())]) == without.ids()
    assert [r.ids for r in asked.requests[:-1]] == [r.ids for r in plain.requests]
    walk = extra.sampling.constraint
    assert walk is not None
    walk = walk.copy()
    with pytest.raises(InvalidSampling):
        for token in asked.tokenizer.encode_frame("Well. <tool_call>"):
            walk.accept(token)
    refused = [r for r in result.session.find(kind="tool_result") if r.error]
    assert len(refused) == (2 if name == "max_tool_calls" else 0)


async def test_a_model_that_calls_all_the_same_ends_at_the_limit() -> None:
    """Oracle: the tool did not run in the extra step. The scripted model heeds no constraint."""
    model = ScriptedModel([WORK, WORK, WORK])
    limits = Limits(max_steps=1, on_limit="answer")
    with pytest.raises(RunLimit, match="max_steps") as caught:
        await Agent(model, tools=[work], limits=limits).run("go")
    assert ran == ["it"] and caught.value.result.steps == 2
    first, refused = caught.value.result.session.find(kind="tool_result")
    assert not first.error and refused.error


async def test_a_hook_cannot_make_the_last_step_call_a_tool() -> None:
    """Oracle: what the grammar of the last step lets through."""
    hooks = Hooks(before_model=lambda *_: StepRequest(tool_choice="required", max_tokens=50))
    model = ScriptedModel([WORK, "So it is."])
    limits = Limits(max_steps=1, on_limit="answer")
    result = await Agent(model, tools=[work], limits=limits, hooks=hooks).run("go")
    assert result.output == "So it is."
    first, last = (request.sampling.constraint for request in model.requests)
    assert first is not None and last is not None
    text = ord("S")
    last.copy().accept(text)
    with pytest.raises(InvalidSampling):
        first.copy().accept(text)


async def test_a_hook_that_returns_something_else_is_told() -> None:
    """Oracle: the documented error, before anything is forwarded."""
    model = ScriptedModel(["never"])
    returned: Any = {"tool_choice": "none"}
    hooks = Hooks(before_model=lambda *_: returned)
    with pytest.raises(InvalidAgent, match="StepRequest"):
        await Agent(model, hooks=hooks).run("go")
    assert not model.requests


async def test_retries_are_counted_over_steps_and_end() -> None:
    """Oracle: what the tool's context says, and what the model is told."""
    seen: list[tuple[int, int]] = []

    @tool(retries=2)
    def guess(ctx: RunContext[Any], number: int) -> str:
        """Guess."""
        seen.append((ctx.retry, ctx.max_retries))
        if number < 9:
            raise ModelRetry("higher")
        return "yes"

    numbers = [1, 2, 3, 9, 4]
    model = ScriptedModel([*[Call("guess", {"number": n}) for n in numbers], "done"])
    result = await Agent(model, tools=[guess]).run("go")
    assert result.output == "done" and seen == [(0, 2), (1, 2), (2, 2), (3, 2), (0, 2)]
    told = result.session.find(kind="tool_result")
    assert [t.error for t in told] == [True, True, True, False, True]
    assert told[0].content == "higher" and "No attempt is left" in told[2].content


async def test_a_tool_that_failed_is_not_tried_again_by_itself() -> None:
    """Oracle: the text of ToolFailed, without a type's name; no retry is counted."""
    seen: list[int] = []

    @tool(retries=2)
    def fetch(ctx: RunContext[Any]) -> str:
        """Fetch."""
        seen.append(ctx.retry)
        raise ToolFailed("The server is down.")

    result = await Agent(
        ScriptedModel([Call("fetch", {}), Call("fetch", {}), "done"]), tools=[fetch]
    ).run("go")
    told = [r.content for r in result.session.find(kind="tool_result")]
    assert told == ["The server is down."] * 2 and seen == [0, 0]


async def test_only_allowed_tools_are_called_and_the_path_stays_as_it_is() -> None:
    """Oracle: a grammar that leaves nothing else; the ids of a run that allows everything."""
    requests: list[Request] = []
    for allowed in (None, ["rest"]):
        model = ScriptedModel([[WORK, Call("rest", {})], "done"])
        made: Agent[Any, str] = Agent(model, tools=[work, rest])
        result = await made.run("go", allowed_tools=allowed)
        requests.append(model.requests[0])
    assert requests[0].ids == requests[1].ids, "the tools on the path are the same"
    constraint = requests[1].sampling.constraint
    assert constraint is not None
    walk = constraint.copy()
    for token in model.tokenizer.encode_frame('<tool_call>\n{"name": "'):
        walk.accept(token)
    assert model.tokenizer.decode(list(walk.forced())).startswith('rest", "arguments": ')
    refused, done = result.session.find(kind="tool_result")  # a model without a grammar
    assert refused.error and "rest" in refused.content and done.content == "rested"
    assert ran == ["it", "rest", "rest"]


async def test_names_that_no_tool_has_are_refused_before_anything_is_written() -> None:
    """Oracle: the session's version, and no request."""
    model = ScriptedModel(["never"])
    made: Agent[Any, str] = Agent(model, tools=[work])
    with Store(":memory:") as store:
        session = store.create("s", model)
        before = session.version
        with pytest.raises(InvalidTool, match="allowed"):
            await made.run("go", session=session, allowed_tools=["wrok"])
        with pytest.raises(InvalidSampling, match="wrok"):
            await made.run("go", session=session, tool_choice="wrok")
        with pytest.raises(InvalidSampling, match="work"):
            await made.run("go", session=session, tool_choice="work", allowed_tools=[])
        with pytest.raises(InvalidSampling, match="required"):
            await made.replace(tools=[]).run("go", session=session, tool_choice="required")
        assert session.version == before and not model.requests


@pytest.mark.parametrize("mode", ["immediate", "after_step"])
@pytest.mark.parametrize("at", ["plan_ready", "text_delta", "reply_finished", "tool_finished"])
async def test_how_much_of_a_step_a_cancel_lets_through(mode: Any, at: str) -> None:
    """Oracle: `after_step` ends the step with all of its tools; `immediate` starts none, and ends
    those that work. Neither makes another model call."""
    calls = [Call("rest", {}), Call("work", {"name": "slow"})]
    model = ScriptedModel([["Now.", *calls], "never"])
    async with Agent(model, tools=[work, rest]).run_stream("go") as run:
        async for event in run:
            if event.type == at:
                run.cancel(mode)
    result = run.result
    assert result.finish_reason == "cancelled" and result.output is None
    assert len(model.requests) <= 1
    done = [r.content for r in result.session.find(kind="tool_result")]
    if mode == "after_step":
        assert done == ["rested", "worked on slow"]
    else:
        assert done == (["rested"] if at == "tool_finished" else [])
        assert set(ran) == ({"rest", "slow"} if at == "tool_finished" else set())


@pytest.mark.parametrize("place", ["after_model", "before_tool"])
async def test_a_cancel_from_a_hook_starts_no_tool(place: str) -> None:
    """Oracle: the tools' own log. The calls stay as if they had never been started."""
    hooks = Hooks(**{place: lambda *_: run.cancel()})
    model = ScriptedModel([PAIR, "done"])
    made: Agent[Any, str] = Agent(model, tools=[work])
    run: Any
    async with made.replace(hooks=hooks).run_stream("go") as run:
        async for _ in run:
            pass
    assert run.result.finish_reason == "cancelled" and ran == []
    assert (await made.resume(run.result.session)).output == "done" and ran == ["a", "b"]
