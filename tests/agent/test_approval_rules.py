# SPDX-License-Identifier: Apache-2.0
"""`needs_approval` as a function: some calls of a tool wait for a decision, others run."""

from collections.abc import Callable
from typing import Annotated, Any

import pytest
from pydantic import AfterValidator

from freetoken_agent import Agent, InvalidTool, RunContext, Store, Tool, tool
from freetoken_agent.testing import Call, ScriptedModel, Step

SEEN: list[tuple[Any, dict[str, Any], str, str]] = []


def outside(context: RunContext[str], arguments: dict[str, Any]) -> bool:
    SEEN.append((context.deps, arguments, context.tool_name, context.call_id))
    return not arguments["path"].startswith(context.deps)


async def outside_later(context: RunContext[str], arguments: dict[str, Any]) -> bool:
    return outside(context, arguments)


def remover(rule: Callable[..., Any], removed: list[str]) -> Tool[..., str]:
    @tool(needs_approval=rule)
    def remove(path: str, times: int = 1) -> str:
        """Remove a file."""
        removed.append(path)
        return f"removed {path}"

    return remove


@pytest.mark.parametrize("rule", [outside, outside_later])
async def test_a_rule_says_which_calls_wait(rule: Callable[..., Any]) -> None:
    """Oracle: what was removed when. The rule sees the arguments as the schema has them, the deps,
    the tool and the call."""
    SEEN.clear()
    removed: list[str] = []
    remove = remover(rule, removed)
    inside = Call("remove", {"path": "/tmp/a", "times": "2"})
    script: list[Step] = [inside, Call("remove", {"path": "/etc/b"}), "done"]
    agent = Agent(ScriptedModel(script), tools=[remove], deps_type=str)
    result = await agent.run("go", deps="/tmp")
    assert removed == ["/tmp/a"] and result.finish_reason == "pending"
    [waiting] = result.pending
    assert waiting.arguments == {"path": "/etc/b"}
    assert SEEN[0][:3] == ("/tmp", {"path": "/tmp/a", "times": 2}, "remove")
    assert SEEN[1][3] == waiting.call_id
    done = await agent.resume(result.session, {str(waiting.call_id): True}, deps="/tmp")
    assert done.output == "done" and removed == ["/tmp/a", "/etc/b"]
    assert len(SEEN) == 2, "what was decided is not asked again"


async def test_none_of_a_step_runs_while_one_call_of_it_waits() -> None:
    """Oracle: what was removed; the call that needs nobody runs with the other one."""
    removed: list[str] = []
    both = [Call("remove", {"path": "/tmp/a"}), Call("remove", {"path": "/etc/b"})]
    agent = Agent(ScriptedModel([both, "done"]), tools=[remover(outside, removed)])
    result = await agent.run("go", deps="/tmp")
    assert removed == []
    waiting = result.pending[1]
    done = await agent.resume(result.session, {str(waiting.call_id): "Not that one."}, deps="/tmp")
    assert removed == ["/tmp/a"]
    texts = [segment.content for segment in done.session.find(kind="tool_result")]
    assert texts == ["removed /tmp/a", "Not that one."]


async def test_a_call_that_is_not_valid_asks_nobody() -> None:
    """Oracle: the model is told, as ever; the rule is not called with what it cannot expect."""
    SEEN.clear()
    removed: list[str] = []
    script: list[Step] = [Call("remove", {"times": 1}), "done"]
    agent = Agent(ScriptedModel(script), tools=[remover(outside, removed)])
    result = await agent.run("go", deps="/tmp")
    assert result.output == "done" and not SEEN and not removed
    assert "- path: is missing" in result.session.find(kind="tool_result")[0].content


async def test_a_rule_that_raises_ends_the_run_and_runs_nothing() -> None:
    """Oracle: its error; a later run with a whole rule goes on from the open call."""

    def broken(context: RunContext[str], arguments: dict[str, Any]) -> bool:
        raise LookupError("no rules today")

    removed: list[str] = []
    model = ScriptedModel([Call("remove", {"path": "/tmp/a"}), "done"])
    agent = Agent(model, tools=[remover(broken, removed)])
    with Store(":memory:") as store:
        session = store.create("s", model)
        with pytest.raises(LookupError):
            await agent.run("go", session=session, deps="/tmp")
        assert removed == []
        mended = agent.replace(tools=[remover(outside, removed)])
        assert (await mended.resume(session, deps="/tmp")).output == "done"
    assert removed == ["/tmp/a"]


async def test_where_a_rule_cannot_be_asked_a_person_is() -> None:
    """A validator that fails by itself might not fail the next time. Oracle: the call waits."""

    def fail(path: str) -> str:
        raise LookupError(path)

    @tool(needs_approval=lambda context, arguments: False)
    def remove(path: Annotated[str, AfterValidator(fail)]) -> str:
        """Remove a file."""
        return path

    agent = Agent(ScriptedModel([Call("remove", {"path": "/tmp/a"}), "done"]), tools=[remove])
    result = await agent.run("go")
    [waiting] = result.pending
    done = await agent.resume(result.session, {str(waiting.call_id): True})
    assert done.output == "done"
    assert done.session.find(kind="tool_result")[0].content == "LookupError: /tmp/a"


@pytest.mark.parametrize("rule", ["always", 1, None, bool])
def test_what_is_no_rule_is_refused(rule: Any) -> None:
    """Oracle: the documented error."""
    with pytest.raises(InvalidTool, match="needs_approval.*a function of the RunContext"):
        remover(rule, [])
