# SPDX-License-Identifier: Apache-2.0
"""The arguments of a call in the spelling of its format, as a grammar that fits their schema.

JSON       {"city": "Oslo", "days": 2}                     the schema as it is
tagged     <parameter=city>\\nOslo\\n</parameter> …           each parameter by its own schema
quoted     {city:<|"|>Oslo<|"|>,days:2}                     types, enumerations, required keys
python     city="Oslo", days=2, sunny=True                  the same
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..call_formats.call_spelling import (
    Arguments,
    JsonArguments,
    PythonArguments,
    QuotedArguments,
    TaggedArguments,
    ValueType,
    python_literal,
)
from .lark import ANY, Rules, quoted
from .string_patterns import FORMATS, searched

Schema = Mapping[str, Any]

SPELLING: Mapping[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
}
_MAX_REFERENCES = 16


def spell(rules: Rules, arguments: Arguments, schema: Schema, *, before: str = "") -> str:
    """What fits the slot of the arguments, behind the literal `before`. Names that the schema does
    not have are not written.

    Literals that may stand in the same place must be whole lexemes: the lexer takes the longest,
    so that a newline and then `<parameter=` could not come where `\n</function>` may, too.
    """
    if isinstance(arguments, TaggedArguments):
        return _Tagged(rules, arguments, schema).parameters(before)
    return f"{rules.literal(before)} {_slot(rules, arguments, schema)}"


def _slot(rules: Rules, arguments: Arguments, schema: Schema) -> str:
    closed = {"type": "object", "additionalProperties": False, **schema}
    if isinstance(arguments, JsonArguments):
        separators = {
            "item_separator": arguments.item_separator,
            "key_separator": arguments.key_separator,
        }
        return rules.value(closed, {**SPELLING, **separators})
    if isinstance(arguments, PythonArguments):
        return _Python(rules, schema).keywords()
    assert isinstance(arguments, QuotedArguments)
    return _Quoted(rules, arguments, closed).object(closed)


@dataclass(frozen=True)
class _Member:
    """How one is written as the first and as a later one."""

    first: str
    later: str
    required: bool


class _Spelling:
    """What the formats that are not JSON share. One use."""

    def __init__(self, rules: Rules, schema: Schema) -> None:
        self._rules = rules
        self._root = schema

    def _resolved(self, schema: Any) -> dict[str, Any]:
        """The schema with references at its top followed, and what it is all of put into it."""
        found = {} if isinstance(schema, bool) else dict(schema)
        for _ in range(_MAX_REFERENCES):
            reference = found.pop("$ref", None)
            if reference is None:
                break
            found = {**self._target(reference), **found}
        parts = [self._resolved(part) for part in found.pop("allOf", ())]
        return {**{key: part[key] for part in parts for key in part}, **found}

    def _target(self, reference: str) -> Mapping[str, Any]:
        target: Any = self._root
        for step in reference.removeprefix("#/").split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        return target if isinstance(target, Mapping) else {}

    def _json(self, schema: Schema) -> str:
        """A JSON value; what it refers to goes with it."""
        named = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return self._rules.value({**named, **schema}, SPELLING)

    def _text(self, schema: Schema, close: str) -> str:
        """A string as it is, and the literal that ends it."""
        bounds = []
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if least or most != "":
            bounds.append(rf"(.|\n){{{least},{most}}}")
        bounds += filter(None, [FORMATS.get(schema.get("format", ""))])
        bounds += filter(None, [searched(schema.get("pattern"))])
        return self._rules.string(bounds or [ANY], close)

    def _members(self, members: Sequence[_Member]) -> str:
        """Members in their order, at least one."""
        later = ""  # what may follow a member
        first = ""
        for one in reversed(members):
            begin = f"{one.first} {later}".strip()
            first = begin if one.required or not first else f"{begin} | {first}"
            follow = f"{one.later} {later}".strip()
            if not one.required:
                follow = f"{follow} | {later}" if later else f"({follow})?"
            later = self._rules.rule(follow)
        return self._rules.rule(first)


class _Tagged(_Spelling):
    def __init__(self, rules: Rules, tags: TaggedArguments, schema: Schema) -> None:
        super().__init__(rules, schema)
        self._tags = tags

    def parameters(self, before: str) -> str:
        """With the literal before them, also where the schema has none."""
        required = self._root.get("required", ())
        members = [
            _Member(
                self._parameter(name, schema, before),
                self._parameter(name, schema, self._tags.between),
                name in required,
            )
            for name, schema in self._root.get("properties", {}).items()
        ]
        return self._members(members) if members else self._rules.literal(before)

    def _parameter(self, name: str, schema: Any, before: str) -> str:
        """By what is written between key and value, the values that may follow it."""
        rules, tags = self._rules, self._tags
        values: dict[str, list[str]] = {}
        found = self._alternatives(schema)
        free = any(_is_text(one) for one in found)  # then nothing is read as anything else
        for one in found:
            if "const" in one:
                constant = one["const"]
                if free and not isinstance(constant, str):
                    continue
                kind: ValueType = "string" if isinstance(constant, str) else "object"
                text = constant if isinstance(constant, str) else json.dumps(constant)
                value = rules.plain(text, tags.close)
            elif free and not _is_text(one):
                continue
            else:
                kind = _TYPES.get(one.get("type"), "object") if not free else "string"
                value = self._text(one, tags.close) if free else self._closed(one)
            values.setdefault(tags.middles.get(kind, tags.middles["string"]), []).append(value)
        opened = rules.literal(before + tags.open)
        return rules.rule(
            " | ".join(
                f"{opened} {quoted(name)} {rules.literal(middle)} {rules.rule(' | '.join(written))}"
                for middle, written in values.items()
            )
        )

    def _closed(self, schema: Schema) -> str:
        """A value that is no text; truth and null also as Python writes them, as some templates
        do."""
        words = {"boolean": ("true", "false", "True", "False"), "null": ("null", "None")}
        close = self._tags.close
        if schema.get("type") in words:
            options = [self._rules.plain(word, close) for word in words[schema["type"]]]
            return self._rules.rule(" | ".join(options))
        return f"{self._json(schema)} {self._rules.literal(close)}"

    def _alternatives(self, schema: Any, depth: int = 0) -> list[Schema]:
        """A schema without unions, lists of types and of constants, each as one alternative."""
        schema = self._resolved(schema)
        constants = _constants(schema)
        if constants is not None:
            return [{"const": value} for value in constants]
        for key in ("anyOf", "oneOf"):
            if key in schema and depth < _MAX_REFERENCES:
                return [a for one in schema[key] for a in self._alternatives(one, depth + 1)]
        kinds = schema.get("type")
        if isinstance(kinds, list):
            return [{**schema, "type": kind} for kind in kinds]
        return [schema]


class _Literals(_Spelling):
    """Values in a spelling of their own, by their types."""

    comma: ClassVar[str]
    free_key: ClassVar[str]  # the terminal of a key that no schema names

    def __init__(self, rules: Rules, schema: Schema) -> None:
        super().__init__(rules, schema)
        self._named: dict[str, str] = {}  # reference -> rule

    def object(self, schema: Schema) -> str:
        properties: Mapping[str, Any] = schema.get("properties", {})
        inside = self._inside(schema, {name: self._key(name) for name in properties})
        free = schema.get("additionalProperties", True)
        if not properties and free is not False:
            inside = self._free(free if isinstance(free, Mapping) else {})
        return self._rules.rule(f'"{{" {inside} "}}"') if inside else '"{}"'

    def _free(self, values: Schema) -> str:
        """Members of any names."""
        member = f"{self._rules.terminal(self.free_key)} {self._value(values)}"
        return f"({member} ({quoted(self.comma)} {member})*)?"

    def _inside(self, schema: Schema, keys: Mapping[str, str]) -> str:
        """The members of an object; '' where it has none."""
        required = schema.get("required", ())
        members = []
        for name, key in keys.items():
            one = f"{key} {self._value(schema['properties'][name])}"
            members.append(_Member(one, f"{quoted(self.comma)} {one}", name in required))
        if not members:
            return ""
        inside = self._members(members)
        return inside if any(name in required for name in keys) else f"{inside}?"

    def _value(self, schema: Any) -> str:
        if isinstance(schema, Mapping) and "$ref" in schema:
            return self._referred(schema["$ref"])
        schema = self._resolved(schema)
        values = _constants(schema)
        if values is not None:
            return self._any(map(self._constant, values))
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return self._any(map(self._value, schema[key]))
        kind = schema.get("type")
        if isinstance(kind, list):
            return self._any(self._value({**schema, "type": one}) for one in kind)
        if kind == "string":
            return self._string(schema)
        if kind == "array":
            item = self._value(schema.get("items", {"type": "string"}))
            return self._rules.rule(f'"[" {self._repeated(item, schema)} "]"')
        return self.object(schema) if kind == "object" else self._plain(schema)

    def _referred(self, reference: str) -> str:
        """A rule of its own, so that a schema may refer to itself."""
        name = self._named.get(reference)
        if name is None:
            name = self._named[reference] = self._rules.forward()
            self._rules.define(name, self._value(self._target(reference)))
        return name

    def _any(self, alternatives: Iterable[str]) -> str:
        return self._rules.rule(" | ".join(alternatives))

    def _repeated(self, item: str, schema: Schema) -> str:
        """Items with commas between them."""
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return ""
        counts = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        rest = f"({quoted(self.comma)} {item}){counts}"
        return f"{item} {rest}" if least else f"({item} {rest})?"

    def _key(self, name: str) -> str:
        raise NotImplementedError

    def _string(self, schema: Schema) -> str:
        raise NotImplementedError

    def _constant(self, value: Any) -> str:
        raise NotImplementedError

    def _plain(self, schema: Schema) -> str:
        """A value that is no string, array or object, or may be any."""
        return self._json(schema)


class _Quoted(_Literals):
    comma = ","
    free_key = "/[a-zA-Z_][a-zA-Z0-9_]{0,31}:/"

    def __init__(self, rules: Rules, quotes: QuotedArguments, schema: Schema) -> None:
        super().__init__(rules, schema)
        self._quotes = quotes

    def _key(self, name: str) -> str:
        return quoted(name + ":")

    def _string(self, schema: Schema) -> str:
        opened = self._rules.literal(self._quotes.open)
        return self._rules.rule(f"{opened} {self._text(schema, self._quotes.close)}")

    def _plain(self, schema: Schema) -> str:
        return self._string(schema) if _is_text(schema) else self._json(schema)

    def _constant(self, value: Any) -> str:
        if not isinstance(value, str):
            return self._json({"const": value})
        opened, closed = map(self._rules.literal, (self._quotes.open, self._quotes.close))
        return f"{opened} {quoted(value)} {closed}"


class _Python(_Literals):
    comma = ", "
    free_key = r'/"[^"\\\n]{1,32}": /'

    def keywords(self) -> str:
        """What stands between the parentheses; '' where the schema has no parameters."""
        properties: Mapping[str, Any] = self._root.get("properties", {})
        return self._inside(self._root, {name: quoted(f"{name}=") for name in properties})

    def _key(self, name: str) -> str:
        return quoted(f"{python_literal(name)}: ")

    def _string(self, schema: Schema) -> str:
        return self._json(schema)

    def _constant(self, value: Any) -> str:
        return quoted(python_literal(value))

    def _plain(self, schema: Schema) -> str:
        words = {"boolean": '("True" | "False")', "null": '"None"'}
        return words.get(schema.get("type", ""), "") or self._json(schema)


def _constants(schema: Schema) -> list[Any] | None:
    """The values that a schema lists."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _is_text(schema: Schema) -> bool:
    """Whether any text may be meant, within bounds."""
    kind = schema.get("type")
    return kind == "string" or (kind is None and not _SHAPED.intersection(schema))


_SHAPED = frozenset(("const", "properties", "items", "prefixItems", "anyOf", "oneOf"))
_TYPES: Mapping[Any, ValueType] = {
    "string": "string",
    "integer": "integer",
    "number": "integer",
    "boolean": "boolean",
    "null": "null",
    "array": "array",
    "object": "object",
}
