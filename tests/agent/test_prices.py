# SPDX-License-Identifier: Apache-2.0
"""Why a plan or a usage reuses no more, in terms of segments; where sessions ask for states.

The oracle of every position is a count by hand or a comparison of id lists; causes on real engines
are in tests/e2e/test_why_it_missed.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from freetoken_agent import Miss, Segment, Session, Store
from freetoken_agent.branches.earlier import EarlierPaths
from freetoken_agent.cli.views import plan_line
from freetoken_agent.segments import SegmentKind
from freetoken_agent.testing import Call, Raw, ScriptedModel, Think
from freetoken_storage.errors import StorageError, StoreFull
from freetoken_storage.records import Snapshot

TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}


def common(a: list[int], b: list[int]) -> int:
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def miss_of(session: Session) -> Miss:
    miss = session.plan().miss
    assert miss is not None
    return miss


def said(miss: Miss) -> tuple[str, str | None, str | None, str | None]:
    """Cause, segment, change, and what stood there."""
    segment = None if miss.segment is None else miss.segment.id
    was = None if miss.was is None else miss.was.id
    return miss.cause, segment, miss.change, was


# -- what stood there


async def test_a_content_that_only_grew_replaces_the_old_one(memory_store: Store) -> None:
    """Oracle: comparing ids. The old content is the beginning of the new one: the first id that
    differs lies behind all of it, where the known path has the next message."""
    session = memory_store.create("s", ScriptedModel(), system="be")
    user = session.append("user", "one")
    session.append("assistant", "two")
    await session.warm()
    before = session.ids()
    [new] = session.replace(user, "one and more").added
    miss = miss_of(session)
    assert said(miss) == ("different_ids", new.id, "edited", user.id)
    assert miss.position == miss.anchor == common(before, session.ids())
    assert (miss.gap, miss.dropped, miss.part) == (0, None, "content")


async def test_a_segment_in_another_frame(memory_store: Store) -> None:
    """Oracle: the ids. Two texts that were one turn are two turns once something stood between."""
    model = ScriptedModel([Raw("first half,"), "second half"])
    session = memory_store.create("s", model)
    session.append("user", "Hi")
    session.generate_sync()
    session.generate_sync()
    before, second = session.ids(), session.path()[-1]
    between = session.insert(before=second, kind="user", content="hm").added[0]
    assert miss_of(session).change == "inserted"
    session.delete(between)
    miss = miss_of(session)
    assert said(miss) == ("different_ids", second.id, "framed", second.id)
    assert (miss.position, miss.part) == (common(before, session.ids()), "frame")
    assert "other ids were computed there" in miss.explain()


async def test_the_edits_own_start_is_asked_first(memory_store: Store) -> None:
    """Oracle: the path that was forwarded, two edits ago."""
    session = memory_store.create("s", ScriptedModel())
    for text in ("a", "b", "c", "d"):
        session.append("user", text)
    await session.warm()
    second, third = session.path()[1:3]
    later = session.replace(third, "x")
    assert said(later.plan.miss or pytest.fail()) == (
        "different_ids",
        later.added[0].id,
        "edited",
        third.id,
    )
    first = session.replace(second, "y")
    assert first.plan.miss is not None
    assert said(first.plan.miss) == ("different_ids", first.added[0].id, "edited", second.id)
    assert first.plan == session.plan()


async def test_what_was_never_computed_stood_nowhere(memory_store: Store) -> None:
    """Oracle: the version that was forwarded, not the ones that only the session has seen."""
    session = memory_store.create("s", ScriptedModel())
    first = session.append("user", "abc")
    await session.warm()
    for text in ("xyz", "xy", "abd"):
        [new] = session.replace(session.path()[-1], text).added
        plan = session.plan()
        assert plan.miss is not None
        assert said(plan.miss) == ("different_ids", new.id, "edited", first.id), text


def stored(folder: Path) -> tuple[Store, Session, ScriptedModel]:
    """A forwarded path of four messages, opened anew."""
    model = ScriptedModel()
    with Store(folder) as store:
        session = store.create("s", model)
        for text in ("a", "b", "c", "d"):
            session.append("user", text)
        model.warm(session.ids())
    store = Store(folder)
    return store, store.open("s", model), model


def test_the_stored_tree_is_asked_where_no_path_is_at_hand(tmp_path: Path) -> None:
    """Oracle: the four messages. What was removed is told from what came instead."""
    store, session, model = stored(tmp_path)
    _, second, third, _ = session.path()
    session.delete(second)
    fork = session.fork(before=third, name="fork")
    fork_added = fork.append("user", "e")
    store.close()
    with Store(tmp_path) as again:
        session = again.open("s", model)
        assert said(miss_of(session)) == ("different_ids", third.id, "removed", second.id)
        fork = again.open("s", model, branch="fork")
        assert said(miss_of(fork)) == ("different_ids", fork_added.id, "diverged", second.id)


async def test_a_purged_segment_is_not_shown(tmp_path: Path) -> None:
    """Oracle: the text of the purged segment, in no part of any plan."""
    store, session, model = stored(tmp_path)
    second = session.path()[1]
    [new] = session.replace(second, "secret").added
    session.replace(new, "public")
    model.warm(session.ids())
    session.replace(session.path()[1], "published")
    await session.purge(new)
    plan = session.plan()
    assert "secret" not in repr(plan) and plan.miss is not None
    assert plan.miss.change == "edited"
    store.close()


def test_a_store_that_cannot_be_read_names_no_neighbour(
    memory_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the plan's numbers, which need no store."""
    model = ScriptedModel()
    session = memory_store.create("s", model)
    session.append("user", "a")
    last = session.append("user", "b")
    model.warm(session.ids())
    fork = session.fork(before=last, name="f")
    added = fork.append("user", "c")
    whole = fork.plan()
    assert whole.miss is not None and whole.miss.was is not None

    def broken(name: str) -> None:
        raise StorageError("the disk is gone")

    monkeypatch.setattr(EarlierPaths, "_at_hand", lambda self: iter(()))
    monkeypatch.setattr(memory_store._database.sessions, "nodes", broken)
    plan = fork.plan()
    assert plan.miss is not None and said(plan.miss) == ("different_ids", added.id, None, None)
    update = {"change": None, "was": None}
    assert plan == whole.model_copy(update={"miss": whole.miss.model_copy(update=update)})


# -- what was paid


def test_a_usage_has_the_reason_of_its_plan(begin: Callable[..., Session]) -> None:
    """Oracle: the plan before; and none where everything was at hand."""
    session = begin("Hello!", "again")
    plan = session.plan()
    assert session.generate_sync().usage.miss == plan.miss is not None
    session.undo()
    assert session.plan().miss is None
    assert session.generate_sync().usage.miss is None


async def test_a_usage_says_what_ran_in_between(memory_store: Store) -> None:
    """Oracle: counting. Between plan and reply the model forwards more of the path, or loses it."""
    model = ScriptedModel(["one", "two"])
    session = memory_store.create("s", model, system="be")
    user = session.append("user", "a rather long question")
    ids = session.ids()
    async with session.generate() as generation:
        await anext(generation)  # the plan: nothing is known
        model.warm(ids[:20])
        async for _ in generation:
            pass
    usage = generation.reply.usage
    assert usage.reused_tokens == 20 and usage.changed is not None
    assert usage.miss is not None and usage.miss.segment is not None
    assert (usage.miss.position, usage.miss.anchor) == (20, 20)
    assert usage.miss.tokens == usage.prefill_tokens
    assert usage.miss.segment.id == user.id
    session.append("user", "more")
    async with session.generate() as generation:
        await anext(generation)
        model.ledger.drop_ram()
        async for _ in generation:
            pass
    usage = generation.reply.usage
    assert usage.reused_tokens == 0 and usage.miss is not None
    assert (usage.miss.position, usage.miss.anchor) == (0, None)
    assert usage.miss.tokens == usage.prefill_tokens


async def test_what_was_cancelled_before_it_began_has_its_plans_reason(
    begin: Callable[..., Session],
) -> None:
    """Oracle: the plan."""
    session = begin("Hello!")
    plan = session.plan()
    async with session.generate() as generation:
        await anext(generation)
        generation.cancel()
        async for _ in generation:
            pass
    assert generation.reply.usage.miss == plan.miss
    assert generation.reply.usage.unforwarded_tokens == plan.input_tokens


# -- where states are asked for


async def test_segment_ends_are_anchors_and_the_preambles_last(memory_store: Store) -> None:
    """Oracle: a count by hand of frames and contents; the control ids of ChatML."""
    model = ScriptedModel([[Think("hm"), "Let me look.", Call("ls", {})], "done"])
    session = memory_store.create("s", model, system="be", tools=[TOOL])
    session.append("user", "Hi")
    session.generate_sync()
    session.append_result(session.path()[-1], "a.txt")
    session.generate_sync()
    ends, at = [], 0
    for segment in session.path()[:-1]:
        at += segment.frame_tokens + segment.num_tokens
        ends.append(at)
    request = model.requests[-1]
    assert list(request.anchors) == ends
    assert list(request.lasting) == ends[:2]
    encode = model.tokenizer.encode_frame
    [think_end], [call], [call_end] = (
        encode(text) for text in ("</think>", "<tool_call>", "</tool_call>")
    )
    assert {think_end, call_end} <= request.anchor_after
    assert call not in request.anchor_after
    assert request.anchor_before == {call: 1}  # a line feed stands between text and call
    thought, text = session.find(kind="thinking")[0], session.find(kind="text")[0]
    ends_at = dict(zip((s.id for s in session.path()), ends, strict=False))
    kept = session.ids()[: ends_at[text.id]]
    assert model.plan(kept).prefill_tokens == 0, "no state where the text ends"
    assert model.plan(session.ids()[: ends_at[thought.id]]).prefill_tokens == 1


def test_states_that_cannot_be_stored_end_no_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the reply, on a full disk."""
    model = ScriptedModel(["Hello!"])
    with Store(tmp_path) as store:
        session = store.create("s", model)
        session.append("user", "Hi")

        def full(snapshots: list[Snapshot]) -> None:
            raise StoreFull("no room")

        assert model.ledger.snapshots is not None
        monkeypatch.setattr(model.ledger.snapshots, "put", full)
        assert session.generate_sync().text == "Hello!"


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_a_path_that_can_be_none_is_refused(path: str) -> None:
    """Oracle: the documented error; an empty path is not the current folder."""
    with pytest.raises(StorageError) as caught:
        Store(path)
    assert caught.value.remedy is not None


# -- for people


def segment(kind: SegmentKind, name: str) -> Segment:
    return Segment(id=name, kind=kind, role="user", content="", text="", num_tokens=1, origin=name)


SENTENCES: list[tuple[dict[str, Any], str]] = [
    (
        {"cause": "different_ids", "change": "edited", "was": segment("user", "old")},
        "user new: replaces user old",
    ),
    (
        {"cause": "different_ids", "change": "removed", "was": segment("thinking", "old")},
        "user new: follows where thinking old was removed",
    ),
    (
        {"cause": "different_ids", "change": "inserted", "was": segment("user", "old")},
        "user new: inserted before user old",
    ),
    (
        {"cause": "different_ids", "change": "diverged", "was": segment("user", "old")},
        "user new: stands where another branch or version has user old",
    ),
    ({"cause": "different_ids"}, "user new: other ids were computed there"),
    ({"cause": "never_computed", "part": "frame"}, "the frame before user new: new from here"),
    (
        {"cause": "never_computed", "segment": None, "part": "opener"},
        "the generation opener: new from here",
    ),
    ({"cause": "fingerprint:quantisation"}, "user new: computed by a model of other quantisation"),
    (
        {"cause": "no_anchor", "anchor": 8, "gap": 4},
        "user new: known, but its state was not kept; restores the state at 8, an anchor at 12 "
        "would save 4 tokens",
    ),
    (
        {"cause": "evicted", "gap": 12, "dropped": 9},
        "user new: its state was evicted; restores nothing, an anchor at 12 would save 12 tokens "
        "(one at 9 gave way to the memory budget)",
    ),
]


@pytest.mark.parametrize(("fields", "sentence"), SENTENCES, ids=[s for _, s in SENTENCES])
def test_a_miss_explains_itself(fields: dict[str, Any], sentence: str) -> None:
    """Oracle: the sentence."""
    given = {"position": 12, "segment": segment("user", "new"), "part": "content", "tokens": 20}
    assert Miss(**{**given, **fields}).explain() == sentence


def test_a_plan_is_shown_with_its_reason(begin: Callable[..., Session]) -> None:
    """Oracle: the plan's own sentence, on a line of its own."""
    session = begin()
    plan = session.plan()
    assert plan.miss is not None
    first, second = plan_line(plan).splitlines()
    assert first.startswith(f"{plan.input_tokens} tokens: reuse 0, forward {plan.prefill_tokens}")
    assert second.strip() == plan.miss.explain()
