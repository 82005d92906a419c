# SPDX-License-Identifier: Apache-2.0
"""ChatFormat: gaps, contents, openers. The oracle is the template's rendering by transformers where
a whole text is compared, and text written by hand where one gap is."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from freetoken_agent.chat_templates.gaps import GapSource, preamble_length
from freetoken_agent.errors import TemplateUnsupported
from freetoken_agent.template import ChatFormat, Item, Options, Piece
from freetoken_agent.testing import CHATML
from freetoken_agent.tokenizers.byte_tokenizer import ByteTokenizer

# SmolLM2's own: a default system text, no tools, no thinking.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are SmolLM<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# No system role, strict alternation, trimmed contents: Gemma 2's habits.
STRICT = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Thoughts and an empty think block only after the last user message: Qwen 3's habits.
FORGETFUL = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.index0 > ns.last %}
        {{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
TOKENIZER = ByteTokenizer()
CHAT = ChatFormat.learn(CHATML, TOKENIZER)
SMOL = ChatFormat.learn(SMOLLM2, TOKENIZER)

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}},
    },
}
SYSTEM, TOOLS = Item("system", "Be brief."), Item("tools", json.dumps([SCHEMA]))
USER, ANSWER = Item("user", "Hi"), Item("text", "Hello!")
THOUGHT, PREFACE = Item("thinking", "hm", open=True), Item("text", "I look.", open=True)


def call(number: int, arguments: dict[str, object] | None = None) -> Item:
    return Item("tool_call", name="bash", arguments=arguments or {}, call_id=f"call{number:05d}")


def result(number: int, text: str = "out") -> Item:
    return Item("tool_result", text, name="bash", call_id=f"call{number:05d}")


def text_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.gap_text + piece.text for piece in pieces)


def ids_of(pieces: Sequence[Piece]) -> list[int]:
    return [i for piece in pieces for i in (*piece.gap_ids, *piece.ids)]


def rendered(source: str, messages: Sequence[dict[str, Any]], **more: Any) -> str:
    """By transformers."""
    (text,), _ = render_jinja_template([messages], chat_template=source, **more)
    return str(text)


def one_by_one(format: ChatFormat, items: Sequence[Item]) -> list[Piece]:
    start = preamble_length(items)
    pieces = format.layout(items[:start])
    for index in range(start, len(items)):
        pieces += format.layout(items[: index + 1], start=index)
    return pieces


STEP = [THOUGHT, replace(PREFACE), call(1, {"cmd": "ls"}), result(1), Item("text", "Done.")]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "hm",
        "tool_calls": [{"function": {"name": "bash", "arguments": {"cmd": "ls"}}}],
    },
    {"role": "tool", "content": "out"},
    {"role": "assistant", "content": "Done."},
    {"role": "user", "content": "Bye"},
]


def test_rule06_frames_joined_are_the_rendering() -> None:
    """Oracle: transformers' rendering of the same messages, character by character; and the ids
    decoded."""
    items = [SYSTEM, TOOLS, USER, *STEP, Item("user", "Bye")]
    wanted = rendered(CHATML, MESSAGES, tools=[SCHEMA], add_generation_prompt=True)
    for pieces in (CHAT.layout(items), one_by_one(CHAT, items)):
        opener = CHAT.opener(items)
        assert text_of(pieces) + opener.text == wanted
        assert TOKENIZER.decode([*ids_of(pieces), *opener.ids]) == wanted


def test_rule06_a_frame_is_one_gap_before_its_right_neighbour() -> None:
    """Oracle: the gaps written by hand."""
    items = [SYSTEM, USER, *STEP, Item("user", "Bye")]
    assert [piece.gap_text for piece in CHAT.layout(items)] == [
        "<|im_start|>system\n",
        "<|im_end|>\n<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>assistant\n<think>\n",
        "\n</think>\n\n",
        "\n",
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n",
        "\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>\n<|im_start|>user\n",
    ]


def test_rule06_frames_look_at_nothing_after_the_run() -> None:
    """Oracle: laying out a prefix gives the prefix of the pieces."""
    items = [SYSTEM, TOOLS, USER, *STEP, Item("user", "Bye")]
    whole = CHAT.layout(items)
    for size in range(2, len(items)):
        assert CHAT.layout(items[:size]) == whole[:size]


def test_rule06_stored_ids_are_kept() -> None:
    """Oracle: the ids given in; the gap is the same as without."""
    stored = replace(ANSWER, ids=(1, 2, 3))
    piece = CHAT.layout([USER, stored], start=1)[0]
    assert piece.ids == (1, 2, 3)
    assert piece.gap_ids == CHAT.layout([USER, ANSWER], start=1)[0].gap_ids


def test_rule06_the_stop_id_is_the_closers_first_id() -> None:
    """Oracle: the ids of the frame behind an answer."""
    (piece,) = CHAT.layout([USER, ANSWER, USER], start=2)
    assert piece.gap_ids[0] in CHAT.closers
    assert TOKENIZER.decode(piece.gap_ids[:1]) == "<|im_end|>"


def test_rule04_after_a_thought_the_opener_is_its_closer() -> None:
    """Oracle: the frame between a thought and its answer, written by hand."""
    opener = CHAT.opener([USER, THOUGHT])
    assert (opener.text, opener.kind) == ("\n</think>\n\n", "text")
    assert opener.ids == CHAT.layout([USER, THOUGHT, ANSWER], start=2)[0].gap_ids


def test_rule07_what_was_cut_goes_on_without_a_frame() -> None:
    """Oracle: an empty opener, and an empty gap before the next content of the same kind."""
    cut_text, cut_thought = Item("text", "Hel", open=True), replace(THOUGHT, partial=True)
    assert CHAT.opener([USER, cut_text]).ids == ()
    assert CHAT.opener([USER, cut_thought]).ids == ()
    assert CHAT.opener([USER, cut_thought]).kind == "thinking"
    for cut in (cut_text, cut_thought):
        more = Item(cut.kind, "lo")
        (piece,) = CHAT.layout([USER, cut, more], start=2)
        assert (piece.gap_text, piece.gap_ids) == ("", ())
        closed = CHAT.layout([USER, cut, more, Item("user", "x")], start=3)[0]
        assert "<|im_end|>" in closed.gap_text or cut.kind == "thinking"


def test_rule07_a_closed_answer_before_another_is_another_message() -> None:
    """Oracle: the frame written by hand."""
    (piece,) = CHAT.layout([USER, ANSWER, ANSWER], start=2)
    assert piece.gap_text == "<|im_end|>\n<|im_start|>assistant\n"


def test_an_answer_after_a_call_has_no_place_but_what_follows_has() -> None:
    """Oracle: the error, and the frame of a new turn."""
    odd = [USER, replace(call(1), open=True), replace(ANSWER, ids=(1,)), USER]
    with pytest.raises(TemplateUnsupported, match="no place") as caught:
        CHAT.layout(odd[:3], start=2)
    assert caught.value.code == "template_unsupported"
    assert CHAT.layout(odd, start=3)[0].gap_text == "<|im_end|>\n<|im_start|>user\n"


def test_rule15_models_without_thinking_or_calls_get_the_fallback() -> None:
    """Oracle: transformers' rendering of messages with the documented inlining."""
    schema = json.dumps(SCHEMA, ensure_ascii=False)
    items = [
        SYSTEM, TOOLS, USER, THOUGHT, PREFACE, call(1, {"cmd": "ls"}), call(2), result(1, "a"),
        result(2, "b"), Item("text", "Done."),
    ]  # fmt: skip
    pieces = SMOL.layout(items)
    system = pieces[0].text + pieces[1].gap_text + pieces[1].text
    tail = pieces[2].gap_text.partition("<|im_end|>")[0]
    assert pieces[1].text == schema
    assert "<tools>\n" in pieces[1].gap_text and "\n</tools>" in tail
    calls = [{"name": "bash", "arguments": {"cmd": "ls"}}, {"name": "bash", "arguments": {}}]
    inlined = "\n".join(f"<tool_call>\n{json.dumps(c)}\n</tool_call>" for c in calls)
    wanted = rendered(
        SMOLLM2,
        [
            {"role": "system", "content": system + tail},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": f"<think>\nhm\n</think>\n\nI look.\n{inlined}"},
            {
                "role": "user",
                "content": "<tool_response>\na\n</tool_response>\n"
                "<tool_response>\nb\n</tool_response>",
            },
            {"role": "assistant", "content": "Done."},
        ],
    )
    assert wanted.removeprefix(text_of(pieces)) == "<|im_end|>\n"
    assert SMOL.report.fallback_thinking and SMOL.report.fallback_tools
    assert any("<think>" in note for note in SMOL.report.notes)
    assert any("<tool_call>" in note for note in SMOL.report.notes)


def test_rule15_thinking_can_be_asked_for_where_it_is_inlined() -> None:
    """Oracle: the fallback's own opening tag."""
    opener = SMOL.opener([USER], thinking=True)
    assert opener.text.endswith("<|im_start|>assistant\n<think>\n")
    assert opener.kind == "thinking"
    assert SMOL.opener([USER]).kind == "text"


def test_c01_an_empty_think_block_touches_no_other_turn() -> None:
    """Oracle: C1 on F1: the gap of the new turn is the same whether the answer before it was
    generated behind an empty think block or not; the report names the template's habit."""
    format = ChatFormat.learn(FORGETFUL, TOKENIZER)
    turns = [SYSTEM, USER, ANSWER, Item("user", "2+2?")]
    (piece,) = format.layout(turns, start=3)
    assert piece.gap_text == "<|im_end|>\n<|im_start|>user\n"
    opener = format.opener(turns, thinking=False)
    assert opener.text.endswith("<think>\n\n</think>\n\n")
    assert opener.kind == "text"
    assert format.report.thinking_switch
    assert any("last answer" in note for note in format.report.notes)


def test_c03_earlier_thoughts_that_the_template_drops_keep_their_frames() -> None:
    """Oracle: transformers drops the thought once a user message follows; the kept path's frames
    are those of the time when it was written."""
    format = ChatFormat.learn(FORGETFUL, TOKENIZER)
    assert format.report.drops_thinking
    items = [USER, THOUGHT, ANSWER, Item("user", "Bye")]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "reasoning_content": "hm", "content": "Hello!"},
    ]
    before = rendered(FORGETFUL, messages)
    after = rendered(FORGETFUL, [*messages, {"role": "user", "content": "Bye"}])
    assert "hm" in before and "hm" not in after
    for pieces in (format.layout(items), one_by_one(format, items)):
        kept = text_of(pieces)
        assert before.startswith(text_of(pieces[:3]))
        assert kept.endswith("Hello!<|im_end|>\n<|im_start|>user\nBye")


def test_s53_without_a_system_role_the_text_leads_the_first_user_turn() -> None:
    """Oracle: transformers' rendering with the text folded in by hand."""
    format = ChatFormat.learn(STRICT, TOKENIZER)
    assert not format.report.system_supported
    items = [SYSTEM, TOOLS, USER, call(1), result(1), ANSWER]
    wanted = rendered(
        STRICT,
        [{"role": "user", "content": "Be brief.\n\nHi"}, {"role": "assistant", "content": "x"}],
    )
    pieces = format.layout([SYSTEM, USER])
    assert wanted.startswith(text_of(pieces))
    assert text_of(format.layout(items)).count("<|im_start|>user") == 2
    assert format.layout([SYSTEM])[0].gap_text == "<|im_start|>user\n"


def test_s53_a_later_system_text_is_a_clear_error() -> None:
    """Oracle: the error's code, and that the path before still lays out."""
    format = ChatFormat.learn(STRICT, TOKENIZER)
    with pytest.raises(TemplateUnsupported, match="no system role") as caught:
        format.layout([USER, ANSWER, SYSTEM], start=2)
    assert caught.value.code == "template_unsupported"
    assert format.layout([USER, ANSWER, USER], start=2)[0].text == "Hi"


def test_s53_what_the_template_refuses_is_said_in_its_words() -> None:
    """Oracle: the template's own message."""
    format = ChatFormat.learn(STRICT, TOKENIZER)
    with pytest.raises(TemplateUnsupported, match="must alternate"):
        format.layout([USER, USER], start=1)


def paths() -> st.SearchStrategy[list[Item]]:
    """Valid paths of several turns and steps, with parallel calls."""

    @st.composite
    def build(draw: st.DrawFn) -> list[Item]:
        items = [SYSTEM] if draw(st.booleans()) else []
        items += [TOOLS] if draw(st.booleans()) else []
        number = 0
        for _ in range(draw(st.integers(1, 3))):
            items.append(USER)
            for calls in draw(st.lists(st.integers(1, 3), max_size=2)):
                items += [THOUGHT] if draw(st.booleans()) else []
                items += [PREFACE] if draw(st.booleans()) else []
                numbers = range(number, number + calls)
                items += [call(n) for n in numbers] + [result(n) for n in numbers]
                number += calls
            items += [THOUGHT] if draw(st.booleans()) else []
            items.append(ANSWER)
        return items

    return build()


@pytest.mark.parametrize("format", [CHAT, SMOL], ids=["native", "inlined"])
def test_windows_give_the_gaps_of_whole_renderings(format: ChatFormat) -> None:
    """Oracle: each gap cut from a rendering of the whole path up to its right neighbour."""
    whole = GapSource(format.grammar, windows=False)
    windowed = GapSource(format.grammar, windows=True)

    @settings(max_examples=40, deadline=None)
    @given(paths())
    def check(items: list[Item]) -> None:
        options = Options()
        for index in range(preamble_length(items), len(items)):
            path = items[: index + 1]
            assert windowed.single(path, index, options) == whole.single(path, index, options)
        assert windowed.opener(items, options) == whole.opener(items, options)
        assert text_of(one_by_one(format, items)) == text_of(format.layout(items))

    check()


MOVING = """\
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and not messages[loop.index:] | selectattr('role', 'equalto', 'user') | list %}
            {{- '[TOOLS]' + (tools | tojson) + '[/TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- else %}{{ message.content + '</s>' }}
    {%- endif %}
{%- endfor %}"""


def test_rule05_tools_that_the_template_moves_stay_where_they_were_laid_out() -> None:
    """Oracle: the text written by hand; transformers puts the tools before the last question."""
    format = ChatFormat.learn(MOVING, TOKENIZER)
    items = [TOOLS, USER, ANSWER, Item("user", "Bye")]
    wanted = f"[TOOLS][{json.dumps(SCHEMA)}][/TOOLS][INST]Hi[/INST]Hello!</s>[INST]Bye"
    assert text_of(one_by_one(format, items)) == text_of(format.layout(items)) == wanted
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    moved = rendered(MOVING, messages, tools=[SCHEMA])
    assert moved.index("[TOOLS]") > moved.index("Hello!")
    assert any("moves the tools" in note for note in format.report.notes)


def test_an_empty_run_is_nothing() -> None:
    """Oracle: no pieces."""
    assert CHAT.layout([]) == []
    assert CHAT.layout([USER], start=1) == []
