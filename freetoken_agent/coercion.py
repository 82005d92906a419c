# SPDX-License-Identifier: Apache-2.0
"""Arguments of calls, as models write them, brought to the types of a schema.

Formats with tagged parameters have no types, so that `5` may be meant as text and `True` as a truth
value; and models write objects into strings. The schema decides, and only where what was written
does not fit it: text stays text where text is allowed ("02134"), and nothing is guessed.
"""

import json
from collections.abc import Mapping
from typing import Any

from .json_schema import Schema, branches, child, resolved
from .json_values import read

_BOOLEANS = {"true": True, "false": False}
_NULLS = ("null", "none")


def coerce(value: Any, schema: Any, root: Schema) -> Any:
    """The value as the schema wants it, as far as that is certain; else as it is. `root` holds the
    definitions that the schema refers to. Never changes what it is given."""
    schema = resolved(schema, root)
    for part in schema.get("allOf", ()):
        value = coerce(value, part, root)
    if branches(schema):
        return _into_branch(value, schema, root)
    if "enum" in schema or "const" in schema:
        return _into_constant(value, schema.get("enum", [schema.get("const")]))
    kinds = _kinds(schema)
    if kinds and not any(_is_kind(value, kind) for kind in kinds):
        value = _into_kind(value, kinds)
    if isinstance(value, Mapping):
        return {key: _entry(inner, schema, key, root) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_entry(inner, schema, index, root) for index, inner in enumerate(value)]
    return value


def _entry(value: Any, schema: Schema, key: str | int, root: Schema) -> Any:
    inner = child(schema, key, root)
    return value if inner is None else coerce(value, inner, root)


def _into_branch(value: Any, schema: Schema, root: Schema) -> Any:
    """Into the first alternative that the value fits, else the first that it can be made fit."""
    for branch in branches(schema):
        if _fits(value, branch, root):
            return coerce(value, branch, root)
    for branch in branches(schema):
        changed = coerce(value, branch, root)
        if _fits(changed, branch, root):
            return changed
    return value


def _fits(value: Any, schema: Any, root: Schema) -> bool:
    """Whether a value is of the schema's type, has its constants and the keys it requires."""
    schema = resolved(schema, root)
    if branches(schema):
        return any(_fits(value, branch, root) for branch in branches(schema))
    if "enum" in schema or "const" in schema:
        return _same(value, schema.get("enum", [schema.get("const")])) is not None
    kinds = _kinds(schema)
    if kinds and not any(_is_kind(value, kind) for kind in kinds):
        return False
    if not isinstance(value, Mapping):
        return True
    constants = {
        key: inner
        for key, inner in schema.get("properties", {}).items()
        if key in value and "const" in resolved(inner, root)
    }
    return set(schema.get("required", ())) <= value.keys() and all(
        _fits(value[key], inner, root) for key, inner in constants.items()
    )


def _same(value: Any, constants: list[Any]) -> list[Any] | None:
    """The constant that a value is, in a list; None if it is none of them."""
    return next(([c] for c in constants if type(c) is type(value) and c == value), None)


def _into_constant(value: Any, constants: list[Any]) -> Any:
    """The constant that is written like the value."""
    if _same(value, constants) is not None:
        return value
    written = _as_text(value)
    alike = [c for c in constants if _as_text(c) == written]
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


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
