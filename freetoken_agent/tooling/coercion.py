# SPDX-License-Identifier: Apache-2.0
"""Arguments of calls, as models write them, brought to the types of a schema.

Formats with tagged parameters have no types, so that `5` may be meant as text and `True` as a truth
value; and models write objects into strings. The schema decides, and only where what was written
does not fit it: text stays text where text is allowed ("02134"), and nothing is guessed.
"""

import datetime
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from .json_schema import Schema, branches, child, resolved
from .json_values import read

_BOOLEANS = {"true": True, "false": False}
_NULLS = ("null", "none")
_TIMES: Mapping[str, TypeAdapter[Any]] = {
    "date-time": TypeAdapter(datetime.datetime),
    "date": TypeAdapter(datetime.date),
}
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?")

Misreading = tuple[tuple[str | int, ...], str]
"""The keys that lead to a value, and what is wrong with it."""


def coerce(value: Any, schema: Any, root: Schema) -> Any:
    """The value as the schema wants it, as far as that is certain; else as it is. `root` holds the
    definitions that the schema refers to. What fits is never changed, nor is what is given."""
    return _Coercion(root).coerced(value, schema)


def misreadings(value: Any, root: Schema) -> list[Misreading]:
    """Where pydantic would take something for a value that it is not, such as true for 1, "nan" for
    a number, or "2026" for the seconds since 1970."""
    return list(dict.fromkeys(_Coercion(root).misread(value, root, (), set())))


class _Coercion:
    """One value against one schema. Each pair of a part of both is looked at once: unions inside of
    unions would otherwise double the work at each level."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        # By identity; the parts are kept, so that no identity is used twice.
        self._coerced: dict[tuple[int, int], tuple[Any, Any, Any]] = {}
        self._fitting: dict[tuple[int, int], tuple[Any, Any, bool]] = {}

    def coerced(self, value: Any, schema: Any) -> Any:
        key = (id(value), id(schema))
        if key not in self._coerced:
            self._coerced[key] = (value, schema, self._coerce(value, schema))
        return self._coerced[key][2]

    def fits(self, value: Any, schema: Any) -> bool:
        """Whether a value has the types, constants and keys of a schema, at every depth."""
        key = (id(value), id(schema))
        if key not in self._fitting:
            self._fitting[key] = (value, schema, self._fits(value, schema))
        return self._fitting[key][2]

    def _coerce(self, value: Any, schema: Any) -> Any:
        schema = resolved(schema, self._root)
        for part in schema.get("allOf", ()):
            value = self.coerced(value, part)
        if branches(schema):
            return self._into_branch(value, branches(schema))
        constants = _constants(schema)
        if constants is not None:
            return _into_constant(value, constants)
        kinds = _kinds(schema)
        if kinds and not any(_is_kind(value, kind) for kind in kinds):
            value = _into_kind(value, kinds)
        if isinstance(value, Mapping):
            return {key: self._entry(inner, schema, key) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._entry(inner, schema, index) for index, inner in enumerate(value)]
        return value

    def _entry(self, value: Any, schema: Schema, key: str | int) -> Any:
        inner = child(schema, key, self._root)
        return value if inner is None else self.coerced(value, inner)

    def _into_branch(self, value: Any, alternatives: Sequence[Any]) -> Any:
        """As it is where it fits an alternative, or as it reads as JSON; else into the first that
        it can be made fit."""
        for one in (value, *_as_json(value)):
            if any(self.fits(one, branch) for branch in alternatives):
                return one
        for branch in alternatives:
            changed = self.coerced(value, branch)
            if self.fits(changed, branch):
                return changed
        return value

    def _fits(self, value: Any, schema: Any) -> bool:
        schema = resolved(schema, self._root)
        if not all(self.fits(value, part) for part in schema.get("allOf", ())):
            return False
        if branches(schema):
            parts = [resolved(branch, self._root) for branch in branches(schema)]
            # Of text and a time, pydantic takes what comes first.
            taken = next((p for p in parts if _is_seconds(value, p) or _is_any_text(p)), None)
            is_time = taken is not None and _is_seconds(value, taken)
            return not is_time and any(self.fits(value, part) for part in parts)
        constants = _constants(schema)
        if constants is not None:
            return _is_constant(value, constants)
        kinds = _kinds(schema)
        if kinds and not any(_is_kind(value, kind) for kind in kinds):
            return False
        if _misreading(value, schema):
            return False
        if isinstance(value, Mapping):
            missing = set(schema.get("required", ())) - value.keys()
            return not missing and all(self._entry_fits(v, schema, k) for k, v in value.items())
        if isinstance(value, list | tuple):
            return all(self._entry_fits(inner, schema, i) for i, inner in enumerate(value))
        return True

    def misread(
        self, value: Any, schema: Any, path: tuple[str | int, ...], seen: set[Any]
    ) -> Iterator[Misreading]:
        """Of a union that fits in some way, nothing is misread. `seen`: pairs of a place and a
        schema, each looked at once."""
        schema = resolved(schema, self._root)
        if (path, id(schema)) in seen:
            return
        seen.add((path, id(schema)))
        alternatives = branches(schema)
        if alternatives and self.fits(value, schema):
            return
        for part in (*alternatives, *schema.get("allOf", ())):
            yield from self.misread(value, part, path, seen)
        said = "" if alternatives else _misreading(value, schema)
        if said:
            yield path, said
        items: Sequence[tuple[str | int, Any]] = ()
        if isinstance(value, Mapping):
            items = list(value.items())
        elif isinstance(value, list | tuple):
            items = list(enumerate(value))
        for key, inner in items if not alternatives else ():
            below = child(schema, key, self._root)
            if below is not None:
                yield from self.misread(inner, below, (*path, key), seen)

    def _entry_fits(self, value: Any, schema: Schema, key: str | int) -> bool:
        inner = child(schema, key, self._root)
        if inner is not None:
            return self.fits(value, inner)
        return isinstance(key, int) or schema.get("additionalProperties") is not False


def _constants(schema: Schema) -> Sequence[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    found: Sequence[Any] | None = schema.get("enum")
    return found


def _is_constant(value: Any, constants: Sequence[Any]) -> bool:
    return any(type(one) is type(value) and one == value for one in constants)


def _into_constant(value: Any, constants: Sequence[Any]) -> Any:
    """The constant that is written like the value."""
    if _is_constant(value, constants):
        return value
    written = _as_text(value)
    alike = [one for one in constants if _as_text(one) == written]
    if not alike:
        word = written.strip().casefold()
        alike = [one for one in constants if _as_text(one).casefold() == word]
    return alike[0] if len(alike) == 1 else value


def _kinds(schema: Schema) -> list[str]:
    kind = schema.get("type", [])
    return [kind] if isinstance(kind, str) else list(kind)


def _is_kind(value: Any, kind: str) -> bool:
    if kind == "string":
        return isinstance(value, str)
    if kind == "boolean":
        return isinstance(value, bool)
    if kind == "null":
        return value is None
    if kind == "array":
        return isinstance(value, list | tuple)
    if kind == "object":
        return isinstance(value, Mapping)
    if isinstance(value, bool):
        return False
    if kind == "integer":
        return isinstance(value, int)
    return kind == "number" and isinstance(value, int | float)


def _misreading(value: Any, schema: Schema) -> str:
    kinds = set(_kinds(schema))
    is_number = bool(kinds & {"integer", "number"})
    if isinstance(value, bool):
        return "should be a number" if is_number and "boolean" not in kinds else ""
    if "number" in kinds and isinstance(value, str | int):
        return "" if "string" in kinds or _is_finite(value) else "should be a finite number"
    return "should not be a number" if _is_seconds(value, schema) else ""


def _is_seconds(value: Any, schema: Schema) -> bool:
    """Whether pydantic would count seconds from 1970 on."""
    time = _TIMES.get(schema.get("format", ""))
    if time is None or not isinstance(value, str) or not _NUMBER.fullmatch(value):
        return False
    try:
        time.validate_strings(value)
    except ValidationError:
        return False
    return True


def _is_any_text(schema: Schema) -> bool:
    return "string" in _kinds(schema) and schema.keys() <= {"type", "title", "description"}


def _is_finite(value: str | int) -> bool:
    """Also of what is no number at all."""
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False
    except ValueError:
        return True


def _into_kind(value: Any, kinds: list[str]) -> Any:
    if isinstance(value, float) and "integer" in kinds and value.is_integer():
        return int(value)
    if isinstance(value, str):
        return _from_text(value, kinds)
    # A null is no text: it says that there is none.
    return _as_text(value) if "string" in kinds and value is not None else value


def _from_text(text: str, kinds: list[str]) -> Any:
    word = text.strip().lower()
    if "boolean" in kinds and word in _BOOLEANS:
        return _BOOLEANS[word]
    if "null" in kinds and word in _NULLS:
        return None
    try:
        value = read(text)
    except ValueError:
        return text
    if isinstance(value, float) and "integer" in kinds and value.is_integer():
        value = int(value)
    return value if any(_is_kind(value, kind) for kind in kinds) else text


def _as_json(value: Any) -> Iterator[Any]:
    """What a text reads as, if it does."""
    if isinstance(value, str):
        try:
            yield read(value)
        except ValueError:
            return


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
