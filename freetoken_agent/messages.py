# SPDX-License-Identifier: Apache-2.0
"""Message lists of the OpenAI and Anthropic APIs <-> items. Pure functions on plain records.

    openai      {"role": system|developer|user|assistant|tool, "content": str | parts | None,
                 "reasoning_content": str, "tool_call_id": str,
                 "tool_calls": [{"id": str, "function": {"name": str, "arguments": JSON}}]}
    anthropic   {"role": system|user|assistant, "content": str | blocks}, blocks: text, thinking,
                 tool_use {id, name, input}, tool_result {tool_use_id, content, is_error}

Text parts of one message are one text. An assistant message is: thought, text, calls. Anthropic's
system text is a parameter beside the list; here it may also lead the list as a system message, and
is emitted so.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from .chat_templates.items import ASSISTANT_KINDS, Item, same_message
from .errors import InvalidEdit, InvalidMessages, UnsupportedContent
from .tooling import json_values

MessageFormat = Literal["openai", "anthropic"]
Message = dict[str, Any]

_REASONING = ("reasoning_content", "reasoning", "thinking")


def parse_messages(messages: Sequence[Mapping[str, Any]], format: MessageFormat) -> list[Item]:
    """The contents of a list, in path order: results in the order of their calls. `open` is set on
    every item that another one of the same message follows. UnsupportedContent for what is not
    text; InvalidMessages, with the message's index, for what the format does not allow."""
    reader = _reader(format)
    if isinstance(messages, str) or not isinstance(messages, Iterable):
        raise InvalidMessages("messages are a list of objects", value=type(messages).__name__)
    items: list[Item] = []
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise _invalid(index, "a message must be an object", type(message).__name__)
        for item in _joined(reader(index, message)):
            if item.kind == "tool_call" and item.call_id is not None:
                names[item.call_id] = item.name or ""
            elif item.kind == "tool_result" and item.name is None:
                item = replace(item, name=names.get(item.call_id or ""))
            items.append(item)
    return _in_call_order(items)


def emit_messages(items: Sequence[Item], format: MessageFormat) -> list[Message]:
    """The message list of a path. Tools are not messages; they are left out."""
    if format == "openai":
        return list(_emit_openai(items))
    _reader(format)
    return list(_emit_anthropic(items))


def _reader(format: str) -> Callable[[int, Mapping[str, Any]], Iterator[Item]]:
    readers = {"openai": _read_openai, "anthropic": _read_anthropic}
    if not isinstance(format, str) or format not in readers:
        raise InvalidMessages(
            "unknown message format", value=format, limit=" or ".join(sorted(readers))
        )
    return readers[format]


def _invalid(
    index: int,
    what: str,
    value: object = None,
    *,
    limit: str | None = None,
    remedy: str | None = None,
) -> InvalidMessages:
    return InvalidMessages(f"message {index}: {what}", value=value, limit=limit, remedy=remedy)


def _joined(items: Iterable[Item]) -> Iterator[Item]:
    """One message's items; each assistant item but the last says that the turn goes on."""
    previous: Item | None = None
    for item in items:
        if previous is not None:
            goes_on = previous.kind in ASSISTANT_KINDS and item.kind in ASSISTANT_KINDS
            yield replace(previous, open=True) if goes_on else previous
        previous = item
    if previous is not None:
        yield previous


def _in_call_order(items: list[Item]) -> list[Item]:
    """Runs of results, sorted by the order of the calls they answer: the last ones before them,
    as ids may come again in later turns."""
    order: dict[str | None, int] = {}
    start = 0
    while start < len(items):
        if items[start].kind == "tool_call":
            order[items[start].call_id] = start
        end = start
        while end < len(items) and items[end].kind == "tool_result":
            end += 1
        items[start:end] = sorted(items[start:end], key=lambda i: order.get(i.call_id, len(items)))
        start = max(end, start + 1)
    return items


def text_of(content: object, index: int = 0) -> str:
    """The text of a string or of text parts; None is ''. UnsupportedContent for other parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise _invalid(index, "content must be a string or a list of parts", content)
    return "".join(_text_part(part, index) for part in content)


def _text_part(part: object, index: int) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind not in ("text", "input_text", "output_text"):
        raise UnsupportedContent(
            f"message {index}: a content part is not text",
            value=kind,
            limit="text",
            remedy="leave the part out, or describe it in words",
        )
    text = part["text"] if isinstance(part, Mapping) and "text" in part else None
    if not isinstance(text, str):
        raise _invalid(index, "a text part has no text", text)
    return text


# OpenAI


def _read_openai(index: int, message: Mapping[str, Any]) -> Iterator[Item]:
    role = message.get("role")
    text = text_of(message.get("content"), index)
    if role in ("system", "developer"):
        yield Item("system", text)
    elif role == "user":
        yield Item("user", text)
    elif role == "tool":
        call_id = message.get("tool_call_id")
        if not isinstance(call_id, str):
            raise _invalid(index, "a tool message needs tool_call_id", call_id)
        yield Item("tool_result", text, name=message.get("name"), call_id=call_id)
    elif role == "assistant":
        thought = next((message[key] for key in _REASONING if message.get(key)), None)
        if thought is not None:
            yield Item("thinking", text_of(thought, index))
        if message.get("function_call"):
            raise _invalid(index, "function_call has no id: send it as tool_calls")
        calls = message.get("tool_calls") or []
        if not isinstance(calls, Sequence):
            raise _invalid(index, "tool_calls must be a list", calls)
        if text or not (calls or thought):
            yield Item("text", text)
        for call in calls:
            yield _openai_call(index, call)
    else:
        raise _invalid(index, "unknown role", role)


def _openai_call(index: int, call: object) -> Item:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise _invalid(index, "a tool call needs a function", call)
    return _call(index, call.get("id"), function.get("name"), function.get("arguments"))


def _call(index: int, call_id: object, name: object, arguments: object) -> Item:
    if not isinstance(call_id, str) or not call_id:
        raise _invalid(index, "a tool call needs an id", call_id)
    if not isinstance(name, str) or not name:
        raise _invalid(index, "a tool call needs a name", name)
    if isinstance(arguments, str):
        try:
            arguments = json_values.read(arguments or "{}")
        except ValueError as error:
            raise _invalid(index, f"arguments of {call_id} are not JSON: {error}") from error
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise _invalid(index, f"arguments of {call_id} must be an object", arguments)
    try:
        plain = json_values.plain(arguments)
    except InvalidEdit as error:
        raise _invalid(index, f"arguments of {call_id} are not JSON: {error}") from error
    return Item("tool_call", name=name, arguments=plain, call_id=call_id)


def _emit_openai(items: Sequence[Item]) -> Iterator[Message]:
    for group in turn_groups(items):
        first = group[0]
        if first.kind in ASSISTANT_KINDS:
            yield _openai_assistant(group)
        elif first.kind == "tool_result":
            for item in group:
                yield {"role": "tool", "tool_call_id": item.call_id, "content": item.text}
        elif first.kind != "tools":
            yield {"role": first.kind, "content": first.text}


def _openai_assistant(group: Sequence[Item]) -> Message:
    texts = [item.text for item in group if item.kind == "text"]
    thoughts = [item.text for item in group if item.kind == "thinking"]
    calls = [
        {
            "id": item.call_id,
            "type": "function",
            "function": {
                "name": item.name,
                "arguments": json.dumps(item.arguments or {}, ensure_ascii=False),
            },
        }
        for item in group
        if item.kind == "tool_call"
    ]
    text = "".join(texts)
    message: Message = {"role": "assistant", "content": text if text or not calls else None}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def turn_groups(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Runs of items that are emitted together: the assistant's contents of one message, and
    adjacent results. Tools split nothing."""
    group: list[Item] = []
    for item in items:
        results = bool(group) and group[-1].kind == item.kind == "tool_result"
        if group and not results and not same_message(group[-1], item):
            yield group
            group = []
        group.append(item)
    if group:
        yield group


# Anthropic

_BLOCKS = {"thinking": "thinking", "text": "text", "tool_call": "tool_use"}
_LATER = {"thinking": ("text", "tool_call"), "text": ("tool_call",)}  # what may not precede
_REMEDIES = {
    "text": "put the thought first, or begin another assistant message with it",
    "tool_call": "put it before the calls, or into a message behind their results",
}


def _read_anthropic(index: int, message: Mapping[str, Any]) -> Iterator[Item]:
    role, content = message.get("role"), message.get("content")
    if role == "system":
        yield Item("system", text_of(content, index))
        return
    if role not in ("user", "assistant"):
        raise _invalid(index, "unknown role", role)
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, Sequence):
        raise _invalid(index, "content must be a string or a list of blocks", content)
    if not blocks:
        yield Item("text" if role == "assistant" else "user")
        return
    yield from _blocks(index, role, blocks)


def _blocks(index: int, role: str, blocks: Sequence[Any]) -> Iterator[Item]:
    """Adjacent text blocks are one text; so are adjacent thoughts. InvalidMessages unless the kinds
    come in the order that templates have for them: thought, text, calls."""
    pending: Item | None = None
    seen: dict[str, None] = {}  # in order
    for block in blocks:
        item = _block(index, role, block)
        if item.kind == "tool_result" and "user" in seen:
            raise _invalid(index, "tool results must come before text", remedy="put the text last")
        for later in _LATER.get(item.kind, ()):
            if later in seen:
                raise _invalid(
                    index,
                    f"a {item.kind} block after a {_BLOCKS[later]} block in one message",
                    value=[_BLOCKS[kind] for kind in (*seen, item.kind)],
                    limit="thinking, then text, then tool_use",
                    remedy=_REMEDIES[later],
                )
        seen[item.kind] = None
        if pending is not None and pending.kind == item.kind and item.call_id is None:
            pending = replace(pending, text=pending.text + item.text)
            continue
        if pending is not None:
            yield pending
        pending = item
    if pending is not None:
        yield pending


def _block(index: int, role: str, block: object) -> Item:
    if not isinstance(block, Mapping):
        raise _invalid(index, "a block must be an object", type(block).__name__)
    kind = block.get("type")
    if kind == "text":
        return Item("text" if role == "assistant" else "user", _text_part(block, index))
    if role == "assistant" and kind == "thinking":
        return Item("thinking", text_of(block.get("thinking"), index))
    if role == "assistant" and kind == "tool_use":
        return _call(index, block.get("id"), block.get("name"), block.get("input"))
    if role == "user" and kind == "tool_result":
        call_id = block.get("tool_use_id")
        if not isinstance(call_id, str):
            raise _invalid(index, "a tool_result needs tool_use_id", call_id)
        text = text_of(block.get("content"), index)
        return Item("tool_result", text, call_id=call_id, error=bool(block.get("is_error")))
    raise UnsupportedContent(
        f"message {index}: a block of the {role} is not supported",
        value=kind,
        limit="text, thinking and tool_use (assistant), text and tool_result (user)",
        remedy="leave the block out, or describe it in words",
    )


def _emit_anthropic(items: Sequence[Item]) -> Iterator[Message]:
    results: list[Message] = []
    for group in turn_groups(items):
        first = group[0]
        if first.kind == "tools":
            continue
        if first.kind == "tool_result":
            results = [_anthropic_result(item) for item in group]
            continue
        if first.kind == "user" and results:
            yield {"role": "user", "content": [*results, {"type": "text", "text": first.text}]}
        else:
            if results:
                yield {"role": "user", "content": results}
            yield _anthropic_message(group)
        results = []
    if results:
        yield {"role": "user", "content": results}


def _anthropic_result(item: Item) -> Message:
    block: Message = {
        "type": "tool_result",
        "tool_use_id": item.call_id,
        "content": [{"type": "text", "text": item.text}],
    }
    if item.error:
        block["is_error"] = True
    return block


def _anthropic_message(group: Sequence[Item]) -> Message:
    first = group[0]
    if first.kind not in ASSISTANT_KINDS:
        return {"role": first.kind, "content": [{"type": "text", "text": first.text}]}
    blocks: list[Message] = []
    for item in group:
        if item.kind == "tool_call":
            blocks.append(
                {
                    "type": "tool_use",
                    "id": item.call_id,
                    "name": item.name,
                    "input": json_values.thawed(item.arguments or {}),
                }
            )
        elif item.kind == "thinking":
            blocks.append({"type": "thinking", "thinking": item.text})
        elif item.text or len(group) == 1:
            blocks.append({"type": "text", "text": item.text})
    return {"role": "assistant", "content": blocks}
