# SPDX-License-Identifier: Apache-2.0
"""Context rules on a real engine: what they say is what the engine counts."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from freetoken_agent import (
    Agent,
    ClearThinking,
    ClearToolResults,
    Hooks,
    LocalModel,
    RunContext,
    Session,
    StepRequest,
    Store,
    Summarise,
    tool,
)
from freetoken_runtime import EngineConfig


@pytest.fixture(params=["llama", "qwen3_next"])
def session(request: pytest.FixtureRequest, folder_of: Callable[[str], Path]) -> Iterator[Session]:
    config = EngineConfig(dtype="float32", threads=1)
    with (
        LocalModel.load(folder_of(request.param), config=config) as model,
        Store(":memory:") as store,
    ):
        made = store.create("s", model, system="Be brief.")
        for turn in range(4):
            made.append("user", f"question {turn}")
            made.append("thinking", f"I shall look at page {turn}.")
            call = made.append_call("read", {"page": turn})
            made.append_result(call, f"page {turn}: " + "many words " * 20)
            made.append("assistant", f"answer {turn}")
        made.append("user", "and now?")
        made.generate_sync(max_tokens=2)
        made.append("user", "go on")
        yield made


@pytest.mark.parametrize(
    "rule", [ClearToolResults(trigger=0, keep=1), ClearThinking(keep_turns=3)], ids=lambda r: r.name
)
def test_the_predicted_price_is_what_the_engine_forwards(
    session: Session, rule: ClearToolResults | ClearThinking
) -> None:
    """Oracle: the runner's count of rows, on full attention and on a hybrid."""
    proposal = rule.propose(session)
    edit = rule.apply_sync(session)
    assert proposal and edit
    usage = session.generate_sync(max_tokens=1).usage
    assert usage.prefill_tokens == edit.plan.prefill_tokens == proposal.edit.plan.prefill_tokens
    assert usage.input_tokens == proposal.before.input_tokens - proposal.saved_tokens


async def test_a_summary_costs_what_was_said_and_no_more(session: Session) -> None:
    """Oracle: the runner's counts: of the fork's call exactly, of the next call at most."""
    rule = Summarise(trigger=0, max_tokens=12)
    proposal = rule.propose(session)
    assert proposal is not None and proposal.writing is not None
    written = await rule.write(session, proposal.changes)
    assert written.usage is not None
    assert written.usage.prefill_tokens == proposal.writing.prefill_tokens
    assert written.usage.output_tokens <= 12
    if not written.changes:
        pytest.skip("the random model wrote blanks")
    edit = session.apply_changes(written.changes)
    usage = (await session.reply(max_tokens=1)).usage
    assert usage.prefill_tokens == edit.plan.prefill_tokens <= proposal.edit.plan.prefill_tokens


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@pytest.mark.parametrize("deferred", [False, True])
async def test_in_a_run_the_engine_forwards_what_the_edit_said(
    folder_of: Callable[[str], Path], family: str, deferred: bool
) -> None:
    """Oracles: the usage of the model call behind each edit, counted by the runner; for a deferred
    rule, both plans before each step, made by hand. The states are dropped once, in the middle:
    from then on the edit pays."""
    pays: dict[int, bool] = {}

    @tool
    def read(page: Literal["one", "two", "three"]) -> str:
        """Read a page."""
        return f"{page}: " + "many words " * 30

    def before_model(context: RunContext[Any], _: StepRequest) -> StepRequest:
        session = context.session
        if context.step == 3:
            model.forget(session.ids(), 0)
        proposal = rule.propose(session, thinking=False)
        if proposal is not None:
            after, before = proposal.edit.plan, session.plan(thinking=False)
            pays[context.step] = after.prefill_tokens <= before.prefill_tokens
        choice = "required" if context.step < 4 else "none"
        return StepRequest(tool_choice=choice, thinking=False, max_tokens=80)

    rule = ClearToolResults(trigger=0, keep=1, deferred=deferred, placeholder="-")
    made: Agent[Any, str] = Agent(
        tools=[read],
        hooks=Hooks(before_model=before_model),
        context_rules=[rule],
        sampling={"parallel_tool_calls": False},
    )
    config = EngineConfig(dtype="float32", threads=1)
    announced, checked, fired = None, 0, []
    with LocalModel.load(folder_of(family), config=config) as model, Store(":memory:") as store:
        session = store.create("s", model)
        async with made.run_stream("go", session=session) as run:
            async for event in run:
                if event.type == "context_edited":
                    announced = event.edit.plan.prefill_tokens
                    fired.append(event.step)
                elif event.type == "reply_finished" and announced is not None:
                    assert event.reply.usage.prefill_tokens == announced
                    checked += 1
                    announced = None
        assert len(session.find(kind="tool_result")) == 4
    assert fired == [step for step, free in pays.items() if free or not deferred]
    assert checked == len(fired) and (3 in fired) and (len(fired) < len(pays)) is deferred
