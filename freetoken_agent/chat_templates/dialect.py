# SPDX-License-Identifier: Apache-2.0
"""From items to the messages that a template understands.

A `Dialect` says in which field a template reads a thought, whether it wants arguments as an object
or a string, and which kinds it cannot express at all. Those are inlined (rule 15 of the API): a
thought as `<think>…</think>`, a call as its `CallSpelling` says, a result as a user turn
`<tool_response>…</tool_response>`, tools as a block in the system text, a system text at the head
of the first user turn.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ..call_formats.call_spelling import CallSpelling
from ..call_formats.named_formats import HERMES
from ..errors import TemplateUnsupported
from .items import ASSISTANT_KINDS, Item, same_message
from .sentinels import mask_tools, sentinel

# Inlined tags are sentinels while a template sees them: some templates look for `</think>` in a
# message and cut it there. `write_tags` puts the literals back.
TAGS = ("<think>", "</think>", "<tool_response>", "</tool_response>")
_THINK, _THINK_END, _RESULT, _RESULT_END = (sentinel("tag", number) for number in range(len(TAGS)))
THINK_OPEN, THINK_CLOSE = f"{_THINK}\n", f"\n{_THINK_END}\n\n"
RESULT_OPEN, RESULT_CLOSE = f"{_RESULT}\n", f"\n{_RESULT_END}"
TOOLS_OPEN = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
_HERMES_CLOSE = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


def tools_close(spelling: CallSpelling) -> str:
    """What follows the schemas of a block of tools."""
    if spelling is HERMES:
        return _HERMES_CLOSE
    return (
        "\n</tools>\n\nFor each function call, return the function's name and its arguments in "
        f"this form:\n{spelling.sample}"
    )


def write_tags(text: str) -> str:
    """A rendering, or a constant of this module, with its inlined tags as literals."""
    for number, literal in enumerate(TAGS):
        text = text.replace(sentinel("tag", number), literal)
    return text


@dataclass(frozen=True)
class Dialect:
    """How one template wants its messages. `calls`: whether as calls; else they are inlined as
    `spelling` says. `results`: whether as messages of tools. `thinking`: the field of a thought,
    None to inline it. `variables` are always passed (some templates render earlier thoughts only if
    asked)."""

    system: bool = True
    tools: bool = True
    calls: bool = True
    results: bool = True
    spelling: CallSpelling = HERMES
    thinking: str | None = "reasoning_content"
    arguments: Literal["object", "string"] = "object"
    empty_content: str | None = ""  # of a message that holds only calls
    no_tools: tuple[()] | None = None
    variables: Mapping[str, object] = field(default_factory=dict)


class Fill(Protocol):
    """What stands in the messages for each item: a sentinel or the real thing."""

    def content(self, index: int) -> str: ...

    def name(self, index: int) -> str: ...

    def call_id(self, index: int) -> str: ...

    def arguments(self, index: int) -> Mapping[str, object]: ...

    def tools(self, index: int) -> list[dict[str, Any]]: ...


class SentinelFill:
    """Every content, name, id and argument is a sentinel numbered by its item."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = items
        self.strings: list[str] = []  # originals of the masked strings of tool schemas

    def content(self, index: int) -> str:
        return sentinel("content", index)

    def name(self, index: int) -> str:
        return sentinel("name", index)

    def call_id(self, index: int) -> str:
        return sentinel("id", index)

    def arguments(self, index: int) -> Mapping[str, object]:
        return {sentinel("key", index): sentinel("value", index)}

    def tools(self, index: int) -> list[dict[str, Any]]:
        masked, self.strings = mask_tools(parse_tools(self._items[index].text))
        return masked


class RealFill:
    """The items as they are."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = items

    def content(self, index: int) -> str:
        return self._items[index].text

    def name(self, index: int) -> str:
        return self._items[index].name or ""

    def call_id(self, index: int) -> str:
        return self._items[index].call_id or ""

    def arguments(self, index: int) -> Mapping[str, object]:
        return self._items[index].arguments or {}

    def tools(self, index: int) -> list[dict[str, Any]]:
        return parse_tools(self._items[index].text)


def parse_tools(text: str) -> list[dict[str, Any]]:
    """The schemas of a tools item. TemplateUnsupported if it is not a JSON list of objects."""
    try:
        tools = json.loads(text or "[]")
    except ValueError as error:
        raise TemplateUnsupported("tools are not JSON", value=str(error)) from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise TemplateUnsupported("tools must be a JSON list of schemas", value=text[:80])
    return tools


@dataclass(frozen=True)
class Request:
    """Arguments of a rendering."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


def answered_calls(items: Sequence[Item]) -> dict[int, int]:
    """Index of each result -> index of the call it answers (its own where the call is unknown)."""
    calls: dict[str | None, int] = {}
    answers: dict[int, int] = {}
    for index, item in enumerate(items):
        if item.kind == "tool_call":
            calls[item.call_id] = index
        elif item.kind == "tool_result":
            answers[index] = calls.get(item.call_id, index)
    return answers


class MessageBuilder:
    """Groups items into messages. One use: build once, then throw away."""

    def __init__(self, dialect: Dialect, items: Sequence[Item], fill: Fill) -> None:
        self._dialect = dialect
        self._items = items
        self._fill = fill
        self._answers = answered_calls(items)
        self._messages: list[dict[str, Any]] = []
        self._tools: list[dict[str, Any]] | None = (
            None if dialect.no_tools is None else list(dialect.no_tools)
        )
        self._head = ""  # text that waits for the first user turn
        self._assistant: dict[str, Any] | None = None
        self._previous: Item | None = None
        self._calls = 0  # inlined ones of the message

    def build(self) -> Request:
        for index, item in enumerate(self._items):
            if item.kind in ASSISTANT_KINDS:
                self._add_assistant(index, item)
            else:
                self._assistant = None
                getattr(self, f"_add_{item.kind}")(index)
            self._previous = item
        if self._head:
            self._messages.append({"role": "user", "content": self._head})
        return Request(self._messages, self._tools)

    def _add_system(self, index: int) -> None:
        text = self._fill.content(index)
        if self._dialect.system:
            self._messages.append({"role": "system", "content": text})
        elif self._messages:
            raise TemplateUnsupported(
                "the template has no system role, so a later system text has no place",
                remedy="set the system text at the start, or send it as a user message",
            )
        else:
            self._head += text

    def _add_tools(self, index: int) -> None:
        if not parse_tools(self._items[index].text):
            return
        if self._dialect.tools:
            self._tools = self._fill.tools(index)
            return
        block = TOOLS_OPEN + self._fill.content(index) + tools_close(self._dialect.spelling)
        if not self._dialect.system:
            self._head += ("\n\n" if self._head else "") + block
        elif self._messages and self._messages[-1]["role"] == "system":
            self._messages[-1]["content"] += "\n\n" + block
        else:
            self._messages.append({"role": "system", "content": block})

    def _add_user(self, index: int) -> None:
        self._add_user_text(self._fill.content(index))

    def _add_user_text(self, text: str) -> None:
        if self._head:
            text = self._head + "\n\n" + text
            self._head = ""
        self._messages.append({"role": "user", "content": text})

    def _add_tool_result(self, index: int) -> None:
        text = self._fill.content(index)
        if self._dialect.results:
            call = self._answers[index]
            self._messages.append(
                {
                    "role": "tool",
                    "content": text,
                    "tool_call_id": self._fill.call_id(call),
                    "name": self._fill.name(call),
                }
            )
            return
        text = RESULT_OPEN + text + RESULT_CLOSE
        if self._previous is not None and self._previous.kind == "tool_result":
            self._messages[-1]["content"] += "\n" + text
        else:
            self._add_user_text(text)

    def _add_assistant(self, index: int, item: Item) -> None:
        goes_on = self._previous is not None and same_message(self._previous, item)
        if self._assistant is None or not goes_on:
            self._assistant = {"role": "assistant", "content": ""}
            self._calls = 0
            self._messages.append(self._assistant)
        message = self._assistant
        if item.kind == "thinking":
            self._add_thinking(message, self._fill.content(index))
        elif item.kind == "text":
            message["content"] = (message["content"] or "") + self._fill.content(index)
        elif self._dialect.calls:
            self._add_call(message, index)
        else:
            self._inline_call(message, index)

    def _inline_call(self, message: dict[str, Any], index: int) -> None:
        spelling = self._dialect.spelling
        call = spelling.written(
            self._fill.name(index),
            self._fill.call_id(index),
            self._calls,
            self._fill.arguments(index),
        )
        before, end = message["content"], spelling.masked(spelling.end)
        if self._calls and spelling.between is None:
            raise TemplateUnsupported(
                "the call format has no parallel calls",
                value=spelling.name,
                remedy="append the result of the first call before the second",
            )
        if self._calls:
            before = before.removesuffix(end) + spelling.masked(spelling.between or "")
        elif before and not before.endswith("\n"):
            before += spelling.masked(spelling.after_text) + spelling.masked(spelling.begin)
        else:
            before += spelling.masked(spelling.begin)
        message["content"] = before + call + end
        self._calls += 1

    def _add_thinking(self, message: dict[str, Any], text: str) -> None:
        field_name = self._dialect.thinking
        if field_name is not None:
            message[field_name] = message.get(field_name, "") + text
            return
        if message["content"].endswith(THINK_CLOSE):
            message["content"] = message["content"].removesuffix(THINK_CLOSE) + text + THINK_CLOSE
        else:
            message["content"] += THINK_OPEN + text + THINK_CLOSE

    def _add_call(self, message: dict[str, Any], index: int) -> None:
        arguments: object = self._fill.arguments(index)
        if self._dialect.arguments == "string":
            arguments = json.dumps(arguments, ensure_ascii=False)
        if not message["content"]:
            message["content"] = self._dialect.empty_content
        message.setdefault("tool_calls", []).append(
            {
                "type": "function",
                "id": self._fill.call_id(index),
                "function": {"name": self._fill.name(index), "arguments": arguments},
            }
        )


def build_messages(dialect: Dialect, items: Sequence[Item], fill: Fill) -> Request:
    """The messages and tools of a path. TemplateUnsupported where the dialect has no place."""
    return MessageBuilder(dialect, items, fill).build()
