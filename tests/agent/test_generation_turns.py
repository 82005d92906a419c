# SPDX-License-Identifier: Apache-2.0
"""How a generation leaves the assistant's turn: closed, open, cut, with calls. Rules 6 and 7."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken_agent import Session, Store
from freetoken_agent.errors import NothingToGenerate
from freetoken_agent.testing import Call, Raw, ScriptedModel, Think

Begin = Callable[..., Session]

END_OF_TEXT = 256  # a stop id that is not the template's closer


WHOLE_CALL = '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>'
CUT_CALL = '<tool_call>\n{"name": "ls", "argu'


async def test_rule06_a_stop_id_that_closes_nothing_is_only_reported(begin: Begin) -> None:
    """Oracle: the template's own gap, which holds <|im_end|> and no other stop id."""
    session = begin(Raw([97, END_OF_TEXT]), "b")
    reply = await session.reply()
    assert (reply.text, reply.finish_reason, reply.usage.output_tokens) == ("a", "stop", 2)
    session.append("user", "go")
    await session.reply()
    assert END_OF_TEXT not in session.ids()


async def test_rule07_a_cut_turn_stays_open_and_goes_on(begin: Begin) -> None:
    """Oracle: the script in two parts. The continuation has no gap and no opener."""
    session = begin("one two", Raw(" two<|im_end|>"), "three")
    first = await session.reply(max_tokens=3)
    assert (first.text, first.finish_reason) == ("one", "length")
    second = await session.reply()
    assert (second.text, second.finish_reason) == (" two", "stop")
    texts = session.path()[-2:]
    assert [s.text for s in texts] == ["one", " two"]
    assert texts[1].frame_tokens == 0
    assert session.render().endswith("<|im_start|>assistant\none two")
    assert second.usage.prefill_tokens == 1  # the last sampled id
    with pytest.raises(NothingToGenerate) as caught:
        await session.reply()
    assert caught.value.code == "nothing_to_generate"
    session.append("user", "more")
    assert (await session.reply()).text == "three"


async def test_rule07_a_cut_thought_goes_on(begin: Begin) -> None:
    """Oracle: the script in two parts."""
    session = begin([Think("abcd"), "x"], Raw("cd\n</think>\n\nso<|im_end|>"))
    first = await session.reply(max_tokens=1 + len("\nab"))
    assert [(s.kind, s.text) for s in first.segments] == [("thinking", "ab")]
    second = await session.reply()
    assert [(s.kind, s.text) for s in second.segments] == [("thinking", "cd"), ("text", "so")]
    assert session.render().endswith("<think>\nabcd\n</think>\n\nso")


async def test_an_answer_that_ends_at_once_closes_the_turn(begin: Begin) -> None:
    """Oracle: the rendering of an empty assistant message."""
    session = begin("")
    reply = await session.reply()
    assert (reply.text, reply.finish_reason) == ("", "stop")
    assert [s.text for s in reply.segments] == [""]
    with pytest.raises(NothingToGenerate):
        await session.reply()


@pytest.mark.parametrize(
    "written",
    ["\n\n", "<think>\n\n</think>\n\n", "<think>\nhm</think>", "<think>\nhm\n</think>\n\n"],
)
async def test_a_reply_without_an_answer_keeps_its_ids(begin: Begin, written: str) -> None:
    """Oracle: the sampled ids, which the path holds and the next turn does not forward again."""
    session = begin(Raw(f"{written}<|im_end|>"), "next")
    reply = await session.reply()
    assert (reply.text, reply.finish_reason) == ("", "stop")
    prompt = session.model.requests[0].ids  # type: ignore[attr-defined]
    sampled = session.model.tokenizer.encode_frame(written)
    assert session.ids() == [*prompt, *sampled]
    session.append("user", "go")
    plan = session.plan()
    assert plan.reused_tokens == len(prompt) + len(sampled)
    assert (await session.reply()).text == "next"


async def test_thinking_reaches_the_template(begin: Begin) -> None:
    """Oracle: the template, which writes an empty thought when thinking is off."""
    session = begin("a", "b")
    await session.reply(thinking=False)
    assert session.render().endswith("<|im_start|>assistant\n<think>\n\n</think>\n\na")
    session.append("user", "go")
    await session.reply()
    assert session.render().endswith("<|im_start|>assistant\nb")


async def test_stop_texts_end_the_answer(begin: Begin) -> None:
    """Oracle: the script up to the end of the first stop text, however its bytes arrive."""
    session = begin("one. twö. three", "next")
    reply = await session.reply(stop=["wö", "never"])
    assert (reply.text, reply.finish_reason) == ("one. twö", "stop")
    session.append("user", "go")
    assert (await session.reply()).text == "next"
    assert "three" not in session.render()


async def test_forced_ids_are_stored_as_if_sampled(begin: Begin) -> None:
    """Oracle: the ids given."""
    session = begin("b")
    reply = await session.reply(force=[104, 105, 195, 169])
    assert reply.text == "hiéb"


async def test_s38_a_call_cut_by_the_limit_is_text(begin: Begin) -> None:
    """Oracle: the script up to the limit, under a kind that nothing executes; the turn stays open
    and what follows does not make it a call."""
    session = begin(Call("ls", {}), Raw('ments": {}}\n</tool_call><|im_end|>'), "next")
    limit = len(session.model.tokenizer.encode_frame(CUT_CALL))
    reply = await session.reply(max_tokens=limit)
    assert (reply.finish_reason, reply.calls) == ("length", ())
    assert [(s.kind, s.text) for s in reply.segments] == [("text", CUT_CALL)]
    assert not (await session.reply()).calls
    session.append("user", "go")
    assert (await session.reply()).text == "next"


async def test_s38_a_cut_second_call_is_not_kept(begin: Begin) -> None:
    """Oracle: the script; the first call is whole and closed as interrupted by the next message."""
    session = begin(Raw(f"{WHOLE_CALL}\n{CUT_CALL}"), "ok")
    reply = await session.reply()
    assert reply.finish_reason == "length"
    assert [(s.kind, s.tool) for s in reply.segments] == [("tool_call", "a")]
    session.append("user", "go")
    assert [s.kind for s in session.path()[-3:]] == ["tool_call", "tool_result", "user"]
    assert session.path()[-2].error
    assert (await session.reply()).text == "ok"


async def test_text_after_a_call_ends_the_reply(begin: Begin) -> None:
    """Oracle: the script up to the call. A result can follow it."""
    session = begin(Raw(f"{WHOLE_CALL}\nIt says 7."), "8")
    reply = await session.reply()
    assert (reply.finish_reason, reply.text) == ("tool_calls", "")
    assert [s.kind for s in reply.segments] == ["tool_call"]
    session.append_result(reply.calls[0], "8")
    assert (await session.reply()).text == "8"
    assert "7" not in session.render()


@settings(max_examples=60, deadline=None)
@given(
    st.text("ab", min_size=1, max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_first_stop_text_ends_the_answer(text: str, stops: list[str]) -> None:
    """Oracle: the shortest prefix of the script that holds a stop text."""
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    with Store(":memory:") as store:
        session = store.create("s", ScriptedModel([text]))
        session.append("user", "Hi")
        reply = session.generate_sync(stop=stops)
    assert reply.text == text[: min(ends, default=len(text))]
