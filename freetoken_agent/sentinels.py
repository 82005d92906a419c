# SPDX-License-Identifier: Apache-2.0
"""Alphanumeric stand-ins for contents, so that a rendering shows where each content lands.

A sentinel is nine characters, like the call ids of templates that check their length:

    Z <slot letter> <six hex digits of the number> Z

No template trims, escapes or splits it, and nothing a user writes is in it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Slot = Literal["content", "name", "id", "key", "value", "string"]

_LETTERS: Mapping[str, Slot] = {
    "c": "content",
    "n": "name",
    "i": "id",
    "k": "key",
    "v": "value",
    "s": "string",
}
_BY_SLOT = {slot: letter for letter, slot in _LETTERS.items()}
PATTERN = re.compile(r"Z([cnikvs])([0-9a-f]{6})Z")


def sentinel(slot: Slot, number: int) -> str:
    return f"Z{_BY_SLOT[slot]}{number:06x}Z"


@dataclass(frozen=True)
class Mark:
    """A sentinel in a rendering: text[start:end]."""

    slot: Slot
    number: int
    start: int
    end: int


def find_marks(text: str) -> list[Mark]:
    return [
        Mark(_LETTERS[match[1]], int(match[2], 16), match.start(), match.end())
        for match in PATTERN.finditer(text)
    ]


# Words of JSON schemas that templates branch on. Everything else in a schema is a user's string.
_SCHEMA_WORDS = frozenset(
    "type function name description parameters strict properties required items enum default "
    "anyOf oneOf allOf additionalProperties $ref $defs title format nullable return returns "
    "object string number integer boolean array null".split()
)


class Masker:
    """Replaces the strings of JSON values by sentinels of slot "string", equal ones by equal
    sentinels; `strings` holds the originals by number."""

    def __init__(self) -> None:
        self.strings: list[str] = []
        self._numbers: dict[str, int] = {}

    def mask(self, value: Any, keep: frozenset[str] = frozenset()) -> Any:
        """A copy with every string, keys included, masked unless it is in `keep`."""
        if isinstance(value, str):
            return value if value in keep else self._sentinel(value)
        if isinstance(value, Mapping):
            return {self.mask(key, keep): self.mask(item, keep) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mask(item, keep) for item in value]
        return value

    def mask_tools(self, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Tool schemas with the user's strings masked and the schema's own words kept."""
        return [self.mask(tool, _SCHEMA_WORDS) for tool in tools]

    def _sentinel(self, value: str) -> str:
        if value not in self._numbers:
            self._numbers[value] = len(self.strings)
            self.strings.append(value)
        return sentinel("string", self._numbers[value])


def _spellings(original: str) -> list[str]:
    """The ways a template may write a string, most literal first."""
    return list(
        dict.fromkeys(
            (
                original,
                json.dumps(original, ensure_ascii=False)[1:-1],
                json.dumps(original)[1:-1],
                original.strip(),
            )
        )
    )


def align(masked: str, real: str, originals: Sequence[str]) -> list[tuple[str, bool]] | None:
    """Split `real` into (text, is_content) parts by the rendering with "string" sentinels.

    Literals of the two must be equal, and each sentinel must stand for one of the spellings of its
    original; None if that is not so, as when a template looks into the strings.
    """
    marks = [mark for mark in find_marks(masked) if mark.slot == "string"]
    literals: list[str] = []
    position = 0
    for mark in marks:
        literals.append(masked[position : mark.start])
        position = mark.end
    literals.append(masked[position:])
    if not real.startswith(literals[0]):
        return None
    # Depth first over spellings: (index of mark, position in real, choices so far).
    pending: list[tuple[int, int, tuple[str, ...]]] = [(0, len(literals[0]), ())]
    seen: set[tuple[int, int]] = set()
    while pending:
        index, position, chosen = pending.pop()
        if index == len(marks):
            if position == len(real):
                return _parts(literals, chosen)
            continue
        if (index, position) in seen:
            continue
        seen.add((index, position))
        for spelling in reversed(_spellings(originals[marks[index].number])):
            follows = spelling + literals[index + 1]
            if real.startswith(follows, position):
                pending.append((index + 1, position + len(follows), (*chosen, spelling)))
    return None


def _parts(literals: Sequence[str], contents: Sequence[str]) -> list[tuple[str, bool]]:
    parts = [(literals[0], False)]
    for content, literal in zip(contents, literals[1:], strict=True):
        parts += [(content, True), (literal, False)]
    return [part for part in parts if part[0]]
