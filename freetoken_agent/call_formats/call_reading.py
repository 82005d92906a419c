# SPDX-License-Identifier: Apache-2.0
"""Learns from the rendering of a call how calls are read. What was learned is a `CallFormat`."""

import re

from ..chat_templates.sentinels import PATTERN, sentinel
from .call_format import (
    CallFormat,
    JsonCalls,
    NamedJsonCalls,
    PythonCalls,
    QuotedCalls,
    TaggedCalls,
    as_arguments,
    read_object,
)
from .quoted_values import Quotes

_NAME = r"(?P<name>[^\s<>{}\[\]\":]+?)"


def learn_call_format(unit: str, number: int, pair: str | None) -> CallFormat | None:
    """The format of a skeleton unit; None if it is of no family known here.

    `unit`: the call of item `number` with one argument. `pair`: the same call with a second
    argument, numbered one higher; needed for tagged parameters and bare keys only.
    """
    name = sentinel("name", number)
    arguments = {sentinel("key", number): sentinel("value", number)}
    position = unit.find("{")
    while position >= 0:
        found = read_object(unit, position)
        if found is not None:
            value = found[0]
            if (path := _path_to(value, name)) is not None:
                into = _path_to(value, arguments)
                if into is None:
                    return None
                return JsonCalls(path, into, _path_to(value, sentinel("id", number)))
            if value == arguments and name in unit[:position]:
                return _named(unit, name, position)
        position = unit.find("{", position + 1)
    if pair is None:
        return None
    if _is_python(pair, name, number):
        return PythonCalls()
    return _tagged(pair, name, number) or _quoted(pair, name, number)


def _is_python(pair: str, name: str, number: int) -> bool:
    numbers = number, number + 1
    members = (f'{sentinel("key", one)}="{sentinel("value", one)}"' for one in numbers)
    return pair == f"{name}({', '.join(members)})"


def _path_to(value: object, wanted: object) -> tuple[str, ...] | None:
    if value == wanted or (isinstance(value, str) and _as_arguments_quietly(value) == wanted):
        return ()
    if isinstance(value, dict):
        for key, inner in value.items():
            path = _path_to(inner, wanted)
            if path is not None:
                return (key, *path)
    return None


def _as_arguments_quietly(text: str) -> object:
    return as_arguments(text) if text.startswith("{") else None


def _loose(literal: str) -> str:
    """A literal as a pattern in which any blanks match any blanks, and any number any number
    (some formats count their calls)."""
    words = (re.sub(r"\d+", r"\\d+", re.escape(word)) for word in re.split(r"\s+", literal))
    return r"\s*".join(words)


def _named(unit: str, name: str, brace: int) -> CallFormat:
    """`before` name `between` {; the id may stand in between, or before the name; or a name in a
    space of names and a number are the id (`functions.f:0`)."""
    start = unit.index(name)
    before = PATTERN.sub("", unit[max(0, unit.rfind("\n", 0, start)) : start]).lstrip()
    between = unit[start + len(name) : brace]
    space, number = re.search(r"\w+\.$", before), re.match(r":\d+", between)
    if space is not None and number is not None:
        whole = rf"(?P<id>{re.escape(space[0])}{_NAME}:\d+)"
        rest = _loose(between[number.end() :])
        return NamedJsonCalls(re.compile(_loose(before[: space.start()]) + whole + rest))
    ident = PATTERN.search(between)
    if ident is None:
        pattern = r"(?P<id>(?!))?" + _loose(between)
    else:
        pattern = rf"(?:{_loose(between[: ident.start()])}(?P<id>[^\s<>\[\]\"]+?))?" + _loose(
            between[ident.end() :]
        )
    return NamedJsonCalls(re.compile(_loose(before) + _NAME + pattern))


def _quoted(unit: str, name: str, number: int) -> CallFormat | None:
    """Reads the quotes off a unit with two arguments."""
    keys = sentinel("key", number), sentinel("key", number + 1)
    values = sentinel("value", number), sentinel("value", number + 1)
    found = re.search(
        rf"(?P<before>.*){name}(?P<after>[^{{]*)\{{\s*{keys[0]}\s*:\s*(?P<open>\S+){values[0]}"
        rf"(?P<close>\S+?)\s*,\s*{keys[1]}\s*:\s*(?P=open){values[1]}(?P=close)\s*\}}",
        unit,
    )
    if found is None:
        return None
    head = _loose(found["before"]) + r"(?P<name>[^\s<>{}\[\]\":]+?)" + _loose(found["after"])
    return QuotedCalls(re.compile(head + r"\s*(?=\{)"), Quotes(found["open"], found["close"]))


def _tagged(unit: str, name: str, number: int) -> CallFormat | None:
    """Reads the tags off a unit with two arguments."""
    key, value = sentinel("key", number), sentinel("value", number)
    second, last = sentinel("key", number + 1), sentinel("value", number + 1)
    if any(part not in unit for part in (name, key, value, second, last)):
        return None
    start = unit.rindex(name, 0, unit.index(key))
    after_name = _between(unit[start:], name, key)
    joint = _between(unit, value, second)
    tag = joint.rfind("<")
    if tag < 0 or not after_name.endswith(joint[tag:]):
        return None
    opened, closed = joint[tag:], joint[:tag].rstrip()
    before = unit[:start]
    before = before[before.rfind("\n") + 1 :]
    after = after_name.removesuffix(opened).rstrip()
    head = _loose(before) + r"(?P<name>[^\s<>\"]+?)" + (_loose(after) or r"(?=[\s<])")
    middle = re.sub(r'="[^"]*"', '="\x00"', _between(unit, key, value))  # types differ by value
    opening = _loose(opened) + r"(?P<key>[^<>\"]+?)" + _edge(middle).replace("\x00", r'[^"<>]*')
    end = _first_tags(unit[unit.index(last) + len(last) :].removeprefix(closed), closed)
    return TaggedCalls(
        re.compile(head),
        re.compile(opening),
        re.compile(_edge(closed)),
        opened.strip(),
        closed.strip(),
        end,
    )


def _between(text: str, left: str, right: str) -> str:
    start = text.index(left) + len(left)
    return text[start : text.index(right, start)]


def _first_tags(text: str, elsewhere: str) -> str:
    """The shortest run of tags at the start that does not occur elsewhere; '' if there is none."""
    for match in re.finditer(r"<[^<>]+>", text):
        if text[: match.end()].strip() not in elsewhere:
            return text[: match.end()].strip()
    return ""


def _edge(literal: str) -> str:
    """A literal around a value: the newlines it has there are optional, other blanks stay text."""
    pattern = _loose(literal.strip())
    lead = r"\n?" if literal.startswith("\n") else ""
    return lead + pattern + (r"\n?" if literal.endswith("\n") else "")
