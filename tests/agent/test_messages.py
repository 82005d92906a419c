# SPDX-License-Identifier: Apache-2.0
"""OpenAI and Anthropic message lists in and out."""

import json
from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken_agent.chat_templates.items import Item, same_message
from freetoken_agent.errors import InvalidMessages, UnsupportedContent
from freetoken_agent.messages import emit_messages, parse_messages

CALL = Item("tool_call", name="bash", arguments={"cmd": "ls"}, call_id="c1")
OTHER = Item("tool_call", name="read", arguments={}, call_id="c2")
RESULT = Item("tool_result", "out", name="bash", call_id="c1")
OTHER_RESULT = Item("tool_result", "text", name="read", call_id="c2", error=True)


def opened(*items: Item) -> list[Item]:
    return [replace(item, open=True) for item in items[:-1]] + [items[-1]]


PATH = [
    Item("system", "Be brief."),
    Item("user", "Hi"),
    *opened(Item("thinking", "hm"), Item("text", "I look."), CALL, OTHER),
    RESULT,
    OTHER_RESULT,
    *opened(Item("thinking", "so"), Item("text", "Done.")),
    Item("user", "Bye"),
]
OPENAI: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "hm",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "bash", "arguments": '{"cmd": "ls"}'},
            },
            {"id": "c2", "type": "function", "function": {"name": "read", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "out"},
    {"role": "tool", "tool_call_id": "c2", "content": "text"},
    {"role": "assistant", "content": "Done.", "reasoning_content": "so"},
    {"role": "user", "content": "Bye"},
]


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


ANTHROPIC: list[dict[str, Any]] = [
    {"role": "system", "content": [text("Be brief.")]},
    {"role": "user", "content": [text("Hi")]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm"},
            text("I look."),
            {"type": "tool_use", "id": "c1", "name": "bash", "input": {"cmd": "ls"}},
            {"type": "tool_use", "id": "c2", "name": "read", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [text("out")]},
            {
                "type": "tool_result",
                "tool_use_id": "c2",
                "content": [text("text")],
                "is_error": True,
            },
        ],
    },
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "so"}, text("Done.")]},
    {"role": "user", "content": [text("Bye")]},
]
LISTS: dict[Literal["openai", "anthropic"], list[dict[str, Any]]] = {
    "openai": OPENAI,
    "anthropic": ANTHROPIC,
}


def without_errors(items: list[Item]) -> list[Item]:
    """OpenAI's lists have no place for a result's error flag."""
    return [replace(item, error=False) for item in items]


@pytest.mark.parametrize("format", LISTS)
def test_rule09_lists_in_and_out(format: Literal["openai", "anthropic"]) -> None:
    """Oracle: the list and the path written by hand, in both directions."""
    assert emit_messages(PATH, format) == LISTS[format]
    parsed = parse_messages(LISTS[format], format)
    assert parsed == (PATH if format == "anthropic" else without_errors(PATH))


def test_tools_are_not_messages() -> None:
    """Oracle: the list without them."""
    path = [PATH[0], Item("tools", "[]"), *PATH[1:]]
    assert emit_messages(path, "openai") == OPENAI
    assert emit_messages(path, "anthropic") == ANTHROPIC


@pytest.mark.parametrize("format", LISTS)
def test_c18_a_string_is_one_text_part(format: Literal["openai", "anthropic"]) -> None:
    """Oracle: C18: both spellings give the same items; several parts are joined."""
    string = parse_messages([{"role": "user", "content": "Hi there"}], format)
    assert string == [Item("user", "Hi there")]
    for parts in ([text("Hi there")], [text("Hi "), text("there")]):
        assert parse_messages([{"role": "user", "content": parts}], format) == string


def test_s54_no_content_is_no_text() -> None:
    """Oracle: S54: None, absent and empty content beside calls give the call alone."""
    calls = OPENAI[2]["tool_calls"][:1]
    variants: list[dict[str, Any]] = [{"content": None}, {}, {"content": ""}, {"content": []}]
    for more in variants:
        message = {"role": "assistant", "tool_calls": calls, **more}
        assert parse_messages([message], "openai") == [CALL]
    assert emit_messages([CALL], "openai")[0]["content"] is None


def test_an_empty_answer_is_an_empty_text() -> None:
    """Oracle: the item written by hand, in and out."""
    for message in ({"role": "assistant", "content": ""}, {"role": "assistant", "content": None}):
        assert parse_messages([message], "openai") == [Item("text", "")]
    assert emit_messages([Item("text", "")], "openai") == [{"role": "assistant", "content": ""}]
    assert parse_messages([{"role": "assistant", "content": []}], "anthropic") == [Item("text", "")]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_come_under_several_names(name: str) -> None:
    """Oracle: the thought and the answer."""
    message = {"role": "assistant", "content": "ok", name: "hm"}
    assert parse_messages([message], "openai") == opened(Item("thinking", "hm"), Item("text", "ok"))


def test_s33_arguments_in_a_string_are_an_object() -> None:
    """Oracle: the same items from a string and from an object."""
    for arguments in ('{"cmd": "ls"}', ' {"cmd":"ls"}\n', {"cmd": "ls"}):
        call = {"id": "c1", "function": {"name": "bash", "arguments": arguments}}
        assert parse_messages([{"role": "assistant", "tool_calls": [call]}], "openai") == [CALL]


def test_rule08_results_are_sorted_by_their_calls() -> None:
    """Oracle: the order of the calls; a name the list leaves out is the call's."""
    swapped = [*OPENAI[:3], OPENAI[4], OPENAI[3], *OPENAI[5:]]
    assert parse_messages(swapped, "openai") == without_errors(PATH)


def test_a_cut_text_is_one_message() -> None:
    """Oracle: the text in one piece."""
    cut = [Item("user", "Hi"), Item("text", "Hel", open=True, partial=True), Item("text", "lo")]
    assert emit_messages(cut, "openai")[1] == {"role": "assistant", "content": "Hello"}
    assert emit_messages(cut, "anthropic")[1]["content"] == [text("Hel"), text("lo")]
    assert parse_messages(emit_messages(cut, "anthropic"), "anthropic")[1] == Item("text", "Hello")


def test_a_user_text_after_results_shares_their_message() -> None:
    """Oracle: Anthropic's lists must alternate."""
    path = [Item("user", "Hi"), CALL, RESULT, Item("user", "Stop")]
    emitted = emit_messages(path, "anthropic")
    assert [message["role"] for message in emitted] == ["user", "assistant", "user"]
    assert parse_messages(emitted, "anthropic") == path


@pytest.mark.parametrize(
    ("format", "part"),
    [
        ("openai", {"type": "image_url", "image_url": {"url": "x"}}),
        ("openai", {"type": "input_audio"}),
        ("openai", 3),
        ("anthropic", {"type": "image", "source": {}}),
        ("anthropic", {"type": "document"}),
        ("anthropic", {"type": "thinking", "thinking": "users do not think"}),
    ],
)
def test_parts_that_are_not_text_are_refused(
    format: Literal["openai", "anthropic"], part: object
) -> None:
    """Oracle: the error's type, code and the message it names."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": c} for c in ("Hi", [part])]
    with pytest.raises((UnsupportedContent, InvalidMessages), match="message 1") as caught:
        parse_messages(messages, format)
    assert caught.value.code in ("unsupported_content", "invalid_messages")
    if isinstance(part, dict):
        assert caught.value.code == "unsupported_content"


@pytest.mark.parametrize(
    ("format", "message", "says"),
    [
        ("openai", {"role": "robot", "content": "x"}, "robot"),
        ("openai", {"content": "x"}, "role"),
        ("openai", {"role": "user", "content": 7}, "content"),
        ("openai", {"role": "tool", "content": "x"}, "tool_call_id"),
        ("openai", {"role": "user", "content": [{"type": "text"}]}, "no text"),
        ("openai", {"role": "assistant", "tool_calls": [{"id": "c"}]}, "function"),
        ("openai", {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, "id"),
        (
            "openai",
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"arguments": "{}"}}]},
            "name",
        ),
        (
            "openai",
            {
                "role": "assistant",
                "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{"}}],
            },
            "not JSON",
        ),
        (
            "openai",
            {
                "role": "assistant",
                "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "[1]"}}],
            },
            "must be an object",
        ),
        ("anthropic", {"role": "tool", "content": "x"}, "tool"),
        ("anthropic", {"role": "user", "content": None}, "content"),
        ("anthropic", {"role": "user", "content": ["x"]}, "object"),
        ("anthropic", {"role": "user", "content": [{"type": "tool_result"}]}, "tool_use_id"),
        (
            "anthropic",
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "f"}, text("after")],
            },
            "after a tool_use",
        ),
        (
            "anthropic",
            {"role": "assistant", "content": [text("a"), {"type": "thinking", "thinking": "b"}]},
            "a thinking block after a text block",
        ),
        (
            "anthropic",
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "a"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {}},
                    {"type": "thinking", "thinking": "b"},
                ],
            },
            "after a tool_use .*'thinking', 'tool_use', 'thinking'.*behind their results",
        ),
        (
            "anthropic",
            {"role": "user", "content": [text("x"), {"type": "tool_result", "tool_use_id": "c"}]},
            "before text",
        ),
    ],
)
def test_lists_that_break_their_format_are_refused(
    format: Literal["openai", "anthropic"], message: dict[str, Any], says: str
) -> None:
    """Oracle: the error's type, code, and the index and fault it names."""
    with pytest.raises(InvalidMessages, match=says) as caught:
        parse_messages([message], format)
    assert caught.value.code == "invalid_messages"
    assert "message 0" in str(caught.value)


def test_what_is_no_message_or_no_format_is_refused() -> None:
    """Oracle: the error's code."""
    with pytest.raises(InvalidMessages):
        parse_messages(["Hi"], "openai")  # type: ignore[list-item]
    for call in (parse_messages, emit_messages):
        with pytest.raises(InvalidMessages, match="anthropic or openai"):
            call([], "gemini")  # type: ignore[arg-type]


TEXT = st.text(min_size=1, max_size=5)


@st.composite
def histories(draw: st.DrawFn) -> list[Item]:
    """Paths as sessions hold them: every call answered."""
    items = [Item("system", draw(TEXT))] if draw(st.booleans()) else []
    number = 0
    for _ in range(draw(st.integers(0, 3))):
        items.append(Item("user", draw(TEXT)))
        for calls in draw(st.lists(st.integers(1, 2), max_size=2)):
            turn = [Item("thinking", draw(TEXT))] if draw(st.booleans()) else []
            turn += [Item("text", draw(TEXT))] if draw(st.booleans()) else []
            numbers = range(number, number + calls)
            number += calls
            arguments = draw(st.dictionaries(TEXT, st.integers() | TEXT, max_size=2))
            turn += [
                Item("tool_call", name="f", arguments=arguments, call_id=f"c{n}") for n in numbers
            ]
            items += opened(*turn)
            items += [Item("tool_result", draw(TEXT), name="f", call_id=f"c{n}") for n in numbers]
        thought = [Item("thinking", draw(TEXT))] if draw(st.booleans()) else []
        items += opened(*thought, Item("text", draw(TEXT)))
    return items


@settings(deadline=None)
@given(histories(), st.sampled_from(["openai", "anthropic"]))
def test_what_is_emitted_is_read_back(
    items: list[Item], format: Literal["openai", "anthropic"]
) -> None:
    """Oracle: the path itself; the list survives JSON."""
    emitted = json.loads(json.dumps(emit_messages(items, format)))
    assert parse_messages(emitted, format) == items


def test_one_message_is_thought_text_and_calls_in_that_order() -> None:
    """Oracle: the table written by hand; a cut content goes on in its own kind."""
    thought, answer = Item("thinking"), Item("text")
    kinds = {"thinking": thought, "text": answer, "tool_call": CALL, "user": Item("user")}
    joined = {(a, b) for a, x in kinds.items() for b, y in kinds.items() if same_message(x, y)}
    assert joined == {
        ("thinking", "text"),
        ("thinking", "tool_call"),
        ("text", "tool_call"),
        ("tool_call", "tool_call"),
    }
    assert same_message(replace(answer, open=True), answer)
    assert same_message(replace(thought, partial=True), thought)
    assert not same_message(replace(CALL, open=True), answer)
