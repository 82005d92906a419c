# SPDX-License-Identifier: Apache-2.0
"""What the report says of a template, on templates that have one habit each."""

import pytest

from freetoken_agent.chat_templates.items import TemplateReport
from freetoken_agent.template import ChatFormat, Item
from freetoken_agent.testing import CHATML
from freetoken_agent.tokenizers.byte_tokenizer import CHATML_CONTROLS, ByteTokenizer

TOKENIZER = ByteTokenizer()
LOOP = "{%- for message in messages %}"
TURNS = LOOP + (
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TOOLS_FIRST = (
    "{% if tools %}{{ '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    + TURNS
)
HOISTING = (
    "{% for message in messages if message.role == 'system' %}{{ message.content }}{% endfor %}"
    "{% for message in messages if message.role != 'system' %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}"
)
DROPPING = (
    "{% for message in messages %}{% if loop.first or message.role != 'system' %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}"
)
FORGETFUL = CHATML.replace(
    "{%- if message.reasoning_content %}",
    "{%- if message.reasoning_content and not messages[loop.index:] %}",
)
SINGLE = CHATML.replace(
    "{%- for call in message.tool_calls or [] %}",
    "{%- if (message.tool_calls or []) | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    "{%- for call in message.tool_calls or [] %}",
)
SEPARATE = CHATML.replace("loop.first or loop.previtem.role != 'tool'", "true").replace(
    "loop.last or loop.nextitem.role != 'tool'", "true"
)
SWITCHED = TURNS + "{% if add_generation_prompt and enable_thinking %}{{ '<think>\\n' }}{% endif %}"
TRIMMING = TURNS.replace("message.content", "(message.content | trim)")


def report(source: str) -> TemplateReport:
    return ChatFormat.learn(source, TOKENIZER).report


@pytest.mark.parametrize(
    ("flag", "with_habit", "without"),
    [
        ("fallback_thinking", TURNS, CHATML),
        ("fallback_tools", TURNS, CHATML),
        ("drops_thinking", FORGETFUL, CHATML),
        ("tools_before_system", TOOLS_FIRST, CHATML),
        ("moves_system", HOISTING, TURNS),
        ("moves_system", DROPPING, CHATML),
        ("dated", "{{ strftime_now('%d') }}" + TURNS, TURNS),
        ("dated", "{% if tools %}{{ strftime_now('%d') }}{% endif %}" + TOOLS_FIRST, TOOLS_FIRST),
        ("thinking_switch", SWITCHED, TURNS),
    ],
)
def test_flags_follow_the_habit(flag: str, with_habit: str, without: str) -> None:
    """Oracle: a template with the habit and one without."""
    assert getattr(report(with_habit), flag)
    assert not getattr(report(without), flag)


def test_parallel_calls_and_the_system_role() -> None:
    """Oracle: a template with and one without; these flags are true by default."""
    refusing = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TURNS
    )
    assert report(CHATML).parallel_calls and not report(SINGLE).parallel_calls
    assert report(CHATML).system_supported and not report(refusing).system_supported


@pytest.mark.parametrize(
    ("source", "says", "without"),
    [
        (TURNS, "it has no thinking", CHATML),
        (TURNS, "it has no calls", CHATML),
        (TURNS, "it shows no tools", CHATML),
        (FORGETFUL, "drops earlier thinking", CHATML),
        (TOOLS_FIRST, "tools before the system text", CHATML),
        (HOISTING, "moves a later system text", TURNS),
        (DROPPING, "drops a later system text", TURNS),
        (SINGLE, "no parallel calls", CHATML),
        (SWITCHED, "thinking can be switched", TURNS),
        (TRIMMING, "user content is trimmed", TURNS),
        (TRIMMING, "text content is trimmed", TURNS),
        (CHATML, "adjacent results into one turn", SEPARATE),
        ("{{ strftime_now('%d') }}" + TURNS, "writes the date", TURNS),
    ],
)
def test_notes_name_the_habit(source: str, says: str, without: str) -> None:
    """Oracle: the sentence, and its absence where the habit is absent."""
    assert any(says in note for note in report(source).notes)
    assert not any(says in note for note in report(without).notes)


def test_the_digest_is_the_templates() -> None:
    """Oracle: equal and different sources."""
    assert report(CHATML).digest == report(CHATML).digest != report(TURNS).digest


def test_a_token_inside_turns_is_no_closer() -> None:
    """Oracle: the token that closes thoughts closes answers too; only the stop id ends a turn."""
    shared = CHATML.replace("'\\n</think>\\n\\n'", "'<|im_end|>'")
    assert shared != CHATML
    named = ByteTokenizer((*CHATML_CONTROLS, "<|stop|>"), stop=("<|stop|>",))
    ids = dict(zip((*CHATML_CONTROLS, "<|stop|>"), range(256, 300), strict=False))
    assert ChatFormat.learn(shared, named).closers == {ids["<|stop|>"]}
    assert ChatFormat.learn(CHATML, named).closers == {ids["<|stop|>"], ids["<|im_end|>"]}


def test_without_stop_tokens_a_lone_call_still_ends_before_the_closer() -> None:
    """Oracle: the unit written by hand; the closer is learned from an answer."""
    silent = ByteTokenizer(stop=(), special_tokens={})
    format = ChatFormat.learn(SINGLE, silent)
    call = Item("tool_call", name="f", arguments={}, call_id="c00000001")
    (_, unit) = format.layout([Item("user", "Hi"), call])
    assert unit.text == '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert [silent.decode([i]) for i in format.closers] == ["<|im_end|>"]
