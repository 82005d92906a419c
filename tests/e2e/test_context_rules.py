# SPDX-License-Identifier: Apache-2.0
"""Context rules on a real engine: what they say is what the engine counts."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from freetoken_agent import ClearThinking, ClearToolResults, LocalModel, Session, Store, Summarise
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
