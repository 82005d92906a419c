# SPDX-License-Identifier: Apache-2.0
"""Objects whose keys are bare and whose strings stand between quotes of their own, unescaped:

    {city:<|"|>Oslo<|"|>,days:[1,2],deep:{on:true,none:None}}

Some templates write the arguments of calls so. Blanks and quoted keys are accepted too.
"""

import re
from dataclasses import dataclass
from typing import Any

from ..tooling.json_values import MAX_DEPTH, read
from .cursor import Cursor

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


class _Reader(Cursor):
    """Reads objects and what is in them."""

    def __init__(self, text: str, at: int, quotes: Quotes) -> None:
        super().__init__(text, at)
        self._quotes = quotes

    def object(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self.expect("{")
        if self.takes("}"):
            return found
        while True:
            key = self._key()
            if key in found:
                raise ValueError("a key comes twice")
            self.expect(":")
            found[key] = self._value(depth + 1)
            if self.takes("}"):
                return found
            self.expect(",")

    def _array(self, depth: int) -> list[Any]:
        found: list[Any] = []
        self.expect("[")
        if self.takes("]"):
            return found
        while True:
            found.append(self._value(depth + 1))
            if self.takes("]"):
                return found
            self.expect(",")

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("it is too deep")
        self.skip_blanks()
        if self.text.startswith(self._quotes.open, self.at):
            return self._string()
        if self.text.startswith("{", self.at):
            return self.object(depth)
        if self.text.startswith("[", self.at):
            return self._array(depth)
        word = self.match(_WORD)
        return _CONSTANTS[word] if word in _CONSTANTS else _scalar(word)

    def _key(self) -> str:
        self.skip_blanks()
        if self.text.startswith(self._quotes.open, self.at):
            return self._string()
        return self.match(_BARE_KEY)

    def _string(self) -> str:
        start = self.at + len(self._quotes.open)
        end = self.text.find(self._quotes.close, start)
        if end < 0:
            raise ValueError("a string is unfinished")
        self.at = end + len(self._quotes.close)
        return self.text[start:end]


def _scalar(word: str) -> Any:
    """A number, true, false or null. ValueError for a bare string: only quoted ones are."""
    value = read(word)
    if isinstance(value, str):
        raise ValueError("a string has foreign quotes")
    return value
