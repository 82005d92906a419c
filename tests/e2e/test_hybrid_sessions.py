# SPDX-License-Identifier: Apache-2.0
"""Sessions on models whose state cannot be cut anywhere: an edit costs what the edited segment and
those behind it hold, a dropped thought costs the answer, a shared preamble is shared."""

from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path

import pytest

from freetoken_agent import LocalModel, Segment, Session, Store
from freetoken_agent.model import Model
from freetoken_agent.proving.proofs import Gold
from freetoken_runtime import Engine, EngineConfig

ONE_THREAD = EngineConfig(dtype="float32", threads=1)
HYBRIDS = ("qwen3_next", "granitemoehybrid")
LOOK = '<tool_call>\n{"name": "look", "arguments": {"at": "/srv/app"}}\n</tool_call>'


def tool(description: str) -> dict[str, object]:
    function = {"name": "look", "description": description, "parameters": {"type": "object"}}
    return {"type": "function", "function": function}


TOOL, OTHER_TOOL = tool("Look."), tool("See.")


@pytest.fixture(params=HYBRIDS)
def folder(request: pytest.FixtureRequest, folder_of: Callable[[str], Path]) -> Path:
    return folder_of(request.param)


@pytest.fixture
def model(folder: Path) -> Iterator[LocalModel]:
    with LocalModel.load(folder, config=ONE_THREAD) as model:
        yield model


@pytest.fixture
def gold(folder: Path) -> Iterator[Gold]:
    with Engine.load(folder, ONE_THREAD) as engine:
        yield Gold(engine)


def starts(session: Session) -> dict[str, int]:
    """Where each segment begins, the frame before it included."""
    sizes = [s.frame_tokens + s.num_tokens for s in session.path()]
    ends = list(accumulate(sizes))
    return {s.id: end - n for s, end, n in zip(session.path(), ends, sizes, strict=True)}


async def says(session: Session, written: str) -> None:
    """Let the model write exactly this."""
    encode = session.model.tokenizer.encode_frame
    force = encode(written + "<|im_end|>")
    reply = await session.reply(force=force, max_tokens=len(force))
    assert reply.finish_reason in ("stop", "tool_calls"), reply.finish_reason


async def agent_run(store: Store, model: Model, name: str = "s") -> Session:
    """A conversation of every kind of segment, all that can be written by the model."""
    session = store.create(name, model, system="You are helpful.", tools=[TOOL])
    session.append("user", "List /srv/app")
    await says(session, f"<think>\nI should look first.\n</think>\n\nLet me look.\n{LOOK}\n{LOOK}")
    for call in session.find(kind="tool_call"):
        session.append_result(call, "a.txt\nb.txt\n" * 3)
    await says(session, "<think>\nThere are two files.\n</think>\n\nTwo files: a.txt and b.txt.")
    session.append("user", "thanks")
    await says(session, "You are welcome.")
    session.append("user", "And now?")
    return session


async def test_c05_dropping_a_thought_costs_the_answer_and_nothing_before_it(
    model: LocalModel, gold: Gold
) -> None:
    """Oracles: a count of the tokens behind the thought, the plan of a dry run, the runner's rows,
    and a cold prefill."""
    with Store(":memory:") as store:
        session = await agent_run(store, model)
        thought = session.find(kind="thinking")[-1]
        path, ids = session.path(), session.ids()
        at = path.index(thought)
        behind = sum(s.frame_tokens + s.num_tokens for s in path[at + 2 :])
        answer = path[at + 1]
        start = starts(session)[thought.id]

        dry = session.delete(thought, dry_run=True).plan
        assert (session.ids(), session.path()) == (ids, path), "a dry run changed the session"
        edit = session.delete(thought)
        assert edit.plan == dry == session.plan()
        opener = dry.input_tokens - len(session.ids())
        frame = next(s for s in session.path() if s.id == answer.id).frame_tokens
        # From the end of what precedes the thought: nothing before it. The turn was begun with the
        # same frame when the thought was written, and that prompt's end is an anchor.
        assert dry.anchor == start + frame
        assert dry.prefill_tokens == answer.num_tokens + behind + opener
        assert dry.miss is not None and dry.miss.gap == 0
        assert dry.miss.change == "removed"
        assert dry.miss.was is not None and dry.miss.was.id == thought.id
        assert dry.miss.segment is not None and dry.miss.segment.id == answer.id

        rows = model.stats().forward_rows
        reply = await session.reply(max_tokens=4)
        usage = reply.usage
        assert usage.prefill_tokens == dry.prefill_tokens
        forwarded = model.stats().forward_rows - rows
        assert forwarded == dry.prefill_tokens + usage.output_tokens - 1
        assert usage.miss == dry.miss
        gold.check(model.engine, session.ids(), num_tokens=16)


async def test_an_edit_of_any_segment_forwards_nothing_before_it(
    model: LocalModel, gold: Gold
) -> None:
    """Oracle: where each segment begins, by counting; segments that the model wrote and segments
    that it was given."""
    with Store(":memory:") as store:
        session = await agent_run(store, model)
        await session.reply(max_tokens=1)
        session.undo()
        where, edited = starts(session), 0
        for segment in session.path():
            if segment.kind == "tools":
                plan = session.set_tools([OTHER_TOOL], dry_run=True).plan
            elif segment.kind == "tool_call":
                plan = session.replace(segment, arguments={"at": "/"}, dry_run=True).plan
            else:
                plan = session.replace(segment, "# changed", dry_run=True).plan
            start = where[segment.id]
            assert (plan.anchor or 0) >= start, (segment.kind, segment.content, plan)
            assert plan.miss is not None and plan.miss.segment is not None, segment
            assert plan.miss.segment.origin == segment.id
            assert plan.miss.change == "edited"
            assert plan.miss.was is not None and plan.miss.was.id == segment.id
            assert plan.miss.gap == plan.miss.position - (plan.anchor or 0)
            edited += 1
        assert edited == 14
        for segment in session.path():
            if segment.kind in ("thinking", "text", "tool_call"):
                plan = session.delete(segment, dry_run=True).plan
                assert (plan.anchor or 0) >= where[segment.id], (segment.kind, segment.content)
        result = session.find(kind="tool_result")[0]
        session.replace(result, "# changed")
        plan = session.plan()
        assert (await session.reply(max_tokens=2)).usage.prefill_tokens == plan.prefill_tokens
        gold.check(model.engine, session.ids(), num_tokens=8)


async def test_two_sessions_share_the_anchor_of_their_preamble(
    model: LocalModel, gold: Gold
) -> None:
    """Oracle: counts. All that two sessions have in common is system and tools."""
    with Store(":memory:") as store:
        first = await agent_run(store, model, "a")
        second = store.create("b", model, system="You are helpful.", tools=[TOOL])
        second.append("user", "Quite another question")
        preamble = preamble_tokens(second)
        plan = second.plan()
        assert (plan.anchor, plan.reused_tokens) == (preamble, preamble)
        reply = await second.reply(max_tokens=2)
        assert reply.usage.prefill_tokens == plan.prefill_tokens == plan.input_tokens - preamble
        third = store.create("c", model, system="You are helpful.", tools=[OTHER_TOOL])
        third.append("user", "Other tools")
        plan = third.plan()
        assert plan.anchor == sum(s.frame_tokens + s.num_tokens for s in third.path()[:1])
        for session in (first, second):
            gold.check(model.engine, session.ids(), num_tokens=8)


async def test_sub_agents_share_the_anchor_of_their_preamble(model: LocalModel) -> None:
    """Oracle: counts. Forks of one session, each with a task of its own; and what each keeps does
    not cost the others theirs."""
    with Store(":memory:") as store:
        session = store.create("s", model, system="You are helpful.", tools=[TOOL])
        root = session.path()[-1]
        preamble = preamble_tokens(session)
        costs = []
        for task in ("List the files", "Count the words", "Say good night"):
            agent = session.fork(at=root, name=task.split()[0])
            agent.append("user", task)
            plan = agent.plan()
            reply = await agent.reply(max_tokens=3)
            assert reply.usage.reused_tokens == plan.reused_tokens
            costs.append((plan.anchor, reply.usage.prefill_tokens - len(agent.ids())))
            agent.append("user", "go on")
            assert agent.plan().reused_tokens > preamble
        assert [anchor for anchor, _ in costs] == [None, preamble, preamble]


async def test_a_new_process_shares_the_anchor_of_a_preamble(
    folder: Path, gold: Gold, tmp_path: Path
) -> None:
    """Oracle: counts, from the store alone; and a cold prefill."""
    with LocalModel.load(folder, config=ONE_THREAD) as model, Store(tmp_path) as store:
        await agent_run(store, model)
        await store.flush()
    with LocalModel.load(folder, config=ONE_THREAD) as model, Store(tmp_path) as store:
        other = store.create("other", model, system="You are helpful.", tools=[TOOL])
        other.append("user", "Quite another question")
        plan = other.plan()
        assert (plan.source, plan.anchor) == ("disk", preamble_tokens(other))
        reply = await other.reply(max_tokens=3)
        assert reply.usage.prefill_tokens == plan.prefill_tokens
        old = store.open("s", model)
        assert [s.kind for s in old.path() if not s.anchored] == ["thinking", "thinking", "user"]
        gold.check(model.engine, other.ids(), num_tokens=8)


async def test_the_preamble_outlives_other_anchors(model: LocalModel) -> None:
    """Oracle: what is left when the budget holds few anchors: the end of system and tools is among
    it, and a session that shares only those still reuses them."""
    with Store(":memory:") as store:
        session = store.create("s", model, system="You are helpful.", tools=[TOOL])
        for number in range(40):
            session.append("user", f"question {number}")
            session.append("assistant", f"answer {number}")
        await session.warm()
        before = model.anchors(session.ids())
        stats = model.stats()
        free = stats.ram_budget_bytes - stats.weights_bytes - stats.working_bytes
        model.set_budget(ram_bytes=stats.ram_budget_bytes - free + stats.state_bytes // 3)
        after = model.anchors(session.ids())
        assert 4 < len(after) < len(before) / 2
        preamble = preamble_tokens(session)
        assert preamble in after and len(session.ids()) in after
        other = store.create("other", model, system="You are helpful.", tools=[TOOL])
        other.append("user", "Hi")
        assert other.plan().anchor == preamble


def preamble_tokens(session: Session) -> int:
    kinds = ("system", "tools")
    return sum(s.frame_tokens + s.num_tokens for s in session.path() if s.kind in kinds)


def test_a_segments_place_is_counted(model: LocalModel) -> None:
    """Oracle: the ids themselves, cut where the counts say."""
    with Store(":memory:") as store:
        session = store.create("s", model, system="You are helpful.")
        added: Segment = session.append("user", "Hi")
        start = starts(session)[added.id]
        decoded = model.tokenizer.decode(session.ids()[start:])
        assert decoded.startswith("<|im_end|>") and decoded.endswith("Hi")
