# SPDX-License-Identifier: Apache-2.0
"""Alphanumeric stand-ins for contents, so that a rendering shows where each content lands.

A sentinel is nine characters, like the call ids of templates that check their length:

    Z <slot letter> <six hex digits of the number> Z

No template trims, escapes or splits it, and nothing a user writes is in it.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Slot = Literal["content", "name", "id", "key", "value", "string", "tag"]

_LETTERS: Mapping[str, Slot] = {
    "c": "content",
    "n": "name",
    "i": "id",
    "k": "key",
    "v": "value",
    "s": "string",
    "t": "tag",
}
_BY_SLOT = {slot: letter for letter, slot in _LETTERS.items()}
PATTERN = re.compile(r"Z([cnikvst])([0-9a-f]{6})Z")


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
    """Replaces the strings of a JSON value by sentinels of slot "string".

    Equal strings get equal sentinels, and sentinels sort as their originals do, because templates
    look names up in lists and sort keys. `strings` holds the originals by number.
    """

    def __init__(self, value: Any, keep: frozenset[str] = frozenset()) -> None:
        self._keep = keep
        self.strings = sorted({text for text in _strings(value) if text not in keep})
        self._numbers = {text: number for number, text in enumerate(self.strings)}

    def mask(self, value: Any) -> Any:
        """A copy with every string, keys included, masked unless it is kept."""
        if isinstance(value, str):
            if value in self._keep:
                return value
            return sentinel("string", self._numbers[value])
        if isinstance(value, Mapping):
            return {self.mask(key): self.mask(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mask(item) for item in value]
        return value


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def mask_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Tool schemas with the user's strings masked and the schema's own words kept, and the
    originals."""
    masker = Masker(tools, _SCHEMA_WORDS)
    return masker.mask(tools), masker.strings


def _spellings(original: str) -> list[str]:
    """The ways a template may write a string, most literal first."""
    return list(
        dict.fromkeys(
            (
                original,
                json.dumps(original, ensure_ascii=False)[1:-1],
                json.dumps(original)[1:-1],
                repr(original)[1:-1],
                original.strip(),
            )
        )
    )


def align(masked: str, real: str, originals: Sequence[str]) -> list[tuple[str, bool]] | None:
    """Split `real` into (text, is_content) parts by the rendering with "string" sentinels.

    The literals of the two must be equal. A sentinel stands for a spelling of its original; where
    the template spells strings in a way of its own, for whatever stands between the literals, if
    there is only one way to place those. None if nothing fits.
    """
    marks = [mark for mark in find_marks(masked) if mark.slot == "string"]
    literals: list[str] = []
    position = 0
    for mark in marks:
        literals.append(masked[position : mark.start])
        position = mark.end
    literals.append(masked[position:])
    spelled = _align_spelled(literals, real, [originals[mark.number] for mark in marks])
    return spelled or _align_literals(literals, real)


def _align_spelled(
    literals: Sequence[str], real: str, originals: Sequence[str]
) -> list[tuple[str, bool]] | None:
    """Depth first over the spellings of each original."""
    if not real.startswith(literals[0]):
        return None
    pending: list[tuple[int, int, tuple[str, ...]]] = [(0, len(literals[0]), ())]
    seen: set[tuple[int, int]] = set()
    while pending:
        index, position, chosen = pending.pop()
        if index == len(originals):
            if position == len(real):
                return _parts(literals, chosen)
            continue
        if (index, position) in seen:
            continue
        seen.add((index, position))
        for spelling in reversed(_spellings(originals[index])):
            follows = spelling + literals[index + 1]
            if real.startswith(follows, position):
                pending.append((index + 1, position + len(follows), (*chosen, spelling)))
    return None


def _align_literals(literals: Sequence[str], real: str) -> list[tuple[str, bool]] | None:
    """Place the literals from the left and from the right; both must agree."""
    first, last = literals[0], literals[-1]
    if len(first) + len(last) > len(real) or not (real.startswith(first) and real.endswith(last)):
        return None
    middle = [literal for literal in literals[1:-1] if literal]
    begin, end = len(first), len(real) - len(last)
    lefts, position = [], begin
    for literal in middle:
        position = real.find(literal, position, end)
        if position < 0:
            return None
        lefts.append(position)
        position += len(literal)
    rights, position = [], end
    for literal in reversed(middle):
        position = real.rfind(literal, begin, position)
        rights.append(position)
    if lefts != rights[::-1]:
        return None
    parts, position = [(first, False)], begin
    for at, literal in zip(lefts, middle, strict=True):
        parts += [(real[position:at], True), (literal, False)]
        position = at + len(literal)
    parts += [(real[position:end], True), (last, False)]
    return [part for part in parts if part[0]]


def _parts(literals: Sequence[str], contents: Sequence[str]) -> list[tuple[str, bool]]:
    parts = [(literals[0], False)]
    for content, literal in zip(contents, literals[1:], strict=True):
        parts += [(content, True), (literal, False)]
    return [part for part in parts if part[0]]
