# SPDX-License-Identifier: Apache-2.0
"""Rule 1: an id names a segment instance, wherever and however often it is used."""

from collections.abc import Iterator

import pytest

from freetoken_agent import (
    FrameNotEditable,
    NothingToRedo,
    SegmentNotFound,
    SegmentReplaced,
    Session,
    Store,
)
from freetoken_agent.testing import ScriptedModel


@pytest.fixture
def session() -> Iterator[Session]:
    with Store(":memory:") as store:
        yield store.create("s", ScriptedModel(), system="You are helpful.")


def _ids(session: Session) -> list[str]:
    return [segment.id for segment in session.path()]


def test_rule01_unchanged_segments_keep_their_ids_and_token_ids(session: Session) -> None:
    """Oracle: the lists of ids and of token ids before the edit."""
    first = session.append("user", "one")
    answer = session.append("assistant", "two")
    last = session.append("user", "three")
    before = {s.id: s.text for s in session.path()}
    edit = session.replace(answer, "zwei")
    assert edit.removed[0].id == answer.id
    new = edit.added[0]
    assert (new.replaces, new.origin) == (answer.id, answer.origin)
    assert new.id != answer.id
    system = session.path()[0].id
    assert _ids(session) == [system, first.id, new.id, last.id]
    kept = {s.id: s.text for s in session.path() if s.id in before}
    assert kept == {i: text for i, text in before.items() if i != answer.id}


def test_rule01_a_second_replacement_keeps_the_first_origin(session: Session) -> None:
    """Oracle: the definition of `origin` and `replaces`."""
    first = session.append("user", "a")
    second = session.replace(first, "b").added[0]
    third = session.replace(second, "c").added[0]
    assert (third.origin, third.replaces) == (first.id, second.id)
    assert [v.id for v in session.versions(first)] == [first.id, second.id, third.id]
    assert [v.id for v in session.versions(third.id)] == [first.id, second.id, third.id]
    assert [s.id for s in session.find(origin=first)] == [third.id]


def test_rule01_equal_content_is_no_edit(session: Session) -> None:
    """Oracle: version and log do not move."""
    user = session.append("user", "hello")
    call = session.append_call("t", {"a": 1, "b": [True, None]})
    session.append_result(call, "r")
    version = session.version
    assert not session.replace(user, "hello")
    assert not session.replace(
        user, [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    )
    assert not session.replace(call, arguments={"b": [True, None], "a": 1})
    assert not session.set_system("You are helpful.")
    assert session.version == version
    assert session.replace(call, arguments={"a": True, "b": [True, None]})  # JSON: true is not 1


def test_rule01_a_replaced_id_names_its_current_version(session: Session) -> None:
    """Oracle: the id of the version on the path."""
    old = session.append("user", "a")
    new = session.replace(old, "b").added[0]
    for stale in (old, old.id):
        with pytest.raises(SegmentReplaced) as error:
            session.replace(stale, "c")
        assert error.value.current.id == new.id
        assert error.value.code == "segment_replaced"
        assert new.id in str(error.value)


@pytest.mark.parametrize("kept_elsewhere", [False, True])
def test_rule01_reason_deleted(session: Session, kept_elsewhere: bool) -> None:
    """Oracle: what was done to the segment on this branch, whatever other branches hold."""
    user = session.append("user", "a")
    if kept_elsewhere:
        session.fork()
    session.delete(user)
    with pytest.raises(SegmentNotFound) as error:
        session.replace(user, "b")
    assert (error.value.reason, error.value.code) == ("deleted", "segment_not_found")


def test_rule01_reason_other_branch_and_unknown(session: Session) -> None:
    """Oracle: where the segment was appended."""
    session.append("user", "a")
    other = session.fork()
    there = other.append("assistant", "b")
    with pytest.raises(SegmentNotFound) as error:
        session.delete(there)
    assert error.value.reason == "other_branch"
    with pytest.raises(SegmentNotFound) as error:
        session.delete("no-such-segment")
    assert error.value.reason == "unknown"


async def test_rule01_reason_purged(session: Session) -> None:
    """Oracle: the purge."""
    user = session.append("user", "a")
    session.delete(user)
    await session.purge(user)
    with pytest.raises(SegmentNotFound) as error:
        session.replace(user, "b")
    assert error.value.reason == "purged"
    with pytest.raises(SegmentNotFound):
        session.versions(user.id)


def test_rule01_a_segment_deleted_inside_a_batch_was_deleted(session: Session) -> None:
    """Oracle: the batch's own history; nothing of it was ever stored."""
    with session.batch():
        user = session.append("user", "a")
        new = session.replace(user, "b").added[0]
        with pytest.raises(SegmentReplaced):
            session.delete(user)
        session.delete(new)
        with pytest.raises(SegmentNotFound) as error:
            session.delete(new)
        assert error.value.reason == "deleted"


async def test_rule01_ids_that_a_batch_replaced_again_are_ids_of_the_session(
    session: Session,
) -> None:
    """Oracle: the versions that were stored, which know nothing of what the batch passed through;
    the same through another handle as far as it can know the id."""
    user = session.append("user", "a")
    with session.batch():
        second = session.replace(user, "b").added[0]
        third = session.replace(second, "c").added[0]
        last = session.replace(third, "d").added[0]
        fresh = session.append("assistant", "x")
        newer = session.replace(fresh, "y").added[0]
    other = session._handle.context.store.open("s", session.model)
    for lost in (second, third):
        assert [v.id for v in session.versions(lost)] == [user.id, last.id]
        assert [v.id for v in session.find(origin=lost)] == [last.id]
        with pytest.raises(SegmentReplaced) as replaced:
            session.delete(lost)
        assert replaced.value.current.id == last.id
    for handle in (session, other):
        stored = {s.id: s for s in handle.path()}
        assert stored[last.id].replaces == user.id
        assert (stored[newer.id].origin, stored[newer.id].replaces) == (fresh.id, None)
        assert [v.id for v in handle.versions(stored[newer.id].origin)] == [newer.id]
        assert handle.find(origin=fresh) == [stored[newer.id]]
        with pytest.raises(SegmentReplaced):
            handle.delete(fresh)
    found = session.diff(third)  # what the path was: up to here
    assert [(a.id, b.id) for a, b in found.replaced] == [(last.id, third.id)]
    with pytest.raises(SegmentNotFound) as missing:
        other.versions(third)
    assert missing.value.reason == "unknown"
    report = await session.purge(third)
    assert (report.num_nodes, report.segments) == (0, (third.id,))
    with pytest.raises(SegmentNotFound) as missing:
        session.versions(third)
    assert missing.value.reason == "purged"
    session.undo()
    with pytest.raises(SegmentNotFound) as missing:
        session.delete(fresh)
    assert missing.value.reason == "deleted"
    with pytest.raises(SegmentNotFound) as missing:
        session.diff(fresh)
    assert missing.value.reason == "deleted"


async def test_rule01_a_purge_reaches_edits_through_what_a_batch_passed(session: Session) -> None:
    """Oracle: the meta data that the last version inherited through a version never stored."""
    user = session.append("user", "a", meta={"raw": "secret"})
    with session.batch():
        session.replace(session.replace(user, "b").added[0], "c")
    last = session.path()[-1]
    assert last.meta == {"raw": "secret"}
    report = await session.purge(user)
    assert report.cleared_segments == (last.id,)
    assert session.path()[-1].meta == {}


def test_rule01_undo_and_redo_revive_ids_and_an_edit_drops_the_redo(session: Session) -> None:
    """Oracle: the recorded paths."""
    user = session.append("user", "a")
    before = _ids(session)
    session.replace(user, "b")
    after = _ids(session)
    session.undo()
    assert _ids(session) == before
    session.redo()
    assert _ids(session) == after
    session.undo()
    session.append("assistant", "x")
    with pytest.raises(NothingToRedo):
        session.redo()


def test_rule01_frames_are_not_editable(session: Session) -> None:
    """Oracle: rule 4, positions name content segments."""
    session.append("user", "a")
    frame = next(s for s in session.path(frames=True) if s.kind == "frame")
    for name in (frame, frame.id):
        with pytest.raises(FrameNotEditable) as error:
            session.delete(name)
        assert error.value.code == "frame_not_editable"
    with pytest.raises(FrameNotEditable):
        session.fork(at=frame)
