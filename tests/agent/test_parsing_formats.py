# SPDX-License-Identifier: Apache-2.0
"""The stream parser on other call formats, and on ids that respect no boundary."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken_agent.catalog import ModelNotFound, resolve
from freetoken_agent.model_calls.pieces import BYTE_ALPHABET
from freetoken_agent.parsing import (
    CallDelta,
    CallStarted,
    ParseEvent,
    SegmentDone,
    StreamParser,
    TextDelta,
    ThinkingDelta,
    parse_turn,
)
from freetoken_agent.template import ChatFormat, Item
from freetoken_agent.tokenizers.byte_tokenizer import ByteTokenizer
from freetoken_agent.tokenizers.gguf_tokenizer import load_gguf_tokenizer
from freetoken_agent.tokenizers.hf_tokenizer import HFTokenizer, TokenizerFiles

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

# Bare keys and quotes that are a token of their own, as Gemma 4 writes them.
QUOTED = """\
{%- macro value(v) %}
    {%- if v is string %}{{ '<|"|>' + v + '<|"|>' }}
    {%- elif v is boolean %}{{ 'true' if v else 'false' }}
    {%- elif v is mapping %}
        {{- '{' }}
        {%- for k, item in v | dictsort %}
            {{- (',' if not loop.first else '') + k + ':' }}{{ value(item) }}
        {%- endfor %}
        {{- '}' }}
    {%- elif v is sequence %}
        {{- '[' }}
        {%- for item in v %}{{ ',' if not loop.first else '' }}{{ value(item) }}{% endfor %}
        {{- ']' }}
    {%- else %}{{ v }}
    {%- endif %}
{%- endmacro %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<|tool_call>call:' + call.function.name }}{{ value(call.function.arguments) }}
        {{- '<tool_call|>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

BYTES = ByteTokenizer()
GEMMA = ByteTokenizer(
    ("<|im_start|>", "<|im_end|>", "<|tool_call>", "<tool_call|>", '<|"|>'), stop=("<|im_end|>",)
)
MISTRAL = ByteTokenizer(
    ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"),
    stop=("</s>",),
)
HARMONY = ByteTokenizer(
    ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"),
    stop=("<|return|>", "<|call|>"),
)
MUSE = ByteTokenizer(("<|start|>", "<|end|>", "<|message|>", "<|eom|>"), stop=("<|end|>",))
MORE = {
    "listed": (ChatFormat.learn(LISTED, MISTRAL), MISTRAL),
    "channels": (ChatFormat.learn(CHANNELS, HARMONY), HARMONY),
    "addressed": (ChatFormat.learn(ADDRESSED, MUSE), MUSE),
    "tagged": (ChatFormat.learn(TAGGED, BYTES), BYTES),
    "quoted": (ChatFormat.learn(QUOTED, GEMMA), GEMMA),
}


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


def test_a_list_of_calls_behind_a_marker() -> None:
    """Oracle: the calls written by hand; marker and list brackets are frame."""
    format, tokenizer = MORE["listed"]
    first_call = '{"name": "a", "arguments": {"x": "]"}, "id": "abcdefghi"}'
    text = f'[TOOL_CALLS][{first_call}, {{"name": "b", "arguments": {{}}}}]'
    events = parse_turn(format, tokenizer, tokenizer.encode_frame(text))
    assert brief(events) == [("tool_call", "a", {"x": "]"}), ("tool_call", "b", {})]
    first, second = segments(events)
    assert (first.call_id, second.call_id) == ("abcdefghi", None)
    assert tokenizer.decode(first.gap_ids) == "[TOOL_CALLS]["
    assert tokenizer.decode(second.gap_ids) == ", "


def test_channels_have_markers_for_text_too() -> None:
    """Oracle: the contents written by hand; every channel header is frame."""
    format, tokenizer = MORE["channels"]
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi"
    events = parse_turn(format, tokenizer, tokenizer.encode_frame(text))
    assert brief(events) == [("thinking", "Hm."), ("text", "Hi")]
    text = "<|channel|>final<|message|>Hi"
    assert brief(parse_turn(format, tokenizer, tokenizer.encode_frame(text))) == [("text", "Hi")]


def test_a_call_that_the_stop_token_ends() -> None:
    """Oracle: the call written by hand; the stop id is not fed."""
    format, tokenizer = MORE["channels"]
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.ls"
        '<|channel|>commentary json<|message|>{"p": "/"}'
    )
    events = parse_turn(format, tokenizer, tokenizer.encode_frame(text))
    assert brief(events) == [("thinking", "Hm."), ("tool_call", "ls", {"p": "/"})]
    cut = parse_turn(format, tokenizer, tokenizer.encode_frame(text)[:-1], reason="length")
    assert [done.kind for done in segments(cut)] == ["thinking", "text"]


@pytest.mark.parametrize("thought", ["", "<|channel|>analysis<|message|>Hm."])
@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.ls <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.ls<|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.ls json<|message|>",
        "<|channel|>commentary to=functions.ls<|message|>",
        " to=functions.ls<|channel|>commentary <|constrain|>json<|message|>",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        "to=functions.ls <|constrain|>json<|message|>",
    ],
)
def test_headers_of_calls_as_gpt_oss_writes_them(header: str, thought: str) -> None:
    """Oracle: by hand. The template shows the recipient first only, and no `<|constrain|>`."""
    format, tokenizer = MORE["channels"]
    text = thought + ("<|end|><|start|>assistant" if thought else "") + header + '{"p": "/"}'
    events = parse_turn(format, tokenizer, tokenizer.encode_frame(text))
    thoughts = [("thinking", "Hm.")] if thought else []
    words = [("text", "I look.")] if "I look." in header else []
    assert brief(events) == [*thoughts, *words, ("tool_call", "ls", {"p": "/"})]
    assert segments(events)[-1].text.startswith("to=functions.ls")


@pytest.mark.parametrize("lead", ["", "<|python_tag|>"])
@pytest.mark.parametrize("first", ["", '"type": "function", '])
def test_calls_without_tags_as_llama_writes_them(lead: str, first: str) -> None:
    """Oracle: by hand; in any chunking the tests of chunkings know. The template has neither."""
    format = ChatFormat.learn(PLAIN, BYTES, call_format="llama3")
    unit = f'{{{first}"name": "ls", "parameters": {{"p": "/"}}}}'
    events = parse_turn(format, BYTES, BYTES.encode_frame(lead + unit))
    assert brief(events) == [("tool_call", "ls", {"p": "/"})]
    assert segments(events)[0].text == unit
    for text in ('<|python_tag|>print("x")', '{"type": "object"}', '{"type": "function"}'):
        assert brief(parse_turn(format, BYTES, BYTES.encode_frame(text))) == [("text", text)]


def test_words_on_the_channel_of_calls_are_text() -> None:
    """Oracle: by hand."""
    format, tokenizer = MORE["channels"]
    text = "<|channel|>commentary<|message|>I look."
    assert brief(parse_turn(format, tokenizer, tokenizer.encode_frame(text))) == [
        ("text", "I look.")
    ]


def test_a_calls_name_is_known_before_its_end() -> None:
    """Oracle: by hand, where the call begins with control tokens: the name comes with its last
    character, and an end of call inside a string ends nothing."""
    format, tokenizer = MORE["quoted"]
    parser = StreamParser(format, tokenizer)
    events: list[ParseEvent] = []
    for token in tokenizer.encode_frame("<|tool_call>call:sh{"):
        events += parser.feed(token)
    assert [e.name for e in events if isinstance(e, CallStarted)] == ["sh"]
    for token in tokenizer.encode_frame('cmd:<|"|>a<tool_call|>b'):
        assert all(isinstance(e, CallDelta) for e in parser.feed(token))


def test_a_marker_that_begins_like_another_waits_for_it() -> None:
    """Oracle: the contents written by hand: `to=user` and `to=self` are no calls."""
    format, tokenizer = MORE["addressed"]
    thought = " to=self<|message|>Hm."
    answer = "<|eom|><|start|>assistant to=user<|message|>Hi"
    call = '<|eom|><|start|>assistant to=ls<|message|>{"p": 1}<|eom|>'
    events = parse_turn(format, tokenizer, tokenizer.encode_frame(thought + answer))
    assert brief(events) == [("thinking", "Hm."), ("text", "Hi")]
    events = parse_turn(format, tokenizer, tokenizer.encode_frame(thought + call))
    assert brief(events) == [("thinking", "Hm."), ("tool_call", "ls", {"p": 1})]


def test_tagged_parameters() -> None:
    """Oracle: the call written by hand: strings as they are, other JSON as values."""
    format, tokenizer = MORE["tagged"]
    text = (
        "Look:\n<tool_call>\n<function=sh>\n<parameter=cmd>\necho 1\n  two\n</parameter>\n"
        '<parameter=n>\n3\n</parameter>\n<parameter=o>\n{"a": [1]}\n</parameter>\n'
        "</function>\n</tool_call>"
    )
    events = parse_turn(format, tokenizer, tokenizer.encode_frame(text))
    arguments = {"cmd": "echo 1\n  two", "n": 3, "o": {"a": [1]}}
    assert brief(events) == [("text", "Look:"), ("tool_call", "sh", arguments)]


def test_bare_keys_and_quotes_of_their_own() -> None:
    """Oracle: the calls written by hand, in the template's spelling and in looser ones."""
    format, tokenizer = MORE["quoted"]
    first = (
        '<|tool_call>call:sh{cmd:<|"|>echo {a:1}, "b"\n[c]<|"|>,deep:{e:{},on:true},l:[1,-2.5e3,'
        '[],<|"|><|"|>],n:None}<tool_call|>'
    )
    second = '<|tool_call>call:now {\n  <|"|>time zone<|"|> : null, bare key: false }<tool_call|>'
    text = f"Look.{first}{second}<|tool_call>call:ls{{}}<tool_call|>"
    events = parse_turn(format, tokenizer, tokenizer.encode_frame(text))
    deep = {"e": {}, "on": True}
    arguments = {"cmd": 'echo {a:1}, "b"\n[c]', "deep": deep, "l": [1, -2500.0, [], ""], "n": None}
    assert brief(events) == [
        ("text", "Look."),
        ("tool_call", "sh", arguments),
        ("tool_call", "now", {"time zone": None, "bare key": False}),
        ("tool_call", "ls", {}),
    ]
    assert [done.text for done in segments(events)][1:] == [
        first, second, "<|tool_call>call:ls{}<tool_call|>",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        "{p:Oslo}",  # a bare string
        '{p:"Oslo"}',  # foreign quotes
        "{p:1,}",
        "{p:1 q:2}",
        "{p:1,p:2}",
        "{p}",
        "{:1}",
        "{p:[1}",
        "{p:NaN}",
        '{p:<|"|>Oslo}',
        "{p:" + "[" * 100 + "]" * 100 + "}",
        "p:1",
    ],
)
def test_a_malformed_object_with_bare_keys_is_never_read_as_arguments(arguments: str) -> None:
    """Oracle: the text as it was written: a call without arguments, or a text where the name or the
    end of a string was not written."""
    format, tokenizer = MORE["quoted"]
    text = f"<|tool_call>call:f{arguments}<tool_call|>"
    events = parse_turn(format, tokenizer, tokenizer.encode_frame(text))
    unended = arguments in ('{p:<|"|>Oslo}', "p:1")
    assert brief(events) == [("text", text) if unended else ("tool_call", "f", None)]
    assert "".join(done.text for done in segments(events)) == text


def test_s30_an_end_of_call_inside_a_quoted_string() -> None:
    """Oracle: the argument written by hand; tokens and plain bytes alike."""
    format, tokenizer = MORE["quoted"]
    text = '<|tool_call>call:sh{cmd:<|"|>echo <tool_call|> x<|"|>}<tool_call|>'
    plain = [
        *tokenizer.encode_frame('<|tool_call>call:sh{cmd:<|"|>echo'),
        *tokenizer.encode_content(" <tool_call|> x"),
        *tokenizer.encode_frame('<|"|>}<tool_call|>'),
    ]
    for ids in (plain, tokenizer.encode_frame(text)):
        assert brief(parse_turn(format, tokenizer, ids)) == [
            ("tool_call", "sh", {"cmd": "echo <tool_call|> x"})
        ]
    cut = tokenizer.encode_frame(text)[:-8]
    assert [d.kind for d in segments(parse_turn(format, tokenizer, cut, reason="length"))] == [
        "text"
    ]


_QUOTED_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_QUOTED_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | _QUOTED_TEXT
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.from_regex(r"[a-z_]{1,5}", fullmatch=True), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.from_regex(r"[a-z_]{1,5}", fullmatch=True), _QUOTED_VALUES, max_size=4))
def test_bare_keys_read_back_what_the_template_writes(arguments: dict[str, Any]) -> None:
    """Oracle: the arguments that the template rendered; they come back equal, in any chunking."""
    format, tokenizer = MORE["quoted"]
    items = [Item("user", "go"), Item("tool_call", name="f", arguments=arguments, call_id="c")]
    ids = format.layout(items)[1].ids
    assert brief(parse_turn(format, tokenizer, ids)) == [("tool_call", "f", arguments)]


def test_s30_a_closing_tag_inside_a_tagged_parameter() -> None:
    """Oracle: the argument written by hand."""
    format, tokenizer = MORE["tagged"]
    text = (
        "<tool_call>\n<function=sh>\n<parameter=cmd>\necho </tool_call> x\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    events = parse_turn(format, tokenizer, tokenizer.encode_frame(text))
    assert brief(events) == [("tool_call", "sh", {"cmd": "echo </tool_call> x"})]


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
    events = parse_turn(format, tokenizer, ids)
    done = segments(events)
    assert [d.text for d in done] == texts
    assert sum(len(d.gap_ids) for d in done) == gaps
    assert [i for d in done for i in (*d.gap_ids, *d.ids)] == ids
    plain = [d.text for d in done if d.kind != "tool_call"]
    assert said(events, ThinkingDelta) + said(events, TextDelta) == "".join(plain)


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
    (done,) = segments(parse_turn(format, tokenizer, ids))
    assert list(done.ids) == ids and done.gap_ids == ()
    assert done.text == tokenizer.decode(ids)
    assert tokenizer.encode_content(done.text) != ids


@pytest.mark.smollm2
def test_any_tokenisation_gives_one_parse(smollm2: tuple[ChatFormat, HFTokenizer]) -> None:
    """Oracle: the parse of the usual tokenisation. A model may spell the same text with other ids;
    contents and calls must come out the same, up to blanks that share an id with a marker."""
    format, tokenizer = smollm2
    text = WHOLE.replace("I look.", "Ich schaue nach: caf\u00e9 \U0001f600.")
    usual = brief(parse_turn(format, tokenizer, tokenizer.encode_frame(text)))
    assert usual[1] == ("text", "Ich schaue nach: caf\u00e9 \U0001f600.")

    @settings(max_examples=60, deadline=None)
    @given(st.sets(st.integers(1, len(text) - 1)))
    def check(cuts: set[int]) -> None:
        edges = [0, *sorted(cuts), len(text)]
        parts = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
        ids = [token_id for part in parts for token_id in tokenizer.encode_content(part)]
        assert brief(parse_turn(format, tokenizer, ids)) == usual

    check()
