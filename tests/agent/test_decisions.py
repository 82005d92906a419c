# SPDX-License-Identifier: Apache-2.0
"""Decisions about calls: which are refused, and what may be said twice."""

import asyncio
from typing import Any

import pytest

from freetoken_agent import Agent, InvalidDecision, Session, Store
from freetoken_agent.branches.pairing import INTERRUPTED
from freetoken_agent.testing import Call, ScriptedModel
from freetoken_agent.tools import tool

executed: list[str] = []


@tool
async def slow() -> str:
    """Never ends."""
    await asyncio.Event().wait()
    return ""


@tool
def add(a: int, b: int) -> int:
    """Add."""
    executed.append("add")
    return a + b


@tool(needs_approval=True)
def remove(path: str) -> str:
    """Remove a file."""
    executed.append("remove")
    return f"removed {path}"


@pytest.fixture(autouse=True)
def _nothing_was_executed() -> None:
    executed.clear()


def results(session: Session) -> list[str]:
    return [segment.content for segment in session.find(kind="tool_result")]


@pytest.mark.parametrize(
    ("decisions", "said"),
    [
        ({"nosuchid": True}, "no call of this id"),
        ({"SEGMENT": True}, "no call of this id"),
        ({"CALL": 1}, "True, False"),
        ({"CALL": None}, "True, False"),
        ({"CALL": True, "nosuchid": False}, "no call of this id"),
    ],
)
async def test_decisions_about_nothing_are_refused_and_nothing_runs(
    memory_store: Store, decisions: dict[str, Any], said: str
) -> None:
    """Oracle: the documented error; the call still waits, and can be decided."""
    model = ScriptedModel([Call("remove", {"path": "a"}), "done"])
    session = memory_store.create("s", model)
    made = Agent(model, tools=[remove])
    [call] = (await made.run("go", session=session)).pending
    names = {"CALL": str(call.call_id), "SEGMENT": call.id}
    with pytest.raises(InvalidDecision, match=said):
        await made.resume(session, {names.get(k, k): v for k, v in decisions.items()})
    assert executed == [] and (await made.resume(session)).pending == (call,)
    assert (await made.resume(session, {str(call.call_id): True})).output == "done"
    with pytest.raises(InvalidDecision, match="any more"):  # too late to deny it
        await made.resume(session, {str(call.call_id): False})
    assert executed == ["remove"]


@pytest.mark.parametrize("decision", [True, False, "Ask Ann."])
async def test_what_was_decided_may_be_said_again(
    memory_store: Store, decision: bool | str
) -> None:
    """Oracle: the tool's own log, and the answer: a program that was killed behind the tool does as
    it did before."""
    model = ScriptedModel([Call("remove", {"path": "a"}), ZeroDivisionError("killed"), "done"])
    session = memory_store.create("s", model)
    made = Agent(model, tools=[remove])
    [call] = (await made.run("go", session=session)).pending
    decisions = {str(call.call_id): decision}
    with pytest.raises(ZeroDivisionError):
        await made.resume(session, decisions)
    assert (await made.resume(session, decisions)).output == "done"
    assert executed == (["remove"] if decision is True else [])


async def test_a_call_that_has_run_is_not_denied(memory_store: Store) -> None:
    """Oracle: the documented error, though its result is not on the path yet; granting it again is
    no second execution."""
    model = ScriptedModel([[Call("slow", {}), Call("add", {"a": 1, "b": 2})], "done"])
    session = memory_store.create("s", model)
    made = Agent(model, tools=[slow, add])
    async with made.run_stream("go", session=session) as run:
        async for event in run:
            if event.type == "tool_finished":
                break
    call_id = str(session.find(tool="add")[0].call_id)
    with pytest.raises(InvalidDecision, match="any more"):
        await made.resume(session, {call_id: False})
    assert (await made.resume(session, {call_id: True})).output == "done"
    assert executed == ["add"] and results(session) == [INTERRUPTED, "3"]
