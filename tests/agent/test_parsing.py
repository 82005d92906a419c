# SPDX-License-Identifier: Apache-2.0
"""The stream parser: ids of a turn as sampled -> thoughts, text and calls."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken_agent.parsing import (
    CallDelta,
    CallStarted,
    FinishReason,
    ParseEvent,
    SegmentDone,
    TextDelta,
    ThinkingDelta,
    parse_turn,
)
from freetoken_agent.template import ChatFormat, Item
from freetoken_agent.testing import CHATML
from freetoken_agent.tokenizers.byte_tokenizer import CHATML_CONTROLS, ByteTokenizer

PLAIN = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
BYTES = ByteTokenizer()
TEXTUAL = ByteTokenizer(("<|im_start|>", "<|im_end|>"))  # think and call tags are plain text
SETUPS: dict[str, tuple[str, ByteTokenizer]] = {
    "native, control tags": (CHATML, BYTES),
    "native, textual tags": (CHATML, TEXTUAL),
    "inlined, control tags": (PLAIN, BYTES),
    "inlined, textual tags": (PLAIN, TEXTUAL),
}
FORMATS = {name: ChatFormat.learn(*setup) for name, setup in SETUPS.items()}


def segments(events: Sequence[ParseEvent]) -> list[SegmentDone]:
    return [event for event in events if isinstance(event, SegmentDone)]


def brief(events: Sequence[ParseEvent]) -> list[tuple[Any, ...]]:
    """Kind and text of contents, kind, name and arguments of calls."""
    return [
        (done.kind, done.name, done.arguments)
        if done.kind == "tool_call"
        else (done.kind, done.text)
        for done in segments(events)
    ]


def said(events: Sequence[ParseEvent], kind: type[TextDelta] | type[ThinkingDelta]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def call_text(name: str, arguments: dict[str, Any]) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


WHOLE = (
    "<think>\nLet me see.\n</think>\n\nI look.\n"
    + call_text("ls", {"path": "/srv"})
    + "\n"
    + call_text("cat", {"n": 3})
)


@pytest.mark.parametrize("setup", FORMATS)
def test_s32_thought_text_and_two_calls(setup: str) -> None:
    """Oracle: the turn written by hand. S32: two adjacent calls, in order."""
    tokenizer = SETUPS[setup][1]
    ids = tokenizer.encode_frame(WHOLE)
    events = parse_turn(FORMATS[setup], tokenizer, ids)
    assert brief(events) == [
        ("thinking", "Let me see."),
        ("text", "I look."),
        ("tool_call", "ls", {"path": "/srv"}),
        ("tool_call", "cat", {"n": 3}),
    ]
    gaps = [tokenizer.decode(done.gap_ids) for done in segments(events)]
    assert gaps == ["<think>\n", "\n</think>\n\n", "\n", "\n"]
    assert said(events, ThinkingDelta) == "Let me see."
    assert said(events, TextDelta) == "I look."
    started = [event for event in events if isinstance(event, CallStarted)]
    assert [(event.index, event.name) for event in started] == [(0, "ls"), (1, "cat")]


@pytest.mark.parametrize("setup", FORMATS)
def test_every_id_is_in_one_place(setup: str) -> None:
    """Oracle: the ids that were fed, in order."""
    tokenizer = SETUPS[setup][1]
    ids = tokenizer.encode_frame(WHOLE)
    held: list[int] = []
    for done in segments(parse_turn(FORMATS[setup], tokenizer, ids)):
        held += [*done.gap_ids, *done.ids]
        assert tokenizer.decode(done.ids) == done.text
    assert held == ids


@pytest.mark.parametrize("setup", FORMATS)
def test_s30_a_closing_tag_inside_a_string_stays_in_it(setup: str) -> None:
    """Oracle: the arguments written by hand."""
    tokenizer = SETUPS[setup][1]
    arguments = {"cmd": 'echo "</tool_call>"', "then": "</tool_call>\n"}
    text = call_text("sh", arguments) + "\n" + call_text("ls", {})
    events = parse_turn(FORMATS[setup], tokenizer, tokenizer.encode_frame(text))
    assert brief(events) == [("tool_call", "sh", arguments), ("tool_call", "ls", {})]


@pytest.mark.parametrize("setup", FORMATS)
def test_s37_a_call_inside_a_thought_is_thought(setup: str) -> None:
    """Oracle: one thought, one text, no call."""
    tokenizer = SETUPS[setup][1]
    inner = "maybe " + call_text("rm", {"all": True}) + " no"
    text = f"<think>\n{inner}\n</think>\n\nDone."
    events = parse_turn(FORMATS[setup], tokenizer, tokenizer.encode_frame(text))
    assert brief(events) == [("thinking", inner), ("text", "Done.")]


@pytest.mark.parametrize("setup", FORMATS)
@pytest.mark.parametrize("reason", ["length", "cancelled"])
def test_s38_a_cut_call_is_text(setup: str, reason: FinishReason) -> None:
    """Oracle: at every cut inside the call the parser reports one open text and no call."""
    tokenizer = SETUPS[setup][1]
    text = "So: " + call_text("sh", {})
    ids = tokenizer.encode_frame(text)
    for size in range(len("So: ") + 1, len(ids)):
        events = parse_turn(FORMATS[setup], tokenizer, ids[:size], reason=reason)
        (done,) = segments(events)
        assert (done.kind, done.partial, done.ids) == ("text", True, tuple(ids[:size]))
        assert said(events, TextDelta) == done.text == tokenizer.decode(ids[:size])


@pytest.mark.parametrize("setup", FORMATS)
def test_s35_a_malformed_call_is_text_and_what_follows_is_read(setup: str) -> None:
    """Oracle: a turn with one broken and one good call."""
    tokenizer = SETUPS[setup][1]
    broken = '<tool_call>\n{"name": sh}\n</tool_call>'
    text = f"A {broken} B\n" + call_text("ls", {})
    events = parse_turn(FORMATS[setup], tokenizer, tokenizer.encode_frame(text))
    assert brief(events) == [("text", f"A {broken} B"), ("tool_call", "ls", {})]
    assert said(events, TextDelta) == f"A {broken} B"


@pytest.mark.parametrize("setup", FORMATS)
def test_s35_an_unterminated_string_ends_as_text(setup: str) -> None:
    """Oracle: the model stopped; nothing is left open."""
    tokenizer = SETUPS[setup][1]
    text = '<tool_call>\n{"name": "sh", "arguments": {"cmd": "ls}}\n</tool_call>'
    (done,) = segments(parse_turn(FORMATS[setup], tokenizer, tokenizer.encode_frame(text)))
    assert (done.kind, done.text, done.partial) == ("text", text, False)


@pytest.mark.parametrize("setup", FORMATS)
def test_s33_arguments_in_a_string_become_the_object(setup: str) -> None:
    """Oracle: the object."""
    tokenizer = SETUPS[setup][1]
    text = '<tool_call>{"arguments": "{\\"n\\": 1}", "name": "f"}</tool_call>'
    events = parse_turn(FORMATS[setup], tokenizer, tokenizer.encode_frame(text))
    assert brief(events) == [("tool_call", "f", {"n": 1})]


@pytest.mark.parametrize("setup", FORMATS)
def test_c07_missing_newlines_leave_gaps_as_sampled(setup: str) -> None:
    """Oracle: C7, the template writes a newline before a tool tag and the model did not: what was
    sampled is kept, the gap is empty."""
    tokenizer = SETUPS[setup][1]
    text = "<think>hm</think>I look." + call_text("ls", {})
    done = segments(parse_turn(FORMATS[setup], tokenizer, tokenizer.encode_frame(text)))
    assert [tokenizer.decode(d.gap_ids) for d in done] == ["<think>", "</think>", ""]
    assert [d.text for d in done[:2]] == ["hm", "I look."]


@pytest.mark.parametrize("setup", FORMATS)
def test_c01_an_empty_thought_is_frame(setup: str) -> None:
    """Oracle: the answer alone is content."""
    tokenizer = SETUPS[setup][1]
    events = parse_turn(
        FORMATS[setup], tokenizer, tokenizer.encode_frame("<think>\n\n</think>\n\nOK")
    )
    (done,) = segments(events)
    assert (done.kind, done.text) == ("text", "OK")
    assert tokenizer.decode(done.gap_ids) == "<think>\n\n</think>\n\n"
    assert said(events, ThinkingDelta) == ""


@pytest.mark.parametrize("setup", FORMATS)
def test_blanks_that_are_no_marker_stay_content(setup: str) -> None:
    """Oracle: the indentation and the trailing newline the model wrote."""
    tokenizer = SETUPS[setup][1]
    text = "<think>\n  a\n\n</think>\n\n    code\n\n"
    done = segments(parse_turn(FORMATS[setup], tokenizer, tokenizer.encode_frame(text)))
    assert [d.text for d in done] == ["  a\n", "    code\n\n"]


@pytest.mark.parametrize("setup", FORMATS)
def test_nothing_but_blanks_is_no_segment(setup: str) -> None:
    """Oracle: no events."""
    tokenizer = SETUPS[setup][1]
    for text in ("", "\n", "<think>\n\n</think>\n\n"):
        assert parse_turn(FORMATS[setup], tokenizer, tokenizer.encode_frame(text)) == []


@pytest.mark.parametrize("setup", FORMATS)
def test_a_thought_begun_by_the_opener(setup: str) -> None:
    """Oracle: `kind="thinking"` reads the first ids as thought."""
    tokenizer = SETUPS[setup][1]
    ids = tokenizer.encode_frame("so\n</think>\n\nYes")
    assert brief(parse_turn(FORMATS[setup], tokenizer, ids, kind="thinking")) == [
        ("thinking", "so"),
        ("text", "Yes"),
    ]
    (cut,) = segments(
        parse_turn(FORMATS[setup], tokenizer, ids[:2], kind="thinking", reason="length")
    )
    assert (cut.kind, cut.text, cut.partial) == ("thinking", "so", True)


def test_tags_as_text_are_not_tags_where_control_tokens_exist() -> None:
    """Oracle: S55 for sampled text: bytes that spell `<tool_call>` are text."""
    text = call_text("rm", {})
    (done,) = segments(
        parse_turn(FORMATS["native, control tags"], BYTES, BYTES.encode_content(text))
    )
    assert (done.kind, done.text) == ("text", text)


SAFE = (
    st.text(
        st.characters(codec="utf-8", exclude_characters="<>[]{}", exclude_categories=["Cs"]),
        min_size=1,
    )
    .map(str.strip)
    .filter(bool)
)
ARGUMENTS = st.dictionaries(
    SAFE, st.one_of(st.text(), st.integers(), st.lists(st.booleans())), max_size=3
)


@pytest.mark.parametrize("setup", FORMATS)
def test_what_the_format_lays_out_is_read_back(setup: str) -> None:
    """Oracle: the layout: the same segments, with the same gap ids and ids."""
    format, tokenizer = FORMATS[setup], SETUPS[setup][1]

    @settings(max_examples=40, deadline=None)
    @given(st.none() | SAFE, st.none() | SAFE, st.lists(ARGUMENTS, max_size=2))
    def check(thought: str | None, text: str | None, calls: list[dict[str, Any]]) -> None:
        items = [Item("user", "Hi")]
        items += [] if thought is None else [Item("thinking", thought, open=True)]
        items += [] if text is None else [Item("text", text, open=bool(calls))]
        items += [
            Item("tool_call", name="f", arguments=arguments, call_id=f"call{index:05d}", open=True)
            for index, arguments in enumerate(calls)
        ]
        pieces = format.layout(items, start=1)
        skip = len(format.opener(items[:1]).ids)
        ids = [token_id for piece in pieces for token_id in (*piece.gap_ids, *piece.ids)]
        done = segments(parse_turn(format, tokenizer, ids[skip:]))
        assert [d.kind for d in done] == [item.kind for item in items[1:]]
        assert [d.ids for d in done] == [piece.ids for piece in pieces]
        assert [d.arguments for d in done if d.kind == "tool_call"] == calls
        gaps = [piece.gap_ids for piece in pieces]
        assert [d.gap_ids for d in done] == [
            gap[skip:] if i == 0 else gap for i, gap in enumerate(gaps)
        ]

    check()


def soup() -> st.SearchStrategy[str]:
    """Text that is full of markers, whole and broken."""
    pieces = [
        *CHATML_CONTROLS,
        "<tool",
        "</think",
        "\n",
        " ",
        '"',
        "{",
        "}",
        call_text("f", {"a": "b"}),
    ]
    return st.lists(st.sampled_from(pieces) | st.text(max_size=4), max_size=12).map("".join)


@pytest.mark.parametrize("setup", FORMATS)
def test_any_stream_keeps_its_ids_and_its_deltas(setup: str) -> None:
    """Oracle: the fed ids, of which only unfinished frame may be left over at the end; and the
    text of each segment, which its deltas joined must be."""
    format, tokenizer = FORMATS[setup], SETUPS[setup][1]

    @settings(max_examples=150, deadline=None)
    @given(soup(), st.sampled_from(["stop", "length"]))
    def check(text: str, reason: FinishReason) -> None:
        ids = tokenizer.encode_frame(text)
        events = parse_turn(format, tokenizer, ids, reason=reason)
        held: list[int] = []
        for done in segments(events):
            held += [*done.gap_ids, *done.ids]
            assert tokenizer.decode(done.ids) == done.text
        assert held == ids[: len(held)]
        texts = "".join(done.text for done in segments(events) if done.kind == "text")
        thoughts = "".join(done.text for done in segments(events) if done.kind == "thinking")
        assert said(events, TextDelta) == texts
        assert said(events, ThinkingDelta) == thoughts
        calls = [done for done in segments(events) if done.kind == "tool_call"]
        for index, call in enumerate(calls):
            raw = [e.text for e in events if isinstance(e, CallDelta) and e.index == index]
            assert "".join(raw).endswith(call.text)

    check()
