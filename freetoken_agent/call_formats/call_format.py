# SPDX-License-Identifier: Apache-2.0
"""Reads a call back from the text of its unit, in the format the template writes calls in.

Five families cover the templates seen: one JSON object that holds name and arguments; a name and
then a JSON object of arguments; a name and then tagged parameters; a name and then an object with
bare keys and quotes of its own; a call as in Python. What is read is lenient about blanks and key
order and strict about everything else.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..tooling.json_values import is_plain, read
from .python_calls import HEAD, inside_string, read_call, read_literals
from .quoted_values import Quotes

_Read = Callable[[str, int], tuple[dict[str, Any], int] | None]
_DECODER = json.JSONDecoder(strict=False)  # models write raw newlines inside strings


@dataclass(frozen=True)
class ParsedCall:
    """A call as a model wrote it. `call_id` is None where the format has no id. `texts`: the values
    as they were written, where the format does not say their types; only a schema can tell.
    `repaired`: the call was malformed."""

    name: str
    arguments: Mapping[str, object]
    call_id: str | None = None
    texts: Mapping[str, str] | None = None
    repaired: bool = False


class CallFormat(Protocol):
    """How one template's calls are read."""

    def parse(self, unit: str) -> ParsedCall | None:
        """The call of a whole unit; None if it is malformed."""

    def repaired(self, unit: str) -> ParsedCall | None:
        """The call of a whole unit that is malformed, if it is certain what was meant."""

    def name_so_far(self, unit: str) -> str | None:
        """The name, as soon as an unfinished unit holds it whole."""

    def open_string(self, unit: str) -> bool:
        """Whether the unit ends inside a string of its arguments."""

    def ends_at(self, unit: str) -> int | None:
        """Where a unit ends that no tag closes; None if it is unfinished."""


def read_object(text: str, start: int = 0) -> tuple[dict[str, Any], int] | None:
    """The JSON object that begins at the first brace from `start`, and its end."""
    brace = text.find("{", start)
    if brace < 0:
        return None
    try:
        value, end = _DECODER.raw_decode(text, brace)
    except (ValueError, RecursionError):
        return None
    return (value, end) if isinstance(value, dict) else None


def _read_loosely(text: str, start: int = 0) -> tuple[dict[str, Any], int] | None:
    """The same, of an object as Python writes it: in either quotes, with True and None, with a
    comma behind the last value."""
    brace = text.find("{", start)
    return None if brace < 0 else read_literals(text, brace)


def _inside_string(text: str, start: int) -> bool:
    """Whether JSON text that begins at `start` (-1: nowhere) ends inside a string."""
    inside = False
    index = start if start >= 0 else len(text)
    while index < len(text):
        if text[index] == "\\" and inside:
            index += 1
        elif text[index] == '"':
            inside = not inside
        index += 1
    return inside


def as_arguments(value: object) -> Mapping[str, object] | None:
    """Arguments are an object, or an object in a string."""
    if isinstance(value, str):
        try:
            value = json.loads(value or "{}")
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) and is_plain(value) else None


def _look(value: object, path: Sequence[str]) -> object:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


@dataclass(frozen=True)
class JsonCalls:
    """`{"name": …, "arguments": {…}}`; the paths are learned. A list around it is accepted."""

    name: tuple[str, ...]
    arguments: tuple[str, ...]
    call_id: tuple[str, ...] | None

    def parse(self, unit: str) -> ParsedCall | None:
        return self._call(read_object(unit))

    def repaired(self, unit: str) -> ParsedCall | None:
        call = self._call(_read_loosely(unit))
        return call and replace(call, repaired=True)

    def _call(self, found: tuple[dict[str, Any], int] | None) -> ParsedCall | None:
        if found is None:
            return None
        name = _look(found[0], self.name)
        arguments = as_arguments(_look(found[0], self.arguments))
        if not isinstance(name, str) or not name or arguments is None:
            return None
        call_id = None if self.call_id is None else _look(found[0], self.call_id)
        return ParsedCall(name, arguments, call_id if isinstance(call_id, str) else None)

    def name_so_far(self, unit: str) -> str | None:
        match = re.search(rf'"{re.escape(self.name[-1])}"\s*:\s*"([^"\\]+)"', unit)
        if match is None or f'"{self.arguments[-1]}"' in unit[: match.start()]:
            return None  # an argument may be called like that
        return match[1]

    def open_string(self, unit: str) -> bool:
        return _inside_string(unit, unit.find("{"))

    def ends_at(self, unit: str) -> int | None:
        found = read_object(unit)
        return found and found[1]


@dataclass(frozen=True)
class NamedJsonCalls:
    """A name between two literals, then a JSON object of arguments."""

    pattern: re.Pattern[str]

    def parse(self, unit: str) -> ParsedCall | None:
        return self._call(unit, read_object)

    def repaired(self, unit: str) -> ParsedCall | None:
        call = self._call(unit, _read_loosely)
        return call and replace(call, repaired=True)

    def _call(self, unit: str, read: _Read) -> ParsedCall | None:
        match = self.pattern.search(unit)
        if match is None:
            return None
        found = read(unit, match.end())
        if found is None or unit[match.end() : unit.find("{", match.end())].strip():
            return None
        if not is_plain(found[0]):
            return None
        return ParsedCall(match["name"], found[0], match["id"])

    def name_so_far(self, unit: str) -> str | None:
        match = self.pattern.search(unit)
        return match["name"] if match else None

    def open_string(self, unit: str) -> bool:
        match = self.pattern.search(unit)
        return match is not None and _inside_string(unit, unit.find("{", match.end()))

    def ends_at(self, unit: str) -> int | None:
        match = self.pattern.search(unit)
        found = None if match is None else read_object(unit, match.end())
        return found and found[1]


@dataclass(frozen=True)
class TaggedCalls:
    """A name, then parameters between tags. A value that reads as JSON other than a string is that
    value, unless a schema is known that wants its text; it ends where its JSON does, another one at
    the first closing tag. `opening` and `closing` match what is around a value. `open` and `close`
    are the tags around a parameter, `end` the one behind the last, '' where there is none."""

    head: re.Pattern[str]
    opening: re.Pattern[str]
    closing: re.Pattern[str]
    open: str
    close: str
    end: str

    def parse(self, unit: str) -> ParsedCall | None:
        match = self.head.search(unit)
        if match is None:
            return None
        texts, position = self._texts(unit, match.end("name"))
        rest = unit[position:]
        if self.open in rest or self.end not in rest:
            return None  # a parameter or the call itself is unfinished
        arguments = {key: _as_value(text) for key, text in texts.items()}
        return ParsedCall(match["name"], arguments, texts=texts)

    def repaired(self, unit: str) -> None:
        return None

    def name_so_far(self, unit: str) -> str | None:
        match = self.head.search(unit)
        return match["name"] if match else None

    def open_string(self, unit: str) -> bool:
        """Inside a parameter: it was opened after the last value closed; or in a string of JSON."""
        match = self.head.search(unit)
        if match is None:
            return False
        _, position = self._texts(unit, match.end("name"), whole=True)
        return self.open in unit[position:]

    def _texts(
        self, unit: str, position: int, *, whole: bool = False
    ) -> tuple[dict[str, str], int]:
        """The values as they are written, from `position` on, and where the last of them was
        closed. `whole`: an object or a list that ends inside a string is not closed by a tag."""
        texts: dict[str, str] = {}
        while opened := self.opening.search(unit, position):
            start = opened.end()
            is_json = unit.startswith(("{", "["), start)
            closed = self._closed_json(unit, start) if is_json else None
            if closed is None:
                if whole and is_json and _inside_string(unit, start):
                    break
                closed = self.closing.search(unit, start)
            if closed is None:
                break
            texts[opened["key"]] = unit[start : closed.start()]
            position = closed.end()
        return texts, position

    def _closed_json(self, unit: str, start: int) -> re.Match[str] | None:
        """What closes the JSON value that begins at `start`, directly behind it."""
        try:
            _, end = _DECODER.raw_decode(unit, start)
        except (ValueError, RecursionError):
            return None
        return self.closing.match(unit, end)

    def ends_at(self, unit: str) -> int | None:
        return len(unit) if self.parse(unit) is not None else None


@dataclass(frozen=True)
class QuotedCalls:
    """A name between two literals, then an object with bare keys and its own quotes."""

    head: re.Pattern[str]
    quotes: Quotes

    def parse(self, unit: str) -> ParsedCall | None:
        match = self.head.search(unit)
        found = None if match is None else self.quotes.read_object(unit, match.end())
        return None if match is None or found is None else ParsedCall(match["name"], found[0])

    def repaired(self, unit: str) -> None:
        return None

    def name_so_far(self, unit: str) -> str | None:
        match = self.head.search(unit)
        return match["name"] if match else None

    def open_string(self, unit: str) -> bool:
        match = self.head.search(unit)
        return match is not None and self.quotes.inside_string(unit, match.end())

    def ends_at(self, unit: str) -> int | None:
        match = self.head.search(unit)
        found = None if match is None else self.quotes.read_object(unit, match.end())
        return found and found[1]


@dataclass(frozen=True)
class PythonCalls:
    """A name and keyword arguments in parentheses."""

    def parse(self, unit: str) -> ParsedCall | None:
        found = read_call(unit)
        return found and ParsedCall(found[0], found[1])

    def repaired(self, unit: str) -> None:
        return None

    def name_so_far(self, unit: str) -> str | None:
        match = HEAD.match(unit)
        return match["name"] if match else None

    def open_string(self, unit: str) -> bool:
        match = HEAD.match(unit)
        return match is not None and inside_string(unit, match.end())

    def ends_at(self, unit: str) -> int | None:
        found = read_call(unit)
        return found and found[2]


def _as_value(text: str) -> object:
    try:
        value = read(text)
    except ValueError:
        return text
    return text if isinstance(value, str) else value
