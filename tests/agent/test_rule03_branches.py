# SPDX-License-Identifier: Apache-2.0
"""Rule 3: a handle is one branch with its own version and log; branches do not meet."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from freetoken_agent import (
    BranchExists,
    BranchNotFound,
    Edit,
    InvalidEdit,
    NothingToRedo,
    NothingToUndo,
    Session,
    Store,
)
from freetoken_agent.testing import ScriptedModel


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


def _texts(session: Session) -> list[str]:
    return [segment.text for segment in session.path()]


def test_rule03_version_undo_and_redo_are_per_branch(session: Session) -> None:
    """Oracle: what was done on each branch."""
    session.append("user", "a")
    fork = session.fork(name="side")
    assert (fork.branch, fork.version) == ("side", 0)
    fork.append("assistant", "b")
    session.append("assistant", "c")
    session.undo()
    assert (_texts(session), _texts(fork)) == (["a"], ["a", "b"])
    fork.undo()
    with pytest.raises(NothingToUndo):  # the fork began here
        fork.undo()
    session.redo()
    assert _texts(session) == ["a", "c"]


def test_rule03_one_call_is_one_step(session: Session, model: ScriptedModel) -> None:
    """Oracle: the paths before each call, in reverse order."""
    seen = [_texts(session)]
    session.append("user", "a")
    seen.append(_texts(session))
    model.extend("one")
    session.generate_sync()
    seen.append(_texts(session))
    session.append("user", "b")
    call = session.append_call("t", {})
    session.undo(2)
    assert _texts(session) == ["a", "one"]
    session.redo(2)
    assert session.path()[-1].id == call.id
    session.undo(2)
    while seen:
        assert _texts(session) == seen.pop()
        if seen:
            session.undo()
    with pytest.raises(NothingToUndo) as error:
        session.undo()
    assert error.value.code == "nothing_to_undo"
    session.redo(4)
    with pytest.raises(NothingToRedo) as redo_error:
        session.redo(2)
    assert redo_error.value.code == "nothing_to_redo"


def test_rule03_the_log_survives_reopening(tmp_path: Path, model: ScriptedModel) -> None:
    """Oracle: the steps as they were made; an edit after undos dropped the redo for good."""
    with Store(tmp_path / "store") as store:
        session = store.create("s", model)
        for text in "abcd":
            session.append("user", text)
        session.undo(3)
        session.append("assistant", "x")
        session.append("user", "y")
        session.undo()
    with Store(tmp_path / "store") as store:
        session = store.open("s", model)
        assert _texts(session) == ["a", "x"]
        with pytest.raises(NothingToRedo):
            session.redo(2)
        session.redo()
        assert _texts(session) == ["a", "x", "y"]
        with pytest.raises(NothingToRedo):
            session.redo()
        session.undo(3)
        assert session.path() == []
        with pytest.raises(NothingToUndo):
            session.undo()


def test_rule03_a_batch_is_one_commit_and_one_step(session: Session) -> None:
    """Oracle: version + 1, and one undo."""
    session.append("user", "a")
    version = session.version
    with session.batch("three") as batch:
        b = session.append("assistant", "b")
        session.append("user", "c")
        session.replace(b, "B")
        assert _texts(session) == ["a", "B", "c"]
        assert session.version == version
    assert session.version == version + 1
    assert batch.edit is not None
    assert [s.text for s in batch.edit.added] == ["B", "c"]
    session.undo()
    assert _texts(session) == ["a"]
    session.redo()
    assert _texts(session) == ["a", "B", "c"]


def test_rule03_a_failed_batch_changes_nothing(session: Session) -> None:
    """Oracle: path and version before it."""
    session.append("user", "a")
    before = (_texts(session), session.version)
    with pytest.raises(RuntimeError), session.batch():
        session.append("assistant", "b")
        raise RuntimeError
    assert (_texts(session), session.version) == before
    session.append("assistant", "c")
    assert _texts(session) == ["a", "c"]


def test_rule03_an_empty_batch_and_one_that_undoes_itself_make_no_step(session: Session) -> None:
    """Oracle: the version, and the node count, which tells whether places were written again."""
    session.append("user", "a")
    session.append("assistant", "b")
    before = (session.version, session.branches())
    with session.batch() as batch:
        pass
    assert batch.edit is not None and not batch.edit
    with session.batch():
        added = session.insert(before=session.path()[1], kind="user", content="x").added[0]
        session.delete(added)
    assert (session.version, session.branches()) == before


def test_rule03_batches_do_not_nest_and_refuse_what_cannot_wait(session: Session) -> None:
    """Oracle: InvalidEdit, and the batch goes on."""
    session.append("user", "a")
    with session.batch():
        session.append("assistant", "b")
        calls: tuple[Callable[[], object], ...] = (
            session.undo,
            session.fork,
            session.reload,
            session.generate_sync,
        )
        for call in calls:
            with pytest.raises(InvalidEdit):
                call()
        with pytest.raises(InvalidEdit), session.batch():
            pass
    assert _texts(session) == ["a", "b"]


def test_rule03_dry_run_changes_nothing(session: Session, model: ScriptedModel) -> None:
    """Oracle: ids, segments, version and branches before; and what the real edit then did."""
    user = session.append("user", "a")
    session.append("thinking", "t")
    session.append("assistant", "b")
    call = session.append_call("f", {"x": 1})
    session.append_result(call, "r")
    session.undo()
    session.redo()

    def state() -> tuple[object, ...]:
        return session.ids(), session.path(), session.version, session.branches()

    before = state()
    edits: tuple[Callable[[bool], Edit], ...] = (
        lambda dry: session.replace(user, "z", dry_run=dry),
        lambda dry: session.replace(call, arguments={"x": 2}, dry_run=dry),
        lambda dry: session.insert(after=user, kind="user", content="n", dry_run=dry),
        lambda dry: session.insert_call("g", {}, "r", after=user, dry_run=dry),
        lambda dry: session.delete(call, dry_run=dry),
        lambda dry: session.drop(kind="thinking", dry_run=dry),
        lambda dry: session.rewind(to=user, dry_run=dry),
        lambda dry: session.set_system("sys", dry_run=dry),
        lambda dry: session.set_tools([{"name": "f"}], dry_run=dry),
        lambda dry: session.append_messages(
            [{"role": "user", "content": "m"}], "openai", dry_run=dry
        ),
        lambda dry: session.sync_messages(
            [{"role": "user", "content": "m"}], "openai", dry_run=dry
        ),
        lambda dry: session.undo(dry_run=dry),
    )
    for edit in edits:
        dry = edit(True)
        assert dry and dry.log_id is None
        assert state() == before
        real = edit(False)
        assert real.plan == dry.plan.model_copy(update={"miss": real.plan.miss})
        assert [s.text for s in real.added] == [s.text for s in dry.added]
        assert [s.id for s in real.removed] == [s.id for s in dry.removed]
        session.redo() if edit is edits[-1] else session.undo()
        assert session.ids() == before[0]
        before = state()


def test_rule03_five_branches_are_written_at_once(tmp_path: Path, model: ScriptedModel) -> None:
    """Oracle: a list of texts per branch; nobody conflicts, and reopening shows the same."""
    with Store(tmp_path / "store") as store:
        session = store.create("s", model, system="sys")
        session.append("user", "root")
        branches = [session.fork(name=f"b{i}") for i in range(5)]
        errors: list[BaseException] = []

        def write(branch: Session) -> None:
            try:
                for step in range(8):
                    branch.append("user", f"{branch.branch}-{step}")
                    if step % 3 == 2:
                        branch.rewind(turns=1)
            except BaseException as error:  # noqa: BLE001 - handed to the test
                errors.append(error)

        threads = [threading.Thread(target=write, args=(branch,)) for branch in branches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        expected = {b.branch: _texts(b) for b in branches}
    kept = [0, 1, 3, 4, 6, 7]
    for name, texts in expected.items():
        assert texts == ["sys", "root", *(f"{name}-{step}" for step in kept)]
    with Store(tmp_path / "store") as store:
        for name, texts in expected.items():
            assert _texts(store.open("s", model, branch=name)) == texts


def test_rule03_threads_take_turns_on_one_handle(session: Session) -> None:
    """Oracle: every text is there once, and each thread's own come in its order."""

    def write(name: int) -> None:
        for step in range(10):
            session.append("user", f"{name}-{step}")

    threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in range(4):
        mine = [text for text in _texts(session) if text.startswith(f"{name}-")]
        assert mine == [f"{name}-{step}" for step in range(10)]
    assert session.version == 41


def test_rule03_forks_share_the_prefix_without_copying(session: Session) -> None:
    """Oracle: the number of stored places does not grow with a fork."""
    for i in range(10):
        session.append("user", str(i))
    places = len(session.tree().nodes)
    fork = session.fork(at=session.path()[4])
    assert len(session.tree().nodes) == places
    fork.append("user", "x")
    assert len(session.tree().nodes) == places + 1


def test_rule03_branch_names(session: Session) -> None:
    """Oracle: the errors of the storage layer and the list of branches."""
    session.append("user", "a")
    session.fork(name="x")
    with pytest.raises(BranchExists):
        session.fork(name="x")
    with pytest.raises(BranchNotFound):
        session.open_branch("nope")
    with pytest.raises(InvalidEdit):
        session.delete_branch("main")
    assert [(b.name, b.current) for b in session.branches()] == [("main", True), ("x", False)]
    assert session.branches()[0].head == session.path()[-1].id
    session.delete_branch("x")
    assert [b.name for b in session.branches()] == ["main"]
