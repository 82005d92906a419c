# SPDX-License-Identifier: Apache-2.0
"""The stream parser: ids of a turn as sampled -> thoughts, text and calls."""

import json
import random
from collections.abc import Sequence
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken_agent.byte_tokenizer import CHATML_CONTROLS, ByteTokenizer
from freetoken_agent.catalog import ModelNotFound, resolve
from freetoken_agent.gguf_tokenizer import load_gguf_tokenizer
from freetoken_agent.hf_tokenizer import HFTokenizer, TokenizerFiles
from freetoken_agent.parsing import (
    CallDelta,
    CallStarted,
    FinishReason,
    ParseEvent,
    SegmentDone,
    StreamParser,
    TextDelta,
    ThinkingDelta,
)
from freetoken_agent.pieces import BYTE_ALPHABET
from freetoken_agent.template import ChatFormat, Item
from freetoken_agent.testing import CHATML
from freetoken_agent.tokenizer import Tokenizer

PLAIN = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# A list of calls behind a marker, as Mistral writes it.
LISTED = """\
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'tool' %}{{ '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- elif message.tool_calls %}
        {{- (message.content or '') + '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + ', "id": "' + call.id + '"}' }}
            {{- ', ' if not loop.last else ']' }}
        {%- endfor %}
        {{- '</s>' }}
    {%- else %}{{ message.content + '</s>' }}
    {%- endif %}
{%- endfor %}"""
# Named channels, as gpt-oss writes them; every message of a turn is closed by a token of its own.
CHANNELS = """\
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>tool to=assistant<|message|>' + message.content + '<|end|>' }}
    {%- else %}
        {%- if message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {%- if message.tool_calls %}
            {{- '<|start|>assistant to=functions.' + message.tool_calls[0].function.name }}
            {{- '<|channel|>commentary json<|message|>' }}
            {{- (message.tool_calls[0].function.arguments | tojson) + '<|call|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
# Parameters between tags, as Qwen3-Coder writes them.
TAGGED = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for key, value in call.function.arguments.items() %}
            {{- '<parameter=' + key + '>\\n' }}
            {{- (value if value is string else (value | tojson)) + '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# The addressee decides what follows, as in muse-glimmer: one marker begins like another.
ADDRESSED = """\
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}{{ '<|start|>tool<|message|>' + message.content + '<|end|>' }}
    {%- else %}
        {%- if message.reasoning_content %}
            {{- '<|start|>assistant to=self<|message|>' + message.reasoning_content + '<|eom|>' }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<|start|>assistant to=' + call.function.name + '<|message|>' }}
            {{- (call.function.arguments | tojson) + '<|eom|>' }}
        {%- endfor %}
        {%- if message.content %}
            {{- '<|start|>assistant to=user<|message|>' + message.content + '<|end|>' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

BYTES = ByteTokenizer()
TEXTUAL = ByteTokenizer(("<|im_start|>", "<|im_end|>"))  # think and call tags are plain text
MISTRAL = ByteTokenizer(
    ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"),
    stop=("</s>",),
)
HARMONY = ByteTokenizer(
    ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"),
    stop=("<|return|>", "<|call|>"),
)
MUSE = ByteTokenizer(("<|start|>", "<|end|>", "<|message|>", "<|eom|>"), stop=("<|end|>",))
SETUPS: dict[str, tuple[str, ByteTokenizer]] = {
    "native, control tags": (CHATML, BYTES),
    "native, textual tags": (CHATML, TEXTUAL),
    "inlined, control tags": (PLAIN, BYTES),
    "inlined, textual tags": (PLAIN, TEXTUAL),
}
FORMATS = {name: ChatFormat.learn(*setup) for name, setup in SETUPS.items()}
MORE = {
    "listed": (ChatFormat.learn(LISTED, MISTRAL), MISTRAL),
    "channels": (ChatFormat.learn(CHANNELS, HARMONY), HARMONY),
    "addressed": (ChatFormat.learn(ADDRESSED, MUSE), MUSE),
    "tagged": (ChatFormat.learn(TAGGED, BYTES), BYTES),
}


def parse(
    format: ChatFormat,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    reason: FinishReason = "stop",
    kind: Literal["text", "thinking"] = "text",
) -> list[ParseEvent]:
    parser = StreamParser(format, tokenizer, kind=kind)
    events: list[ParseEvent] = []
    for token_id in ids:
        events += parser.feed(token_id)
    return events + parser.finish(reason)


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
    events = parse(FORMATS[setup], tokenizer, ids)
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
    for done in segments(parse(FORMATS[setup], tokenizer, ids)):
        held += [*done.gap_ids, *done.ids]
        assert tokenizer.decode(done.ids) == done.text
    assert held == ids


@pytest.mark.parametrize("setup", FORMATS)
def test_s30_a_closing_tag_inside_a_string_stays_in_it(setup: str) -> None:
    """Oracle: the arguments written by hand."""
    tokenizer = SETUPS[setup][1]
    arguments = {"cmd": 'echo "</tool_call>"', "then": "</tool_call>\n"}
    text = call_text("sh", arguments) + "\n" + call_text("ls", {})
    events = parse(FORMATS[setup], tokenizer, tokenizer.encode_frame(text))
    assert brief(events) == [("tool_call", "sh", arguments), ("tool_call", "ls", {})]


@pytest.mark.parametrize("setup", FORMATS)
def test_s37_a_call_inside_a_thought_is_thought(setup: str) -> None:
    """Oracle: one thought, one text, no call."""
    tokenizer = SETUPS[setup][1]
    inner = "maybe " + call_text("rm", {"all": True}) + " no"
    text = f"<think>\n{inner}\n</think>\n\nDone."
    events = parse(FORMATS[setup], tokenizer, tokenizer.encode_frame(text))
    assert brief(events) == [("thinking", inner), ("text", "Done.")]


@pytest.mark.parametrize("setup", FORMATS)
@pytest.mark.parametrize("reason", ["length", "cancelled"])
def test_s38_a_cut_call_is_text(setup: str, reason: FinishReason) -> None:
    """Oracle: at every cut inside the call the parser reports one open text and no call."""
    tokenizer = SETUPS[setup][1]
    text = "So: " + call_text("sh", {})
    ids = tokenizer.encode_frame(text)
    for size in range(len("So: ") + 1, len(ids)):
        events = parse(FORMATS[setup], tokenizer, ids[:size], reason)
        (done,) = segments(events)
        assert (done.kind, done.partial, done.ids) == ("text", True, tuple(ids[:size]))
        assert said(events, TextDelta) == done.text == tokenizer.decode(ids[:size])


@pytest.mark.parametrize("setup", FORMATS)
def test_s35_a_malformed_call_is_text_and_what_follows_is_read(setup: str) -> None:
    """Oracle: a turn with one broken and one good call."""
    tokenizer = SETUPS[setup][1]
    broken = '<tool_call>\n{"name": sh}\n</tool_call>'
    text = f"A {broken} B\n" + call_text("ls", {})
    events = parse(FORMATS[setup], tokenizer, tokenizer.encode_frame(text))
    assert brief(events) == [("text", f"A {broken} B"), ("tool_call", "ls", {})]
    assert said(events, TextDelta) == f"A {broken} B"


@pytest.mark.parametrize("setup", FORMATS)
def test_s35_an_unterminated_string_ends_as_text(setup: str) -> None:
    """Oracle: the model stopped; nothing is left open."""
    tokenizer = SETUPS[setup][1]
    text = '<tool_call>\n{"name": "sh", "arguments": {"cmd": "ls}}\n</tool_call>'
    (done,) = segments(parse(FORMATS[setup], tokenizer, tokenizer.encode_frame(text)))
    assert (done.kind, done.text, done.partial) == ("text", text, False)


@pytest.mark.parametrize("setup", FORMATS)
def test_s33_arguments_in_a_string_become_the_object(setup: str) -> None:
    """Oracle: the object."""
    tokenizer = SETUPS[setup][1]
    text = '<tool_call>{"arguments": "{\\"n\\": 1}", "name": "f"}</tool_call>'
    events = parse(FORMATS[setup], tokenizer, tokenizer.encode_frame(text))
    assert brief(events) == [("tool_call", "f", {"n": 1})]


@pytest.mark.parametrize("setup", FORMATS)
def test_c07_missing_newlines_leave_gaps_as_sampled(setup: str) -> None:
    """Oracle: C7, the template writes a newline before a tool tag and the model did not: what was
    sampled is kept, the gap is empty."""
    tokenizer = SETUPS[setup][1]
    text = "<think>hm</think>I look." + call_text("ls", {})
    done = segments(parse(FORMATS[setup], tokenizer, tokenizer.encode_frame(text)))
    assert [tokenizer.decode(d.gap_ids) for d in done] == ["<think>", "</think>", ""]
    assert [d.text for d in done[:2]] == ["hm", "I look."]


@pytest.mark.parametrize("setup", FORMATS)
def test_c01_an_empty_thought_is_frame(setup: str) -> None:
    """Oracle: the answer alone is content."""
    tokenizer = SETUPS[setup][1]
    events = parse(FORMATS[setup], tokenizer, tokenizer.encode_frame("<think>\n\n</think>\n\nOK"))
    (done,) = segments(events)
    assert (done.kind, done.text) == ("text", "OK")
    assert tokenizer.decode(done.gap_ids) == "<think>\n\n</think>\n\n"
    assert said(events, ThinkingDelta) == ""


@pytest.mark.parametrize("setup", FORMATS)
def test_blanks_that_are_no_marker_stay_content(setup: str) -> None:
    """Oracle: the indentation and the trailing newline the model wrote."""
    tokenizer = SETUPS[setup][1]
    text = "<think>\n  a\n\n</think>\n\n    code\n\n"
    done = segments(parse(FORMATS[setup], tokenizer, tokenizer.encode_frame(text)))
    assert [d.text for d in done] == ["  a\n", "    code\n\n"]


@pytest.mark.parametrize("setup", FORMATS)
def test_nothing_but_blanks_is_no_segment(setup: str) -> None:
    """Oracle: no events."""
    tokenizer = SETUPS[setup][1]
    for text in ("", "\n", "<think>\n\n</think>\n\n"):
        assert parse(FORMATS[setup], tokenizer, tokenizer.encode_frame(text)) == []


@pytest.mark.parametrize("setup", FORMATS)
def test_a_thought_begun_by_the_opener(setup: str) -> None:
    """Oracle: `kind="thinking"` reads the first ids as thought."""
    tokenizer = SETUPS[setup][1]
    ids = tokenizer.encode_frame("so\n</think>\n\nYes")
    assert brief(parse(FORMATS[setup], tokenizer, ids, kind="thinking")) == [
        ("thinking", "so"),
        ("text", "Yes"),
    ]
    (cut,) = segments(parse(FORMATS[setup], tokenizer, ids[:2], "length", kind="thinking"))
    assert (cut.kind, cut.text, cut.partial) == ("thinking", "so", True)


def test_tags_as_text_are_not_tags_where_control_tokens_exist() -> None:
    """Oracle: S55 for sampled text: bytes that spell `<tool_call>` are text."""
    text = call_text("rm", {})
    (done,) = segments(parse(FORMATS["native, control tags"], BYTES, BYTES.encode_content(text)))
    assert (done.kind, done.text) == ("text", text)


def test_a_list_of_calls_behind_a_marker() -> None:
    """Oracle: the calls written by hand; marker and list brackets are frame."""
    format, tokenizer = MORE["listed"]
    first_call = '{"name": "a", "arguments": {"x": "]"}, "id": "abcdefghi"}'
    text = f'[TOOL_CALLS][{first_call}, {{"name": "b", "arguments": {{}}}}]'
    events = parse(format, tokenizer, tokenizer.encode_frame(text))
    assert brief(events) == [("tool_call", "a", {"x": "]"}), ("tool_call", "b", {})]
    first, second = segments(events)
    assert (first.call_id, second.call_id) == ("abcdefghi", None)
    assert tokenizer.decode(first.gap_ids) == "[TOOL_CALLS]["
    assert tokenizer.decode(second.gap_ids) == ", "


def test_channels_have_markers_for_text_too() -> None:
    """Oracle: the contents written by hand; every channel header is frame."""
    format, tokenizer = MORE["channels"]
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi"
    events = parse(format, tokenizer, tokenizer.encode_frame(text))
    assert brief(events) == [("thinking", "Hm."), ("text", "Hi")]
    text = "<|channel|>final<|message|>Hi"
    assert brief(parse(format, tokenizer, tokenizer.encode_frame(text))) == [("text", "Hi")]


def test_a_call_that_the_stop_token_ends() -> None:
    """Oracle: the call written by hand; the stop id is not fed."""
    format, tokenizer = MORE["channels"]
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.ls"
        '<|channel|>commentary json<|message|>{"p": "/"}'
    )
    events = parse(format, tokenizer, tokenizer.encode_frame(text))
    assert brief(events) == [("thinking", "Hm."), ("tool_call", "ls", {"p": "/"})]
    cut = parse(format, tokenizer, tokenizer.encode_frame(text)[:-1], "length")
    assert [done.kind for done in segments(cut)] == ["thinking", "text"]


def test_a_marker_that_begins_like_another_waits_for_it() -> None:
    """Oracle: the contents written by hand: `to=user` and `to=self` are no calls."""
    format, tokenizer = MORE["addressed"]
    thought = " to=self<|message|>Hm."
    answer = "<|eom|><|start|>assistant to=user<|message|>Hi"
    call = '<|eom|><|start|>assistant to=ls<|message|>{"p": 1}<|eom|>'
    events = parse(format, tokenizer, tokenizer.encode_frame(thought + answer))
    assert brief(events) == [("thinking", "Hm."), ("text", "Hi")]
    events = parse(format, tokenizer, tokenizer.encode_frame(thought + call))
    assert brief(events) == [("thinking", "Hm."), ("tool_call", "ls", {"p": 1})]


def pieced(*pieces: str) -> HFTokenizer:
    """A byte-level tokenizer that takes these pieces whole, whatever they join."""
    letters = {byte: letter for letter, byte in BYTE_ALPHABET.items()}
    spelled = ["".join(letters[byte] for byte in piece.encode()) for piece in pieces]
    vocabulary = [letters[byte] for byte in range(256)] + spelled
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    model = {
        "type": "BPE",
        "vocab": {piece: index for index, piece in enumerate(vocabulary)},
        "merges": [],
        "ignore_merges": True,
    }
    definition: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
    return HFTokenizer(TokenizerFiles(definition, "digest"))


@pytest.mark.parametrize(
    ("stream", "texts", "gaps"),
    [
        # an id with the marker's newline and the first letter stays with the thought
        (["<think>", "\nH", "m", "\n</think>", "\n\n", "Yes"], ["\nHm", "Yes"], 3),
        # an id with the last letter and the begin of the marker stays with the thought
        (["<think>\n", "Hm", ".<", "/think>", "\n\nYes"], ["Hm.<", "\n\nYes"], 2),
        # an id with the marker's end, its blanks and more blanks is frame
        (["<think>\n", "Hm", "\n</think", ">\n\n\n", "Yes"], ["Hm", "Yes"], 3),
        # an id of extra blanks and the marker is frame
        (["<think>\n", "Hm", "\n\n<", "/think>", "\n\n", "Yes"], ["Hm", "Yes"], 4),
        # a call keeps the ids that hold its ends
        (["So", ".\n<tool_call>", '{"name": "f", "arguments": {}}', "</tool_call>\n\n", "x"],
         ["So.\n<tool_call>", '{"name": "f", "arguments": {}}</tool_call>\n\n', "x"], 0),
    ],
)  # fmt: skip
def test_an_id_that_holds_both_sides_of_a_cut_stays_with_the_content(
    stream: list[str], texts: list[str], gaps: int
) -> None:
    """Oracle: the segments written by hand; ids are whole, and deltas are the segments' text."""
    tokenizer = pieced(*stream)
    format = ChatFormat.learn(PLAIN, tokenizer)
    ids = [token_id for piece in stream for token_id in tokenizer.encode_content(piece)]
    assert len(ids) == len(stream)
    events = parse(format, tokenizer, ids)
    done = segments(events)
    assert [d.text for d in done] == texts
    assert sum(len(d.gap_ids) for d in done) == gaps
    assert [i for d in done for i in (*d.gap_ids, *d.ids)] == ids
    plain = [d.text for d in done if d.kind != "tool_call"]
    assert said(events, ThinkingDelta) + said(events, TextDelta) == "".join(plain)


def test_tagged_parameters() -> None:
    """Oracle: the call written by hand: strings as they are, other JSON as values."""
    format, tokenizer = MORE["tagged"]
    text = (
        "Look:\n<tool_call>\n<function=sh>\n<parameter=cmd>\necho 1\n  two\n</parameter>\n"
        '<parameter=n>\n3\n</parameter>\n<parameter=o>\n{"a": [1]}\n</parameter>\n'
        "</function>\n</tool_call>"
    )
    events = parse(format, tokenizer, tokenizer.encode_frame(text))
    arguments = {"cmd": "echo 1\n  two", "n": 3, "o": {"a": [1]}}
    assert brief(events) == [("text", "Look:"), ("tool_call", "sh", arguments)]


def test_s30_a_closing_tag_inside_a_tagged_parameter() -> None:
    """Oracle: the argument written by hand."""
    format, tokenizer = MORE["tagged"]
    text = (
        "<tool_call>\n<function=sh>\n<parameter=cmd>\necho </tool_call> x\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    events = parse(format, tokenizer, tokenizer.encode_frame(text))
    assert brief(events) == [("tool_call", "sh", {"cmd": "echo </tool_call> x"})]


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
        done = segments(parse(format, tokenizer, ids[skip:]))
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
        events = parse(format, tokenizer, ids, reason)
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


@pytest.fixture(scope="module")
def smollm2() -> tuple[ChatFormat, HFTokenizer]:
    try:
        tokenizer = load_gguf_tokenizer(resolve("smollm2"))
    except ModelNotFound:
        pytest.skip("SmolLM2 is not pulled: freetoken-agent pull smollm2")
    assert tokenizer.chat_template is not None
    return ChatFormat.learn(tokenizer.chat_template, tokenizer), tokenizer


@pytest.mark.smollm2
def test_c09_ids_that_encode_otherwise_are_kept(smollm2: tuple[ChatFormat, HFTokenizer]) -> None:
    """Oracle: the fed ids. C9 on F4: pairs of ids whose text encodes to other ids."""
    format, tokenizer = smollm2
    rng = random.Random(4)
    pairs: list[list[int]] = []
    while len(pairs) < 100:
        pair = [rng.randrange(17, tokenizer.vocab_size) for _ in range(2)]
        text = tokenizer.decode(pair)
        if "\ufffd" not in text and "<" not in text and tokenizer.encode_content(text) != pair:
            pairs.append(pair)
    newline, blank = tokenizer.encode_content("\n")[0], tokenizer.encode_content(" ")[0]
    pairs += [[newline, newline], [blank, tokenizer.encode_content("~")[0]]]
    ids = [token_id for pair in pairs for token_id in pair]
    (done,) = segments(parse(format, tokenizer, ids))
    assert list(done.ids) == ids and done.gap_ids == ()
    assert done.text == tokenizer.decode(ids)
    assert tokenizer.encode_content(done.text) != ids


@pytest.mark.smollm2
def test_any_tokenisation_gives_one_parse(smollm2: tuple[ChatFormat, HFTokenizer]) -> None:
    """Oracle: the parse of the usual tokenisation. A model may spell the same text with other ids;
    contents and calls must come out the same, up to blanks that share an id with a marker."""
    format, tokenizer = smollm2
    text = WHOLE.replace("I look.", "Ich schaue nach: caf\u00e9 \U0001f600.")
    usual = brief(parse(format, tokenizer, tokenizer.encode_frame(text)))
    assert usual[1] == ("text", "Ich schaue nach: caf\u00e9 \U0001f600.")

    @settings(max_examples=60, deadline=None)
    @given(st.sets(st.integers(1, len(text) - 1)))
    def check(cuts: set[int]) -> None:
        edges = [0, *sorted(cuts), len(text)]
        parts = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
        ids = [token_id for part in parts for token_id in tokenizer.encode_content(part)]
        assert brief(parse(format, tokenizer, ids)) == usual

    check()
