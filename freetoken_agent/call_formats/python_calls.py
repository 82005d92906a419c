# SPDX-License-Identifier: Apache-2.0
"""Calls that are written as Python writes them, with keyword arguments that are literals:

    forecast(city="Oslo", days=2, deep={"on": True, "none": None})

JSON's words and escapes are accepted too, and either quotes. Nothing is evaluated.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..tooling.json_values import MAX_DEPTH, read

HEAD = re.compile(r"\s*(?P<name>[^\s(),=\[\]{}\"':<>|]+)\s*\(")
_BLANKS = re.compile(r"\s*")
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


@dataclass
class _Reader:
    """A position in the text; ValueError for what does not fit."""

    text: str
    at: int

    def arguments(self) -> dict[str, Any]:
        """What stands between the parentheses, of which the first was read."""
        return self._members(")", "=", self._keyword, 0)

    def object(self) -> dict[str, Any]:
        self._expect("{")
        return self._members("}", ":", self._string, 0)

    def _members(
        self, close: str, colon: str, key: Callable[[], str], depth: int
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self._takes(close):
            name = key()
            if name in found:
                raise ValueError("a key comes twice")
            self._expect(colon)
            found[name] = self._value(depth + 1)
            if not self._takes(","):
                self._expect(close)
                break
        return found

    def _items(self, close: str, depth: int) -> list[Any]:
        found: list[Any] = []
        while not self._takes(close):
            found.append(self._value(depth + 1))
            if not self._takes(","):
                self._expect(close)
                break
        return found

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("it is too deep")
        if self._takes("{"):
            return self._members("}", ":", self._string, depth)
        for opened, closed in ("[]", "()"):
            if self._takes(opened):
                return self._items(closed, depth)
        if self.text[self.at : self.at + 1] in _PLAIN:
            return self._string()
        word = self._match(_WORD)
        return _CONSTANTS[word] if word in _CONSTANTS else read(word)

    def _keyword(self) -> str:
        self._skip_blanks()
        return self._match(_KEY)

    def _string(self) -> str:
        self._skip_blanks()
        quote = self.text[self.at : self.at + 1]
        if quote not in _PLAIN:
            raise ValueError("a string is missing")
        self.at += 1
        read_so_far: list[str] = []
        while True:
            read_so_far.append(self._match(_PLAIN[quote]))
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

    def _match(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        if match is None:
            raise ValueError("a word is missing")
        self.at = match.end()
        return match[0]

    def _takes(self, character: str) -> bool:
        self._skip_blanks()
        if not self.text.startswith(character, self.at):
            return False
        self.at += 1
        return True

    def _expect(self, character: str) -> None:
        if not self._takes(character):
            raise ValueError(f"{character} is missing")

    def _skip_blanks(self) -> None:
        match = _BLANKS.match(self.text, self.at)
        assert match is not None, "the pattern matches nothing, too"
        self.at = match.end()
