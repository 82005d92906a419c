# SPDX-License-Identifier: Apache-2.0
"""What was hunted down around runs: what users do beside them, to them, and inside them."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from freetoken_agent import (
    Agent,
    ClearToolResults,
    ContextOverflow,
    Hooks,
    NothingToGenerate,
    ResultLimit,
    RunContext,
    Session,
    SessionBusy,
    Store,
    StoreClosed,
    Usage,
)
from freetoken_agent.branches.pairing import INTERRUPTED
from freetoken_agent.context_rules import CLEARED
from freetoken_agent.testing import Call, ScriptedModel, Think
from freetoken_agent.tools import AnyTool, tool


@tool
async def slow() -> str:
    """Never ends."""
    await asyncio.Event().wait()
    return ""


@tool
async def quick(text: str = "soon") -> str:
    """Ends at once."""
    return text


TOOLS: list[AnyTool] = [slow, quick]


def results(session: Session) -> list[str]:
    return [segment.content for segment in session.find(kind="tool_result")]


@pytest.mark.parametrize("how", ["append", "append_messages", "sync_messages", "batch"])
async def test_a_stored_result_is_not_lost_when_somebody_goes_on_without_the_run(
    memory_store: Store, how: str
) -> None:
    """Oracle: the result that `ToolFinished` reported, as a hook shortened it; the call whose tool
    had not ended is interrupted."""
    hooks = Hooks(after_tool=lambda ctx, call, outcome: outcome.text[:3])
    model = ScriptedModel([[Call("slow", {}), Call("quick", {"text": "sooner"})], "first"])
    session = memory_store.create("s", model)
    made = Agent(model, tools=TOOLS, hooks=hooks)
    async with made.run_stream("go", session=session) as run:
        async for event in run:
            if event.type == "tool_finished":
                break
    said = [{"role": "user", "content": "and now?"}]
    match how:
        case "append":
            session.append("user", "and now?")
        case "append_messages":
            session.append_messages(said, "openai")
        case "sync_messages":
            session.sync_messages([*session.to_messages("openai"), *said], "openai")
        case _:
            with session.batch():
                session.append("user", "and now?")
    assert results(session) == [INTERRUPTED, "soo"]
    assert [r.error for r in session.find(kind="tool_result")] == [True, False]
    assert (await made.run(session=session)).output == "first"


async def test_a_call_that_was_taken_back_has_no_stored_result(memory_store: Store) -> None:
    """Oracle: `rewind` makes calls new, also inside a batch that goes on."""
    model = ScriptedModel([[Call("quick", {}), Call("slow", {})]])
    session = memory_store.create("s", model)
    async with Agent(model, tools=TOOLS).run_stream("go", session=session) as run:
        async for event in run:
            if event.type == "tool_finished":
                break
    with session.batch():
        session.rewind(to=session.find(kind="tool_call")[0])
        session.append("user", "and now?")
    assert results(session) == [INTERRUPTED]


@tool
def add(a: int, b: int) -> int:
    """Add."""
    executed.append("add")
    return a + b


executed: list[str] = []
ADD = Call("add", {"a": 1, "b": 2})


@pytest.fixture(autouse=True)
def _nothing_was_executed() -> None:
    executed.clear()


EDITS: dict[str, Callable[[Session], object]] = {
    "append": lambda session: session.append("user", "by the way"),
    "delete": lambda session: session.delete(session.find(kind="tool_call")[0]),
    "arguments": lambda session: session.replace(
        session.find(kind="tool_call")[1], arguments={"a": 4, "b": 4}
    ),
    "user": lambda session: session.replace(session.find(kind="user")[0], "other"),
}


@pytest.mark.parametrize("by", ["a tool", "the reader"])
@pytest.mark.parametrize("edit", EDITS)
async def test_edits_while_calls_are_open_do_not_end_the_run(
    memory_store: Store, check_pairs: Callable[[Session], None], edit: str, by: str
) -> None:
    """Oracle: the run answers, every call on the path has one result, and the edit is there."""

    @tool
    async def look(ctx: RunContext[Any]) -> str:
        """Look, and edit the conversation."""
        if by == "a tool":
            EDITS[edit](ctx.session)
        return "seen"

    model = ScriptedModel([[Call("look", {}), ADD], "done"])
    session = memory_store.create("s", model)
    async with Agent(model, tools=[look, add]).run_stream("go", session=session) as run:
        async for event in run:
            if by == "the reader" and event.type == "tool_finished" and event.call.tool == "look":
                EDITS[edit](session)
    assert run.result.output == "done" and session.path()[-1].content == "done"
    check_pairs(session)
    assert len(session.find(kind="tool_call")) == len(results(session))
    match edit:
        case "append":
            assert session.path()[-2].content == "by the way"
        case "delete":
            assert [c.tool for c in session.find(kind="tool_call")] == ["add"]
        case "arguments":
            assert results(session)[1] == "8"
        case _:
            assert session.find(kind="user")[0].content == "other"
            assert results(session) == ["seen", "3"]


async def test_two_runs_on_one_branch_are_refused_by_name(memory_store: Store) -> None:
    """Oracle: the documented error for the second one, at once; the first one, and what comes after
    it, are as if there had been none. A run that is read slowly counts, one that was left does
    not; a fork is another branch."""
    model = ScriptedModel([ADD, "one", "two", "three", "four"])
    session = memory_store.create("s", model)
    made = Agent(model, tools=[add])
    async with made.run_stream("first", session=session) as run:
        async for event in run:
            if event.type == "tool_finished":
                with pytest.raises(SessionBusy, match="another run"):
                    await made.run("second", session=session)
                with pytest.raises(SessionBusy, match="another run"):
                    await made.resume(memory_store.open("s", model))
                assert (await made.run("sub", session=session.fork())).output == "one"
    assert run.result.output == "two"
    assert [s.content for s in session.find(kind="user")] == ["first"]
    async with made.run_stream("third", session=session) as run:
        async for _ in run:
            break
    assert (await made.run("fourth", session=session)).output == "three"


async def test_a_store_that_is_closed_in_a_run_ends_it_with_its_error(memory_store: Store) -> None:
    """Oracle: the documented error; no task is left."""

    @tool
    async def close() -> str:
        """Close the store."""
        memory_store.close()
        return "closed"

    model = ScriptedModel([[Call("close", {}), Call("slow", {})]])
    session = memory_store.create("s", model)
    with pytest.raises(StoreClosed):
        await Agent(model, tools=[close, slow]).run("go", session=session)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_finished_session_has_nothing_to_resume(memory_store: Store) -> None:
    """Oracle: the documented error; the session is as it was. An answer that was cut goes on."""
    model = ScriptedModel(["done", "and more"])
    session = memory_store.create("s", model)
    made = Agent(model)
    with pytest.raises(NothingToGenerate, match="empty"):
        await made.resume(session)
    cut = await made.replace(sampling={"max_tokens": 2}).run("go", session=session)
    assert (cut.finish_reason, cut.output) == ("length", "do")
    assert (await made.resume(session)).output == "and more"
    before = session.ids()
    with pytest.raises(NothingToGenerate, match="closed"):
        await made.resume(session)
    assert session.ids() == before


HOOKS = ("before_model", "after_model", "before_tool", "after_tool", "before_edit", "on_edit")


@pytest.mark.parametrize("place", HOOKS)
async def test_a_hook_that_raises_ends_the_run_and_loses_nothing(
    memory_store: Store, check_pairs: Callable[[Session], None], place: str
) -> None:
    """Oracle: its own exception; `resume` goes on, and no tool that has worked runs again."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError("broken")

    rule = ClearToolResults(trigger=0, keep=1, placeholder="-")
    model = ScriptedModel([[Call("add", {"a": 1, "b": 10**30}), ADD], "one"])
    session = memory_store.create("s", model)
    made = Agent(model, tools=[add], context_rules=[rule])
    with pytest.raises(ZeroDivisionError, match="broken"):
        await made.replace(hooks=Hooks(**{place: broken})).run("go", session=session)
    check_pairs(session)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert (await made.resume(session)).output == "one"
    assert executed == ["add", "add"] and results(session) == ["-", "3"]


def test_sub_agents_are_tools_in_any_kind_of_function(memory_store: Store) -> None:
    """Oracle: the answers: of a plain tool with `run_sync`, an async one with `run`, and one that
    runs on a fork of its own conversation."""

    def inner(answer: str) -> Agent[Any, str]:
        return Agent(ScriptedModel([ADD, answer]), tools=[add])

    @tool
    def plain() -> str:
        """Ask in a thread."""
        return str(inner("of a thread").run_sync("?").output)

    @tool
    async def waited() -> str:
        """Ask in the loop."""
        return str((await inner("of the loop").run("?")).output)

    @tool
    async def forked(ctx: RunContext[Any]) -> str:
        """Ask on a fork."""
        result = await Agent(model, prompt_policy="keep").run("?", session=ctx.session.fork())
        return str(result.output)

    calls = [Call(name, {}) for name in ("plain", "waited", "forked")]
    model = ScriptedModel([calls, "of a fork", "done"])
    session = memory_store.create("s", model)
    assert Agent(model, tools=[plain, waited, forked]).run_sync("go", session=session).output
    assert results(session) == ["of a thread", "of the loop", "of a fork"]


async def test_run_sync_works_in_a_loop_and_in_threads_at_once() -> None:
    """Oracle: each run's own answer, all of them inside their tools at the same time."""
    everybody = threading.Barrier(4)

    @tool
    def meet() -> str:
        """Wait for the others."""
        everybody.wait(20)
        return "met"

    def run(answer: str) -> Any:
        return Agent(ScriptedModel([Call("meet", {}), answer]), tools=[meet]).run_sync("go").output

    others = [asyncio.create_task(asyncio.to_thread(run, str(number))) for number in range(3)]
    await asyncio.sleep(0)  # so that they begin: this thread will be blocked
    assert run("here") == "here"
    assert await asyncio.gather(*others) == ["0", "1", "2"]


async def test_a_result_beyond_the_context_leaves_a_session_that_goes_on(
    memory_store: Store,
) -> None:
    """Oracle: the documented error, with the result stored; a rule clears it before it is forwarded
    at all."""

    @tool(result_limit=ResultLimit(max_chars=100_000))
    def read() -> str:
        """Read much."""
        return "x" * 5_000

    model = ScriptedModel([Call("read", {}), "short enough"], context_limit=3_000)
    session = memory_store.create("s", model)
    made = Agent(model, tools=[read])
    with pytest.raises(ContextOverflow):
        await made.run("go", session=session)
    assert results(session) == ["x" * 5_000]
    cleared = made.replace(context_rules=[ClearToolResults(trigger=0, keep=0)])
    assert (await cleared.resume(session)).output == "short enough"
    assert results(session) == [CLEARED] and len(model.requests) == 2


@pytest.mark.parametrize("how", ["cancel", "leave"])
async def test_the_end_of_a_run_does_not_wait_for_a_state_to_be_warmed(
    memory_store: Store, how: str
) -> None:
    """Oracle: the run ends while the model is still at it."""
    begun, end = threading.Event(), threading.Event()

    class Slow(ScriptedModel):
        def warm(self, ids: Any, **anchors: Any) -> Any:
            if threading.current_thread().name.startswith("AnyIO"):  # not of a generation
                begun.set()
                assert end.wait(60), "the run has waited"
            return super().warm(ids, **anchors)

    model = Slow([[Call("slow", {})], "done"])
    session = memory_store.create("s", model)
    made = Agent(model, tools=TOOLS)
    async with made.run_stream("go", session=session) as run:
        pulling = asyncio.create_task(pull(run))
        await asyncio.to_thread(begun.wait, 60)
        if how == "cancel":
            run.cancel()
            assert await pulling == "cancelled"
        else:
            pulling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pulling
    end.set()
    assert (await made.run("and now?", session=session)).output == "done"


async def pull(run: Any) -> Any:
    async for _ in run:
        pass
    return run.result.finish_reason


async def test_usage_is_the_sum_of_the_model_calls(memory_store: Store) -> None:
    """Oracle: the replies of the run, and what the model was asked."""
    model = ScriptedModel([[Think("hm"), ADD], [ADD, ADD], "done"])
    session = memory_store.create("s", model)
    usages: list[Usage] = []
    hooks = Hooks(after_model=lambda context, reply: usages.append(reply.usage))
    result = await Agent(model, tools=[add], hooks=hooks).run("go", session=session)
    for name in ("input_tokens", "reused_tokens", "prefill_tokens", "output_tokens"):
        assert getattr(result.usage, name) == sum(getattr(usage, name) for usage in usages)
    assert result.usage.input_tokens == sum(len(request.ids) for request in model.requests)
    assert result.usage.thinking_tokens == usages[0].thinking_tokens == 2
    assert result.usage.reused_tokens + result.usage.prefill_tokens == result.usage.input_tokens
