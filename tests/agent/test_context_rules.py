# SPDX-License-Identifier: Apache-2.0
"""Context rules on a session: what they change, what they say it costs, and what they leave."""

from collections.abc import Callable, Iterator, Sequence

import pytest

from freetoken_agent import (
    Agent,
    ClearThinking,
    ClearToolResults,
    ContextRule,
    InvalidAgent,
    InvalidRule,
    ReusePlan,
    Session,
    Store,
    Summarise,
)
from freetoken_agent.context_rules import CLEARED
from freetoken_agent.runs.changes import Change, Replace
from freetoken_agent.runs.summaries import PROMPT, QUESTION, filler, fitting
from freetoken_agent.testing import ScriptedModel

LONG = "a line of the file\n" * 20


def history(session: Session, turns: int = 3) -> None:
    """Turns of a thought, a call of `read` and one of `fail`, and an answer."""
    for turn in range(turns):
        session.append("user", f"question {turn}")
        session.append("thinking", f"thought {turn}")
        calls = [session.append_call("read", {"n": turn}), session.append_call("fail", {})]
        session.append_result(calls[0], f"{turn} {LONG}")
        session.append_result(calls[1], f"Error: {LONG}", error=True)
        session.append("assistant", f"answer {turn}")


@pytest.fixture
def model() -> ScriptedModel:
    return ScriptedModel()


@pytest.fixture
def session(model: ScriptedModel) -> Iterator[Session]:
    with Store(":memory:") as store:
        made = store.create("s", model, system="Be brief.")
        history(made)
        made.append("user", "and now?")
        yield made


def contents(session: Session, kind: str) -> list[str]:
    return [segment.content for segment in session.find(kind=kind)]


def paid(session: Session, model: ScriptedModel) -> int:
    """What the next generation forwards."""
    model.extend("done")
    return session.generate_sync().usage.prefill_tokens


def counts(plan: ReusePlan) -> tuple[int, int]:
    return plan.reused_tokens, plan.prefill_tokens


def warmed(session: Session, model: ScriptedModel) -> None:
    """The path has been forwarded, as after earlier turns of a run."""
    model.warm(session.ids(), anchors=session._handle.path.anchors)


def test_old_results_are_cleared_and_their_calls_stay(session: Session) -> None:
    """Oracle: the definition of keep, exclude and errors, written out."""
    rule = ClearToolResults(trigger=0, keep=2)
    before = session.ids()
    edit = rule.apply_sync(session)
    assert edit and len(edit.added) == 2
    results = session.find(kind="tool_result")
    assert [r.content == CLEARED for r in results] == [True, False, True, False, False, False]
    assert [r.call_id for r in results] == [c.call_id for c in session.find(kind="tool_call")]
    assert rule.apply_sync(session) is None
    session.undo()
    assert session.ids() == before
    ClearToolResults(trigger=0, keep=0, errors=True, exclude=["read"]).apply_sync(session)
    cleared = [r.tool for r in session.find(kind="tool_result") if r.content == CLEARED]
    assert cleared == ["fail"] * 3 and all(
        r.error for r in session.find(tool="fail", kind="tool_result")
    )


def test_the_price_of_clearing_is_what_is_paid(session: Session, model: ScriptedModel) -> None:
    """Oracle: the usage of the next generation, on a warm and on a cold path."""
    for keep in (5, 2, 0):
        warmed(session, model)
        proposal = ClearToolResults(trigger=0, keep=keep, errors=True).propose(session)
        assert proposal is not None and not proposal.pays and proposal.due
        edit = ClearToolResults(trigger=0, keep=keep, errors=True).apply_sync(session)
        assert edit and counts(edit.plan) == counts(proposal.edit.plan)
        assert proposal.saved_tokens == proposal.before.input_tokens - edit.plan.input_tokens > 0
        assert paid(session, model) == edit.plan.prefill_tokens
        session.append("user", "more")


def test_small_savings_wait(session: Session) -> None:
    """Oracle: the difference of the two paths; clear_at_least is met to the token."""
    proposal = ClearToolResults(trigger=0, keep=0).propose(session)
    assert proposal is not None
    saved = proposal.saved_tokens
    assert ClearToolResults(trigger=0, keep=0, clear_at_least=saved).propose(session)
    assert ClearToolResults(trigger=0, keep=0, clear_at_least=saved + 1).propose(session) is None


def test_a_trigger_counts_the_tokens_of_the_path(session: Session) -> None:
    """Oracle: session.ids()."""
    count = len(session.ids())
    assert ClearToolResults(trigger=count, keep=0).propose(session)
    assert ClearToolResults(trigger=count + 1, keep=0).propose(session) is None


def test_thoughts_of_the_last_turns_stay(session: Session, model: ScriptedModel) -> None:
    """Oracle: drop(kind="thinking") on a fork; an open thought at the head stays."""
    fork = session.fork()
    fork.drop(kind="thinking", keep_turns=2)
    rule = ClearThinking(keep_turns=2)
    proposal = rule.propose(session)
    edit = rule.apply_sync(session)
    assert edit and session.ids() == fork.ids() and rule.propose(session) is None
    assert proposal and paid(session, model) == proposal.edit.plan.prefill_tokens
    session.append("user", "next")
    session.append("thinking", "I begin", open=True)
    ClearThinking(keep_turns=0).apply_sync(session)
    assert contents(session, "thinking") == ["I begin"]


def test_a_summary_takes_the_place_of_old_turns(session: Session, model: ScriptedModel) -> None:
    """Oracle: the path written out; what the model was shown; the usage of the next generation."""
    warmed(session, model)
    rule = Summarise(trigger=0, keep_turns=2, max_tokens=64)
    before = session.ids()
    proposal = rule.propose(session)
    assert proposal is not None and proposal.writing is not None
    model.extend("Two files were read.")
    edit = rule.apply_sync(session)
    assert edit is not None
    shown = model.requests[-1]
    assert model.tokenizer.decode(shown.ids).count(PROMPT) == 1
    assert (len(shown.ids), shown.sampling.max_tokens) == (proposal.writing.input_tokens, 64)
    assert contents(session, "user") == [QUESTION, "question 2", "and now?"]
    assert contents(session, "text")[0] == "Two files were read."
    assert edit.plan.prefill_tokens <= proposal.edit.plan.prefill_tokens
    assert paid(session, model) == edit.plan.prefill_tokens
    assert [b.name for b in session.branches()] == ["main"]
    session.undo(2)
    assert session.ids() == before


def test_what_writing_a_summary_costs_is_known_before(
    session: Session, model: ScriptedModel
) -> None:
    """Oracle: the counts of the ledger around the fork's call."""
    warmed(session, model)
    rule = Summarise(trigger=0, max_tokens=64)
    proposal = rule.propose(session)
    assert proposal is not None and proposal.writing is not None
    seen: list[int] = []

    def write(request: object) -> str:
        seen.append(model.plan(request.ids).prefill_tokens)  # type: ignore[attr-defined]
        return "short"

    model.extend(write)
    rule.apply_sync(session)
    assert seen == [proposal.writing.prefill_tokens]


def test_the_longest_summary_costs_the_predicted_price(
    session: Session, model: ScriptedModel
) -> None:
    """Oracle: the usage of the next generation, with a summary of exactly max_tokens; and one that
    goes on is cut there."""
    rule = Summarise(trigger=0, keep_turns=1, max_tokens=40)
    warmed(session, model)
    proposal = rule.propose(session)
    assert proposal is not None
    model.extend("x" * 100)
    edit = rule.apply_sync(session)
    assert edit and contents(session, "text")[0] == "x" * 40
    assert edit.plan.prefill_tokens == paid(session, model)
    assert 0 <= proposal.edit.plan.prefill_tokens - edit.plan.prefill_tokens <= 1


def test_a_summary_is_not_summarised_again(session: Session, model: ScriptedModel) -> None:
    """Oracle: no proposal on the unchanged history; one more turn makes one."""
    rule = Summarise(trigger=0, max_tokens=64)
    model.extend("All was read.")
    assert rule.apply_sync(session)
    assert rule.propose(session) is None and rule.apply_sync(session) is None
    session.append("assistant", LONG)
    session.append("user", "next")
    model.extend("All was read, twice.")
    assert rule.apply_sync(session)
    assert contents(session, "text") == ["All was read, twice."]


def test_nothing_is_summarised_where_that_saves_nothing(
    session: Session, model: ScriptedModel
) -> None:
    """Oracle: the length of the path; an empty summary changes nothing either."""
    assert Summarise(trigger=0, max_tokens=len(session.ids())).propose(session) is None
    assert Summarise(trigger=0, keep_turns=4).propose(session) is None
    before = session.ids()
    model.extend("  ")
    assert Summarise(trigger=0, max_tokens=64).apply_sync(session) is None
    assert session.ids() == before and len(session.branches()) == 1


def test_fillers_and_cuts_fit_the_count(model: ScriptedModel) -> None:
    """Oracle: the tokenizer."""
    for count in (1, 2, 7, 40, 511):
        assert (
            count
            <= len(model.tokenizer.encode_content(filler(model.tokenizer, count)))
            <= count + 1
        )
        cut = fitting(model.tokenizer, "ä" * 600, count)
        assert len(model.tokenizer.encode_content(cut)) <= count


class Shout(ContextRule):
    """A rule of a user's own."""

    def changes(self, session: Session) -> Sequence[Change]:
        return [Replace(s, s.content.upper()) for s in session.find(kind="user")]


async def test_rules_of_ones_own(session: Session, model: ScriptedModel) -> None:
    """Oracle: the rule's definition; its name comes from its class."""
    assert Shout(trigger=10**6).propose(session) is None
    rule = Shout()
    assert rule.name == "shout"
    proposal = rule.propose(session)
    edit = await rule.apply(session)
    assert proposal and edit and counts(edit.plan) == counts(proposal.edit.plan)
    assert contents(session, "user")[-1] == "AND NOW?"
    assert await rule.apply(session) is None


def test_rules_that_make_no_sense_are_refused() -> None:
    """Oracle: the documented errors, naming the field."""
    refused: dict[str, Callable[[], ContextRule]] = {
        "trigger": lambda: ClearThinking(trigger=-1),
        "keep ": lambda: ClearToolResults(keep=-1),
        "exclude": lambda: ClearToolResults(exclude="read"),
        "placeholder": lambda: ClearToolResults(placeholder=" "),
        "keep_turns": lambda: Summarise(keep_turns=0),
        "max_tokens": lambda: Summarise(max_tokens=0),
        "prompt": lambda: Summarise(prompt=""),
        "deferred": lambda: ClearThinking(limit=10),
        "limit": lambda: Summarise(trigger=100, deferred=True, limit=99),
    }
    for name, make in refused.items():
        with pytest.raises(InvalidRule, match=name):
            make()
    with pytest.raises(InvalidAgent, match="context rule"):
        Agent(context_rules=["clear"])  # type: ignore[list-item]
