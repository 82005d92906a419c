# SPDX-License-Identifier: Apache-2.0
"""What ChatFormat makes of real chat templates.

Each template renders conversations with `transformers` (the oracle), in every message dialect that
its authors use. A conversation is *accepted* if some rendering holds every content once, in order.
It is *equal* if the frames joined with the contents are that rendering.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import jinja2
from transformers.utils import chat_template_utils

from freetoken_agent.chat_templates.items import Item, Options
from freetoken_agent.errors import TemplateUnsupported
from freetoken_agent.template import ChatFormat
from freetoken_agent.tokenizers.byte_tokenizer import CHATML_CONTROLS, ByteTokenizer

NOW_S = 1_800_000_000.0
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)
SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}

_SCHEMA = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up in the dictionary.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word to look up."}},
            "required": ["word"],
        },
    },
}
SYSTEM = Item("system", "Be brief and kind.")
TOOLS = Item("tools", json.dumps([_SCHEMA]))
FIRST, SECOND = Item("user", "The first question."), Item("user", "Another question.")
THOUGHT = Item("thinking", "Consider it first.", open=True)
AFTERTHOUGHT = Item("thinking", "Weigh the outcome.", open=True)
ANSWER, LAST = Item("text", "This is an answer."), Item("text", "Here is the conclusion.")
PREFACE = Item("text", "Let me look.", open=True)


def _call(word: str, call_id: str) -> Item:
    return Item("tool_call", name="look_up", arguments={"word": word}, call_id=call_id)


def _result(text: str, call_id: str) -> Item:
    return Item("tool_result", text, name="look_up", call_id=call_id)


CALL, OTHER_CALL = _call("heron", "aaaaaaaa1"), _call("egret", "aaaaaaaa2")
RESULT, OTHER_RESULT = _result("A grey bird.", "aaaaaaaa1"), _result("A white bird.", "aaaaaaaa2")

CONVERSATIONS: dict[str, list[Item]] = {
    "a question": [FIRST],
    "an answer, no final user": [FIRST, ANSWER],
    "system, two turns": [SYSTEM, FIRST, ANSWER, SECOND],
    "a thought in history": [FIRST, THOUGHT, ANSWER, SECOND],
    "a thought at the end": [SYSTEM, FIRST, THOUGHT, ANSWER],
    "system and tools": [SYSTEM, TOOLS, FIRST],
    "tools, one call": [TOOLS, FIRST, CALL, RESULT],
    "text before a call, then an answer": [SYSTEM, TOOLS, FIRST, PREFACE, CALL, RESULT, LAST],
    "thoughts around a call": [TOOLS, FIRST, THOUGHT, CALL, RESULT, AFTERTHOUGHT, LAST],
    "parallel calls, two results": [TOOLS, FIRST, CALL, OTHER_CALL, RESULT, OTHER_RESULT, LAST],
    "calls, then a new turn": [
        SYSTEM, TOOLS, FIRST, CALL, RESULT, ANSWER, SECOND, OTHER_CALL, OTHER_RESULT, LAST,
    ],
    "a system text in the middle": [
        SYSTEM, FIRST, ANSWER, Item("system", "Now speak Latin."), SECOND,
    ],
}  # fmt: skip

# What a template makes of calls alone. Some show no tools, or show a tool's text twice: calls are
# tried without a list of tools, too.
_ONE_CALL = [FIRST, CALL, RESULT]
_TWO_CALLS = [FIRST, CALL, OTHER_CALL, RESULT, OTHER_RESULT]
CALLS: dict[str, list[Item]] = {
    "one call": _ONE_CALL,
    "one, with tools": [TOOLS, *_ONE_CALL],
    "two calls": _TWO_CALLS,
    "two, with tools": [TOOLS, *_TWO_CALLS],
}


@dataclass(frozen=True)
class Outcome:
    """One conversation: what the oracle made of it, and whether ours equals it. `lost`: what the
    best of its renderings does not hold once, in order."""

    accepted: bool
    refused: str | None  # the oracle's own words
    listed: bool  # equal from one layout of the list
    stepwise: bool  # equal from one-by-one appends
    reason: str = ""  # of ours, where it refused
    lost: str = ""


@dataclass(frozen=True)
class Row:
    """One template."""

    name: str
    learned: ChatFormat | None
    error: str
    outcomes: dict[str, Outcome]
    calls: dict[str, Outcome]


def native_messages(
    items: Sequence[Item], field: str, empty: str | None, as_string: bool
) -> list[Any]:
    """The messages of a conversation, as clients of `transformers` write them."""
    messages: list[dict[str, Any]] = []
    previous: Item | None = None
    for item in items:
        if item.kind in ("thinking", "text", "tool_call"):
            if previous is None or previous.kind not in ("thinking", "text", "tool_call"):
                messages.append({"role": "assistant", "content": ""})
            message = messages[-1]
            if item.kind == "thinking":
                message[field] = item.text
            elif item.kind == "text":
                message["content"] = item.text
            else:
                message["content"] = message["content"] or empty
                arguments: Any = item.arguments
                if as_string:
                    arguments = json.dumps(arguments)
                function = {"name": item.name, "arguments": arguments}
                message.setdefault("tool_calls", []).append(
                    {"type": "function", "id": item.call_id, "function": function}
                )
        elif item.kind == "tool_result":
            messages.append(
                {
                    "role": "tool",
                    "content": item.text,
                    "tool_call_id": item.call_id,
                    "name": item.name,
                }
            )
        elif item.kind != "tools":
            messages.append({"role": item.kind, "content": item.text})
        previous = item
    return messages


class _Frozen(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> "_Frozen":
        return cls.fromtimestamp(NOW_S, UTC)


def oracle(source: str, items: Sequence[Item], generation: bool) -> Iterator[str | Exception]:
    """Renderings by `transformers` in each dialect of messages."""
    tools = [_SCHEMA] if any(item.kind == "tools" for item in items) else None
    absent: tuple[list[Any] | None, ...] = (None, [])
    extras: tuple[dict[str, Any], ...] = ({}, {"thinking": True})
    for field, empty, as_string, no_tools, extra in itertools.product(
        ("reasoning_content", "thought"), ("", None), (False, True), absent, extras
    ):
        try:
            with mock.patch.object(chat_template_utils, "datetime", _Frozen):
                rendered, _ = chat_template_utils.render_jinja_template(
                    [native_messages(items, field, empty, as_string)],
                    tools=tools or no_tools,
                    chat_template=source,
                    add_generation_prompt=generation,
                    **SPECIAL,
                    **extra,
                )
        except _REFUSALS as error:
            yield error
        else:
            yield rendered[0]


def contents(items: Sequence[Item]) -> list[str]:
    """What a rendering must hold once, in order."""
    found = []
    for item in items:
        if item.kind == "tool_call":
            found += [str(value) for value in (item.arguments or {}).values()]
        elif item.kind == "tools":
            found.append("Look a word up in the dictionary.")
        else:
            found.append(item.text)
    return found


def holds(rendered: str, items: Sequence[Item]) -> bool:
    """Whether every content is there once, in order."""
    position = 0
    for content in contents(items):
        at = rendered.find(content)
        if at < position or rendered.count(content) != 1:
            return False
        position = at + len(content)
    return True


def lost(rendered: str, items: Sequence[Item]) -> str:
    """What a rendering drops or repeats, in words; a second one only where the first is there."""
    names = {"tool_call": "call", "tool_result": "result"}
    found: dict[str, list[str]] = {"drops": [], "repeats": []}
    seen: set[str] = set()
    for item in items:
        name = names.get(item.kind, item.kind)
        times = rendered.count(contents([item])[0])
        if times != 1:
            lacking = found["repeats" if times else "drops"]
            if f"the {name}" not in lacking:
                lacking.append(f"the second {name}" if name in seen else f"the {name}")
        seen.add(name)
    return "; ".join(f"{verb} {' and '.join(what)}" for verb, what in found.items() if what)


def orders(items: Sequence[Item]) -> list[list[Item]]:
    """The conversation with its preamble in either order."""
    if [item.kind for item in items[:2]] == ["system", "tools"]:
        return [list(items), [items[1], items[0], *items[2:]]]
    return [list(items)]


def examine(source: str, learned: ChatFormat | None, items: Sequence[Item]) -> Outcome:
    """One conversation of one template."""
    generation = items[-1].kind in ("user", "tool_result")
    renderings = list(oracle(source, items, generation))
    accepted: list[tuple[str, list[Item]]] = []
    for order in orders(items):
        for rendered in renderings:
            if isinstance(rendered, str) and holds(rendered, order):
                accepted.append((rendered, order))
    errors = [str(error) for error in renderings if isinstance(error, Exception)]
    refused = errors[0] if len(errors) == len(renderings) else None
    losses = [lost(r, items) for r in renderings if isinstance(r, str) and not accepted]
    fewest = min(losses, key=len, default="")
    if learned is None:
        return Outcome(bool(accepted), refused, False, False, "not learned", fewest)
    wanted = {rendered for rendered, _ in accepted}
    order = accepted[0][1] if accepted else in_order(learned, items)
    options = Options(now_s=NOW_S)
    try:
        listed = "".join(p.gap_text + p.text for p in learned.layout(order, options=options))
        if generation:
            listed += learned.opener(order, options=options).text
        reason = ""
    except TemplateUnsupported as error:
        listed, reason = "", str(error)
    try:
        stepwise = one_by_one(learned, order, options)
        if generation:
            stepwise += learned.opener(order, options=options).text
    except TemplateUnsupported:
        stepwise = ""

    def equal(text: str) -> bool:
        if generation:
            return text in wanted
        return bool(text) and any(
            rendered.startswith(text) and holds(text, order) for rendered in wanted
        )

    return Outcome(bool(accepted), refused, equal(listed), equal(stepwise), reason, fewest)


def in_order(learned: ChatFormat, items: Sequence[Item]) -> list[Item]:
    """The conversation with its preamble as the format wants it."""
    for order in orders(items):
        kinds = [item.kind for item in order[:2]]
        if kinds == list(learned.preamble_order):
            return order
    return list(items)


def one_by_one(learned: ChatFormat, items: Sequence[Item], options: Options) -> str:
    """The preamble in one run, then each content appended to what stands before it."""
    preamble = [item for item in items if item.kind in ("system", "tools")][:2]
    preamble = list(items[: len(preamble)]) if list(items[: len(preamble)]) == preamble else []
    text = "".join(p.gap_text + p.text for p in learned.layout(preamble, options=options))
    for index in range(len(preamble), len(items)):
        piece = learned.layout(items[: index + 1], start=index, options=options)[0]
        text += piece.gap_text + piece.text
    return text


def study(path: Path) -> Row:
    """One template."""
    source = path.read_text(encoding="utf-8")
    tokenizer = ByteTokenizer((*CHATML_CONTROLS, *SPECIAL.values()), special_tokens=SPECIAL)
    learned, error = None, ""
    try:
        learned = ChatFormat.learn(source, tokenizer)
    except TemplateUnsupported as refusal:
        error = str(refusal)
    outcomes = {title: examine(source, learned, items) for title, items in CONVERSATIONS.items()}
    calls = {title: examine(source, learned, items) for title, items in CALLS.items()}
    return Row(path.stem, learned, error, outcomes, calls)


def study_all(folder: Path) -> list[Row]:
    """Every template of a folder, by name."""
    return [study(path) for path in sorted(folder.glob("*.jinja"), key=lambda p: p.name.lower())]
