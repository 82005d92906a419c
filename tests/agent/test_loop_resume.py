# SPDX-License-Identifier: Apache-2.0
"""Runs that are cut: by a cancelled task, Ctrl-C, a reader who leaves, edits. What is left of them
is valid, and goes on."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken_agent import Agent, Hooks, Session, Store
from freetoken_agent.branches.pairing import INTERRUPTED
from freetoken_agent.testing import Call, ScriptedModel
from freetoken_agent.tools import AnyTool, tool
from freetoken_storage.errors import FreetokenError


@tool
async def slow() -> str:
    """Never ends."""
    await asyncio.Event().wait()
    return ""


@tool
async def quick(text: str = "soon") -> str:
    """Ends at once."""
    return text


@tool
def threaded(text: str = "plain") -> str:
    """Ends at once, in a thread."""
    return text


TOOLS: list[AnyTool] = [slow, quick, threaded]
Check = Callable[[Session], None]
PAIR = [Call("quick", {}), Call("threaded", {})]


def results(session: Session) -> list[str]:
    return [segment.content for segment in session.find(kind="tool_result")]


async def nothing_is_left(caplog: pytest.LogCaptureFixture) -> None:
    """No task goes on, and nothing was reported."""
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


POINTS = ("before_model", "after_model", "before_tool", "in a tool", "after_tool")


def cancelling(at: str, stop: Callable[[], None]) -> tuple[Hooks, AnyTool]:
    """Hooks and a tool that call `stop` at one point, the first time."""
    left = [at]

    def reached(point: str) -> None:
        if left == [point]:
            left.clear()
            stop()

    def hook(point: str) -> Callable[..., None]:
        return lambda *_: reached(point)

    @tool
    async def work() -> str:
        """Work."""
        reached("in a tool")
        await asyncio.sleep(0)
        return "worked"

    return Hooks(**{p: hook(p) for p in POINTS if p != "in a tool"}), work


@pytest.mark.parametrize("point", POINTS)
async def test_s11_a_cancelled_task_leaves_a_session_that_goes_on(
    memory_store: Store, caplog: pytest.LogCaptureFixture, check_pairs: Check, point: str
) -> None:
    """Oracle: the pairs, the next run's answer; no task is left and nothing logged."""
    task: asyncio.Task[Any] | None = None

    def stop() -> None:
        assert task is not None
        task.cancel()

    hooks, work = cancelling(point, stop)
    model = ScriptedModel([[Call("work", {}), *PAIR], "first", "second"])
    session = memory_store.create("s", model)
    made = Agent(model, tools=[work, *TOOLS], hooks=hooks)
    task = asyncio.create_task(made.run("go", session=session))
    with pytest.raises(asyncio.CancelledError):
        await task
    check_pairs(session)
    await nothing_is_left(caplog)
    later = await made.replace(hooks=Hooks()).run("and now?", session=session)
    assert later.output == "first"
    check_pairs(session)


def interrupting() -> AnyTool:
    @tool
    def interrupt() -> str:
        """Press Ctrl-C."""
        os.kill(os.getpid(), signal.SIGINT)
        return "pressed"

    return interrupt


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """A process that was started in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.parametrize("inside_a_loop", [False, True], ids=["plain", "inside a loop"])
def test_s11_ctrl_c_on_run_sync_leaves_a_session_that_goes_on(
    memory_store: Store, check_pairs: Check, inside_a_loop: bool
) -> None:
    """Oracle: KeyboardInterrupt; then the pairs and the next run's answer. In a notebook the
    caller's thread runs a loop, and Ctrl-C finds it waiting."""
    model = ScriptedModel([[Call("slow", {}), Call("interrupt", {})], "first"])
    session = memory_store.create("s", model)
    made = Agent(model, tools=[*TOOLS, interrupting()])

    def run() -> None:
        made.run_sync("go", session=session)

    async def cell() -> None:
        run()

    with pytest.raises(KeyboardInterrupt):
        if inside_a_loop:
            loop = asyncio.new_event_loop()  # as a notebook's: without asyncio.run's own handler
            try:
                loop.run_until_complete(cell())
            finally:
                loop.close()
        else:
            run()
    check_pairs(session)
    assert made.run_sync("and now?", session=session).output == "first"
    check_pairs(session)
    assert results(session)[0] == INTERRUPTED


LEFT_AT = (
    "plan_ready",
    "prefill_progress",
    "text_delta",
    "tool_call_started",
    "tool_call_ready",
    "reply_finished",
    "tool_finished",
    "segment_finished",
    "step_finished",
    "run_finished",
)


@pytest.mark.parametrize("left_at", LEFT_AT)
async def test_s43_leaving_a_stream_early_closes_everything(
    memory_store: Store, caplog: pytest.LogCaptureFixture, check_pairs: Check, left_at: str
) -> None:
    """Oracle: no task, no report, a branch that can be written, and the next run's answer."""
    model = ScriptedModel([["I look.", *PAIR], "first", "second"])
    session = memory_store.create("s", model)
    made = Agent(model, tools=TOOLS)
    async with made.run_stream("go", session=session) as run:
        async for event in run:
            if event.type == left_at:
                break
        else:
            pytest.fail(f"no event {left_at}")
    check_pairs(session)
    await nothing_is_left(caplog)
    session.append("user", "and now?")
    check_pairs(session)
    assert (await made.run(session=session)).output in ("first", "second")


async def test_s43_a_stream_that_is_dropped_without_its_block(
    memory_store: Store, caplog: pytest.LogCaptureFixture, check_pairs: Check
) -> None:
    """Oracle: the same, where an exception of the reader ends the block while a tool works."""
    model = ScriptedModel([[Call("slow", {}), Call("quick", {})], "first"])
    session = memory_store.create("s", model)
    made = Agent(model, tools=TOOLS)
    with pytest.raises(ZeroDivisionError):
        async with made.run_stream("go", session=session) as run:
            async for event in run:
                if event.type == "tool_finished":
                    raise ZeroDivisionError
    await nothing_is_left(caplog)
    assert (await made.run("and now?", session=session)).output == "first"
    assert results(session) == [INTERRUPTED, "soon"]  # what had finished is not lost
    check_pairs(session)


async def test_edits_while_tools_run_keep_what_is_known_of_the_calls(memory_store: Store) -> None:
    """Oracle: one execution of the finished call, none more of the started one."""
    executed: list[str] = []

    @tool
    async def counted(name: str) -> str:
        """Count."""
        executed.append(name)
        if executed.count("long") == 1 and name == "long":
            await asyncio.Event().wait()
        return name

    calls = [Call("counted", {"name": "long"}), Call("counted", {"name": "short"})]
    model = ScriptedModel([calls, "done"])
    session = memory_store.create("s", model)
    made = Agent(model, tools=[counted])
    async with made.run_stream("go", session=session) as run:
        async for event in run:
            if event.type == "tool_finished":
                session.replace(session.find(kind="user")[0], "go on")
                break
    assert (await made.resume(session)).output == "done"
    assert executed == ["long", "short"]
    assert results(session) == [INTERRUPTED, "short"]


async def test_an_edited_call_is_a_new_one(memory_store: Store) -> None:
    """Oracle: it runs with its new arguments, though the old one had been started."""
    began = asyncio.Event()

    @tool
    async def work(long: bool) -> str:
        """Work."""
        if long:
            began.set()
            await asyncio.Event().wait()
        return "worked"

    model = ScriptedModel([Call("work", {"long": True}), "done"])
    session = memory_store.create("s", model)
    made = Agent(model, tools=[work])
    task = asyncio.create_task(made.run("go", session=session))
    await began.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    session.replace(session.find(kind="tool_call")[0], arguments={"long": False})
    assert (await made.resume(session)).output == "done"
    assert results(session) == ["worked"]


async def test_sub_agents_on_forks_of_one_point_forward_what_they_share_once(
    memory_store: Store,
) -> None:
    """Oracle: the model's own account. The three work at the same time: each waits for the
    others in its tool."""
    everybody = asyncio.Barrier(3)

    @tool
    async def meet(who: str) -> str:
        """Wait for the others."""
        await everybody.wait()
        return f"met {who}"

    model = ScriptedModel(["Ready."])
    main = memory_store.create("s", model, system="You research. " * 40)
    made = Agent(model, tools=[meet], prompt_policy="keep")
    main.set_tools([meet])
    await made.run("Here is what we know: " + "facts " * 100, session=main)
    shared = len(main.ids())
    before = len(model.requests)

    forks = [main.fork(name=f"sub{n}") for n in range(3)]
    # Which sub-agent asks first is not fixed, so a reply depends on what was asked.
    first = [lambda request: Call("meet", {"who": _who(model, request.ids)})] * 3
    model.extend(*first, "a", "b", "c")
    runs = [made.run(f"Look at part {n}", session=fork) for n, fork in enumerate(forks)]
    done = await asyncio.gather(*runs)

    assert sorted(str(result.output) for result in done) == ["a", "b", "c"]
    assert [results(fork) for fork in forks] == [[f"met part {n}"] for n in range(3)]
    assert all(request.ids[:shared] == tuple(main.ids()) for request in model.requests[before:])
    for result in done:
        assert result.usage.reused_tokens >= 2 * shared - 2  # both of its model calls
        assert result.usage.prefill_tokens < shared / 4


def _who(model: ScriptedModel, ids: Sequence[int]) -> str:
    return "part " + model.tokenizer.decode(ids).rsplit("part ", 1)[1][0]


ACTIONS = ("cancel", "after_step", "replace", "delete", "insert", "append", "undo", "rewind")
PLANS = st.dictionaries(st.integers(0, 12), st.tuples(st.sampled_from(ACTIONS), st.integers(0, 9)))


@given(plan=PLANS, leave=st.booleans())
@settings(max_examples=25, deadline=None)
def test_s12_edits_and_cancels_between_events_never_break_the_pairs(
    check_pairs: Check, plan: dict[int, tuple[str, int]], leave: bool
) -> None:
    """Oracle: the pairs after every event, and the next run's answer. An edit that is refused,
    because the branch is being written or its target is none, changes nothing."""
    asyncio.run(edited_run(check_pairs, plan, leave))


@pytest.mark.slow
@given(plan=PLANS, leave=st.booleans())
@settings(max_examples=200, deadline=None)
def test_s12_many_edits_and_cancels_between_events(
    check_pairs: Check, plan: dict[int, tuple[str, int]], leave: bool
) -> None:
    """The same, longer."""
    asyncio.run(edited_run(check_pairs, plan, leave))


async def edited_run(check_pairs: Check, plan: dict[int, tuple[str, int]], leave: bool) -> None:
    model = ScriptedModel([["Look.", *PAIR], PAIR, "a", "b", "c", "d", "e"])
    with Store(":memory:") as store:
        session = store.create("s", model, system="Be brief.")
        made = Agent(model, tools=TOOLS)
        with suppress(FreetokenError):  # an edit may take away what the run needs
            async with made.run_stream("go", session=session) as run:
                number = 0
                async for event in run:
                    if event.type not in ("tool_finished", "step_finished", "segment_finished"):
                        continue
                    if number in plan:
                        act(*plan[number], session, run.cancel)
                    check_pairs(session)
                    number += 1
                    if leave and number > len(plan):
                        break
        check_pairs(session)
        model.extend("z", "z", "z")
        await made.run("and now?", session=session)
        check_pairs(session)
        assert session.path()[-1].kind == "text"


def act(action: str, which: int, session: Session, cancel: Callable[..., None]) -> None:
    path = session.path()
    target = path[which % len(path)]
    with suppress(FreetokenError):
        match action:
            case "cancel":
                cancel()
            case "after_step":
                cancel("after_step")
            case "replace" if target.kind == "tool_call":
                session.replace(target, arguments={"text": "other"})
            case "replace":
                session.replace(target, "other")
            case "delete":
                session.delete(target)
            case "insert":
                session.insert(kind="user", content="by the way", before=target)
            case "append":
                session.append("user", "wait")
            case "undo":
                session.undo()
            case "rewind":
                session.rewind(to=target)
