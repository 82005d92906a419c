# SPDX-License-Identifier: Apache-2.0
"""Who may pull a generation, when it is closed, and what its usage says when little of it ran."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from freetoken_agent import Session
from freetoken_agent.errors import SessionBusy
from freetoken_agent.events import GenerationEvent, PlanReady, PrefillProgress, TextDelta
from freetoken_agent.generation import Generation, GenerationInUse, GenerationUnfinished
from freetoken_agent.testing import Answer, Request, ScriptedModel

Begin = Callable[..., Session]


async def pull_until(generation: Generation, text: str) -> None:
    """Pull up to the delta that says `text`."""
    async for event in generation:
        if isinstance(event, TextDelta) and event.text == text:
            return


async def rest_of(generation: Generation) -> list[str]:
    return [event.type async for event in generation]


def free(session: Session) -> None:
    """The branch takes an edit, and gives it back."""
    session.append("user", "free?")
    session.undo()


def test_a_second_loop_is_refused_and_the_first_goes_on(begin: Begin) -> None:
    """Oracle: the script, read to its end where it was begun."""
    session = begin("slow")
    generation = session.generate()

    async def main() -> None:
        await pull_until(generation, "l")
        with pytest.raises(GenerationInUse, match="another event loop") as caught:
            await asyncio.to_thread(asyncio.run, rest_of(generation))
        assert caught.value.code == "generation_in_use"
        with pytest.raises(SessionBusy):
            session.append("user", "no")
        assert (await rest_of(generation))[-1] == "reply_finished"

    asyncio.run(main())
    assert generation.reply.text == session.path()[-1].text == "slow"


def test_a_generation_whose_loop_is_gone_is_ended(begin: Begin) -> None:
    """Oracle: what was read in the first loop; the branch is free, and nothing more comes."""
    session = begin("slow", "again")
    generation = session.generate()
    asyncio.run(pull_until(generation, "l"))
    with pytest.raises(SessionBusy):
        session.append("user", "no")
    with pytest.raises(GenerationInUse, match="has been closed") as caught:
        asyncio.run(rest_of(generation))
    assert caught.value.remedy
    assert session.path()[-1].text == generation.reply.text == "sl"
    assert asyncio.run(rest_of(generation)) == []
    session.append("user", "now?")
    assert asyncio.run(session.reply()).text == "again"


def test_aclose_works_from_any_loop(begin: Begin) -> None:
    """Oracle: the branch is free, twice closed as once; also when nothing had been pulled yet."""
    session = begin("slow")
    generation = session.generate()
    asyncio.run(pull_until(generation, "s"))
    asyncio.run(generation.aclose())
    asyncio.run(generation.aclose())
    assert session.path()[-1].text == "s"
    free(session)


async def test_a_second_task_is_refused_and_the_first_goes_on(begin: Begin) -> None:
    """Oracle: a script that waits until the second task has been refused."""
    loop, asked, go = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def wait(request: Request) -> Answer:
        loop.call_soon_threadsafe(asked.set)
        assert go.wait(20)
        return "done"

    generation = begin(wait).generate()
    first = asyncio.ensure_future(rest_of(generation))
    await asked.wait()
    with pytest.raises(GenerationInUse, match="two tasks"):
        await anext(generation)
    go.set()
    assert (await first)[-1] == "reply_finished"
    assert generation.reply.text == "done"


@pytest.mark.parametrize("how", ["aclose", "with"])
async def test_closed_before_the_first_pull_it_never_begins(how: str, begin: Begin) -> None:
    """Oracle: no request reached the model, no event comes, the branch was never busy."""
    session = begin("unsaid")
    generation = session.generate()
    if how == "aclose":
        await generation.aclose()
    else:
        async with generation:
            pass
    assert await rest_of(generation) == []
    with pytest.raises(StopAsyncIteration):
        await anext(generation)
    with pytest.raises(GenerationUnfinished, match="without a reply"):
        _ = generation.reply
    free(session)
    assert isinstance(session.model, ScriptedModel) and not session.model.requests


@pytest.mark.parametrize("how", ["cancel", "aclose"])
async def test_nothing_forwarded_is_said_of_every_token(how: str, begin: Begin) -> None:
    """Oracle: the plan: all of its input is unforwarded, although some would have been reused."""
    session = begin("first", "second")
    await session.reply()
    session.append("user", "go on")
    generation = session.generate()
    event: GenerationEvent = await anext(generation)
    assert isinstance(event, PlanReady) and event.plan.reused_tokens > 0
    if how == "cancel":
        generation.cancel()
        await rest_of(generation)
    else:
        await generation.aclose()
    usage = generation.reply.usage
    assert usage.unforwarded_tokens == usage.input_tokens == event.plan.input_tokens
    assert (usage.reused_tokens, usage.prefill_tokens, usage.changed) == (0, 0, None)
    assert (await session.reply()).usage.unforwarded_tokens == 0


async def test_a_slow_reader_gets_the_newest_progress_before_the_first_token(begin: Begin) -> None:
    """Oracle: a model that reports each row of its prompt before the reader wakes up once."""

    class Chatty(ScriptedModel):
        def generate(self, ids, sampling, **options):  # type: ignore[no-untyped-def]
            report = options.pop("on_progress")
            for done in range(1, len(ids) + 1):
                report(done, len(ids))
            return super().generate(ids, sampling, **options)

    session = begin("hi")
    model = session.model
    assert isinstance(model, ScriptedModel)
    model.__class__ = Chatty
    events = [event async for event in session.generate()]
    progress = [event for event in events if isinstance(event, PrefillProgress)]
    total = len(model.requests[0].ids)
    assert 1 <= len(progress) < total
    assert (progress[-1].done_tokens, progress[-1].total_tokens) == (total, total)
    assert [type(event) for event in events[: len(progress) + 2]] == [
        PlanReady,
        *[PrefillProgress] * len(progress),
        TextDelta,
    ]
