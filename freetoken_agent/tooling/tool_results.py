# SPDX-License-Identifier: Apache-2.0
"""What a tool returned, as text for the model: strings as they are, everything else as JSON."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic_core import PydanticSerializationError, to_json

from freetoken_storage.errors import FreetokenError

from ..errors import InvalidTool

Keep = Literal["head", "tail", "both"]
_BYTES = bytes | bytearray | memoryview


class InvalidToolResult(FreetokenError):
    """A tool returned what no text can stand for. The model sees the message as an error."""

    code = "invalid_tool_result"


@dataclass(frozen=True)
class ResultLimit:
    """How much of a result the model sees: `max_chars` characters of its head, its tail, or half of
    each. Where the rest was, a note says how many characters went, and `hint` how to get them.
    InvalidTool for a limit that is none."""

    max_chars: int = 20_000
    keep: Keep = "both"  # head, tail or both
    hint: str = "To see them, call again for a smaller part."

    def __post_init__(self) -> None:
        if isinstance(self.max_chars, bool) or not isinstance(self.max_chars, int):
            raise InvalidTool("max_chars of a ResultLimit is a number", value=self.max_chars)
        if self.max_chars < 1:
            raise InvalidTool("a ResultLimit keeps something", value=self.max_chars, limit="≥ 1")
        if self.keep not in ("head", "tail", "both"):
            raise InvalidTool("a ResultLimit keeps head, tail or both", value=self.keep)

    def cut(self, text: str) -> tuple[str, int]:
        """The text within the limit, and how many characters were left out."""
        gone = len(text) - self.max_chars
        if gone <= 0:
            return text, 0
        head = {"head": self.max_chars, "tail": 0, "both": (self.max_chars + 1) // 2}[self.keep]
        end = len(text) - (self.max_chars - head)
        said = f"{gone:,} of {len(text):,} characters were left out here. {self.hint}".strip()
        parts = (text[:head], f"[{said}]", text[end:])
        return "\n".join(part for part in parts if part), gone


def result_text(value: object) -> str:
    """InvalidToolResult for bytes, and for what JSON does not have. Not-a-number and infinities are
    written as strings, halves of surrogate pairs as U+FFFD. An iterator is read to its end."""
    if isinstance(value, str):
        return whole_text(value)
    if isinstance(value, Iterator):
        value = list(value)  # so that what it raises is not taken for a fault of the encoder
    try:
        text = to_json(value, inf_nan_mode="strings").decode()
    except PydanticSerializationError as error:
        raise _invalid(value, str(error)) from error
    held = _first_bytes(value)  # pydantic would read them as text
    if held is not None:
        raise _invalid(held, "bytes are no text")
    return text


def whole_text(text: str) -> str:
    """The text with U+FFFD for halves of surrogate pairs, which no encoding holds."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _first_bytes(value: object) -> object:
    """The first bytes in a value that is no string and has no cycles; None if there are none. What
    pydantic models hold is written as their fields say."""
    if isinstance(value, _BYTES):
        return value
    inner: Iterable[object] = ()
    if isinstance(value, Mapping):
        inner = (*value.keys(), *value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        inner = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, field.name) for field in dataclasses.fields(value)]
    found = (_first_bytes(one) for one in inner)
    return next((one for one in found if one is not None), None)


def _invalid(value: object, why: str) -> InvalidToolResult:
    return InvalidToolResult(
        f"a tool returned {type(value).__name__}, which has no text ({why})",
        remedy="return a str, JSON values, a pydantic model or a dataclass",
    )
