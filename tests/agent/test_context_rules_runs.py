# SPDX-License-Identifier: Apache-2.0
"""Context rules in runs: prices before and after, when deferred rules fire, ends, invariants."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken_agent import (
    Agent,
    ClearThinking,
    ClearToolResults,
    ContextEdited,
    ContextRule,
    Edit,
    Hooks,
    RunContext,
    RunEvent,
    Session,
    StepRequest,
    Store,
    Summarise,
)
from freetoken_agent.context_rules import CLEARED, Proposal
from freetoken_agent.runs.summaries import PROMPT
from freetoken_agent.testing import Call, Request, ScriptedModel, Step, Think
from freetoken_agent.tools import tool


@tool
def read(size: int) -> str:
    """Read so many characters."""
    return "x" * size


@tool
def fail(size: int) -> str:
    """Fail with so many characters."""
    raise RuntimeError("y" * size)


def model_of(*script: Any, summary: Step = "It went well.") -> ScriptedModel:
    """Plays the script; whenever it is asked for a summary, it writes that one."""
    model = ScriptedModel()
    left = list(script)

    def play(request: Request) -> Any:
        prompted = model.tokenizer.decode(request.ids[-len(PROMPT) - 200 :])
        step = summary if PROMPT in prompted else left.pop(0)
        return step(request) if callable(step) else step

    model.extend(*[play] * (4 * len(left) + 8))
    return model


@dataclass
class Seen:
    """What a run reported."""

    events: list[RunEvent] = field(default_factory=list)

    @property
    def edits(self) -> list[ContextEdited]:
        return [e for e in self.events if isinstance(e, ContextEdited) and e.reason != "preamble"]

    def check_prices(self, *, exact: bool = True) -> int:
        """Of the last edit before each model call: its plan is the call's plan and its usage.
        Returns how many there were. Not `exact`: a fork may have forwarded some of it meanwhile."""
        last, checked = None, 0
        for event in self.events:
            if event.type == "context_edited":
                last = event.edit.plan.prefill_tokens
            elif event.type == "plan_ready" and last is not None:
                paid = event.plan.prefill_tokens
                assert paid == last if exact else paid <= last
                checked += 1
            elif event.type == "reply_finished":
                if last is not None and exact:
                    assert event.reply.usage.prefill_tokens == last
                last = None
        return checked


async def watched(made: Agent[Any, Any], session: Session, content: str = "go") -> Seen:
    seen = Seen()
    async with made.run_stream(content, session=session) as run:
        async for event in run:
            seen.events.append(event)
    return seen


def new_session(store: Store, made: Agent[Any, Any]) -> Session:
    return store.create("s", made.model)  # type: ignore[arg-type]


@pytest.mark.parametrize("thinking", [None, False])
async def test_a_rule_in_a_run_reports_its_edit_and_its_price(thinking: bool | None) -> None:
    """Oracle: the plan and the usage of the model call that follows, whatever opener it asks for;
    the hook hears of it; the run stays one undo step."""
    heard: list[tuple[int, Edit]] = []
    proposed: list[int] = []
    hooks = Hooks(
        before_edit=lambda _, proposal: proposed.append(proposal.edit.plan.prefill_tokens),
        on_edit=lambda context, edit: heard.append((context.step, edit)),
    )
    rule = ClearToolResults(trigger=0, keep=1)
    script = [Call("read", {"size": 300}) for _ in range(4)]
    made = Agent(model_of(*script, "done"), tools=[read], hooks=hooks, context_rules=[rule])
    made = made.replace(sampling={"thinking": thinking})
    with Store(":memory:") as store:
        session = new_session(store, made)
        seen = await watched(made, session)
        assert seen.check_prices() == 3
        assert [(e.reason, e.step) for e in seen.edits] == [
            ("clear_tool_results", step) for step in (2, 3, 4)
        ]
        assert heard == [(event.step, event.edit) for event in seen.edits]
        assert proposed == [event.edit.plan.prefill_tokens for event in seen.edits]
        results = [r.content == CLEARED for r in session.find(kind="tool_result")]
        assert results == [True, True, True, False]
        session.undo()
        assert session.ids() == []


async def test_a_hook_may_leave_an_edit_out() -> None:
    """Oracle: the proposals that it saw, and the edits that were made of the others."""
    seen: list[Proposal] = []

    def before_edit(context: RunContext[Any], proposal: Proposal) -> bool | None:
        seen.append(proposal)
        return False if context.step == 2 else None

    script = [Call("read", {"size": 300}) for _ in range(3)]
    made = Agent(
        model_of(*script, "done"),
        tools=[read],
        hooks=Hooks(before_edit=before_edit),
        context_rules=[ClearToolResults(trigger=0, keep=1)],
    )
    with Store(":memory:") as store:
        session = new_session(store, made)
        run = await watched(made, session)
        assert [event.step for event in run.edits] == [3] and len(seen) == 2
        assert [len(proposal.changes) for proposal in seen] == [1, 2]
        results = [r.content == CLEARED for r in session.find(kind="tool_result")]
        assert results == [True, True, False]


@pytest.mark.parametrize("limit", [None, 2000])
async def test_a_deferred_rule_fires_exactly_when_it_pays(limit: int | None) -> None:
    """Oracle: both plans, made by hand before each model call: on the session, and on a fork with
    the results replaced one by one."""
    pays: dict[int, bool] = {}

    def before_model(context: RunContext[Any], _: StepRequest) -> None:
        session = context.session
        fork = session.fork()
        for result in fork.find(kind="tool_result"):
            if result.num_tokens > len(CLEARED):
                fork.replace(result, CLEARED)
        if fork.ids() == session.ids():
            return
        free = fork.plan().prefill_tokens <= session.plan().prefill_tokens
        pays[context.step] = free or (limit is not None and len(session.ids()) >= limit)

    sizes = [400, 300, 500, 200, 2500, 300, 400, 60, 1500]
    rule = ClearToolResults(trigger=900, keep=0, deferred=True, limit=limit)
    made = Agent(
        model_of(*[Call("read", {"size": size}) for size in sizes], "done"),
        tools=[read],
        hooks=Hooks(before_model=before_model),
        context_rules=[rule],
    )
    with Store(":memory:") as store:
        seen = await watched(made, new_session(store, made))
    triggered = {step for step in pays if step >= 2}  # the path reaches the trigger there
    fired = [event.step for event in seen.edits]
    assert fired == [step for step in sorted(triggered) if pays[step]]
    assert fired and len(fired) < len(pays), "it fires at some steps and waits at others"
    seen.check_prices()


async def test_a_deferred_rule_fires_when_the_states_are_gone() -> None:
    """Oracle: a model that has computed nothing forwards everything, so that less is cheaper."""
    with Store(":memory:") as store:
        script = [Call("read", {"size": 400}) for _ in range(3)]
        made = Agent(model_of(*script, "done", "again"), tools=[read])
        session = new_session(store, made)
        await made.run("go", session=session)
        rule = ClearToolResults(trigger=0, keep=0, deferred=True)
        proposal = rule.propose(session)
        assert proposal is not None and not proposal.due
        assert isinstance(made.model, ScriptedModel)
        made.model.forget(session.ids(), 0)
        proposal = rule.propose(session)
        assert proposal is not None and proposal.pays and proposal.due
        seen = await watched(made.replace(context_rules=[rule]), session, "more")
        assert [event.step for event in seen.edits] == [0] and seen.check_prices() == 1


async def test_the_usage_of_a_run_holds_its_summaries() -> None:
    """Oracle: the sum over all requests that the model got."""
    summary = "short"
    made = Agent(
        model_of("long " * 200, "second", "third", summary=summary),
        context_rules=[Summarise(trigger=600, max_tokens=60)],
    )
    with Store(":memory:") as store:
        session = new_session(store, made)
        await watched(made, session)
        model = made.model
        assert isinstance(model, ScriptedModel)
        first = len(model.requests)
        result = await made.run("next", session=session)
        lengths = [len(request.ids) for request in model.requests[first:]]
    assert len(lengths) == 2 and result.usage.input_tokens == sum(lengths)
    assert result.usage.output_tokens == len(summary) + 1 + len("second") + 1
    assert [s.content for s in session.find(kind="text")] == [summary, "second"]


async def test_a_cancel_ends_the_writing_of_a_summary() -> None:
    """Oracle: the path as it was before; no branch is left."""
    run: Any = None

    def summary(_: Request) -> str:
        run.cancel()
        return "never used"

    made = Agent(
        model_of("long " * 200, "second", summary=summary),
        context_rules=[Summarise(trigger=600, max_tokens=60)],
    )
    with Store(":memory:") as store:
        session = new_session(store, made)
        await made.run("go", session=session)
        before = [segment.id for segment in session.path()]
        async with made.run_stream("next", session=session) as run:
            types = [event.type async for event in run]
        assert run.result.finish_reason == "cancelled" and types == ["run_finished"]
        assert [segment.id for segment in session.path()[:-1]] == before
        assert [branch.name for branch in session.branches()] == ["main"]
        assert (await made.replace(context_rules=()).run(session=session)).output == "second"


async def test_a_cancelled_task_leaves_no_fork() -> None:
    """Oracle: the branches; the task ends as cancelled."""
    begun, wait = threading.Event(), threading.Event()

    def summary(_: Request) -> str:
        begun.set()
        wait.wait(20)
        return "late"

    made = Agent(
        model_of("long " * 200, "second", summary=summary),
        context_rules=[Summarise(trigger=600, max_tokens=60)],
    )
    with Store(":memory:") as store:
        session = new_session(store, made)
        await made.run("go", session=session)
        task = asyncio.create_task(made.run("next", session=session))
        await asyncio.to_thread(begun.wait, 20)
        task.cancel()
        wait.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [branch.name for branch in session.branches()] == ["main"]
        assert session.path()[-1].content == "next"


RULES = st.one_of(
    st.builds(
        ClearToolResults,
        trigger=st.integers(0, 1500),
        keep=st.integers(0, 3),
        clear_at_least=st.integers(0, 400),
        exclude=st.sampled_from([(), ("read",), ("fail",)]),
        errors=st.booleans(),
        deferred=st.booleans(),
    ),
    st.builds(ClearThinking, keep_turns=st.integers(0, 2), deferred=st.booleans()),
    st.builds(
        Summarise,
        trigger=st.integers(0, 1500),
        keep_turns=st.integers(1, 2),
        max_tokens=st.integers(1, 200),
        deferred=st.booleans(),
    ),
)
CALLS = st.builds(
    lambda name, size: Call(name, {"size": size}),
    st.sampled_from(["read", "fail"]),
    st.integers(0, 600),
)
STEPS = st.builds(
    lambda thought, text, calls: [
        *([Think(thought)] if thought else []),
        *([text] if text else []),
        *calls,
    ],
    st.sampled_from(["", "hm", "I wonder. " * 10]),
    st.sampled_from(["", "I look.", "words " * 30]),
    st.lists(CALLS, min_size=1, max_size=3),
)
RUNS = st.lists(st.lists(STEPS, max_size=4), min_size=1, max_size=4)


def check_pairs(session: Session) -> None:
    calls = [s.call_id for s in session.path() if s.kind == "tool_call"]
    results = [s.call_id for s in session.path() if s.kind == "tool_result"]
    assert calls == results


def check_again(rules: Sequence[ContextRule], session: Session) -> None:
    """What a rule has done, it does not do again."""
    for rule in rules:
        before = session.version
        if rule.apply_sync(session) is None:  # nothing to do, or the summary was empty
            assert session.version == before
        else:
            assert rule.propose(session) is None and rule.apply_sync(session) is None


async def check_runs(
    rules: Sequence[ContextRule], runs: Sequence[Sequence[Any]], summary: str
) -> None:
    script = [step for steps in runs for step in (*steps, "answer " * 20)]
    made = Agent(model_of(*script, summary=summary), tools=[read, fail], context_rules=rules)
    with Store(":memory:") as store:
        session = new_session(store, made)
        for number in range(len(runs)):
            before = session.ids()
            seen = await watched(made, session, f"question {number} " * 5)
            after = session.ids()
            seen.check_prices(exact=bool(summary))  # an empty one is paid for and makes no edit
            check_pairs(session)
            session.undo()
            assert session.ids() == before
            session.redo()
            assert session.ids() == after
        assert [branch.name for branch in session.branches()] == ["main"]
        await asyncio.to_thread(check_again, rules, session)
        check_pairs(session)


PROGRAM = given(
    rules=st.lists(RULES, max_size=3), runs=RUNS, summary=st.sampled_from(["", "ok", "s" * 300])
)


@PROGRAM
@settings(max_examples=25, deadline=None)
def test_random_rules_keep_every_invariant(
    rules: list[ContextRule], runs: list[Any], summary: str
) -> None:
    """Oracle: pairing, the plan and usage after each edit, the ids before the run, nothing to do
    the second time."""
    asyncio.run(check_runs(rules, runs, summary))


@pytest.mark.slow
@PROGRAM
@settings(max_examples=200, deadline=None)
def test_many_random_rules_keep_every_invariant(
    rules: list[ContextRule], runs: list[Any], summary: str
) -> None:
    """The same, eight times as often."""
    asyncio.run(check_runs(rules, runs, summary))
