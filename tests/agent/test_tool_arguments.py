# SPDX-License-Identifier: Apache-2.0
"""From arguments as models write them to values: S33, S34, and what models are told."""

import copy
import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import AfterValidator, BaseModel, Field

from freetoken_agent import ModelRetry, Session, Store, Tool, ToolCall, tool
from freetoken_agent.testing import ScriptedModel
from freetoken_agent.tool_testing import call_tool
from freetoken_agent.tooling.coercion import coerce
from freetoken_agent.tooling.json_values import equal, frozen


class Place(BaseModel):
    lat: float
    tags: list[str] = []


@dataclass
class Span:
    days: int
    open: bool = False


GOT: list[dict[str, Any]] = []


@tool
def book(
    code: str,
    days: int = 1,
    price: float = 0.0,
    now: bool = False,
    note: str | None = None,
    level: Literal["1", "2"] = "1",
    grade: Literal[1, 2] = 1,
    place: Place | None = None,
    spans: list[Span] | None = None,
    either: int | str = 0,
    anything: Any = None,
) -> str:
    GOT.append({name: value for name, value in locals().items() if name != "GOT"})
    return "booked"


@pytest.mark.parametrize(
    ("name", "written", "expected"),
    [
        ("code", "02134", "02134"),
        ("code", 2134, "2134"),
        ("code", 1.5, "1.5"),
        ("code", True, "true"),
        ("code", {"a": [1]}, '{"a": [1]}'),
        ("code", '{"a": 1}', '{"a": 1}'),
        ("code", "null", "null"),
        ("days", "5", 5),
        ("days", " 5 ", 5),
        ("days", "5.0", 5),
        ("days", 5.0, 5),
        ("price", "5", 5.0),
        ("price", "1e2", 100.0),
        ("now", "True", True),
        ("now", "true", True),
        ("now", "FALSE", False),
        ("note", "null", "null"),
        ("note", None, None),
        ("note", 7, "7"),
        ("level", 2, "2"),
        ("grade", "2", 2),
        ("place", '{"lat": "1.5", "tags": ["x", 2]}', Place(lat=1.5, tags=["x", "2"])),
        ("place", {"lat": 1, "tags": '["x"]'}, Place(lat=1, tags=["x"])),
        ("place", "None", None),
        ("spans", '[{"days": "3", "open": "True"}]', [Span(3, True)]),
        ("spans", ['{"days": 3}'], [Span(3)]),
        ("either", "5", "5"),
        ("either", 5, 5),
        ("either", True, "true"),
        ("anything", "5", "5"),
        ("anything", "[1]", "[1]"),
    ],
)
async def test_s34_the_schema_leads_coercion(name: str, written: object, expected: object) -> None:
    """Oracle: the value by hand, and its type."""
    GOT.clear()
    outcome = await call_tool(book, {"code": "-", **{name: written}})
    assert outcome.status == "ok", outcome.text
    (got,) = GOT
    assert got[name] == expected
    assert type(got[name]) is type(expected)


async def test_s34_as_text_from_a_tagged_format() -> None:
    """A format without types writes everything as text; what is text by the schema keeps its
    spelling."""
    GOT.clear()
    written = {
        "code": "1.50",
        "days": "14",
        "price": "9.90",
        "now": "false",
        "place": '{"lat": 59.9}',
        "grade": "1",
    }
    assert (await call_tool(book, written)).status == "ok"
    (got,) = GOT
    assert (got["code"], got["days"], got["price"], got["now"]) == ("1.50", 14, 9.9, False)
    assert (got["place"], got["grade"]) == (Place(lat=59.9), 1)


@pytest.mark.parametrize(
    "written",
    [
        '{"code": "02134", "days": 2}',
        '  {"code": "02134", "days": "2"}\n',
        json.dumps('{"code": "02134", "days": 2}'),
    ],
)
async def test_s33_arguments_as_a_string_become_the_object(written: str) -> None:
    """Oracle: the object inside; a string in a string too."""
    GOT.clear()
    assert (await call_tool(book, written)).status == "ok"
    assert (GOT[0]["code"], GOT[0]["days"]) == ("02134", 2)


async def test_s33_no_arguments_at_all() -> None:
    """An empty text is an empty object, as some formats write it."""

    @tool
    def ping() -> str:
        return "pong"

    assert (await call_tool(ping, "")).text == "pong"
    assert (await call_tool(ping, {})).text == "pong"


async def test_arguments_of_a_segment_are_not_shared(memory_store: Store) -> None:
    """A segment is a snapshot that refuses changes; a tool gets values of its own."""

    @tool
    def change(items: list[Any], deep: Any) -> str:
        items.append(3)
        deep["a"].append(4)
        return json.dumps([items, deep])

    raw = Tool.from_schema(
        "raw", {"properties": {"deep": {}}}, lambda given: given["deep"]["a"].append(5) or given
    )
    session: Session = memory_store.create("s", ScriptedModel(), tools=[change, raw])
    session.append("user", "?")
    call = session.append_call("change", {"items": [1, 2], "deep": {"a": [1]}})
    before = copy.deepcopy(call.arguments)
    call_of_it = ToolCall.of(call)
    assert (call_of_it.id, call_of_it.name) == (call.call_id, "change")
    outcome = await call_tool(change, call_of_it.arguments)
    assert outcome.text == '[[1, 2, 3], {"a": [1, 4]}]'
    deep = await call_tool(raw, frozen({"deep": {"a": [1]}}))
    assert deep.text == '{"deep":{"a":[1,5]}}'
    assert call.arguments == before


def even(number: int) -> int:
    if number % 2:
        raise ValueError("odd numbers are taken")
    return number


@tool
def order(
    place: Place,
    unit: Literal["c", "f"] = "c",
    days: Annotated[int, Field(ge=1, le=14)] = 1,
    either: int | list[Span] = 0,
    row: Annotated[int, AfterValidator(even)] = 0,
    name: Annotated[str, Field(max_length=3)] = "",
) -> str:
    return "done"


async def test_s34_on_failure_the_model_is_told() -> None:
    """Oracle: the message by hand: the field, what was wrong, what it held, what is expected."""
    written = {
        "place": {"tags": ["a", None]},
        "unit": "k",
        "days": "many",
        "either": [{"days": "x"}],
        "row": 3,
        "name": "Anna",
        "zz": [1],
    }
    outcome = await call_tool(order, written)
    assert (outcome.status, outcome.is_error, outcome.retry) == ("retry", True, 1)
    assert isinstance(outcome.exception, ModelRetry)
    assert outcome.text.splitlines() == [
        "The arguments of order are not valid:",
        "- place.lat: is missing; expected a number",
        "- place.tags[1]: should be a valid string; got null; expected text",
        '- unit: should be \'c\' or \'f\'; got "k"; expected one of "c", "f"',
        "- days: should be a valid integer, unable to parse string as an integer; "
        'got "many"; expected a whole number, at least 1, at most 14',
        '- either: should be a valid integer; got [{"days": "x"}]; '
        "expected a whole number or a list of (an object with days)",
        "- either[0].days: should be a valid integer, unable to parse string as an integer; "
        'got "x"; expected a whole number',
        "- row: odd numbers are taken; got 3; expected a whole number",
        '- name: String should have at most 3 characters; got "Anna"; '
        "expected text, at most 3 characters",
        "- zz: is not known; known are: place, unit, days, either, row, name; got [1]",
        "Correct them and call order again.",
    ]


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ('{"place": ', "they are no JSON object: Expecting value"),
        ("[1]", "they are no JSON object but [1]"),
        ("5", "they are no JSON object but 5"),
        ("order it", 'they cannot be read: "order it"'),
        ('{"place": "Oslo", "days": zz}', 'they are no JSON object: Expecting value at "zz}"'),
        (
            '<tool_call>\n{"name": "order", "arguments": {"days": zz}}\n</tool_call>',
            r'they are no JSON object: Expecting value at "zz}}\n</tool_call>"',
        ),
        (
            "<tool_call>\n<function=order>\n<parameter=days>\n7\n</tool_call>",
            r'they cannot be read: "<tool_call>\n<function=order>',
        ),
        ('{"place": "Oslo"', "they are no JSON object: Expecting ',' delimiter at the end"),
        ("[" * 5000, "they are no JSON object: it is too deep"),
        ('{"place": NaN}', "they are no JSON object"),
    ],
)
async def test_s34_what_is_no_object_is_told(written: str, told: str) -> None:
    """Also what would break a parser: the run goes on."""
    outcome = await call_tool(order, written)
    assert outcome.status == "retry"
    assert f"- {told}" in outcome.text
    assert len(outcome.text) < 300


async def test_messages_stay_short() -> None:
    """Long values and many fields are cut: a message is paid for in tokens."""

    @tool
    def many(items: list[int]) -> str:
        return ""

    outcome = await call_tool(many, {"items": ["x" * 10_000] * 500})
    assert "- and 490 more" in outcome.text
    assert len(outcome.text) < 4_000


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ({}, "- a: is missing"),
        ({"a": 1, "c": 2}, "- c: is not known; known are: a, b; got 2"),
        ('"x"', 'they cannot be read: "x"'),
    ],
)
async def test_a_schema_from_elsewhere_is_checked_at_its_top(written: Any, told: str) -> None:
    """Oracle: the schema's `required` and closed properties; text becomes what the schema says."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/B"}},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"B": {"type": "array", "items": {"type": "boolean"}}},
    }
    made = Tool.from_schema("far", schema, lambda given: given)
    outcome = await call_tool(made, written)
    assert outcome.status == "retry"
    assert told in outcome.text
    assert (await call_tool(made, {"a": "5", "b": "[true]"})).text == '{"a":5,"b":[true]}'


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    scalars: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
        [
            {"type": "string"},
            {"type": "integer"},
            {"type": "number"},
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["string", "null"]},
            {"enum": ["a", 1, None, True]},
            {"const": "1"},
            {},
        ]
    )

    def deeper(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        def made(properties: dict[str, Any], closed: bool) -> dict[str, Any]:
            schema = {"type": "object", "properties": properties, "required": list(properties)[:1]}
            return {**schema, "additionalProperties": False} if closed else schema

        return st.one_of(
            st.builds(lambda items: {"type": "array", "items": items}, inner),
            st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=3)),
            st.builds(made, st.dictionaries(st.sampled_from("abc"), inner), st.booleans()),
            st.builds(lambda v: {"type": "object", "additionalProperties": v}, inner),
        )

    return st.recursive(scalars, deeper, max_leaves=6)


WORDS = [
    "",
    "a",
    "1",
    "5",
    "1.0",
    "-2.5",
    "true",
    "None",
    "null",
    '["1"]',
    '{"a": "1"}',
    "[5, null]",
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from([0.0, 1.0, 2.5, *WORDS]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner),
    max_leaves=8,
)


@settings(deadline=None)
@given(schemas(), VALUES)
def test_what_is_valid_is_never_changed(schema: dict[str, Any], value: Any) -> None:
    """Oracle: jsonschema says what is valid. Coercing twice changes nothing more, and coercion
    leaves what it was given as it was."""
    before = copy.deepcopy(value)
    changed = coerce(value, schema, schema)
    if Draft202012Validator(schema).is_valid(value):
        assert equal(changed, value)
    assert equal(coerce(changed, schema, schema), changed)
    assert value == before


TYPED = st.fixed_dictionaries(
    {},
    optional={
        "text": st.text(max_size=5) | st.sampled_from(WORDS),
        "count": st.integers(),
        "ratio": st.floats(allow_nan=False, allow_infinity=False),
        "flag": st.booleans(),
        "items": st.lists(st.none() | st.text(max_size=3), max_size=3),
        "deep": st.dictionaries(st.text(max_size=3), st.integers(), max_size=3),
    },
)


@settings(deadline=None)
@given(TYPED)
def test_text_becomes_what_it_was_written_from(value: dict[str, Any]) -> None:
    """Oracle: the values that were written: strings as they are, everything else as JSON."""
    kinds = {
        "text": "string",
        "count": "integer",
        "ratio": "number",
        "flag": "boolean",
        "items": "array",
        "deep": "object",
    }
    schema = {"properties": {name: {"type": kind} for name, kind in kinds.items()}}
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in value.items()}
    assert coerce(texts, schema, schema) == value


def test_nested_unions_cost_what_the_value_costs() -> None:
    """A union of two records that hold one another, 50 deep and wrong at the end: each of 2^50 ways
    would take for ever (the test's timeout is the oracle)."""
    records = {
        name: {"type": "object", "properties": {"it": {"$ref": "#/$defs/Any"}}, "required": ["it"]}
        for name in ("A", "B")
    }
    either = {"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}, {"type": "integer"}]}
    root = {"$ref": "#/$defs/Any", "$defs": {**records, "Any": either}}
    value: Any = "x"
    for _ in range(50):
        value = {"it": value}
    assert coerce(value, root, root) == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[3]", [3]),
        ('["3"]', ["3"]),
        ("5", 5),
        ("5.0", 5),
        ("[3.5]", ["3.5"]),
        ("nothing", "nothing"),
    ],
)
def test_a_text_that_reads_as_one_of_a_union_is_that_one(text: str, expected: Any) -> None:
    """Oracle: written by hand: [3] is a list of numbers although texts come first, and becomes
    texts only where there is no other way."""
    texts = {"type": "array", "items": {"type": "string"}}
    numbers = {"type": "array", "items": {"type": "integer"}}
    union = {"anyOf": [texts, numbers, {"type": "integer"}]}
    assert equal(coerce(text, union, union), expected)
