# SPDX-License-Identifier: Apache-2.0
"""Stores: creating, opening, listing, deleting, flushing, and what bad stores and names do."""

import threading
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest

from freetoken_agent import (
    BranchNotFound,
    FreetokenError,
    InvalidEdit,
    InvalidName,
    Session,
    SessionExists,
    SessionNotFound,
    Store,
    StoreAlreadyOpen,
    StoreClosed,
    StoreDamaged,
    StoreNewer,
    StoreReadOnly,
    UnknownOption,
)
from freetoken_agent.testing import ScriptedModel
from freetoken_storage import Database
from freetoken_storage.records import Changes, NewNode, SegmentRecord


def test_store_create_open_list_delete(tmp_path: Path) -> None:
    """Oracle: names and times by hand."""
    model = ScriptedModel(name="m")
    with Store(tmp_path / "store") as store:
        assert store.list() == []
        store.create("b/one", model, meta={"n": 1})
        two = store.create("b/two", model)
        two.append("user", "x")
        two.fork(name="side")
        store.create("c", model)
        assert [info.name for info in store.list("b/")] == ["b/one", "b/two"]
        one, second = store.list("b/")
        assert (one.model, one.meta, one.branches) == ("m", {"n": 1}, ("main",))
        assert second.branches == ("main", "side")
        assert second.created_s <= second.updated_s
        store.delete("b/two")
        with pytest.raises(SessionNotFound):
            store.open("b/two", model)
        with pytest.raises(SessionNotFound):
            store.delete("b/two")
        with pytest.raises(BranchNotFound):
            store.open("c", model, branch="side")
    with Store(tmp_path / "store") as store:
        assert [info.name for info in store.list()] == ["b/one", "c"]


def test_store_exist_ok_opens_what_is_there(tmp_path: Path) -> None:
    """Oracle: the first preamble; without exist_ok SessionExists and no change."""
    model = ScriptedModel()
    with Store(tmp_path / "store") as store:
        first = store.create("s", model, system="first")
        with pytest.raises(SessionExists):
            store.create("s", model, system="second")
        again = store.create("s", model, system="second", exist_ok=True)
        assert again.ids() == first.ids()
        assert store.create("sx", model, exist_ok=True).path() == []


@pytest.mark.parametrize("name", ["", "x" * 129, "a\nb", "é" * 65])
def test_store_bad_names_create_nothing(tmp_path: Path, name: str) -> None:
    """Oracle: InvalidName; names are only ever keys."""
    with Store(tmp_path / "store") as store:
        model = ScriptedModel()
        with pytest.raises(InvalidName) as error:
            store.create(name, model)
        assert error.value.code == "invalid_name"
        assert store.list() == []
        store.create("../../etc/x", model)
        assert [info.name for info in store.list()] == ["../../etc/x"]
    assert {p.name for p in tmp_path.iterdir()} == {"store"}


def test_store_a_creator_stopped_between_its_commits_is_finished_at_opening(
    tmp_path: Path,
) -> None:
    """Oracle: a session created whole. The crash is a store that refuses the second commit."""
    model = ScriptedModel()
    with Store(tmp_path / "store") as store:
        whole = store.create("whole", model, system="sys", tools=[{"name": "t"}])
        sessions = store._database.sessions
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(sessions), "commit", _refuse)
            with pytest.raises(KeyboardInterrupt):
                store.create("half", model, system="sys", tools=[{"name": "t"}])
    with Store(tmp_path / "store") as store:
        assert store.open("half").path() == []  # read-only: nothing is written
        half = store.create("half", model, exist_ok=True)
        assert half.ids() == whole.ids()
        half.append("user", "x")
    with Store(tmp_path / "store") as store:
        assert [s.kind for s in store.open("half", model).path()] == ["system", "tools", "user"]


def _refuse(*args: object, **named: object) -> None:
    raise KeyboardInterrupt


def test_store_an_opener_may_finish_what_a_creator_began(tmp_path: Path) -> None:
    """Oracle: both handles see the preamble once. The opener comes between the two commits."""
    model = ScriptedModel()
    with Store(tmp_path / "store") as store:
        sessions = store._database.sessions
        create = type(sessions).create
        opened: list[Session] = []

        def create_and_lose_the_race(*args: Any, **named: Any) -> Any:
            record = create(*args, **named)
            opened.append(store.open("s", model))
            return record

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(sessions), "create", create_and_lose_the_race)
            created = store.create("s", model, system="sys")
        assert [s.text for s in created.path()] == ["sys"]
        assert [s.id for s in opened[0].path()] == [s.id for s in created.path()]
        created.append("user", "x")


def test_store_a_purged_preamble_does_not_come_back(tmp_path: Path) -> None:
    """Oracle: the record of the session holds no text once it has begun."""
    with Store(tmp_path / "store") as store:
        store.create("s", ScriptedModel(), system="canary-text")
        assert b"canary-text" not in store._database.sessions.get("s").body


async def test_store_flush_puts_the_heads_states_on_disk(tmp_path: Path) -> None:
    """Oracle: another model object, which has nothing in RAM, reuses the whole head."""
    model = ScriptedModel(["hello"])
    with Store(tmp_path / "store") as store:
        session = store.create("s", model, system="sys")
        session.append("user", "hi")
        session.generate_sync()
        await session.warm()
        await store.flush()
    fresh = ScriptedModel()
    with Store(tmp_path / "store") as store:
        plan = store.open("s", fresh).plan()
        assert (plan.source, plan.prefill_tokens) == ("disk", 0)


def test_store_delete_frees_only_what_no_other_session_shares(tmp_path: Path) -> None:
    """Oracle: plans of both paths before and after."""
    model = ScriptedModel(["one", "two"])
    with Store(tmp_path / "store") as store:
        system = "a shared system text that is long enough to count"
        doomed = store.create("doomed", model, system=system)
        kept = store.create("kept", model, system=system)
        for session, text in ((doomed, "doomed question"), (kept, "kept question")):
            session.append("user", text)
            session.generate_sync()
        ids, kept_plan = doomed.ids(), kept.plan()
        shared = next(i for i, (a, b) in enumerate(zip(ids, kept.ids(), strict=False)) if a != b)
        assert model.plan(ids).reused_tokens >= len(ids) - 1
        store.delete("doomed")
        assert model.plan(ids).reused_tokens <= shared
        assert kept.plan() == kept_plan


def test_store_closed_and_twice_open(tmp_path: Path) -> None:
    """Oracle: the storage layer's errors reach the caller."""
    model = ScriptedModel()
    store = Store(tmp_path / "store")
    session = store.create("s", model)
    with pytest.raises(StoreAlreadyOpen):
        Store(tmp_path / "store")
    store.close()
    store.close()
    with pytest.raises(StoreClosed):
        session.append("user", "x")
    with pytest.raises(StoreClosed):
        store.list()
    with Store(tmp_path / "other") as other:  # the model was let go of
        other.create("s", model)


def test_store_opened_for_reading(tmp_path: Path) -> None:
    """Oracle: reads as before; a write is StoreReadOnly and leaves handle and process well."""
    model = ScriptedModel()
    with Store(tmp_path / "store") as store:
        session = store.create("s", model)
        session.append("user", "x")
    with Store(tmp_path / "store", read_only=True) as store:
        session = store.open("s", model)
        before = session.ids()
        with pytest.raises(StoreReadOnly):
            session.append("user", "y")
        assert session.ids() == before


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", StoreDamaged),
        (b"\xc1", StoreDamaged),
        (b"[]", StoreDamaged),
        (msgpack.packb([1]), StoreDamaged),
        (msgpack.packb({"v": 1}), StoreDamaged),
        (msgpack.packb({"v": "1"}), StoreDamaged),
        (msgpack.packb({"v": 2, "new": True}), StoreNewer),
    ],
)
def test_store_foreign_records_are_named_errors(
    tmp_path: Path, body: bytes, expected: type[FreetokenError]
) -> None:
    """Oracle: StoreDamaged or StoreNewer for the session; others stay usable."""
    with Database(tmp_path / "store") as database:
        database.sessions.create("bad", body)
    with Store(tmp_path / "store") as store:
        with pytest.raises(expected):
            store.open("bad")
        store.create("good", ScriptedModel()).append("user", "x")


@pytest.mark.parametrize("part", ["segment", "node", "branch", "log"])
def test_store_foreign_parts_are_named_errors(tmp_path: Path, part: str) -> None:
    """Oracle: StoreDamaged when the part is read."""
    model = ScriptedModel()
    with Store(tmp_path / "store") as store:
        store.create("s", model).append("user", "x")
    with Database(tmp_path / "store") as database:
        good = next(iter(database.sessions.all_segments("s"))).body
        node = next(iter(database.sessions.nodes("s"))).body
        junk = msgpack.packb({"v": 1, "x": 0})
        changes = {
            "segment": Changes(
                segments=[SegmentRecord("bad", junk)], nodes=[NewNode(0, "bad", node)], head=-1
            ),
            "node": Changes(
                segments=[SegmentRecord("new", good)], nodes=[NewNode(0, "new", junk)], head=-1
            ),
            "branch": Changes(body=junk),
            "log": Changes(log=[junk]),
        }[part]
        version = database.sessions.branch("s", "main").version
        database.sessions.commit("s", "main", changes, expected_version=version)
    with Store(tmp_path / "store") as store, pytest.raises(StoreDamaged):
        store.open("s", model)


def test_store_sessions_are_created_from_many_threads(tmp_path: Path) -> None:
    """Oracle: exist_ok gives every thread the same session, and one of them made it."""
    model = ScriptedModel()
    with Store(tmp_path / "store") as store:
        made: list[Session] = []

        def create() -> None:
            made.append(store.create("s", model, system="sys", exist_ok=True))

        threads = [threading.Thread(target=create) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(made) == 6
        assert {tuple(s.id for s in store.open("s").path())} == {
            tuple(s.id for s in session.path()) for session in made
        }


def test_store_refuses_template_options_that_the_template_does_not_read() -> None:
    """Oracle: CHATML reads enable_thinking and nothing else of the caller's."""
    with Store(":memory:") as store:
        with pytest.raises(UnknownOption) as error:
            store.create("s", ScriptedModel(), template_options={"enabel_thinking": True})
        assert error.value.code == "unknown_option"
        assert "enable_thinking" in str(error.value)
        assert store.list() == []
        store.create("s", ScriptedModel(), template_options={"enable_thinking": True})


def test_store_unknown_policy_creates_nothing() -> None:
    """Oracle: the list of sessions."""
    with Store(":memory:") as store:
        with pytest.raises(InvalidEdit):
            store.create("s", ScriptedModel(), meta={"x": object()})
        with pytest.raises(InvalidEdit):
            store.create("s", ScriptedModel(), template_options={"x": float("inf")})
        assert store.list() == []
