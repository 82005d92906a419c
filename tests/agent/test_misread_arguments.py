# SPDX-License-Identifier: Apache-2.0
"""What pydantic would take for a value that the model did not mean; near misses that are certain;
errors about keys."""

import datetime
import enum
import json
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any, Literal, Union

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import BaseModel, TypeAdapter, ValidationError

from freetoken_agent import InvalidOutputType, InvalidTool, ModelRetry, tool
from freetoken_agent.grammars.constraint import check_schema
from freetoken_agent.tool_testing import call_tool
from freetoken_agent.tooling.coercion import misreadings
from freetoken_agent.tooling.output_type import OutputType


class Unit(enum.Enum):
    CELSIUS = "celsius"
    KELVIN = "kelvin"


class Row(BaseModel):
    at: datetime.datetime
    share: float = 0.0


def taking(hint: Any) -> Callable[..., str]:
    def take(x: Any) -> str:
        return repr(x)

    take.__annotations__["x"] = hint
    return take


HUGE = 10**400
NOT_TIMES: list[tuple[Any, Any, str]] = [
    (datetime.datetime, "2026", 'x: should not be a number; got "2026"'),
    (datetime.datetime, 1700000000, "like 2026-01-31T18:00:00Z"),
    (datetime.date, "0", "like 2026-01-31"),
    (datetime.datetime | str, "2026", "x: should not be a number"),
    (datetime.date | None, "0", "x: should not be a number"),
    (list[datetime.datetime], ["2026-01-02", "2026"], 'x[1]: should not be a number; got "2026"'),
    (dict[str, Row], {"a": {"at": "2026"}}, "x.a.at: should not be a number"),
]
NOT_NUMBERS: list[tuple[Any, Any, str]] = [
    (float, "nan", 'x: should be a finite number; got "nan"; expected a number'),
    (float, "-Infinity", "should be a finite number"),
    (float, HUGE, "should be a finite number"),
    (float, "1e999", "should be a finite number"),
    (float | None, "inf", "should be a finite number"),
    (float, True, "x: should be a number; got true"),
    (int, False, "x: should be a number; got false; expected a whole number"),
    (list[int], [1, True], "x[1]: should be a number"),
    (Row, {"at": "2026-01-02", "share": "NaN"}, "x.share: should be a finite number"),
]


@pytest.mark.parametrize(("hint", "written", "told"), [*NOT_TIMES, *NOT_NUMBERS], ids=str)
async def test_s34_what_pydantic_would_misread_is_told(hint: Any, written: Any, told: str) -> None:
    """Oracle: pydantic alone reads every one of these as something else; the model is told. An
    answer is read the same way."""
    TypeAdapter(hint).validate_json(json.dumps(written))
    outcome = await call_tool(taking(hint), {"x": written})
    assert outcome.status == "retry" and told in outcome.text
    with pytest.raises(ModelRetry, match="should"):
        OutputType.of(dict[str, hint]).validate(json.dumps({"x": written}))


@pytest.mark.parametrize(
    ("hint", "written", "value"),
    [
        (float, "1e3", 1000.0),
        (float | str, "nan", "nan"),
        (datetime.date | str, "2026", "2026"),
        (str, "half \ud800 pair", "half \ufffd pair"),
        (str, "inf", "inf"),
        (int | bool, True, True),
        (bool, 1, True),
        (bool, "yes", True),
        (datetime.datetime | int, "2026", 2026),
        (datetime.date, "2026-01-02", datetime.date(2026, 1, 2)),
        (Decimal, "1.50", Decimal("1.50")),
        (Any, True, True),
        (int, 10**30, 10**30),
        (dict[str, Any], {"x": [True, "nan"]}, {"x": [True, "nan"]}),
    ],
)
async def test_s34_what_is_meant_is_read(hint: Any, written: Any, value: Any) -> None:
    """Oracle: the value by hand, and its type."""
    assert (await call_tool(taking(hint), {"x": written})).text == repr(value)


@pytest.mark.parametrize(
    ("hint", "written", "value"),
    [
        (Unit, "Celsius", Unit.CELSIUS),
        (Unit, " KELVIN\n", Unit.KELVIN),
        (Literal["GET", "POST"], "get", "GET"),
        (Literal["a", "A"], "a", "a"),
        (Literal["x"] | None, "X", "x"),
        (Literal["x"] | str, "X", "X"),
    ],
)
async def test_s34_a_constant_in_other_letters_is_that_constant(
    hint: Any, written: str, value: Any
) -> None:
    """Oracle: the one constant that differs only by case and blanks around it; where text is
    allowed, the text."""
    assert (await call_tool(taking(hint), {"x": written})).text == repr(value)


async def test_s34_a_constant_that_could_be_two_is_none() -> None:
    """Nothing is guessed."""
    outcome = await call_tool(taking(Literal["ab", "AB"]), {"x": "Ab"})
    assert outcome.status == "retry"
    assert 'got "Ab"; expected one of "ab", "AB"' in outcome.text


async def test_a_wrong_key_is_told_as_a_key() -> None:
    """Oracle: the message by hand; what stands under the key is not at fault."""
    outcome = await call_tool(taking(dict[str, dict[int, str]]), {"x": {"a": {"one": "fine"}}})
    assert outcome.text.splitlines()[1] == (
        '- the key "one" of x.a: should be a valid integer, unable to parse string as an integer; '
        'got "one"'
    )


@pytest.mark.parametrize("hint", [dict[Unit, int], dict[Literal["celsius", "kelvin"], int]])
async def test_keys_that_are_known_can_be_enforced(hint: Any) -> None:
    """Oracles: jsonschema, for what the schema takes; llguidance, for what a grammar can do."""
    made = tool(taking(hint))
    check_schema(made.parameters)
    valid = Draft202012Validator(json.loads(json.dumps(made.parameters))).is_valid
    assert valid({"x": {"kelvin": 1}}) and valid({"x": {}})
    assert not valid({"x": {"rankine": 1}}) and not valid({"x": {"kelvin": "one"}})
    assert (await call_tool(made, {"x": {"kelvin": 1}})).text.endswith(": 1}")


@pytest.mark.parametrize("hint", [Iterable[int], type[int], list[Iterable[str]]], ids=str)
def test_what_is_no_value_is_no_type(hint: Any) -> None:
    """pydantic would hand out an iterator that checks its items when it is too late, and a class
    that JSON never holds."""
    with pytest.raises(InvalidTool, match="'x'.*(list|no value)"):
        tool(taking(hint))
    with pytest.raises(InvalidOutputType):
        OutputType.of(hint)


KINDS = st.sampled_from([float, int, str, bool, datetime.datetime, datetime.date, None])
WORDS = st.sampled_from(["nan", "inf", "1", "2026", "true", "x", "2026-01-02"])


@settings(deadline=None)
@example([float, str, datetime.datetime], "1")
@example([datetime.date, str], "0")
@given(
    st.lists(KINDS, min_size=1, max_size=3, unique=True),
    st.none() | st.booleans() | st.integers() | WORDS,
)
def test_what_fits_the_schema_is_not_misread(kinds: list[Any], value: Any) -> None:
    """Oracle: jsonschema with its format checks says what is valid; a value that pydantic's strict
    mode takes as it is, is no misreading either."""
    hint = kinds[0]
    for kind in kinds[1:]:
        hint = hint | kind
    adapter = TypeAdapter(list[hint])  # type: ignore[valid-type]
    schema = adapter.json_schema()
    try:
        read = adapter.validate_json(json.dumps([value]), strict=True)
    except ValidationError:
        return
    if type(read[0]) is type(value):
        assert misreadings([value], schema) == []


def test_misreadings_of_nested_unions_cost_what_the_value_costs() -> None:
    """Two records that hold one another, 60 deep and wrong at the end (the test's timeout is the
    oracle)."""
    records = {
        name: {"type": "object", "properties": {"it": {"$ref": "#/$defs/Any"}}, "required": ["it"]}
        for name in ("A", "B")
    }
    either = {"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}, {"type": "number"}]}
    root = {"$ref": "#/$defs/Any", "$defs": {**records, "Any": either}}
    value: Any = True
    for _ in range(60):
        value = {"it": value}
    assert misreadings(value, root) == [(("it",) * 60, "should be a number")]


class Node(BaseModel):
    share: float
    unit: Unit = Unit.KELVIN
    more: "list[Node]" = []


def of(kind: Any, *inner: Any) -> Any:
    return kind[inner if len(inner) > 1 else inner[0]]


LEAVES: list[Any] = [int, float, str, bool, None, Unit, Node, Decimal, Any, Literal["x", 1]]
LEAVES += [datetime.date, datetime.datetime]
HINTS = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        inner.map(lambda hint: of(list, hint)),
        inner.map(lambda hint: of(dict, str, hint)),
        inner.map(lambda hint: of(dict, Unit, hint)),
        st.tuples(inner, inner).map(lambda two: of(Union, *two)),
        st.tuples(inner, inner).map(lambda two: of(tuple, *two)),
    ),
    max_leaves=4,
)
TEXTS = ["", "x", "1", "nan", "true", "null", "2026", "2026-01-02", "[1]", "[", "Kelvin", "\ud800"]
TEXTS += ['{"share": "1", "unit": "KELVIN"}', '{"kelvin": [1]}']
WRITTEN = st.recursive(
    st.none() | st.booleans() | st.sampled_from([0, 1, -5, 1.5, HUGE]) | st.sampled_from(TEXTS),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["share", "more", "kelvin", "1"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(deadline=None, max_examples=200)
@given(HINTS, st.lists(WRITTEN, min_size=1, max_size=5))
def test_s34_any_arguments_are_read_or_told(hint: Any, written: list[Any]) -> None:
    """Oracles: nothing else is ever raised, a message is short and says the field, and pydantic's
    strict mode: what it takes, a tool gets, unless that is a misreading."""
    made = tool(taking(hint))
    for value in written:
        try:
            strict: Any = TypeAdapter(hint).validate_json(json.dumps(value), strict=True)
        except ValidationError:
            strict = LookupError
        try:
            [], read = made.reader.read("take", {"x": value})
        except ModelRetry as told:
            assert "- x" in str(told) or "of x" in str(told)
            assert len(str(told)) < 5000
            assert strict is LookupError or misreadings({"x": value}, made.parameters)
            continue
        if strict is not LookupError:
            assert read["x"] == strict
