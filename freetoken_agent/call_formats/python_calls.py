# SPDX-License-Identifier: Apache-2.0
"""Calls that are written as Python writes them, with keyword arguments that are literals:

    forecast(city="Oslo", days=2, deep={"on": True, "none": None})

JSON's words and escapes are accepted too, and either quotes. Nothing is evaluated.
"""

import re
from collections.abc import Callable
from typing import Any

from ..tooling.json_values import MAX_DEPTH, read
from .cursor import Cursor

HEAD = re.compile(r"\s*(?P<name>[^\s(),=\[\]{}\"':<>|]+)\s*\(")
_KEY = re.compile(r"[^\s(),=\[\]{}\"':]+")
_WORD = re.compile(r"[^\s(),=\[\]{}\"':]+")
_PLAIN = {quote: re.compile(rf"[^\\{quote}]*") for quote in "\"'"}
_CONSTANTS = {"None": None, "True": True, "False": False}
_ESCAPES = {
    **{"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""},
    **{"\\": "\\", '"': '"', "'": "'", "/": "/"},
}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


def read_call(text: str, start: int = 0) -> tuple[str, dict[str, Any], int] | None:
    """Name, arguments and end of the call that begins at `start`; None if it is malformed."""
    head = HEAD.match(text, start)
    if head is None:
        return None
    reader = _Reader(text, head.end())
    try:
        return head["name"], reader.arguments(), reader.at
    except ValueError:
        return None


def read_literals(text: str, start: int) -> tuple[dict[str, Any], int] | None:
    """The object that begins with the brace at `start`, and its end; None if it is malformed."""
    reader = _Reader(text, start)
    try:
        return reader.object(), reader.at
    except ValueError:
        return None


def inside_string(text: str, start: int) -> bool:
    """Whether the text from `start` on ends inside a string."""
    quote = ""
    while start < len(text):
        character = text[start]
        if quote and character == "\\":
            start += 1
        elif character == quote:
            quote = ""
        elif not quote and character in "\"'":
            quote = character
        start += 1
    return bool(quote)


class _Reader(Cursor):
    """Reads calls, objects and literals."""

    def arguments(self) -> dict[str, Any]:
        """What stands between the parentheses, of which the first was read."""
        return self._members(")", "=", self._keyword, 0)

    def object(self) -> dict[str, Any]:
        self.expect("{")
        return self._members("}", ":", self._string, 0)

    def _members(
        self, close: str, colon: str, key: Callable[[], str], depth: int
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self.takes(close):
            name = key()
            if name in found:
                raise ValueError("a key comes twice")
            self.expect(colon)
            found[name] = self._value(depth + 1)
            if not self.takes(","):
                self.expect(close)
                break
        return found

    def _items(self, close: str, depth: int) -> list[Any]:
        found: list[Any] = []
        while not self.takes(close):
            found.append(self._value(depth + 1))
            if not self.takes(","):
                self.expect(close)
                break
        return found

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("it is too deep")
        if self.takes("{"):
            return self._members("}", ":", self._string, depth)
        for opened, closed in ("[]", "()"):
            if self.takes(opened):
                return self._items(closed, depth)
        if self.text[self.at : self.at + 1] in _PLAIN:
            return self._string()
        word = self.match(_WORD)
        return _CONSTANTS[word] if word in _CONSTANTS else read(word)

    def _keyword(self) -> str:
        self.skip_blanks()
        return self.match(_KEY)

    def _string(self) -> str:
        self.skip_blanks()
        quote = self.text[self.at : self.at + 1]
        if quote not in _PLAIN:
            raise ValueError("a string is missing")
        self.at += 1
        read_so_far: list[str] = []
        while True:
            read_so_far.append(self.match(_PLAIN[quote]))
            if self.text.startswith(quote, self.at):
                self.at += 1
                return "".join(read_so_far)
            read_so_far.append(self._escape())

    def _escape(self) -> str:
        letter = self.text[self.at + 1 : self.at + 2]
        if not letter:
            raise ValueError("a string is unfinished")
        digits = self.text[self.at + 2 : self.at + 2 + _HEX_DIGITS.get(letter, 0)]
        self.at += 2 + len(digits)
        if letter not in _HEX_DIGITS:
            return _ESCAPES.get(letter, "\\" + letter)
        if re.fullmatch(rf"[0-9a-fA-F]{{{_HEX_DIGITS[letter]}}}", digits) is None:
            raise ValueError("an escape is unfinished")
        return chr(int(digits, 16))  # ValueError beyond Unicode
