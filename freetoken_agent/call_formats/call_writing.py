# SPDX-License-Identifier: Apache-2.0
"""How a template writes calls, as data (`call_spelling`), learned from renderings.

What comes before the first call, between two and after the last belongs to gaps: it is here too,
because the model has to write it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..chat_templates.dialect import SentinelFill
from ..chat_templates.frames import Grammar
from ..chat_templates.items import DEFAULT_OPTIONS, Item
from ..chat_templates.markup import Gaps, Markup, beyond
from ..chat_templates.probes import CALL, OTHER_CALL, USER
from ..chat_templates.sentinels import PATTERN, sentinel
from ..errors import TemplateUnsupported
from .call_spelling import (
    Arguments,
    JsonArguments,
    Literally,
    Part,
    PythonArguments,
    QuotedArguments,
    TaggedArguments,
    ValueType,
)


@dataclass(frozen=True)
class CallWriting:
    """`unit`: a call with arguments; `bare`: one without any. `at_start`, `after_text` and
    `after_thought`: what the model writes before the first call of a turn that begins with it, or
    behind a text or a thought (closing it); None where the template has no such turn. `between`:
    before a further call, None where only one fits. `end`: behind the last one."""

    unit: tuple[Part, ...]
    bare: tuple[Part, ...]
    arguments: Arguments
    at_start: str
    after_text: str | None
    after_thought: str | None
    between: str | None
    end: str


def learn_call_writing(grammar: Grammar, markup: Markup, gaps: Gaps) -> CallWriting | None:
    """None where calls are not shown whole, or in a way that cannot be told from two of them."""
    if markup.calls is None or gaps.to_call is None:
        return None
    try:
        full = _unit(grammar, {_KEYS[0]: _VALUES[0], _KEYS[1]: _VALUES[1]})
        bare = _unit(grammar, {})
        other = _second(grammar)
    except TemplateUnsupported:
        return None
    if full is None:
        return None
    found = _json(full) or _tagged(grammar, full) or _quoted(full) or _python(full)
    if found is None:
        return None
    arguments, start, stop = found
    head, tail = full[:start], full[stop:]
    unit = (*_parts(head, other), "arguments", *_parts(tail, other))
    return CallWriting(
        unit=unit,
        bare=unit if bare is None or not isinstance(arguments, _BARE) else _parts(bare, other),
        arguments=arguments,
        at_start=_at_start(gaps, gaps.to_call),
        after_text=gaps.text_to_call,
        after_thought=gaps.thinking_to_call or None,
        between=gaps.call_to_call,
        end=_end(gaps, markup),
    )


_BARE = TaggedArguments, QuotedArguments  # no arguments may be another text
_KEYS = sentinel("key", 1), sentinel("key", 2)
_VALUES = sentinel("value", 1), sentinel("value", 2)
_TYPED: Mapping[ValueType, tuple[object, str]] = {
    "string": (_VALUES[0], re.escape(_VALUES[0])),
    "integer": (5551, "5551"),
    "boolean": (True, "(?i:true)"),
    "null": (None, "(?i:null|none)"),
    "array": ([_VALUES[0]], r"\["),
    "object": ({_KEYS[1]: _VALUES[0]}, r"\{"),
}


@dataclass
class _Filled(SentinelFill):
    """Calls with given arguments."""

    items: Sequence[Item]
    given: Mapping[str, object]
    strings: list[str] = field(default_factory=list)

    def arguments(self, index: int) -> Mapping[str, object]:
        return self.given


def _unit(grammar: Grammar, arguments: Mapping[str, object]) -> str | None:
    """The first call of a turn, with these arguments. What surrounds it does not depend on them."""
    items = [USER, CALL]
    rendering = grammar.skeleton(items, DEFAULT_OPTIONS)
    extent = rendering.extents[1]
    if extent is None:
        return None
    text = grammar.text(items, _Filled(items, arguments), DEFAULT_OPTIONS)
    after = len(rendering.text) - extent[1]
    return text[extent[0] : len(text) - after]


def _second(grammar: Grammar) -> str | None:
    """A call that follows another one."""
    try:
        rendering = grammar.skeleton([USER, CALL, OTHER_CALL], DEFAULT_OPTIONS)
    except TemplateUnsupported:
        return None
    extent = rendering.extents[2]
    return None if extent is None else rendering.text[extent[0] : extent[1]]


def _parts(text: str, other: str | None) -> tuple[Part, ...]:
    """Literals and slots. A number is an index where the call after it has another one there."""
    numbers = set() if other is None else _changed_numbers(text, other)
    parts: list[Part] = []
    position = 0
    for match in PATTERN.finditer(text):
        parts += _indexed(text[position : match.start()], numbers)
        parts.append("name" if match[1] == "n" else "id")
        position = match.end()
    return (*parts, *_indexed(text[position:], numbers))


def _changed_numbers(text: str, other: str) -> set[str]:
    """Numbers of the text, with the characters before them, that the other text lacks."""
    found = set(re.findall(r"\D\d+", PATTERN.sub("\0", text)))
    return found - set(re.findall(r"\D\d+", PATTERN.sub("\0", other)))


def _indexed(literal: str, numbers: set[str]) -> list[Part]:
    parts: list[Part] = []
    position = 0
    for match in re.finditer(r"(?<=(\D))\d+", literal):
        if match[1] + match[0] in numbers:
            parts += [Literally(literal[position : match.start()]), "index"]
            position = match.end()
    return [*parts, Literally(literal[position:])] if literal[position:] else parts


def _json(unit: str) -> tuple[JsonArguments, int, int] | None:
    start = unit.rfind("{", 0, unit.index(_KEYS[0]))
    stop = unit.find("}", unit.index(_VALUES[1])) + 1
    try:
        value = json.loads(unit[start:stop]) if start >= 0 else None
    except ValueError:
        return None
    if value != {_KEYS[0]: _VALUES[0], _KEYS[1]: _VALUES[1]}:
        return None
    if unit[start + 1] != '"':  # spread over lines, which nobody expects of a model
        return JsonArguments(), start, stop
    key = _between(unit, _KEYS[0], _VALUES[0])[1:-1]
    item = _between(unit, _VALUES[0], _KEYS[1])[1:-1]
    return JsonArguments(item, key), start, stop


def _tagged(grammar: Grammar, unit: str) -> tuple[TaggedArguments, int, int] | None:
    joint = _between(unit, _VALUES[0], _KEYS[1])
    tag = joint.rfind("<")
    start = unit.index(_KEYS[0])
    if tag < 0 or not unit[:start].endswith(joint[tag:]):
        return None
    opened, closed = joint[tag:], joint[:tag]
    close = closed.rstrip()
    stop = unit.index(_VALUES[1]) + len(_VALUES[1])
    if not unit.startswith(close, stop):
        return None
    middles = {kind: _middle(grammar, kind, close) for kind in _TYPED}
    if middles["string"] is None:
        return None
    known = {kind: middle for kind, middle in middles.items() if middle is not None}
    arguments = TaggedArguments(opened, close, closed[len(close) :], known)
    return arguments, start - len(opened), stop + len(close)


def _middle(grammar: Grammar, kind: ValueType, close: str) -> str | None:
    """What stands between a key and a value of this type."""
    value, pattern = _TYPED[kind]
    try:
        unit = _unit(grammar, {_KEYS[0]: value})
    except TemplateUnsupported:
        return None
    behind = "" if unit is None else unit.partition(_KEYS[0])[2]
    match = re.search(rf"{pattern}[^<]*{re.escape(close)}", behind)
    return None if match is None else behind[: match.start()]


def _quoted(unit: str) -> tuple[QuotedArguments, int, int] | None:
    found = re.search(
        rf"\{{{_KEYS[0]}:(?P<open>\S+){_VALUES[0]}(?P<close>\S+?),{_KEYS[1]}:(?P=open){_VALUES[1]}"
        rf"(?P=close)\}}",
        unit,
    )
    return found and (QuotedArguments(found["open"], found["close"]), *found.span())


def _python(unit: str) -> tuple[PythonArguments, int, int] | None:
    arguments = f'{_KEYS[0]}="{_VALUES[0]}", {_KEYS[1]}="{_VALUES[1]}"'
    start = unit.find(f"({arguments})") + 1
    return (PythonArguments(), start, start + len(arguments)) if start else None


def _between(text: str, left: str, right: str) -> str:
    start = text.index(left) + len(left)
    return text[start : text.index(right, start)]


def _at_start(gaps: Gaps, gap: str) -> str:
    """Without an empty thought: whether there is one is the model's choice."""
    written = beyond(gaps.opener, gap)
    closer = (gaps.thinking_to_text or "").strip()
    if closer and closer in written:
        written = written[written.index(closer) + len(closer) :].lstrip()
    behind = gaps.text_to_call or ""
    return behind if behind.strip() and written.endswith(behind) else written


def _end(gaps: Gaps, markup: Markup) -> str:
    """Up to the last literal that closes a section of calls."""
    literal = gaps.call_to_result or ""
    stop = 0
    for closer in markup.skip_after_call:
        at = literal.find(closer, stop)
        stop = stop if at < 0 else at + len(closer)
    return literal[:stop]
