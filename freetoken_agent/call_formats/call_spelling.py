# SPDX-License-Identifier: Apache-2.0
"""How calls are spelled, as data: literals around slots.

    <tool_call>\\n{"name": "  NAME  ", "arguments":   ARGUMENTS   }\\n</tool_call>
    [TOOL_CALLS]  NAME  [CALL_ID]  ID  [ARGS]  ARGUMENTS

What a template writes is learned (`call_writing`). Where it has no calls, or other ones than the
model, they are written into the content by a `CallSpelling` (`named_formats`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ..chat_templates.sentinels import Slot as Sentinel
from ..chat_templates.sentinels import find_marks, sentinel

Slot = Literal["name", "id", "index", "arguments"]
ValueType = Literal["string", "integer", "boolean", "null", "array", "object"]


@dataclass(frozen=True)
class Literally:
    """Text of the template's own; control tokens in it are control tokens."""

    text: str


Part = Literally | Slot


@dataclass(frozen=True)
class JsonArguments:
    """One JSON object."""

    item_separator: str = ", "
    key_separator: str = ": "


@dataclass(frozen=True)
class TaggedArguments:
    """One parameter after another: open, key, middle, value, close. Strings stand as they are,
    other values as JSON. `middles` differ where the template says the type."""

    open: str
    close: str
    between: str
    middles: Mapping[ValueType, str]


@dataclass(frozen=True)
class QuotedArguments:
    """An object with bare keys, its strings between quotes of the template's own."""

    open: str
    close: str


@dataclass(frozen=True)
class PythonArguments:
    """Keyword arguments, as in a call of Python: `city="Oslo", days=2, deep={"on": True}`."""


Arguments = JsonArguments | TaggedArguments | QuotedArguments | PythonArguments

_SLOTS: Mapping[str, Slot] = {
    "NAME": "name",
    "ID": "id",
    "INDEX": "index",
    "ARGUMENTS": "arguments",
}


def parts(text: str) -> tuple[Part, ...]:
    """Literals and slots of a text in which slots stand in guillemets: `«NAME»`."""
    found: list[Part] = []
    for number, piece in enumerate(text.replace("»", "«").split("«")):
        if number % 2:
            found.append(_SLOTS[piece])
        elif piece:
            found.append(Literally(piece))
    return tuple(found)


@dataclass(frozen=True)
class CallSpelling:
    """Calls inside the content of a message. `unit`: a call; `bare`: one without arguments, where
    that is another text. `begin` and `end` stand around the calls of a turn, `between` before a
    further one (None: only one fits), `after_text` behind a text. `constants`: how values that are
    no strings are spelled between tags. `tool_role`: results are written as the template writes
    them, where it does. `signs`: literals that only templates and tokenizers of this format have.
    """

    name: str
    unit: tuple[Part, ...]
    arguments: Arguments
    bare: tuple[Part, ...] = ()
    begin: str = ""
    end: str = ""
    between: str | None = "\n"
    after_text: str = "\n"
    constants: Literal["json", "python"] = "json"
    tool_role: bool = True
    signs: tuple[str, ...] = ()

    def written(self, name: str, call_id: str, index: int, arguments: Mapping[str, object]) -> str:
        """One call. Literals are sentinels (`literals`) until the template has been rendered: some
        templates trim what they are given, or read meaning into tags."""
        shown = self.unit if arguments or not self.bare else self.bare
        return "".join(
            self.masked(part.text)
            if isinstance(part, Literally)
            else self._filled(part, name, call_id, index, arguments)
            for part in shown
        )

    def _filled(
        self, slot: Slot, name: str, call_id: str, index: int, arguments: Mapping[str, object]
    ) -> str:
        if slot == "arguments":
            return self._spelled(arguments)
        if slot == "name" and isinstance(self.arguments, JsonArguments):
            return json.dumps(name, ensure_ascii=False)[1:-1]
        return {"name": name, "id": call_id, "index": str(index)}[slot]

    def _spelled(self, arguments: Mapping[str, object]) -> str:
        how = self.arguments
        if isinstance(how, JsonArguments):
            separators = how.item_separator, how.key_separator
            return json.dumps(arguments, ensure_ascii=False, separators=separators)
        if isinstance(how, PythonArguments):
            return ", ".join(f"{key}={python_literal(value)}" for key, value in arguments.items())
        assert isinstance(how, TaggedArguments), "no named format quotes strings in its own way"
        return how.between.join(
            f"{how.open}{key}{how.middles[_type(value)]}{self._tagged(value)}{how.close}"
            for key, value in arguments.items()
        )

    def _tagged(self, value: object) -> str:
        if isinstance(value, str):
            return value
        if self.constants == "python" and not isinstance(value, Mapping | list | tuple):
            return python_literal(value)
        return json.dumps(value, ensure_ascii=False)

    @cached_property
    def literals(self) -> Mapping[str, str]:
        """Sentinel -> the literal for which it stands."""
        texts = [self.begin, self.end, self.between or "", self.after_text]
        texts += [part.text for part in (*self.unit, *self.bare) if isinstance(part, Literally)]
        distinct = dict.fromkeys(text for text in texts if text)
        return {sentinel("tag", _FIRST + number): text for number, text in enumerate(distinct)}

    def masked(self, literal: str) -> str:
        """The sentinel of a literal; '' for none."""
        return next((mask for mask, text in self.literals.items() if text == literal), "")

    def unmasked(self, text: str) -> str:
        """A rendering with the literals in their places."""
        for mask, literal in self.literals.items():
            text = text.replace(mask, literal)
        return text

    @cached_property
    def ends(self) -> tuple[tuple[Sentinel, ...], str, str]:
        """The slots of a call with one argument, what stands before the first of them, and what
        stands behind the last."""
        arguments = {sentinel("key", 0): sentinel("value", 0)}
        call = self.written(sentinel("name", 0), sentinel("id", 0), 0, arguments)
        text = self.unmasked(call)
        marks = find_marks(text)
        return tuple(mark.slot for mark in marks), text[: marks[0].start], text[marks[-1].end :]

    @cached_property
    def sample(self) -> str:
        """A call for a model to imitate."""
        filled = {
            "name": "<function-name>",
            "id": "<call-id>",
            "index": "0",
            "arguments": "<args-json-object>"
            if isinstance(self.arguments, JsonArguments)
            else self._spelled({"<parameter>": "<value>"}),
        }
        call = (part.text if isinstance(part, Literally) else filled[part] for part in self.unit)
        return f"{self.begin}{''.join(call)}{self.end}".strip()


_FIRST = 16  # the sentinels before it are those of the tags that all dialects share


def python_literal(value: object) -> str:
    """A JSON value as Python writes it, its strings as JSON does."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        pairs = (f"{python_literal(key)}: {python_literal(item)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(python_literal, value)) + "]"
    return repr(value)


def _type(value: object) -> ValueType:
    if isinstance(value, str):
        return "string"
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "object"
    return "array" if isinstance(value, list | tuple) else "integer"
