# SPDX-License-Identifier: Apache-2.0
"""Changes as data: one edit that leaves what the single edits leave."""

import random
from collections.abc import Iterator, Sequence

import pytest

from freetoken_agent import InvalidEdit, PairingError, SegmentNotFound, Session, Store
from freetoken_agent.runs.changes import Change, InsertBefore, Remove, Replace
from freetoken_agent.testing import ScriptedModel


@pytest.fixture
def session() -> Iterator[Session]:
    with Store(":memory:") as store:
        made = store.create("s", ScriptedModel(), system="Be brief.")
        for turn in range(3):
            made.append("user", f"question {turn}")
            made.append("thinking", f"thought {turn}")
            made.append("assistant", f"I look. {turn}")
            calls = [made.append_call("read", {"n": turn}), made.append_call("read", {"n": -1})]
            for call in calls:
                made.append_result(call, f"result {call.arguments} " * 5)
            made.append("assistant", f"answer {turn}")
        yield made


def one_by_one(session: Session, changes: Sequence[Change]) -> list[int]:
    """The ids that the single edits leave on a fork: inserts, replacements, then the removals."""
    fork = session.fork()
    for change in changes:
        if isinstance(change, InsertBefore):
            fork.insert(before=change.segment, kind=change.kind, content=change.content)
    for change in changes:
        if isinstance(change, Replace):
            fork.replace(change.segment, change.content)
    gone = [change.segment for change in changes if isinstance(change, Remove)]
    replaced = {c.segment for c in changes if isinstance(c, Replace)}
    assert not replaced & set(gone)
    if gone:
        fork.delete(*gone)
    return fork.ids()


def test_changes_leave_what_single_edits_leave(session: Session) -> None:
    """Oracle: insert, replace and delete, on 60 random lists of changes; undo brings it back."""
    before, priced = session.ids(), 0
    for seed in range(60):
        drawn = random.Random(seed)
        path = [segment.id for segment in session.path()]
        kinds = {segment.id: segment.kind for segment in session.path()}
        changes: list[Change] = []
        for segment in drawn.sample(path[1:], drawn.randint(1, 5)):
            if kinds[segment] == "user" and drawn.random() < 0.5:
                changes.append(InsertBefore(segment, "user", f"note {seed}"))
                changes.append(InsertBefore(segment, "assistant", f"noted {seed}"))
            elif kinds[segment] in ("thinking", "tool_call", "tool_result"):
                changes.append(Remove(segment))
            elif drawn.random() < 0.5:
                changes.append(Replace(segment, f"other {seed}"))
        expected = one_by_one(session, changes)
        dry = session.apply_changes(changes, dry_run=True)
        assert session.ids() == before and dry.plan.input_tokens == len(expected)
        edit = session.apply_changes(changes)
        assert session.ids() == expected and edit.plan == dry.plan
        priced += bool(edit)
        if edit:
            session.undo()
        assert session.ids() == before
    assert priced > 40


def test_no_changes_and_equal_content_are_no_edit(session: Session) -> None:
    """Oracle: the version of the branch."""
    version = session.version
    user = session.find(kind="user")[0]
    assert not session.apply_changes([])
    assert not session.apply_changes([Replace(user, user.content)])
    assert session.version == version


def test_changes_that_cannot_be_made_change_nothing(session: Session) -> None:
    """Oracle: the documented errors, and the ids."""
    before = session.ids()
    system, call = session.path()[0], session.find(kind="tool_call")[0]
    result = session.find(kind="tool_result")[0]
    refused: list[tuple[type[Exception], Change]] = [
        (InvalidEdit, Replace(call, "text")),
        (InvalidEdit, InsertBefore(system, "user", "first")),
        (InvalidEdit, InsertBefore(call, "tool_call", "x")),
        (PairingError, InsertBefore(result, "user", "between")),
        (SegmentNotFound, Remove("nothing00000")),
    ]
    for error, change in refused:
        with pytest.raises(error):
            session.apply_changes([Replace(session.path()[1], "new"), change])
    assert session.ids() == before


def test_removing_everything_leaves_an_empty_path(session: Session) -> None:
    """Oracle: the ids."""
    session.apply_changes([Remove(segment) for segment in session.path()])
    assert session.ids() == []
