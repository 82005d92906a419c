# SPDX-License-Identifier: Apache-2.0
"""ChatFormat: what options and the clock change, and what openers say."""

from freetoken_agent.template import ChatFormat, Item, Options
from freetoken_agent.testing import CHATML
from freetoken_agent.tokenizers.byte_tokenizer import ByteTokenizer

PLAIN = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DATED = "{{ 'Today is ' + strftime_now('%d %b %Y') + '.' }}" + PLAIN
TOKENIZER = ByteTokenizer()
CHAT = ChatFormat.learn(CHATML, TOKENIZER)
SMOL = ChatFormat.learn(PLAIN, TOKENIZER)
USER, ANSWER = Item("user", "Hi"), Item("text", "Hello!")


def test_gaps_are_cached_per_options() -> None:
    """Oracle: the variable's value in a later gap, asked for in turns."""
    source = PLAIN.replace(
        "'<|im_start|>' + message['role']", "(mark | default('-')) + message['role']"
    )
    format = ChatFormat.learn(source, TOKENIZER)
    path = [USER, ANSWER, USER]
    for mark in ("a", "b", "a"):
        (piece,) = format.layout(path, start=2, options=Options(variables={"mark": mark}))
        assert piece.gap_text == f"<|im_end|>\n{mark}user\n"


def test_an_opener_that_begins_a_thought_says_so() -> None:
    """Oracle: the template's opener, written by hand; switched off it closes an empty thought."""
    source = CHATML.replace(
        "{{- '<|im_start|>assistant\\n' }}\n    {%- if enable_thinking",
        "{{- '<|im_start|>assistant\\n' }}\n    {%- if not (enable_thinking is defined and "
        "enable_thinking is false) %}{{ '<think>\\n' }}{% endif %}\n    {%- if enable_thinking",
    )
    assert source != CHATML
    format = ChatFormat.learn(source, TOKENIZER)
    opener = format.opener([USER])
    assert (opener.kind, opener.text[-8:]) == ("thinking", "<think>\n")
    assert format.opener([USER], thinking=False).kind == "text"
    assert CHAT.opener([USER]).kind == "text"


def test_options_reach_the_template() -> None:
    """Oracle: the variable's value in the first gap."""
    format = ChatFormat.learn("{{ mood | default('calm') }}:" + PLAIN, TOKENIZER)
    loud = Options(variables={"mood": "loud"})
    assert format.layout([USER])[0].gap_text.startswith("calm:")
    assert format.layout([USER], options=loud)[0].gap_text.startswith("loud:")


def test_the_format_names_the_options_of_its_template() -> None:
    """Oracle: the variables the templates here read beyond messages and tools."""
    assert CHAT.variables == {"enable_thinking"}
    assert SMOL.variables == frozenset()
    assert ChatFormat.learn("{{ mood }}{{ bos_token }}" + DATED, TOKENIZER).variables == {"mood"}


def test_c16_the_date_is_that_of_the_options() -> None:
    """Oracle: the day written by hand; the same options on any day give the same ids."""
    format = ChatFormat.learn(DATED, TOKENIZER)
    assert format.report.dated
    assert not SMOL.report.dated
    first, second = Options(now_s=0.0), Options(now_s=86_400.0)
    assert format.layout([USER], options=first)[0].gap_text.startswith("Today is 01 Jan 1970.")
    assert format.layout([USER], options=second)[0].gap_text.startswith("Today is 02 Jan 1970.")
    assert format.layout([USER], options=first) == format.layout([USER], options=Options())
