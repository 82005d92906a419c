# SPDX-License-Identifier: Apache-2.0
"""Rules 2, 4 and 7: turns, positions, cuts, and whether the assistant turn at the head is open."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from freetoken_agent import InvalidEdit, NothingToGenerate, Segment, Session, Store
from freetoken_agent.testing import Raw, ScriptedModel, Think


@pytest.fixture
def model() -> ScriptedModel:
    return ScriptedModel()


@pytest.fixture
def session(model: ScriptedModel) -> Iterator[Session]:
    with Store(":memory:") as store:
        yield store.create("s", model)


def _kinds(session: Session) -> list[str]:
    return [segment.kind for segment in session.path()]


def _turn(session: Session, model: ScriptedModel) -> list[Segment]:
    session.append("user", "2+2?")
    model.extend([Think("easy"), "four"])
    session.generate_sync()
    return session.path()


def test_rule02_turns_start_at_user_messages(session: Session) -> None:
    """Oracle: a count of user messages by hand."""
    session.set_system("sys")
    session.append("assistant", "welcome")
    for text in ("a", "b"):
        session.append("user", text)
        session.append("assistant", text + "!")
    assert [s.turn for s in session.path()] == [None, None, 0, 0, 1, 1]
    assert [[s.text for s in t.segments] for t in session.turns()] == [["a", "a!"], ["b", "b!"]]
    assert [t.index for t in session.turns()] == [0, 1]
    edit = session.rewind(turns=1)
    assert [s.text for s in edit.removed] == ["b", "b!"]
    with pytest.raises(InvalidEdit) as error:
        session.rewind(turns=2)
    assert error.value.code == "invalid_edit"


def test_rule04_at_and_to_include_before_and_after_do_not(session: Session) -> None:
    """Oracle: lists of texts by hand."""
    a = session.append("user", "a")
    b = session.append("assistant", "b")
    session.append("user", "c")
    assert [s.text for s in session.fork(at=b).path()] == ["a", "b"]
    assert [s.text for s in session.fork(before=b).path()] == ["a"]
    assert [s.text for s in session.fork().path()] == ["a", "b", "c"]
    assert [s.text for s in session.rewind(to=b, dry_run=True).removed] == ["c"]
    assert [s.text for s in session.rewind(before=b, dry_run=True).removed] == ["b", "c"]
    session.insert(after=a, kind="assistant", content="x")
    session.insert(before=a, kind="user", content="y")
    assert [s.text for s in session.path()] == ["y", "a", "x", "b", "c"]
    for wrong in ({}, {"turns": 1, "to": a}, {"to": a, "before": b}):
        with pytest.raises(InvalidEdit):
            session.rewind(**wrong)
    with pytest.raises(InvalidEdit):
        session.fork(at=a, before=b)


def test_rule04_after_a_thought_generate_writes_the_answer(
    session: Session, model: ScriptedModel
) -> None:
    """Oracle: the ids the model was given when it wrote the answer the first time."""
    _, thought, answer = _turn(session, model)
    whole = session.ids()
    session.rewind(to=thought)
    assert _kinds(session) == ["user", "thinking"]
    model.extend("four")
    reply = session.generate_sync()
    assert [s.kind for s in reply.segments] == ["text"]
    assert session.ids() == whole  # the closer of the thought was part of the opener
    assert model.requests[-1].ids == tuple(whole[: -answer.num_tokens])


def test_rule04_after_a_text_generate_continues_it(session: Session, model: ScriptedModel) -> None:
    """Oracle: a cut inside the turn gives the model exactly the path, without any opener."""
    session.append("user", "ls")
    text = session.append("assistant", "I will look.")
    session.append_call("ls", {})
    session.rewind(to=text)
    model.extend(" Now.")
    reply = session.generate_sync()
    assert model.requests[-1].ids == tuple(session.ids()[: -reply.segments[0].num_tokens])
    assert session.path()[-1].frame_tokens == 0
    assert session.render().endswith("I will look. Now.")


def test_rule04_a_cut_at_the_end_of_a_turn_leaves_it_closed(
    session: Session, model: ScriptedModel
) -> None:
    """Oracle: NothingToGenerate (rule 7)."""
    answer = _turn(session, model)[-1]
    session.append("user", "more")
    session.rewind(to=answer)
    with pytest.raises(NothingToGenerate) as error:
        session.generate_sync()
    assert error.value.code == "nothing_to_generate"
    fork = session.fork(at=answer)
    with pytest.raises(NothingToGenerate):
        fork.generate_sync()


def test_rule07_a_cut_reply_is_open_until_another_role_comes(
    session: Session, model: ScriptedModel
) -> None:
    """Oracle: the partial text is kept, and a continuation follows it without a gap."""
    session.append("user", "count")
    model.extend(Raw("one, tw"))  # no closer: ends by length
    first = session.generate_sync()
    assert first.finish_reason == "length"
    model.extend("o, three")
    second = session.generate_sync()
    assert [s.text for s in session.path()] == ["count", "one, tw", "o, three"]
    assert second.segments[0].frame_tokens == 0
    with pytest.raises(NothingToGenerate):
        session.generate_sync()
    session.rewind(to=first.segments[0])
    session.append("user", "stop")
    assert "one, tw<|im_end|>" in session.render()
    session.rewind(to=first.segments[0])  # now the last of its turn: closed
    with pytest.raises(NothingToGenerate):
        session.generate_sync()
    session.undo()
    session.undo()  # back before the user message: open again
    model.extend("o!")
    assert session.generate_sync().text == "o!"


def test_rule07_an_open_turn_is_open_after_reopening_and_after_an_undo(
    tmp_path: Path, model: ScriptedModel
) -> None:
    """Oracle: the continuation follows without a gap, as it would have before."""
    with Store(tmp_path / "store") as store:
        session = store.create("s", model)
        session.append("user", "count")
        session.append("assistant", "one", open=True)
        session.fork(name="side")
        session.append("user", "stop")
    for branch in ("main", "side"):
        with Store(tmp_path / "store") as store:
            session = store.open("s", model, branch=branch)
            if branch == "main":
                session.undo()
            model.extend(", two")
            assert session.generate_sync().segments[0].frame_tokens == 0
            assert session.render().endswith("one, two")
            session.undo()
            session.redo()
            with pytest.raises(NothingToGenerate):
                session.generate_sync()


@pytest.mark.parametrize("kind", ["assistant", "thinking"])
def test_rule07_a_prefilled_start_is_continued(
    session: Session, model: ScriptedModel, kind: str
) -> None:
    """Oracle: no ids between the prefilled text and what the model writes."""
    session.append("user", "2+2?")
    session.append(kind, "The answer", open=True)
    end = len(session.ids())
    model.extend(Raw(" is"))
    reply = session.generate_sync()
    written = reply.segments[0]
    assert written.kind == ("text" if kind == "assistant" else "thinking")
    assert written.frame_tokens == 0
    assert len(model.requests[-1].ids) == end


def test_rule07_a_whole_thought_leaves_the_turn_open_for_the_answer(
    session: Session, model: ScriptedModel
) -> None:
    """Oracle: the template's own rendering of a message with reasoning."""
    session.append("user", "2+2?")
    session.append("thinking", "easy")
    model.extend("4")
    session.generate_sync()
    assert session.render().endswith("assistant\n<think>\neasy\n</think>\n\n4")


def test_rule07_ids_exclude_the_opener_and_plan_includes_it(
    session: Session, model: ScriptedModel
) -> None:
    """Oracle: the ids the model is then given."""
    session.append("user", "hi")
    assert session.render() == "<|im_start|>user\nhi"
    plan = session.plan()
    model.extend(Raw("a"), "b")
    session.generate_sync()
    given = model.requests[-1].ids
    assert plan.input_tokens == len(given)
    opened = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert model.tokenizer.decode(given) == opened
    assert session.plan().input_tokens == len(session.ids())  # open: no opener
    session.generate_sync()
    assert session.plan().input_tokens == len(session.ids())  # closed: the price of warm()


def test_rule07_only_the_assistant_can_be_left_open(session: Session) -> None:
    """Oracle: the error."""
    with pytest.raises(InvalidEdit):
        session.append("user", "x", open=True)


def test_rule07_an_empty_path_has_nothing_to_generate(session: Session) -> None:
    """Oracle: the error; a plan of nothing costs nothing."""
    with pytest.raises(NothingToGenerate):
        session.generate_sync()
    plan = session.plan()
    assert (plan.input_tokens, plan.prefill_tokens, plan.source) == (0, 0, "none")


def test_s02_after_a_rewind_the_path_has_no_ghost(session: Session, model: ScriptedModel) -> None:
    """Oracle: the ids of a session that never had the later turns."""
    first = session.append("user", "a")
    kept = session.ids()
    _turn(session, model)
    session.rewind(to=first)
    assert session.ids() == kept
    assert [s.id for s in session.path()] == [first.id]


def test_s06_forking_a_node_twice_leaves_the_original_byte_for_byte(session: Session) -> None:
    """Oracle: ids, segments and version of the original before the forks."""
    session.append("user", "a")
    at = session.append("assistant", "b")
    session.append("user", "c")
    before = (session.ids(), session.path(), session.version)
    for text in ("x", "y"):
        fork = session.fork(at=at)
        fork.append("user", text)
        fork.replace(fork.path()[0], text)
    session.reload()
    assert (session.ids(), session.path(), session.version) == before
    assert {b.name for b in session.branches()} == {"main", "fork-1", "fork-2"}
