# SPDX-License-Identifier: Apache-2.0
"""What was wrong with a value that a model wrote, told to that model: which field, what was wrong,
what it held and what is expected there."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from .coercion import misreadings
from .json_schema import Schema, child, in_words, resolved

MAX_PROBLEMS = 10  # fields named in one message
_PREVIEW_CHARS = 80
_WHOLE = "the value"
ProblemsAt = dict[tuple[str | int, ...], list[str]]
"""What is wrong, by the keys that lead there."""

_KEY = "[key]"  # how pydantic says that it means the key


@dataclass(frozen=True)
class _Place:
    """Where an error is: the path of keys, what stands there, and what should; and the same of what
    it is in."""

    path: str
    held: Any
    schema: Schema
    parent: Schema
    above: str


def problems_in(error: ValidationError, value: Any, schema: Schema) -> str:
    """One line for each field that pydantic refused. `value`: what it was given, as JSON has it."""
    found: dict[str, tuple[_Place, list[str]]] = {}
    for item in error.errors(include_url=False, include_input=False):
        place = _place(item["loc"], value, schema, missing=item["type"] == "missing")
        if item["loc"][-1:] == (_KEY,):  # of a dict: what stands there is not at fault
            key = str(item["loc"][-2])
            place = _Place(f"the key {preview(key)} of {place.above}", key, {}, {}, place.above)
        _, messages = found.setdefault(place.path, (place, []))
        message = _message(item["type"], item["msg"], place, schema)
        if message not in messages:
            messages.append(message)
    return _shortened([f"- {path}: {_told(*told, schema)}" for path, told in found.items()])


def _shortened(lines: list[str]) -> str:
    if len(lines) > MAX_PROBLEMS:
        lines[MAX_PROBLEMS:] = [f"- and {len(lines) - MAX_PROBLEMS} more"]
    return "\n".join(lines)


def misread_in(value: Any, schema: Schema) -> str:
    """One line for each field that pydantic would take for what it is not; "" if there is none."""
    found: ProblemsAt = {}
    for keys, said in misreadings(value, schema):
        found.setdefault(keys, []).append(said)
    return problem_lines(found, value, schema)


def problem_lines(found: ProblemsAt, value: Any, schema: Schema) -> str:
    """One line for each place of a value; "" if there is none."""
    places = [(_place(keys, value, schema, missing=False), said) for keys, said in found.items()]
    return _shortened([f"- {place.path}: {_told(place, said, schema)}" for place, said in places])


def preview(value: Any) -> str:
    """A value as JSON, cut to a few words."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= _PREVIEW_CHARS else text[: _PREVIEW_CHARS - 1] + "…"


def _place(loc: Sequence[str | int], value: Any, schema: Schema, *, missing: bool) -> _Place:
    """Follow a location of pydantic's. It also names branches of unions, which are no keys."""
    path, above, held, here, parent = "", "", value, schema, schema
    for number, key in enumerate(loc, 1):
        in_list = isinstance(held, list) and isinstance(key, int) and key < len(held)
        if in_list or (isinstance(held, dict) and key in held):
            held = held[key]
        elif not (missing and number == len(loc)):
            continue
        parent, here, above = here, child(here, key, schema) or {}, path
        path += f"[{key}]" if isinstance(key, int) else f".{key}" if path else key
    return _Place(path or _WHOLE, held, here, parent, above or _WHOLE)


def _message(kind: str, message: str, place: _Place, root: Schema) -> str:
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        known = ", ".join(resolved(place.parent, root).get("properties", ()))
        return f"is not known; known are: {known}" if known else "is not known: nothing is"
    for start in ("Value error, ", "Assertion failed, ", "Input "):
        message = message.removeprefix(start)
    return message


def _told(place: _Place, messages: list[str], root: Schema) -> str:
    notes = [] if messages == ["is missing"] else [f"got {preview(place.held)}"]
    expected = in_words(place.schema, root)
    if expected:
        notes.append(f"expected {expected}")
    return "; ".join([" or: ".join(messages), *notes])
