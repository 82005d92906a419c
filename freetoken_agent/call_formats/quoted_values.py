# SPDX-License-Identifier: Apache-2.0
"""Objects whose keys are bare and whose strings stand between quotes of their own, unescaped:

    {city:<|"|>Oslo<|"|>,days:[1,2],deep:{on:true,none:None}}

Some templates write the arguments of calls so. Blanks and quoted keys are accepted too.
"""

import re
from dataclasses import dataclass
from typing import Any

from ..tooling.json_values import MAX_DEPTH, read

_BLANKS = re.compile(r"\s*")
_BARE_KEY = re.compile(r"[^\s:,{}\[\]]+(?:[ \t]+[^\s:,{}\[\]]+)*")
_WORD = re.compile(r"[^\s,{}\[\]]+")
_CONSTANTS = {"None": None, "True": True, "False": False}  # as Jinja prints them


@dataclass(frozen=True)
class Quotes:
    """The literals before and after a string."""

    open: str
    close: str

    def read_object(self, text: str, start: int) -> tuple[dict[str, Any], int] | None:
        """The object that begins at the brace at `start`, and its end; None if it is malformed."""
        reader = _Reader(text, start, self)
        try:
            return reader.object(0), reader.at
        except ValueError:
            return None

    def inside_string(self, text: str, start: int) -> bool:
        """Whether the text from `start` on ends inside a string."""
        at = text.find(self.open, start)
        while at >= 0:
            end = text.find(self.close, at + len(self.open))
            if end < 0:
                return True
            at = text.find(self.open, end + len(self.close))
        return False


class _Reader:
    """A position in the text; ValueError for what does not fit."""

    def __init__(self, text: str, at: int, quotes: Quotes) -> None:
        self._text, self.at, self._quotes = text, at, quotes

    def object(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self._expect("{")
        if self._takes("}"):
            return found
        while True:
            key = self._key()
            if key in found:
                raise ValueError("a key comes twice")
            self._expect(":")
            found[key] = self._value(depth + 1)
            if self._takes("}"):
                return found
            self._expect(",")

    def _array(self, depth: int) -> list[Any]:
        found: list[Any] = []
        self._expect("[")
        if self._takes("]"):
            return found
        while True:
            found.append(self._value(depth + 1))
            if self._takes("]"):
                return found
            self._expect(",")

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("it is too deep")
        self._skip_blanks()
        if self._text.startswith(self._quotes.open, self.at):
            return self._string()
        if self._text.startswith("{", self.at):
            return self.object(depth)
        if self._text.startswith("[", self.at):
            return self._array(depth)
        word = self._match(_WORD)
        return _CONSTANTS[word] if word in _CONSTANTS else _scalar(word)

    def _key(self) -> str:
        self._skip_blanks()
        if self._text.startswith(self._quotes.open, self.at):
            return self._string()
        return self._match(_BARE_KEY)

    def _string(self) -> str:
        start = self.at + len(self._quotes.open)
        end = self._text.find(self._quotes.close, start)
        if end < 0:
            raise ValueError("a string is unfinished")
        self.at = end + len(self._quotes.close)
        return self._text[start:end]

    def _match(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self.at)
        if match is None:
            raise ValueError("a word is missing")
        self.at = match.end()
        return match[0]

    def _takes(self, character: str) -> bool:
        self._skip_blanks()
        if not self._text.startswith(character, self.at):
            return False
        self.at += 1
        return True

    def _expect(self, character: str) -> None:
        if not self._takes(character):
            raise ValueError(f"{character} is missing")

    def _skip_blanks(self) -> None:
        match = _BLANKS.match(self._text, self.at)
        assert match is not None, "the pattern matches nothing, too"
        self.at = match.end()


def _scalar(word: str) -> Any:
    """A number, true, false or null. ValueError for a bare string: only quoted ones are."""
    value = read(word)
    if isinstance(value, str):
        raise ValueError("a string has foreign quotes")
    return value
