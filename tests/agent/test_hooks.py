# SPDX-License-Identifier: Apache-2.0
"""Hooks of runs: when each is called, what it may change, and what of it is kept."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from freetoken_agent import (
    Agent,
    ClearToolResults,
    Edit,
    Hooks,
    Proposal,
    Reply,
    RunContext,
    Session,
    StepRequest,
    Store,
    ToolCall,
    ToolFailed,
    ToolOutcome,
    tool,
)
from freetoken_agent.branches.pairing import INTERRUPTED
from freetoken_agent.errors import ModelRetry
from freetoken_agent.testing import Call, ScriptedModel

SECRET = "the whole page, which nobody should have to read"


@tool
def read(page: int) -> str:
    """Read a page."""
    return f"{SECRET} ({page})"


@tool
async def hang() -> str:
    """Never end."""
    await asyncio.Event().wait()
    return ""


def read_call(page: int) -> Call:
    return Call("read", {"page": page})


def forwarded(model: ScriptedModel) -> str:
    """Everything that the model was ever given."""
    return "\n".join(model.tokenizer.decode(request.ids) for request in model.requests)


def results(session: Session) -> list[str]:
    return [result.content for result in session.find(kind="tool_result")]


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_every_hook_is_called_in_its_place(memory_store: Store, kind: str) -> None:
    """Oracle: the order, written by hand, and what each is given."""
    seen: list[str] = []

    def hook(name: str) -> Callable[..., Any]:
        def plain(context: RunContext[Any], *given: Any) -> None:
            types = " ".join(type(one).__name__ for one in given)
            seen.append(f"{name} {context.step} {types}")
            assert context.deps == "deps" and context.session.name == "s"

        async def waited(context: RunContext[Any], *given: Any) -> None:
            await asyncio.sleep(0)
            plain(context, *given)

        return waited if kind == "async" else plain

    names = list(Hooks.__dataclass_fields__)
    made: Agent[Any, str] = Agent(
        ScriptedModel([read_call(1), read_call(2), "done"]),
        instructions="New.",
        tools=[read],
        hooks=Hooks(**{name: hook(name) for name in names}),
        context_rules=[ClearToolResults(trigger=0, keep=1, placeholder="-")],
    )
    session = memory_store.create("s", made.model, system="Old.")  # type: ignore[arg-type]
    await made.run("go", session=session, deps="deps")
    step = [
        "after_model {0} Reply",
        "before_tool {0} ToolCall",
        "after_tool {0} ToolCall ToolOutcome",
    ]
    assert seen == [
        "on_edit 0 Edit",
        "before_model 0 StepRequest",
        *(line.format(0) for line in step),
        "before_model 1 StepRequest",
        *(line.format(1) for line in step),
        "before_model 2 StepRequest",
        "before_edit 2 Proposal",
        "on_edit 2 Edit",
        "after_model 2 Reply",
    ]
    assert {line.split()[0] for line in seen} == set(names)


def shorter(context: RunContext[Any], call: ToolCall, outcome: ToolOutcome) -> Any:
    return outcome.text[-3:]


def another(context: RunContext[Any], call: ToolCall, outcome: ToolOutcome) -> Any:
    return replace(outcome, text=outcome.text[-3:])


def value(context: RunContext[Any], call: ToolCall, outcome: ToolOutcome) -> Any:
    return {"seen": outcome.is_error}


@pytest.mark.parametrize(
    ("hook", "live"),
    [(shorter, "(1)"), (another, "(1)"), (value, '{"seen":false}')],
    ids=["text", "outcome", "value"],
)
async def test_what_after_tool_returns_is_live_and_the_original_an_earlier_version(
    memory_store: Store, hook: Callable[..., Any], live: str
) -> None:
    """Oracles: the versions of the segment; every id that the model was given; the run's undo."""
    model = ScriptedModel([read_call(1), "done"])
    session = memory_store.create("s", model)
    made: Agent[Any, str] = Agent(model, tools=[read], hooks=Hooks(after_tool=hook))
    result = await made.run("go", session=session)
    [segment] = session.find(kind="tool_result")
    assert segment.content == live and segment in result.segments and not segment.error
    assert [v.content for v in session.versions(segment)] == [f"{SECRET} (1)", live]
    assert SECRET not in forwarded(model) and live in forwarded(model)
    session.undo()
    assert session.path() == []


async def test_a_hook_may_make_a_success_an_error_and_an_error_a_success(
    memory_store: Store,
) -> None:
    """Oracle: the results' error flags, the events' status, and what the model may try again."""

    def turned(context: RunContext[Any], call: ToolCall, outcome: ToolOutcome) -> ToolOutcome:
        return replace(outcome, text="turned", status="failed" if outcome.status == "ok" else "ok")

    model = ScriptedModel([[read_call(1), Call("nosuch", {})], "done"])
    session = memory_store.create("s", model)
    made: Agent[Any, str] = Agent(model, tools=[read], hooks=Hooks(after_tool=turned))
    async with made.run_stream("go", session=session) as run:
        status = [event.status async for event in run if event.type == "tool_finished"]
    assert sorted(status) == ["failed", "ok"]
    assert [r.error for r in session.find(kind="tool_result")] == [True, False]


async def test_a_shortened_result_stays_short_across_a_restart(memory_store: Store) -> None:
    """Oracle: the run is left between the tool's end and the path; another one resumes it. The hook
    is not asked again, and the original is still the earlier version."""
    model = ScriptedModel([[Call("hang", {}), read_call(1)], "done"])
    session = memory_store.create("s", model)
    made: Agent[Any, str] = Agent(model, tools=[hang, read], hooks=Hooks(after_tool=shorter))
    async with made.run_stream("go", session=session) as run:
        async for event in run:
            if event.type == "tool_finished":
                break
    again = memory_store.open("s", model)
    assert (await made.replace(hooks=Hooks()).resume(again)).output == "done"
    assert results(again)[1] == "(1)" and SECRET not in forwarded(model)
    versions = again.versions(again.find(kind="tool_result")[1])
    assert [v.content for v in versions] == [f"{SECRET} (1)", "(1)"]


@pytest.mark.parametrize("how", ["raises", "is cancelled"])
@pytest.mark.parametrize("then", ["resume", "append"])
async def test_a_result_that_the_hook_has_not_seen_is_kept_for_it(
    memory_store: Store, how: str, then: str
) -> None:
    """Oracles: one execution of the tool; the hook is asked again; what it did not let through is
    never forwarded, whoever goes on."""
    asked: list[str] = []

    async def broken(context: RunContext[Any], call: ToolCall, outcome: ToolOutcome) -> str:
        asked.append(outcome.text)
        if how == "raises":
            raise ZeroDivisionError
        task.cancel()
        await asyncio.sleep(10)
        return ""

    executed: list[int] = []

    @tool
    def once() -> str:
        """Work."""
        executed.append(1)
        return SECRET

    model = ScriptedModel([Call("once", {}), "done", "later"])
    session = memory_store.create("s", model)
    made: Agent[Any, str] = Agent(model, tools=[once], hooks=Hooks(after_tool=broken))
    task = asyncio.create_task(made.run("go", session=session))
    with pytest.raises((ZeroDivisionError, asyncio.CancelledError)):
        await task
    again = memory_store.open("s", model)
    if then == "append":
        again.append("user", "and now?")
    assert (await made.replace(hooks=Hooks(after_tool=shorter)).resume(again)).output == "done"
    assert results(again) == [SECRET[-3:] if then == "resume" else INTERRUPTED]
    assert asked == [SECRET] and executed == [1] and SECRET not in forwarded(model)


REQUESTS: dict[str, StepRequest] = {
    "tool_choice": StepRequest(tool_choice="none"),
    "allowed_tools": StepRequest(allowed_tools=("hang",)),
    "thinking": StepRequest(thinking=False),
    "max_tokens": StepRequest(max_tokens=7),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_before_model_changes_one_step(name: str) -> None:
    """Oracle: what the model was asked in that step, and in the next one."""

    def changed(context: RunContext[Any], request: StepRequest) -> StepRequest | None:
        return replace(REQUESTS[name], max_tokens=7) if context.step == 0 else None

    model = ScriptedModel([read_call(1), "done"])
    made: Agent[Any, str] = Agent(model, tools=[read, hang], hooks=Hooks(before_model=changed))
    run = await made.replace(sampling={"max_tokens": 99}).run("go")
    assert run.finish_reason == "length", "7 tokens are too few for the call"
    first = model.requests[0]
    assert first.sampling.max_tokens == 7
    constraint = first.sampling.constraint
    assert constraint is not None
    walk = constraint.copy()
    for token in model.tokenizer.encode_frame("<tool_call>"):
        if name == "tool_choice":
            with pytest.raises(Exception, match="grammar"):
                walk.accept(token)
            break
        walk.accept(token)
    if name == "allowed_tools":
        assert "hang" in model.tokenizer.decode(list(walk.forced()))
    closed = model.tokenizer.decode(first.ids).endswith("</think>\n\n")
    assert closed is (name == "thinking")
    await made.replace(hooks=Hooks()).resume(run.session)
    assert model.requests[1].sampling.max_tokens != 7


@pytest.mark.parametrize(("raised", "status"), [(ModelRetry, "retry"), (ToolFailed, "failed")])
async def test_before_tool_may_answer_instead_of_the_tool(
    memory_store: Store, raised: type[Exception], status: str
) -> None:
    """Oracle: the text; the tool did not run, its neighbour did."""

    def guard(context: RunContext[Any], call: ToolCall) -> None:
        if call.arguments == {"page": 1}:
            raise raised("not that page")

    model = ScriptedModel([[read_call(1), read_call(2)], "done"])
    session = memory_store.create("s", model)
    made: Agent[Any, str] = Agent(model, tools=[read], hooks=Hooks(before_tool=guard))
    assert (await made.run("go", session=session)).output == "done"
    assert results(session) == ["not that page", f"{SECRET} (2)"]
    assert [r.error for r in session.find(kind="tool_result")] == [True, False]


async def test_what_looking_hooks_see_is_what_happened(memory_store: Store) -> None:
    """Oracles: the session, the events."""
    replies: list[Reply] = []
    edits: list[Edit] = []
    proposals: list[Proposal] = []
    made: Agent[Any, str] = Agent(
        ScriptedModel([read_call(1), read_call(2), "done"]),
        tools=[read],
        hooks=Hooks(
            after_model=lambda _, reply: replies.append(reply),
            on_edit=lambda _, edit: edits.append(edit),
            before_edit=lambda _, proposal: proposals.append(proposal),
        ),
        context_rules=[ClearToolResults(trigger=0, keep=1, placeholder="-")],
    )
    session = memory_store.create("s", made.model)  # type: ignore[arg-type]
    async with made.run_stream("go", session=session) as run:
        events = [event async for event in run]
    assert replies == [e.reply for e in events if e.type == "reply_finished"]
    assert edits == [e.edit for e in events if e.type == "context_edited"]
    [proposal], [edit] = proposals, edits
    counts = ("input_tokens", "reused_tokens", "prefill_tokens")
    for name in counts:
        assert getattr(proposal.edit.plan, name) == getattr(edit.plan, name)
