# SPDX-License-Identifier: Apache-2.0
"""Leaving and cancelling generations of a real engine, then going on. Cases S11 and S43."""

import pytest

from freetoken_agent import LocalModel, Session, Store
from freetoken_agent.events import PrefillProgress, TextDelta
from freetoken_agent.proving.proofs import Gold

SCRIPT = b"some forced text that the model then goes on from"
MANY = 240  # tokens: far more than are written before a cancel and handed over behind it


async def go_on(session: Session, model: LocalModel, gold: Gold) -> None:
    """The next turn works, costs what its plan says, and its state is GOLD."""
    session.append("user", "And now?")
    plan = session.plan()
    usage = (await session.reply(max_tokens=4)).usage
    assert usage.prefill_tokens == plan.prefill_tokens
    assert usage.reused_tokens + usage.prefill_tokens == usage.input_tokens
    gold.check(model.engine, session.ids(), num_tokens=16)


@pytest.mark.parametrize("pulls", [1, 3, 5, 30])
@pytest.mark.parametrize("how", ["cancel", "leave"])
async def test_s11_stop_at_an_event_then_prompt_again(
    how: str, pulls: int, tiny: LocalModel, tiny_gold: Gold
) -> None:
    """Oracles: the forced ids, of which the path holds a prefix, what was shown, and GOLD."""
    with Store(":memory:") as store:
        session = store.create("s", tiny, system="You are helpful. " * 40)
        session.append("user", "Hi")
        start = session.plan().input_tokens
        shown, count = "", 0
        async for event in (generation := session.generate(force=SCRIPT, max_tokens=MANY)):
            count += 1
            shown += event.text if isinstance(event, TextDelta) else ""
            if count == pulls and how == "leave":
                break
            if count == pulls:
                generation.cancel()
        await generation.aclose()
        written = session.ids()[start:]
        assert written[: len(SCRIPT)] == list(SCRIPT)[: len(written)]
        text = session.path()[-1].text if written else ""
        assert text.startswith(shown)
        assert text == shown or (how == "leave" and len(text) < len(shown) + 16)  # held back
        usage = generation.reply.usage
        assert len(written) <= usage.output_tokens < MANY // 2
        assert generation.reply.finish_reason == "cancelled"
        await go_on(session, tiny, tiny_gold)


@pytest.mark.parametrize("how", ["cancel", "leave"])
async def test_s11_stop_inside_a_prefill(how: str, tiny: LocalModel, tiny_gold: Gold) -> None:
    """Oracle: the rows counted by the runner: what was forwarded is reused, nothing is written."""
    with Store(":memory:") as store:
        session = store.create("s", tiny, system="You are helpful. " * 180)
        session.append("user", "Hi")
        before = session.path()
        rows = tiny.stats().forward_rows
        async for event in (generation := session.generate(max_tokens=4)):
            if isinstance(event, PrefillProgress) and event.done_tokens < event.total_tokens:
                generation.cancel()
                if how == "leave":
                    break
        await generation.aclose()
        forwarded = tiny.stats().forward_rows - rows
        usage = generation.reply.usage
        assert usage.prefill_tokens == forwarded < usage.input_tokens
        assert usage.input_tokens == usage.reused_tokens + forwarded + usage.unforwarded_tokens
        assert usage.unforwarded_tokens > 0 and usage.changed is None
        assert generation.reply.finish_reason == "cancelled"
        assert [s.id for s in session.path()] == [s.id for s in before]
        assert session.plan().reused_tokens == forwarded
        assert (await session.reply(max_tokens=4)).usage.reused_tokens == forwarded
        await go_on(session, tiny, tiny_gold)
