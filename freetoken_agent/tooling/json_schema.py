# SPDX-License-Identifier: Apache-2.0
"""JSON schemas as models see them: made from types, always in one order, and put in words.

A schema becomes ids in the preamble of a session. So its keys have a fixed order that does not
depend on the version of pydantic or on hash seeds, and what only repeats names is left out.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, JsonSchemaWarningKind
from pydantic_core import core_schema

Schema = Mapping[str, Any]

_FIRST = ("$ref", "type", "description", "enum", "const", "anyOf", "oneOf", "allOf", "properties")
_LAST = ("required", "additionalProperties", "default", "$defs")
_MAPS = ("properties", "$defs", "patternProperties")  # of schemas
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = (
    "items",
    "additionalProperties",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
    "contains",
)
_FORMATS = (
    "date-time",
    "date",
    "time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uri",
    "uuid",
)
_DROPPED = ("title", "discriminator")  # said by the names; said by the constants of the branches
_MAX_WORDS = 240
_EXAMPLES = {
    "date-time": "2026-01-31T18:00:00Z",
    "date": "2026-01-31",
    "time": "18:00:00",
    "duration": "PT1H30M",
}
_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
    "multipleOf": "a multiple of",
    "minLength": "at least (characters)",
    "maxLength": "at most (characters)",
    "pattern": "matching",
    "format": "in the format",
    "minItems": "at least (items)",
    "maxItems": "at most (items)",
}
_TYPES = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
}


class _Generator(GenerateJsonSchema):
    # A default that JSON does not have is still one: its field is not required.
    ignored_warning_kinds: set[JsonSchemaWarningKind] = {
        "skipped-choice",
        "non-serializable-default",
    }

    def generator_schema(self, schema: core_schema.GeneratorSchema) -> JsonSchemaValue:
        raise PydanticInvalidForJsonSchema("an Iterable is read only once: make it a list")

    def is_subclass_schema(self, schema: core_schema.IsSubclassSchema) -> JsonSchemaValue:
        raise PydanticInvalidForJsonSchema("a class is no value")


def schema_of(adapter: TypeAdapter[Any]) -> dict[str, Any]:
    """The schema of what a type accepts, in our order. pydantic's PydanticUserError where JSON has
    no such type, PydanticUndefinedAnnotation where it names a type that there is not."""
    if not adapter.pydantic_complete:
        adapter.rebuild()
    return ordered(inlined(adapter.json_schema(schema_generator=_Generator)), generated=True)


def inlined(schema: Schema) -> dict[str, Any]:
    """The same schema with definitions where they are used: many chat templates look for `type` and
    `enum` there. Recursive ones stay apart, and records that are used more than once."""
    definitions: Mapping[str, Schema] = schema.get("$defs", {})
    uses = Counter(_references(schema))
    apart = {
        name
        for name, inner in definitions.items()
        if _reaches(inner, name, definitions) or (uses[name] > 1 and "properties" in inner)
    }

    def placed(part: Any) -> Any:
        if isinstance(part, list):
            return [placed(one) for one in part]
        if not isinstance(part, Mapping):
            return part
        name = _reference(part)
        if name in definitions and name not in apart:
            said = {key: value for key, value in part.items() if key != "$ref"}
            return placed({**definitions[name], **said})
        return {key: placed(value) for key, value in part.items()}

    rest = {key: placed(value) for key, value in schema.items() if key != "$defs"}
    if apart:
        rest["$defs"] = {name: placed(definitions[name]) for name in apart}
    return rest


def _reference(part: Mapping[str, Any]) -> str:
    reference = part.get("$ref")
    return reference.removeprefix("#/$defs/") if isinstance(reference, str) else ""


def _references(part: Any) -> Iterator[str]:
    """The names of definitions that are referred to, as often as they are."""
    if isinstance(part, Mapping):
        yield from filter(None, [_reference(part)])
    for one in part.values() if isinstance(part, Mapping) else part:
        if isinstance(one, Mapping | list):
            yield from _references(one)


def _reaches(schema: Schema, name: str, definitions: Mapping[str, Schema]) -> bool:
    """Whether a schema refers to a definition, also through others."""
    seen: set[str] = set()
    ahead = list(_references(schema))
    while ahead:
        one = ahead.pop()
        if one == name:
            return True
        if one not in seen:
            seen.add(one)
            ahead += _references(definitions.get(one, {}))
    return False


def ordered(schema: Schema, *, generated: bool = False) -> dict[str, Any]:
    """The same schema with its keys in one order, without titles. `generated`: pydantic made it, so
    what it says but does not check goes (a set takes repeated items, `path` is any text), and
    objects are closed whose further keys it would ignore."""
    found = {key: value for key, value in schema.items() if not _is_dropped(key, value)}
    if generated:
        found.pop("uniqueItems", None)
        if found.get("format") not in _FORMATS:
            found.pop("format", None)
        found = _with_known_keys(found)
        if "properties" in found:
            found.setdefault("additionalProperties", False)
    middle = sorted(found.keys() - {*_FIRST, *_LAST})
    keys = [key for key in (*_FIRST, *middle, *_LAST) if key in found]
    return {key: _ordered_value(key, found[key], generated) for key in keys}


def _with_known_keys(schema: dict[str, Any]) -> dict[str, Any]:
    """A dict whose keys are constants, as an object that may have each of them: grammars know no
    names of properties but these."""
    keys = schema.get("propertyNames", {})
    names = keys.get("enum", [keys["const"]] if "const" in keys else [])
    inner = schema.get("additionalProperties", True)
    if not names or "properties" in schema or not all(isinstance(name, str) for name in names):
        return schema
    kept = {key: value for key, value in schema.items() if key != "propertyNames"}
    return {**kept, "properties": dict.fromkeys(names, inner), "additionalProperties": False}


def _is_dropped(key: str, value: object) -> bool:
    return key in _DROPPED and isinstance(value, str | Mapping)


def _ordered_value(key: str, value: Any, generated: bool) -> Any:
    if key in _MAPS and isinstance(value, Mapping):
        names = sorted(value) if key == "$defs" else value
        return {name: _inner(value[name], generated) for name in names}
    if key in _LISTS and isinstance(value, Sequence):
        return [_inner(schema, generated) for schema in value]
    return _inner(value, generated) if key in _SCHEMAS else value


def _inner(schema: Any, generated: bool) -> Any:
    return (
        ordered(schema, generated=generated) if isinstance(schema, Mapping) else schema
    )  # true, false


def resolved(schema: Any, root: Schema) -> Schema:
    """What a schema refers to, through any number of references; {} if it says nothing."""
    for _ in range(len(root.get("$defs", ())) + 1):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            break
        if reference == "#":
            schema = root
            continue
        target: Any = root
        for part in reference.removeprefix("#/").split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            target = target.get(part) if isinstance(target, Mapping) else None
        schema = target
    return schema if isinstance(schema, Mapping) else {}


def branches(schema: Schema) -> Sequence[Any]:
    """The alternatives of a union; () if it is none."""
    found = schema.get("anyOf") or schema.get("oneOf") or ()
    return found if isinstance(found, Sequence) else ()


def child(schema: Any, key: str | int, root: Schema) -> Schema | None:
    """The schema of an entry of an object or an array, also inside a union; None if it has none."""
    schema = resolved(schema, root)
    for branch in (*branches(schema), *schema.get("allOf", ())):
        found = child(branch, key, root)
        if found is not None:
            return found
    if isinstance(key, int):
        front = schema.get("prefixItems", ())
        inner = front[key] if key < len(front) else schema.get("items")
    else:
        inner = schema.get("properties", {}).get(key, schema.get("additionalProperties"))
    return inner if isinstance(inner, Mapping) else None


def in_words(schema: Any, root: Schema) -> str:
    """What a schema expects, in words for a model; '' if it expects nothing. Long ones are cut."""
    words = _words(resolved(schema, root), root, 0)
    return words if len(words) <= _MAX_WORDS else words[: _MAX_WORDS - 1] + "…"


def _words(schema: Schema, root: Schema, depth: int) -> str:
    if "enum" in schema:
        values = ", ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
        return f"one of {values}"
    if "const" in schema:
        return json.dumps(schema["const"], ensure_ascii=False)
    if branches(schema):
        inner = [_words(resolved(one, root), root, depth) for one in branches(schema)]
        return " or ".join(dict.fromkeys(words for words in inner if words))
    kind = schema.get("type")
    if isinstance(kind, list):
        return " or ".join(_words({**schema, "type": one}, root, depth) for one in kind)
    parts = [_kind_words(kind, schema, root, depth), *_bounds(schema)]
    return ", ".join(part for part in parts if part)


def _kind_words(kind: object, schema: Schema, root: Schema, depth: int) -> str:
    if kind == "array":
        items = _words(resolved(schema.get("items"), root), root, depth + 1) if depth < 2 else ""
        return f"a list of ({items})" if items else "a list"
    if kind == "object":
        needed = ", ".join(schema.get("required", ()))
        return f"an object with {needed}" if needed else "an object"
    return _TYPES.get(kind, "") if isinstance(kind, str) else ""


def _bounds(schema: Schema) -> Iterator[str]:
    for key, words in _BOUNDS.items():
        if key in schema:
            before, _, unit = words.partition(" (")
            value = schema[key]
            yield f"{before} {value} {unit.rstrip(')')}".rstrip()
            if key == "format" and value in _EXAMPLES:
                yield f"like {_EXAMPLES[value]}"
