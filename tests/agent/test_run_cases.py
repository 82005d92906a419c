# SPDX-License-Identifier: Apache-2.0
"""Runs that are stopped and edited, on each way to run an agent: S11, S12, S17.

S43 is of streams only, see test_loop_resume.py; S14 needs processes that die, see
tests/e2e/test_run_kills.py."""

import asyncio
import itertools
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freetoken_agent import Agent, Hooks, Result, RunContext, Session, Store
from freetoken_agent.branches.pairing import INTERRUPTED
from freetoken_agent.loop import Run
from freetoken_agent.testing import Call, ScriptedModel, Step, Think
from freetoken_agent.tools import tool
from freetoken_storage.errors import FreetokenError

Play = Callable[..., Result[Any]]
Check = Callable[[Session], None]


@tool
def echo(text: str = "nothing") -> str:
    """Say the text."""
    return f"<{text}>"


@tool
async def late(text: str) -> str:
    """Say the text after a while."""
    await asyncio.sleep(0.02)
    return text


@tool
def fail(text: str) -> str:
    """Fail."""
    raise RuntimeError(text)


PAIR = [Call("echo", {}), Call("fail", {"text": "no"})]


def agent(*script: Step, **fields: Any) -> Agent[Any, Any]:
    return Agent(ScriptedModel(script), tools=[echo, late, fail], **fields)


@pytest.fixture
def heeds_ctrl_c() -> Any:
    """A process that was started in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def stopping(way: str, number: int, patch: pytest.MonkeyPatch) -> list[str]:
    """From now on a run is stopped at its event of this number, as each way is stopped: by the
    cancel of its task, Ctrl-C, `Run.cancel`. Several events of one type in a row, such as deltas,
    are one. Returns those that were pulled, which may be more than the number."""
    pulled: list[str] = []
    pull = Run.__anext__

    async def counted(run: Run[Any]) -> Any:
        event = await pull(run)
        again = pulled[-1:] == [event.type]
        if not again:
            pulled.append(event.type)
        if len(pulled) == number and not again:
            task = asyncio.current_task()
            assert task is not None
            match way:
                case "run":
                    task.cancel()
                case "run_sync":
                    os.kill(os.getpid(), signal.SIGINT)
                case _:
                    run.cancel()
        return event

    patch.setattr(Run, "__anext__", counted)
    return pulled


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_s11_stopped_at_every_event_then_prompted_again(
    way: str, play: Play, check_pairs: Check, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: the pairs; the next run answers; each open call is closed as interrupted, unless its
    result was stored; nothing is logged. The last number stops nothing: no event was left out."""
    ends = {"run": asyncio.CancelledError, "run_sync": KeyboardInterrupt}
    seen: set[str] = set()
    for number in itertools.count(1):
        calls = [Call("echo", {"text": "soon"}), Call("late", {"text": "late"})]
        made = agent([Think("hm"), "I look.", *calls], *["answer"] * 3)
        with Store(":memory:") as store, pytest.MonkeyPatch.context() as patch:
            session = store.create("s", made.model)  # type: ignore[arg-type]
            pulled = stopping(way, number, patch)
            stopped: BaseException | None = None
            try:
                result = play(made, "go", session=session)
            except (asyncio.CancelledError, KeyboardInterrupt) as raised:
                stopped = raised
            patch.undo()
            if len(pulled) < number:
                assert stopped is None and result.output == "answer"
                break
            seen.add(pulled[number - 1])
            assert isinstance(stopped, ends[way]) if way in ends else stopped is None
            check_pairs(session)
            assert play(made, "and now?", session=session).output == "answer"
            check_pairs(session)
            kept = {("echo", "<soon>"), ("late", "late")}
            for answer in session.find(kind="tool_result"):
                assert (answer.tool, answer.content) in kept or answer.content == INTERRUPTED
                assert answer.error is (answer.content == INTERRUPTED)
    assert seen >= {
        "plan_ready", "thinking_delta", "text_delta", "tool_call_started", "tool_call_delta",
        "tool_call_ready", "segment_finished", "reply_finished", "tool_finished", "step_finished",
        "run_finished",
    }  # fmt: skip
    assert [r.getMessage() for r in caplog.records if r.levelname != "INFO"] == []


EDITS = ("replace", "delete", "insert", "append", "undo", "rewind", "insert_call")
PROGRAMS = st.lists(st.tuples(st.sampled_from(EDITS), st.integers(0, 12)), max_size=8)


@given(during=PROGRAMS, between=PROGRAMS)
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_s12_random_edits_never_part_a_call_from_its_result(
    play: Play,
    check_pairs: Check,
    during: list[tuple[str, int]],
    between: list[tuple[str, int]],
) -> None:
    """Oracle: the pairs after every edit, and that the next run answers. Before each model call and
    behind each tool a hook edits; what is refused changes nothing."""
    todo = list(during)

    def edit_next(context: RunContext[Any], *_: Any) -> None:
        if todo:
            edit(context.session, *todo.pop(0))
            check_pairs(context.session)

    hooks = Hooks(before_model=edit_next, after_tool=edit_next)
    made = agent(["I look.", *PAIR], Call("echo", {}), "a", "b", "c", "d", hooks=hooks)
    with Store(":memory:") as store:
        session = store.create("s", made.model, system="Be brief.")  # type: ignore[arg-type]
        try:
            play(made, "go", session=session)
        except FreetokenError:
            pass  # a hook took away what the run needs
        check_pairs(session)
        for one in between:
            edit(session, *one)
            check_pairs(session)
        assert isinstance(made.model, ScriptedModel)
        made.model.extend(*"zzzz")
        assert play(made.replace(hooks=Hooks()), "more", session=session).output is not None
        check_pairs(session)


def edit(session: Session, action: str, which: int) -> None:
    path = session.path()
    if not path:
        return
    target = path[which % len(path)]
    try:
        match action:
            case "replace" if target.kind == "tool_call":
                session.replace(target, arguments={"text": "other"})
            case "replace":
                session.replace(target, "other")
            case "delete":
                session.delete(target)
            case "insert":
                session.insert(kind="user", content="by the way", before=target)
            case "insert_call":
                session.insert_call("echo", {}, "<nothing>", before=target)
            case "append":
                session.append("user", "wait")
            case "undo":
                session.undo()
            case "rewind":
                session.rewind(to=target)
    except FreetokenError:
        pass


def test_s17_every_way_leaves_the_same_tree(play: Play) -> None:
    """Oracle: the tree written by hand, so that all ways have the same one."""
    made = agent([Think("hm"), "Two.", *PAIR], "Done.")
    result = play(made.replace(instructions="Be brief."), "go")
    session = result.session
    assert [(s.kind, s.content) for s in session.path() if s.kind != "tools"] == [
        ("system", "Be brief."),
        ("user", "go"),
        ("thinking", "hm"),
        ("text", "Two."),
        ("tool_call", session.find(tool="echo")[0].content),
        ("tool_call", session.find(tool="fail")[0].content),
        ("tool_result", "<nothing>"),
        ("tool_result", "RuntimeError: no"),
        ("text", "Done."),
    ]
    nodes = session.tree().nodes
    assert len(nodes) == len(session.path()) and [b.name for b in session.branches()] == ["main"]
    session.undo()
    assert session.path() == []
