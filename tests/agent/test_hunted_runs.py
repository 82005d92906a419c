# SPDX-License-Identifier: Apache-2.0
"""What was hunted down around runs: what users do beside them, to them, and inside them."""

import asyncio

import pytest

from freetoken_agent import Agent, Hooks, Session, Store
from freetoken_agent.pairing import INTERRUPTED
from freetoken_agent.testing import Call, ScriptedModel
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
