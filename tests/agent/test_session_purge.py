# SPDX-License-Identifier: Apache-2.0
"""Purge: nothing of a purged segment is left in tree, logs, states or files."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from freetoken_agent import (
    NothingToRedo,
    NothingToUndo,
    SegmentInUse,
    SegmentNotFound,
    Session,
    SessionBusy,
    SessionConflict,
    Store,
)
from freetoken_agent.parsing import SegmentDone
from freetoken_agent.testing import ScriptedModel

CANARY = "the code is ZX-41-canary"


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with Store(":memory:" if request.param == "memory" else tmp_path / "store") as store:
        yield store


@pytest.fixture
def model() -> ScriptedModel:
    return ScriptedModel()


def _talk(store: Store, model: ScriptedModel) -> Session:
    """system, user, secret, answer, user; everything computed."""
    session = store.create("s", model, system="sys")
    session.append("user", "first")
    session.append("assistant", CANARY)
    session.append("user", "second")
    model.extend("reply")
    session.generate_sync()
    return session


def _held(folder: Path, needle: bytes) -> list[Path]:
    return [f for f in folder.rglob("*") if f.is_file() and needle in f.read_bytes()]


async def test_purge_leaves_no_byte_in_any_file(tmp_path: Path, model: ScriptedModel) -> None:
    """Oracle: a search for the canary in every file of the store, before and after."""
    folder = tmp_path / "store"
    with Store(folder) as store:
        session = _talk(store, model)
        other = store.create("other", model)
        other.append("user", "keep me")
        secret = session.path()[2]
        await store.flush()
        session.rewind(before=secret)
        assert _held(folder, CANARY.encode())
        report = await session.purge(secret)
        assert report.scrubbed
        assert report.segments and report.num_nodes == 3 and report.num_states > 0
        assert not _held(folder, CANARY.encode())
        assert [s.text for s in session.path()] == ["sys", "first"]
        session.append("user", "go on")
    assert not _held(folder, CANARY.encode())
    with Store(folder) as store:
        assert [s.text for s in store.open("s").path()] == ["sys", "first", "go on"]
        assert [s.text for s in store.open("other").path()] == ["keep me"]


async def test_purge_drops_states_at_or_after_and_keeps_those_before(
    store: Store, model: ScriptedModel
) -> None:
    """Oracle: a plan of the purged path reuses exactly what precedes the segment's content."""
    session = _talk(store, model)
    secret = session.path()[2]
    ids = session.ids()
    start = sum(s.num_tokens + s.frame_tokens for s in session.path()[:2]) + secret.frame_tokens
    session.rewind(before=secret)
    await session.purge(secret)
    assert model.plan(ids).reused_tokens == start


async def test_purge_refuses_what_a_path_holds(store: Store, model: ScriptedModel) -> None:
    """Oracle: the branches that hold it; nothing is changed."""
    session = _talk(store, model)
    secret = session.path()[2]
    fork = session.fork(name="side")
    session.rewind(before=secret)
    with pytest.raises(SegmentInUse) as error:
        await session.purge(secret)
    assert error.value.branches == ("side",)
    assert error.value.code == "segment_in_use"
    assert fork.path()[2].text == CANARY
    session.undo()
    with pytest.raises(SegmentInUse) as error:
        await session.purge(secret)
    assert error.value.branches == ("main", "side")


async def test_purge_removes_the_undo_steps_that_mention_it(
    store: Store, model: ScriptedModel
) -> None:
    """Oracle: undo works down to the purged step and not past it."""
    session = store.create("s", model)
    session.append("user", "a")
    secret = session.append("assistant", CANARY)
    session.replace(secret, "clean")
    session.append("user", "b")
    report = await session.purge(secret)
    assert report.num_log_entries == 1
    session.undo()
    assert [s.text for s in session.path()] == ["a", "clean"]
    for _ in range(2):
        with pytest.raises(NothingToUndo):
            session.undo()
    session.redo()
    session.append("assistant", "c")
    session.undo(2)
    with pytest.raises(NothingToUndo):
        session.undo()


async def test_purge_removes_a_redo_that_leads_to_it(store: Store, model: ScriptedModel) -> None:
    """Oracle: NothingToRedo, also in a handle opened later."""
    session = store.create("s", model)
    session.append("user", "a")
    secret = session.append("assistant", CANARY)
    session.undo()
    await session.purge(secret)
    for handle in (session, store.open("s", model)):
        with pytest.raises(NothingToRedo):
            handle.redo()
        handle.undo(dry_run=True)
    session.append("assistant", "b")
    assert [s.text for s in session.path()] == ["a", "b"]


async def test_purge_makes_stale_handles_conflict(store: Store, model: ScriptedModel) -> None:
    """Oracle: a handle whose log mentions purged steps must reload first."""
    session = store.create("s", model)
    session.append("user", "a")
    secret = session.append("assistant", CANARY)
    session.rewind(before=secret)
    stale = store.open("s", model)
    await session.purge(secret)
    with pytest.raises(SessionConflict):
        stale.undo()
    stale.reload()
    with pytest.raises(NothingToUndo):
        stale.undo()


async def test_purge_names_what_still_holds_the_text(store: Store, model: ScriptedModel) -> None:
    """Oracle: copies made by hand, in this session and in another."""
    session = store.create("s", model)
    session.append("user", "a")
    secret = session.append("assistant", CANARY)
    quoting = session.append("user", f"you said: {CANARY}!")
    call = session.append_call("say", {"text": CANARY})
    session.append_result(call, "ok")
    other = store.create("other", model)
    other.append("user", CANARY)
    store.create("clean", model).append("user", "x")
    session.delete(secret)
    report = await session.purge(secret)
    assert set(report.other_segments) == {quoting.id, call.id}
    assert report.other_sessions == ("other",)


async def test_purge_takes_every_place_of_the_segment_and_all_below(
    store: Store, model: ScriptedModel
) -> None:
    """Oracle: the tree; segments used elsewhere stay, those only used below go."""
    session = store.create("s", model)
    first = session.append("user", "a")
    secret = session.append("assistant", CANARY)
    below = session.append("user", "only below")
    session.replace(first, "A")  # the secret now stands at two places
    session.rewind(before=secret)
    report = await session.purge(secret.id)
    assert set(report.segments) == {secret.id, below.id}
    assert report.num_nodes == 4
    assert [n.segment.text for n in session.tree().nodes] == ["a", "A"]
    for gone in (secret, below):
        with pytest.raises(SegmentNotFound) as error:
            session.versions(gone)
        assert error.value.reason == "purged"


async def test_purge_drops_the_states_of_models_that_are_not_here(tmp_path: Path) -> None:
    """Oracle: what the first model could reuse, before and after a purge under the second."""
    with Store(tmp_path / "store") as store:
        first = ScriptedModel(parts={"quant": "none"})
        session = _talk(store, first)
        ids, secret = session.ids(), session.path()[2]
        await store.flush()
    with Store(tmp_path / "store") as store:
        again = ScriptedModel(parts={"quant": "none"})
        store.open("s", again)
        assert again.plan(ids).source == "disk"
    with Store(tmp_path / "store") as store:
        session = store.open("s", ScriptedModel(parts={"quant": "int4"}))
        session.rewind(before=secret.id)
        assert (await session.purge(secret.id)).num_states > 0
    with Store(tmp_path / "store") as store:
        again = ScriptedModel(parts={"quant": "none"})
        store.open("s", again)
        assert again.plan(ids).reused_tokens == 0


async def test_purge_beyond_the_context(store: Store) -> None:
    """Oracle: a path too long to be forwarded has no states, and is purged like any other."""
    session = store.create("s", ScriptedModel(context_limit=50))
    session.append("user", "x" * 100)
    secret = session.append("assistant", CANARY)
    session.undo()
    report = await session.purge(secret)
    assert (report.segments, report.num_states) == ((secret.id,), 0)
    store.delete("s")


async def test_purge_waits_for_generations_whose_logs_it_rewrites(
    store: Store, model: ScriptedModel
) -> None:
    """Oracle: SessionBusy where the generating branch's log mentions the segment; else it runs."""
    session = _talk(store, model)
    secret = session.path()[2]
    session.rewind(before=secret)
    free = session.fork(name="free")
    with session.begin_generation(), pytest.raises(SessionBusy):
        await session.purge(secret)
    with free.begin_generation() as draft:
        await session.purge(secret)
        draft.write(SegmentDone("text", (), tuple(b"x"), "x"))
    assert free.path()[-1].text == "x"
    session.append("assistant", "not busy")


async def test_purge_of_an_unknown_segment(store: Store, model: ScriptedModel) -> None:
    """Oracle: the error."""
    session = store.create("s", model)
    with pytest.raises(SegmentNotFound):
        await session.purge("nothing")


async def test_purge_takes_meta_with_the_segment_and_with_its_edits(
    tmp_path: Path, model: ScriptedModel
) -> None:
    """Oracle: a search for the canary, which is only in meta data, in every file; what the edits
    were given besides stays."""
    folder = tmp_path / "store"
    with Store(folder) as store:
        session = store.create("s", model)
        secret = session.append("user", "my card", meta={"raw": [CANARY], "by": "me"})
        first = session.replace(secret, "my ...").added[0]
        second = session.replace(first, "my c., hidden").added[0]
        session.append("assistant", "thanks")
        side = session.fork()
        stale = store.open("s", model)
        with session.batch("without my card"):
            session.replace(second, "hidden")
        last = session.path()[0]
        report = await session.purge(secret)
        assert set(report.segments) == {secret.id}
        assert set(report.cleared_segments) == {first.id, second.id, last.id}
        assert report.other_segments == report.other_sessions == ()
        assert report.other_places == ("labels of undo steps",)
        assert [s.meta for s in session.versions(last)] == [{}, {}, {}]
        assert session.path()[0].meta == {}
        assert session.path()[0].text == "hidden"
        with pytest.raises(SessionConflict):  # it would write back what it read before
            stale.replace(second, "x")
        with pytest.raises(SessionConflict):
            side.replace(second, "x")
        for handle in (stale, side):
            handle.reload()
            assert handle.path()[0].meta == {}
            handle.replace(handle.path()[0], "y")
        session.reload()
        session.undo(2)
        assert (session.path()[0].id, session.path()[0].meta) == (second.id, {})
        await session.purge(last)
        session.append("user", "go on")
        assert (await session.purge(first)).scrubbed
    assert not _held(folder, CANARY.encode())
    with Store(folder) as store:
        assert store.open("s", model).path()[0].id == second.id


async def test_purge_of_a_later_version_names_the_earlier_ones_that_share_its_meta(
    store: Store, model: ScriptedModel
) -> None:
    """Oracle: they are untouched: nothing of theirs came from what is purged."""
    session = store.create("s", model)
    old = session.append("user", "a", meta={"raw": CANARY})
    new = session.replace(old, "b").added[0]
    session.undo()
    report = await session.purge(new)
    assert (report.cleared_segments, report.other_segments) == ((), (old.id,))
    assert session.path()[0].meta == {"raw": CANARY}


async def test_purge_names_every_kind_of_place_that_holds_the_text(
    store: Store, model: ScriptedModel
) -> None:
    """Oracle: one copy in each kind of place, by hand; in lists, keys, names and with quotes."""
    text = 'line one\n"two"'
    session = store.create("s", model, meta={"note": [text]})
    session.append("user", "a")
    secret = session.append("user", text)
    session.delete(secret)
    noted = session.append("user", "b", meta={"deep": {f"<{text}>": 1}})
    call = session.append_call("f", {"quoted": [text]})
    session.append_result(call, "r")
    named = session.append_call(text, {})
    with session.batch(f"without {text}"):
        session.append_result(named, "r")
    session.fork(name="line one")
    for name, meta in (("by meta", {"x": text}), ("clean", {"x": "line one"})):
        store.create(name, model, meta=meta)
    labelled = store.create("by label", model)
    with labelled.batch(text):
        labelled.append("user", "x")
    report = await session.purge(secret)
    assert report.segments == (secret.id,)
    result = session.path()[-1]
    assert set(report.other_segments) == {noted.id, call.id, named.id, result.id}
    assert report.other_places == ("session meta", "labels of undo steps")
    assert report.other_sessions == ("by label", "by meta")
    assert report.cleared_segments == ()


async def test_purge_does_not_search_for_a_name_or_meta_data(
    store: Store, model: ScriptedModel
) -> None:
    """Oracle: a word that anything may hold is not reported as a copy of the text."""
    session = store.create("s", model)
    session.append("user", "ls by me")
    secret = session.append_call("ls", {"path": "/secret"})
    session.append_result(secret, "r")
    session.rewind(before=secret)
    report = await session.purge(secret)
    assert report.other_segments == ()
