# SPDX-License-Identifier: Apache-2.0
"""Rule 10: one writer per branch; readers never wait; nothing of a conflict is lost."""

import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Literal

import pytest

from freetoken_agent import (
    GenerationConflict,
    Session,
    SessionBusy,
    SessionConflict,
    Store,
)
from freetoken_agent.parsing import SegmentDone
from freetoken_agent.testing import ScriptedModel
from freetoken_storage.records import Changes


@pytest.fixture
def model() -> ScriptedModel:
    return ScriptedModel()


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(":memory:") as store:
        yield store


@pytest.fixture
def session(store: Store, model: ScriptedModel) -> Session:
    return store.create("s", model)


def _done(model: ScriptedModel, kind: Literal["thinking", "text"], text: str) -> SegmentDone:
    return SegmentDone(kind, (), tuple(model.tokenizer.encode_content(text)), text)


def _texts(session: Session) -> list[str]:
    return [segment.text for segment in session.path()]


def test_rule10_a_generation_keeps_its_branch_to_itself(
    store: Store, session: Session, model: ScriptedModel
) -> None:
    """Oracle: every mutator raises, every reader works, other branches are free."""
    user = session.append("user", "a")
    call = session.append_call("f", {})
    session.append_result(call, "r")
    model.extend("b")
    other_handle = store.open("s", model)
    draft = session.begin_generation()
    mutators: tuple[Callable[[Session], object], ...] = (
        lambda s: s.append("user", "x"),
        lambda s: s.append_call("f", {}),
        lambda s: s.append_result(call, "r"),
        lambda s: s.append_messages([], "openai"),
        lambda s: s.sync_messages([], "openai"),
        lambda s: s.set_system("x"),
        lambda s: s.set_tools([]),
        lambda s: s.replace(user, "x"),
        lambda s: s.insert(after=user, kind="user", content="x"),
        lambda s: s.insert_call("f", {}, "r", after=user),
        lambda s: s.delete(user),
        lambda s: s.drop(kind="user"),
        lambda s: s.rewind(turns=1),
        lambda s: s.apply_changes([]),
        lambda s: s.undo(),
        lambda s: s.redo(),
        lambda s: s.batch().__enter__(),
        lambda s: s.generate_sync(),
        lambda s: s.replace(user, "x", dry_run=True),
        lambda s: s.begin_generation(),
        lambda s: s.pin(user),
        lambda s: s.unpin(user),
    )
    for handle in (session, other_handle):
        for mutate in mutators:
            with pytest.raises(SessionBusy) as error:
                mutate(handle)
            assert error.value.code == "session_busy"
    with pytest.raises(SessionBusy):
        store.delete("s")
    assert session.find(kind="user")[0].id == user.id
    assert session.plan() == draft.plan()[0]
    assert not session.diff("main")
    fork = session.fork(name="free")
    fork.append("assistant", "x")
    with pytest.raises(SessionBusy):
        fork.delete_branch("main")
    draft.release()
    session.append("assistant", "now")


def test_rule10_every_public_method_is_a_mutator_or_not() -> None:
    """Oracle: the class itself. What is added to it must be put on one of the two lists, and what
    changes the branch also into the test above."""
    named_above = inspect.getsource(test_rule10_a_generation_keeps_its_branch_to_itself)
    free = {  # reads, or writes elsewhere than on this branch
        "binding", "branch", "branches", "delete_branch", "diff", "find", "fork",
        "history_thinking", "ids", "meta", "model", "name", "open_branch", "path", "plan",
        "reload", "render", "rerender", "restore_pins", "to_messages", "tree", "turns", "version",
        "versions", "warm",
    }  # fmt: skip
    elsewhere = {
        "generate",  # begins at the first pull, as generate_sync and reply do
        "reply",
        "begin_run",  # what it returns writes, and is refused when it does
        "purge",  # test_purge_waits_for_generations_whose_logs_it_rewrites
    }
    for name in (n for n in dir(Session) if not n.startswith("_")):
        mutates = f"s.{name}(" in named_above
        assert mutates + (name in free) + (name in elsewhere) == 1, name


async def test_rule10_asynchronous_mutators_are_refused_too(
    store: Store, session: Session, model: ScriptedModel
) -> None:
    """Oracle: the error, from a second handle, while a generation runs."""
    session.append("user", "a")
    other_handle = store.open("s", model)
    with session.begin_generation():
        with pytest.raises(SessionBusy):
            await other_handle.reply()
        with pytest.raises(SessionBusy):
            async for _ in other_handle.generate():
                pass


def test_rule10_a_pin_of_a_second_handle_does_not_divert_a_generation(
    store: Store, session: Session, model: ScriptedModel
) -> None:
    """Oracle: the generation is saved on its own branch, and no other one exists."""
    user = session.append("user", "a")
    other_handle = store.open("s", model)
    draft = session.begin_generation()
    draft.write(_done(model, "thinking", "one"), tail="open")
    with pytest.raises(SessionBusy):
        other_handle.pin(user)
    draft.write(_done(model, "text", "two"))
    draft.finish()
    assert _texts(session) == ["a", "one", "two"]
    assert [b.name for b in session.branches()] == ["main"]
    session.pin(user)


def test_rule10_a_stale_handle_conflicts_and_reloads(
    store: Store, session: Session, model: ScriptedModel
) -> None:
    """Oracle: the other handle's path; nothing of either is lost."""
    session.append("user", "a")
    stale = store.open("s", model)
    session.append("assistant", "b")
    with pytest.raises(SessionConflict) as error:
        stale.append("user", "x")
    assert error.value.code == "session_conflict"
    assert _texts(stale) == ["a"]  # as it was
    stale.reload()
    assert _texts(stale) == ["a", "b"]
    stale.append("user", "x")
    stale.undo()
    assert _texts(stale) == ["a", "b"]


def test_rule10_a_generation_that_conflicts_is_saved_on_a_branch_of_its_own(
    store: Store, session: Session, model: ScriptedModel
) -> None:
    """Oracle: both the other writer's edit and the whole generation are there."""
    session.append("user", "a")
    draft = session.begin_generation()
    draft.write(_done(model, "thinking", "one"), tail="open")
    # What another process would do: its Store knows nothing of our busy branch.
    sessions = session._handle.context.sessions
    sessions.commit("s", "main", Changes(), expected_version=session.version)
    segment = draft.write(_done(model, "text", "two"))
    assert draft.conflict is not None
    with pytest.raises(GenerationConflict) as error:
        draft.finish()
    saved = session.open_branch(error.value.branch)
    assert _texts(saved) == ["a", "one", "two"]
    assert saved.path()[-1].id == segment.id
    session.reload()
    assert _texts(session) == ["a", "one"]
    session.append("user", "free again")
    saved.undo()
    assert _texts(saved) == ["a", "one"]


def test_rule10_readers_do_not_wait_for_a_writer(session: Session) -> None:
    """Oracle: readers return while another thread holds the writers' lock."""
    session.append("user", "a")
    done = threading.Event()

    def read() -> None:
        session.path()
        session.plan()
        session.find(kind="user")
        session.ids()
        done.set()

    with session._handle.lock:
        thread = threading.Thread(target=read)
        thread.start()
        assert done.wait(10)
        thread.join()
