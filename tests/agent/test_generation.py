# SPDX-License-Identifier: Apache-2.0
"""Generations on a scripted model: what is stored, what is counted, what is refused."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken_agent import Session, Store
from freetoken_agent.branches.branch import Branch
from freetoken_agent.errors import GenerationConflict, SessionBusy
from freetoken_agent.events import (
    GenerationEvent,
    PlanReady,
    ReplyFinished,
    SegmentFinished,
    TextDelta,
    ThinkingDelta,
    ToolCallReady,
)
from freetoken_agent.generation import GenerationUnfinished
from freetoken_agent.model import ContextOverflow, SamplingOptions
from freetoken_agent.testing import Answer, Call, Raw, Request, ScriptedModel, Step, Think

Begin = Callable[..., Session]

CLOSER = 258  # <|im_end|>
END_OF_TEXT = 256  # a stop id that is not the template's closer
THOUGHT_TEXT_CALLS: Step = [Think("hm"), "so", Call("ls", {"p": "/"}), Call("cd", {"p": "é"})]


def scripted(session: Session) -> ScriptedModel:
    assert isinstance(session.model, ScriptedModel)
    return session.model


async def events_of(stream: AsyncIterator[GenerationEvent]) -> list[GenerationEvent]:
    return [event async for event in stream]


async def test_a_text_reply_yields_exactly_these_events(begin: Begin) -> None:
    """Oracle: the order that the events module documents; one delta per byte of the script."""
    session = begin("héy")
    events = await events_of(session.generate())
    assert [event.type for event in events] == [
        "plan_ready",
        "prefill_progress",
        *["text_delta"] * 3,
        "segment_finished",
        "reply_finished",
    ]
    assert {(event.session, event.branch, event.step) for event in events} == {("s", "main", 0)}
    last = events[-1]
    assert isinstance(last, ReplyFinished)
    assert (last.reply.text, last.reply.finish_reason) == ("héy", "stop")
    assert [s.id for s in last.reply.segments] == [session.path()[-1].id]


async def test_thoughts_texts_and_calls_become_segments(begin: Begin) -> None:
    """Oracle: the script, and the sampled ids, which the path must hold as they were sampled."""
    session = begin(THOUGHT_TEXT_CALLS)
    before = session.ids()
    events = await events_of(session.generate())
    reply = events[-1].reply if isinstance(events[-1], ReplyFinished) else None
    assert reply is not None
    assert [s.kind for s in reply.segments] == ["thinking", "text", "tool_call", "tool_call"]
    assert (reply.thinking, reply.text) == ("hm", "so")
    assert [(c.tool, c.arguments) for c in reply.calls] == [("ls", {"p": "/"}), ("cd", {"p": "é"})]
    assert len({c.call_id for c in reply.calls}) == 2
    assert reply.finish_reason == "tool_calls"
    ready = [event.call for event in events if isinstance(event, ToolCallReady)]
    assert tuple(ready) == reply.calls
    request = scripted(session).requests[0]
    assert list(request.ids[: len(before)]) == before
    sampled = session.ids()[len(request.ids) :]
    twin = ScriptedModel([THOUGHT_TEXT_CALLS])
    stream = twin.generate([1], request.sampling)
    assert [*sampled, CLOSER] == [token.id for token in stream]
    assert reply.usage.output_tokens == len(sampled) + 1
    assert reply.usage.thinking_tokens == len("hm")


async def test_a_segment_is_stored_before_its_event(begin: Begin, memory_store: Store) -> None:
    """Oracle: a second handle on the store, read while the event is being handled."""
    session = begin(THOUGHT_TEXT_CALLS)
    finished = 0
    async for event in session.generate():
        if isinstance(event, SegmentFinished):
            finished += 1
            stored = memory_store.open("s").path()
            assert stored[-1].id == event.segment.id
            assert len(stored) == 2 + finished
    assert finished == 4


async def test_a_generation_is_one_undo_step(begin: Begin) -> None:
    """Oracle: the path before it. API rule 3."""
    session = begin(THOUGHT_TEXT_CALLS)
    before = session.path()
    await session.reply()
    after = session.path()
    session.undo()
    assert [s.id for s in session.path()] == [s.id for s in before]
    session.redo()
    assert [s.id for s in session.path()] == [s.id for s in after]


async def test_the_plan_comes_true(begin: Begin) -> None:
    """Oracle: counting by hand; API rule 6: the stop id starts the next gap, so P = new + 1."""
    session = begin("abc", "d", "e")
    first = await session.reply()
    total = len(scripted(session).requests[0].ids)
    assert (first.usage.reused_tokens, first.usage.prefill_tokens) == (0, total)
    before = len(session.ids())
    session.append("user", "go")
    plan = session.plan()
    assert plan.prefill_tokens == plan.input_tokens - before
    async with session.generate() as generation:
        events = await events_of(generation)
    assert isinstance(events[0], PlanReady) and events[0].plan == plan
    usage = generation.reply.usage
    assert usage.prefill_tokens == plan.prefill_tokens
    assert usage.reused_tokens + usage.prefill_tokens == usage.input_tokens == plan.input_tokens
    await session.warm()
    assert session.plan().prefill_tokens == 0


async def test_a_plan_that_did_not_come_true_says_why(begin: Begin) -> None:
    """Oracle: another branch, which forwards the same prompt between the plan and the request."""
    session = begin("other", "mine")
    fork = session.fork()
    async for event in session.generate():
        if isinstance(event, PlanReady):
            assert event.plan.reused_tokens == 0
            assert (await fork.reply()).usage.changed is None
        last = event
    assert isinstance(last, ReplyFinished)
    usage = last.reply.usage
    assert usage.prefill_tokens == 0 and usage.reused_tokens == usage.input_tokens
    assert usage.changed == f"another request computed {usage.input_tokens} tokens of the path"


@pytest.mark.parametrize("pulls", range(1, 60, 3))
async def test_s11_cancel_at_every_event_then_prompt_again(begin: Begin, pulls: int) -> None:
    """Oracle: the uncancelled run: what was written is a prefix of it, and the next turn works."""
    stops = SamplingOptions(stop_ids=frozenset({CLOSER}))
    whole = ScriptedModel([THOUGHT_TEXT_CALLS]).generate([1], stops)
    said = [token.id for token in whole][:-1]
    session = begin(THOUGHT_TEXT_CALLS, "again")
    async with session.generate() as generation:
        count = 0
        async for event in generation:
            last, count = event, count + 1
            if count == pulls:
                generation.cancel()
    assert isinstance(last, ReplyFinished)
    assert generation.reply == last.reply
    assert last.reply.finish_reason in ("cancelled", "tool_calls")
    usage, begun = last.reply.usage, bool(scripted(session).requests)
    assert usage.input_tokens == usage.reused_tokens + usage.prefill_tokens + (
        0 if begun else usage.unforwarded_tokens
    )
    assert begun or usage.input_tokens == usage.unforwarded_tokens > 0
    if last.reply.segments:
        written = session.ids()[len(scripted(session).requests[0].ids) :]
        assert written == said[: len(written)]
    session.append("user", "now?")
    asked = len(scripted(session).requests)  # 0: cancelled before the model was asked
    assert (await session.reply()).text == ("again" if asked else "so")
    kinds = [s.kind for s in session.path()]
    if asked:
        assert kinds.count("tool_call") == kinds.count("tool_result")


@pytest.mark.parametrize("pulls", range(1, 60, 7))
async def test_s43_leaving_a_stream_early_closes_everything(
    begin: Begin, pulls: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: the log stays empty, no thread stays, and the branch takes the next message.
    Warnings and unraisable errors fail a test here."""
    session = begin(THOUGHT_TEXT_CALLS, "again")
    threads = threading.active_count()
    count = 0
    async for _ in session.generate():
        count += 1
        if count == pulls:
            break
    session.append("user", "now?")
    asked = len(scripted(session).requests)  # 0: left before the model was asked
    assert (await session.reply()).text == ("again" if asked else "so")
    assert not caplog.records
    await asyncio.sleep(0.01)
    assert threading.active_count() <= threads


async def test_a_cancelled_task_keeps_what_was_written(begin: Begin) -> None:
    """Oracle: the script up to the point where it waits."""
    session = begin("slow", "again")
    seen = asyncio.Event()

    async def consume() -> None:
        async for event in session.generate():
            if isinstance(event, TextDelta) and event.text == "l":
                seen.set()
                await asyncio.sleep(60)

    task = asyncio.ensure_future(consume())
    await seen.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert session.path()[-1].text == "sl"
    session.append("user", "now?")
    assert (await session.reply()).text == "again"


async def test_an_error_of_the_model_keeps_the_text_and_frees_the_branch(begin: Begin) -> None:
    """Oracle: the script; the error arrives unchanged."""
    session = begin(["par", RuntimeError("fell off")], Raw("tly<|im_end|>"))
    with pytest.raises(RuntimeError, match="fell off"):
        await session.reply()
    assert session.path()[-1].text == "par"
    assert (await session.reply()).text == "tly"


async def test_an_overlong_path_is_refused_and_the_session_goes_on(begin: Begin) -> None:
    """Oracle: the model's own limit, in the error."""
    session = begin("ok", context_limit=100)
    session.append("user", "x" * 100)
    with pytest.raises(ContextOverflow) as caught:
        await session.reply()
    assert caught.value.code == "context_overflow"
    session.undo()
    assert (await session.reply()).text == "ok"


async def test_rule10_one_writer_per_branch(begin: Begin) -> None:
    """Oracle: API rule 10: mutators raise, readers and forks work."""
    session = begin("hello", "other")
    async with session.generate() as generation:
        await anext(generation)
        with pytest.raises(SessionBusy) as caught:
            session.append("user", "no")
        assert caught.value.code == "session_busy"
        with pytest.raises(SessionBusy):
            await session.reply()
        assert len(session.path()) == 2 and session.find(kind="user") and session.plan()
        fork = session.fork()
        assert (await fork.reply()).text == "hello"
        assert [event.type async for event in generation][-1] == "reply_finished"
    assert generation.reply.text == "other"


RIVAL = """
import sys
from freetoken_agent import Store
from freetoken_agent.testing import ScriptedModel

with Store(sys.argv[1]) as store:
    store.open("s", ScriptedModel()).append("user", "first!")
"""


async def test_rule10_a_conflicting_generation_is_saved_elsewhere(tmp_path: Path) -> None:
    """Oracle: the branch is as the other process left it, ours is whole on the named branch."""
    with Store(tmp_path) as store:
        session = store.create("s", ScriptedModel([["abc", Call("ls", {})], "late"]))
        session.append("user", "Hi")
        with pytest.raises(GenerationConflict) as caught:
            async for event in session.generate():
                if isinstance(event, PlanReady):
                    rival = [sys.executable, "-c", RIVAL, str(tmp_path)]
                    await asyncio.to_thread(subprocess.run, rival, check=True, timeout=60)
        assert caught.value.code == "session_conflict"
        assert store.open("s").path()[-1].text == "first!"
        saved = store.open("s", branch=caught.value.branch).path()
        assert [s.kind for s in saved] == ["user", "text", "tool_call"]
        session.reload()
        assert (await session.reply()).text == "late"


async def test_five_branches_write_concurrently(begin: Begin) -> None:
    """Oracle: each branch's own script."""

    def answer(request: Request) -> Answer:
        return request_text(request)[-1] * 5

    session = begin(*[answer] * 5)
    branches = [session.fork(name=f"b{i}") for i in range(5)]
    for index, branch in enumerate(branches):
        branch.append("user", f"say {index}")
    replies = await asyncio.gather(*(branch.reply() for branch in branches))
    assert [reply.text for reply in replies] == [str(i) * 5 for i in range(5)]
    assert [branch.path()[-1].text for branch in branches] == [str(i) * 5 for i in range(5)]


def request_text(request: Request) -> str:
    """The text of the last user message of a scripted request."""
    text = bytes(i for i in request.ids if i < 256).decode()
    return text.rsplit("user\n", 1)[1].split("\nassistant")[0]


async def test_work_runs_off_the_event_loop(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the threads that asked the model and that committed, and a loop that goes on while
    the model blocks. API rule 11."""
    loop, reached, released = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    asked: list[int] = []
    committed: list[int] = []
    commit = Branch.commit

    def slow(request: Request) -> Answer:
        asked.append(threading.get_ident())
        loop.call_soon_threadsafe(reached.set)
        assert released.wait(5), "the loop was blocked"
        return "done"

    def noted(self: Branch, *given: Any, **named: Any) -> int | None:
        committed.append(threading.get_ident())
        return commit(self, *given, **named)

    session = begin(slow)
    monkeypatch.setattr(Branch, "commit", noted)
    task = asyncio.ensure_future(session.reply())
    await reached.wait()
    released.set()
    assert (await task).text == "done"
    assert asked and committed
    assert threading.get_ident() not in (*asked, *committed)


async def test_generate_sync_works_inside_a_running_loop(begin: Begin) -> None:
    """Oracle: the script."""
    session = begin(THOUGHT_TEXT_CALLS)
    assert session.generate_sync().text == "so"


def test_generate_sync_works_without_a_loop(begin: Begin) -> None:
    """Oracle: the script; an error of the model leaves the session usable."""
    session = begin("a", [RuntimeError("fell off")], "b")
    assert session.generate_sync().text == "a"
    session.append("user", "go")
    with pytest.raises(RuntimeError, match="fell off"):
        session.generate_sync()
    assert session.generate_sync().text == "b"


async def test_nothing_happens_before_the_first_pull(begin: Begin) -> None:
    """Oracle: the branch is not busy, and the reply is refused by name."""
    session = begin("a")
    generation = session.generate()
    session.append("user", "more")
    with pytest.raises(GenerationUnfinished) as caught:
        _ = generation.reply
    assert caught.value.code == "generation_unfinished"
    await generation.aclose()
    assert not scripted(session).requests


TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)


@settings(max_examples=40, deadline=None)
@given(TEXTS, TEXTS)
def test_deltas_are_whole_characters(thought: str, text: str) -> None:
    """Oracle: the script; the byte tokenizer samples one byte at a time."""
    parts: Sequence[str | Think] = [Think(thought), text] if thought.strip() else [text]
    with Store(":memory:") as store:
        session = store.create("s", ScriptedModel([list(parts)]))
        session.append("user", "Hi")
        deltas = asyncio.run(events_of(session.generate()))
    assert "\ufffd" not in "".join(d.text for d in deltas if isinstance(d, TextDelta))
    shown = "".join(d.text for d in deltas if isinstance(d, TextDelta))
    assert shown == (text if text.strip() else "")  # blanks alone are no answer
    if thought.strip():
        shown = "".join(d.text for d in deltas if isinstance(d, ThinkingDelta))
        assert shown.strip() == thought.strip()
