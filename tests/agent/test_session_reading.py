# SPDX-License-Identifier: Apache-2.0
"""What a session shows: find, versions, tree, diff, plans, pins."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn

import pytest

from freetoken_agent import InvalidEdit, ModelClosed, SegmentNotFound, Session, Store
from freetoken_agent.branches.views import diff as diff_paths
from freetoken_agent.testing import Call, ScriptedModel, Think


@pytest.fixture
def model() -> ScriptedModel:
    return ScriptedModel()


@pytest.fixture
def session(model: ScriptedModel) -> Iterator[Session]:
    with Store(":memory:") as store:
        yield store.create("s", model, system="sys")


def test_session_find_matches_all_of_what_is_given(session: Session, model: ScriptedModel) -> None:
    """Oracle: by hand."""
    session.append("user", "go")
    model.extend([Think("t"), "text", Call("ls", {}), Call("cat", {"f": "x"})])
    calls = session.generate_sync().calls
    for call in calls:
        session.append_result(call, "r")
    assert [s.kind for s in session.find(tool="ls")] == ["tool_call", "tool_result"]
    assert [s.id for s in session.find(kind="tool_call", tool="cat")] == [calls[1].id]
    assert [s.text for s in session.find(kind="assistant")] == ["text"]
    assert session.find(kind="text") == session.find(kind="assistant")
    assert session.find(tool="rm") == []
    assert session.find() == session.path()
    with pytest.raises(SegmentNotFound):
        session.find(origin="unknown")


def test_session_versions_cover_all_branches_and_old_replacements(session: Session) -> None:
    """Oracle: the ids in the order they were made."""
    user = session.append("user", "a")
    fork = session.fork()
    second = session.replace(user, "b").added[0]
    third = fork.replace(user, "c").added[0]
    expected = [user.id, second.id, third.id]
    for handle in (session, fork):
        assert [v.id for v in handle.versions(user)] == expected
    current = session.versions(user)[1]
    assert (current.turn, current.frame_tokens) == (0, session.path()[1].frame_tokens)
    assert (session.versions(user)[0].turn, session.versions(user)[0].frame_tokens) == (None, 0)
    with session.batch():
        fourth = session.replace(second, "d").added[0]
        assert [v.id for v in session.versions(user)] == [*expected, fourth.id]


def test_session_tree_holds_every_place_once(session: Session) -> None:
    """Oracle: parents by hand."""
    user = session.append("user", "a")
    answer = session.append("assistant", "b")
    session.fork(name="side")
    session.replace(user, "A")
    tree = session.tree()
    texts = [node.segment.text for node in tree.nodes]
    assert texts == ["sys", "a", "b", "A", "b"]
    assert [node.parent for node in tree.nodes] == [None, 0, 1, 0, 3]
    assert [node.branches for node in tree.nodes] == [(), (), ("side",), (), ("main",)]
    assert [node.on_path for node in tree.nodes] == [True, False, False, True, True]
    assert tree.children(None) == (0,)
    assert tree.children(0) == (1, 3)
    assert tree.nodes[2].segment.id == tree.nodes[4].segment.id == answer.id
    assert [node.segment.turn for node in tree.nodes] == [None, 0, 0, 0, 0]
    session.rewind(before=session.path()[0])
    assert session.tree().empty_branches == ("main",)


def test_session_diff_against_handles_branches_and_segments(session: Session) -> None:
    """Oracle: by hand."""
    user = session.append("user", "a")
    answer = session.append("assistant", "b")
    fork = session.fork(name="side")
    fork.replace(answer, "B")
    extra = fork.append("user", "c")
    for other in (fork, "side"):
        found = session.diff(other)
        assert found
        assert found.common_segments == 2
        assert found.common_tokens == sum(s.num_tokens + s.frame_tokens for s in session.path()[:2])
        assert [(a.text, b.text) for a, b in found.replaced] == [("b", "B")]
        assert [s.id for s in found.added] == [extra.id]
        assert found.removed == ()
    back = fork.diff(session)
    assert [s.id for s in back.removed] == [extra.id]
    assert not session.diff(session)
    assert not session.diff("main")
    new = session.replace(user, "A").added[0]
    versions = session.diff(user)  # from the path up to the new version, to the old one
    assert [(a.id, b.id) for a, b in versions.replaced] == [(new.id, user.id)]
    assert (versions.added, versions.removed) == ((), ())
    at_extra = session.diff(extra.id)
    assert [s.id for s in at_extra.added] == [extra.id]
    with pytest.raises(SegmentNotFound):
        session.diff("unknown")
    other_session = session._handle.context.store.create("t", session.model)
    with pytest.raises(InvalidEdit):
        session.diff(other_session)


def test_session_diff_sees_that_only_a_gap_differs(session: Session) -> None:
    """Oracle: two paths of the same segments with unequal gaps share only what precedes it."""
    session.append("user", "a")
    path = session._handle.path
    changed = replace(path, places=(path.places[0], replace(path.places[1], gap_ids=(1,))))
    assert diff_paths(path, changed).common_segments == 1


def test_session_anchored_says_where_a_state_can_be_restored(
    session: Session, model: ScriptedModel
) -> None:
    """Oracle: the model's own list of anchors."""
    session.append("user", "a")
    assert not any(s.anchored for s in session.path())
    model.extend("b")
    session.generate_sync()
    end, marks = 0, []
    for segment in session.path():
        end += segment.frame_tokens + segment.num_tokens
        marks.append(end in model.anchors(session.ids()))
    assert [s.anchored for s in session.path()] == marks
    assert any(marks)
    model.ledger.drop_ram()
    assert not any(s.anchored for s in session.path())


def test_session_reads_without_its_model(session: Session, model: ScriptedModel) -> None:
    """Oracle: the path before the model was closed; prices need it."""
    session.append("user", "a")
    model.extend("b")
    session.generate_sync()
    before = session.path()
    model.close()
    model.anchors = lambda ids: _closed()  # type: ignore[method-assign]
    assert [s.id for s in session.path()] == [s.id for s in before]
    assert not any(s.anchored for s in session.path())
    assert session.tree().nodes and session.render() and session.to_messages("openai")
    with pytest.raises(ModelClosed):
        session.plan()
    version = session.version
    with pytest.raises(ModelClosed):
        session.replace(before[1].id, "x")
    assert session.version == version


def _closed() -> NoReturn:
    raise ModelClosed("the model is closed")


def test_session_plans_name_the_segment_of_the_miss(session: Session, model: ScriptedModel) -> None:
    """Oracle: the segment that was edited."""
    session.append("user", "first question")
    model.extend("an answer", "more")
    session.generate_sync()
    session.append("user", "second question")
    session.generate_sync()
    target = session.find(kind="text")[0]
    edit = session.replace(target, "another")
    assert edit.plan.miss is not None and edit.plan.miss.segment is not None
    assert edit.plan.miss.segment.id == edit.added[0].id
    assert edit.plan.reused_tokens + edit.plan.prefill_tokens == edit.plan.input_tokens
    assert edit.plan == session.plan()
    session.undo()
    added = session.append("user", "third question")
    miss = session.plan().miss
    assert miss is not None and miss.segment is not None
    assert miss.position == session._handle.path.start(5)  # its gap belongs to it
    assert miss.segment.id == added.id


def test_session_a_path_beyond_the_context_is_priced_as_impossible() -> None:
    """Oracle: the limit; the edit itself works, so that one can cut afterwards."""
    model = ScriptedModel(context_limit=60)
    with Store(":memory:") as store:
        session = store.create("s", model)
        user = session.append("user", "x" * 100)
        plan = session.plan()
        assert plan.miss is not None
        assert (plan.miss.cause, plan.miss.position) == ("context_overflow", 60)
        assert plan.miss.segment is not None and plan.miss.segment.id == user.id
        assert plan.miss.tokens == plan.input_tokens - 60
        assert plan.predicted_s == float("inf")
        session.pin(user)
        assert [s.id for s in session.path()] == [user.id]
        assert session.replace(user, "x").plan.miss is not None
        assert session.plan().predicted_s < float("inf")


def test_session_pins_protect_states_and_follow_the_branch(
    session: Session, model: ScriptedModel
) -> None:
    """Oracle: the paths that the model was told to protect."""
    told: list[tuple[str, list[tuple[int, ...]]]] = []
    pin = model.pin

    def listen(owner: str, paths: list[tuple[int, ...]]) -> None:
        told.append((owner, list(paths)))
        pin(owner, paths)

    model.pin = listen  # type: ignore[method-assign,assignment]
    user = session.append("user", "a")
    session.append("assistant", "b")
    session.pin(user)
    end = sum(s.num_tokens + s.frame_tokens for s in session.path()[:2])
    assert told[-1][1] == [tuple(session.ids()[:end])]
    assert told[-1][0].endswith("s/main")
    version = session.version
    session.append("user", "c")
    assert len(told) == 1  # nothing changed for the pinned state
    session.set_system("other")
    assert told[-1][1] == [tuple(session.ids()[: session._handle.path.ends[1]])]
    session.undo()
    session.unpin(user)
    assert told[-1][1] == []
    assert session.version > version
    with pytest.raises(SegmentNotFound):
        session.pin("unknown")


def test_session_pins_survive_reopening(model: ScriptedModel) -> None:
    """Oracle: the paths told again at opening."""
    with Store(":memory:") as store:
        session = store.create("s", model)
        user = session.append("user", "a")
        session.pin(user)
        told: list[object] = []
        model.pin = lambda owner, paths: told.append(list(paths))  # type: ignore[method-assign]
        reopened = store.open("s", model)
        assert told == [[tuple(reopened.ids())]]
        reopened.delete(user)
        assert told[-1] == []


def test_session_the_path_is_cached_and_never_shared_mutable(session: Session) -> None:
    """Oracle: a caller's list is the caller's own."""
    session.append("user", "a")
    first = session.path()
    first.clear()
    assert len(session.path()) == 2
    assert session.path()[0] is session.path()[0]
    session.meta["x"] = 1  # type: ignore[index]
    assert session.meta == {}


def test_session_kinds_are_checked(session: Session) -> None:
    """Oracle: InvalidEdit for a kind that does not exist."""
    user = session.append("user", "a")
    with pytest.raises(InvalidEdit):
        session.append("robot", "x")
    with pytest.raises(InvalidEdit):
        session.insert(after=user, kind="tools", content="[]")
    with pytest.raises(InvalidEdit):
        session.drop(kind="robot")
    with pytest.raises(InvalidEdit):
        session.drop(kind="user", keep_turns=-1)
    with pytest.raises(InvalidEdit):
        session.undo(0)
    with pytest.raises(InvalidEdit):
        session.insert(kind="user", content="x")


def test_session_drop_keeps_the_last_turns(session: Session, model: ScriptedModel) -> None:
    """Oracle: thoughts of all but the last two turns are gone."""
    for turn in range(4):
        session.append("user", f"u{turn}")
        model.extend([Think(f"t{turn}"), f"a{turn}"])
        session.generate_sync()
    edit = session.drop(kind="thinking", keep_turns=2)
    assert [s.text for s in edit.removed] == ["t0", "t1"]
    assert [s.text for s in session.find(kind="thinking")] == ["t2", "t3"]
    assert not session.drop(kind="thinking", keep_turns=2)  # run twice: edits nothing (S10)
    assert session.drop(kind="thinking").removed[0].text == "t2"
