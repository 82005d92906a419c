# SPDX-License-Identifier: Apache-2.0
"""From signatures and docstrings to schemas: S56, every kind of type, one order of keys."""

import datetime
import enum
import json
import os
import pathlib
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Annotated, Any, Literal, NotRequired

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field
from typing_extensions import Doc, TypedDict

from freetoken_agent import InvalidTool, RunContext, Tool, tool
from freetoken_agent.grammars.constraint import check_schema
from freetoken_agent.tool_testing import call_tool
from freetoken_agent.tooling.docstrings import read_docstring


def google(city: str, days: int = 3) -> str:
    """Look up the weather.

    It may rain,
    or not.

    Args:
        city: The city,
            in English.
        days: How many days: 1 to 14.

    Returns:
        A forecast.

    Raises:
        ValueError: Never.
    """
    return f"{city} {days}"


def google_with_types(city: str, days: int = 3) -> str:
    """Look up the weather.

    It may rain, or not.

    Args:
        city (str): The city, in English.
        days (int, optional): How many days: 1 to 14.
    """
    return f"{city} {days}"


def numpy(city: str, days: int = 3) -> str:
    """Look up the weather.

    It may rain,
    or not.

    Parameters
    ----------
    city : str
        The city, in English.
    days : int, optional
        How many days: 1 to 14.

    Returns
    -------
    str
        A forecast.
    """
    return f"{city} {days}"


def numpy_without_types(city: str, days: int = 3) -> str:
    """
    Look up the weather.

    It may rain, or not.

    Parameters
    ----------
    city
        The city,
        in English.
    days
        How many days: 1 to 14.
    """
    return f"{city} {days}"


def sphinx(city: str, days: int = 3) -> str:
    """Look up the weather.

    It may rain,
    or not.

    :param city: The city,
        in English.
    :type city: str
    :param int days: How many days: 1 to 14.
    :return: A forecast.
    :rtype: str
    """
    return f"{city} {days}"


def epydoc(city: str, days: int = 3) -> str:
    """Look up the weather.

    It may rain, or not.

    @param city: The city, in English.
    @type city: str
    @param days: How many days: 1 to 14.
    @return: A forecast.
    """
    return f"{city} {days}"


SHAPES = [google, google_with_types, numpy, numpy_without_types, sphinx, epydoc]


@pytest.mark.parametrize("function", SHAPES, ids=lambda f: f.__name__)
def test_s56_docstring_shapes_give_the_same_schema(function: Callable[..., str]) -> None:
    """Oracle: the schema, written out."""
    assert tool(function, name="weather").schema == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Look up the weather.\n\nIt may rain, or not.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "The city, in English."},
                    "days": {
                        "type": "integer",
                        "description": "How many days: 1 to 14.",
                        "default": 3,
                    },
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }


@pytest.mark.parametrize(
    "first",
    [
        "Args:\n    city: The city.",
        "Args:\n        city: The\n            city.\n    ",
        "\n    Arguments:\n        city: The city.\n",
        "Params:\n  city: The city.",
        "Args:\n        city: The city.\n\n    Returns:\n        Nothing.\n    ",
    ],
)
def test_s56_a_docstring_may_begin_with_its_parameters(first: str) -> None:
    """The same parameters as with a summary before them; there is no description."""
    found = read_docstring(first)
    assert (found.description, found.parameters) == ("", {"city": "The city."})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Add.\n\nParameters\n----------\na, b : int\n    Both.\n", {"a": "Both.", "b": "Both."}),
        ("Add.\n\nArgs:\n    a, b: A number.\n", {"a": "A number.", "b": "A number."}),
        ("Add.\n\nArgs:\n    *args: One.\n    **kw: More.\n", {"args": "One.", "kw": "More."}),
        ("Add.\n\nArgs:\n    \\*args: The rest.\n", {"args": "The rest."}),
        ("Add.\n\nParameters\n----------\n*args\n    The rest.\n", {"args": "The rest."}),
        ("Add.\n\n:param a:\n:param b: A number.", {"b": "A number."}),
        ("Add.\n\nArgs:\n    a: One: two, http://x.y/z.\n", {"a": "One: two, http://x.y/z."}),
        ("Add.", {}),
    ],
)  # fmt: skip
def test_s56_what_the_library_loses_is_kept(text: str, expected: dict[str, str]) -> None:
    """Several names before one description, stars, and no description at all."""
    found = read_docstring(text)
    assert (found.description, found.parameters) == ("Add.", expected)


@pytest.mark.parametrize("text", [":: :type", "@type", "Do it.\n\nUse ::\n\n    :type"])
def test_what_no_style_can_read_is_description(text: str) -> None:
    """docstring-parser raises IndexError for the first; a docstring is no reason for an error."""
    assert read_docstring(text).parameters == {}
    assert read_docstring(text).description


@pytest.mark.parametrize("text", [None, "", "   \n  "])
def test_no_docstring_is_no_description(text: str | None) -> None:
    """Not an error: a name may say enough."""
    assert read_docstring(text) == read_docstring("")


def test_a_context_is_no_parameter() -> None:
    """Oracle: the schema of the same function without it; its documentation is left out too."""

    def plain(city: str) -> str:
        """Do it.

        Args:
            city: The city.
        """
        return city

    def with_context(context: RunContext[dict[str, int]], city: str) -> str:
        """Do it.

        Args:
            context: What the run knows.
            city: The city.
        """
        return city

    assert tool(with_context, name="x").schema == tool(plain, name="x").schema
    assert tool(with_context).takes_context


class Unit(enum.Enum):
    """Of temperature."""

    CELSIUS = "c"
    KELVIN = "k"


class Place(BaseModel):
    """Somewhere."""

    lat: float = Field(ge=-90, le=90)
    name: str | None = None


@dataclass
class Span:
    start: datetime.date
    days: int = 1
    tags: list[str] = field(default_factory=list)


class Extra(TypedDict):
    key: str
    note: NotRequired[str]


class Node(BaseModel):
    value: int
    children: list["Node"] = []


TYPES: list[tuple[Any, Any, Any]] = [
    # hint, what the model writes, what the function gets
    (str, "02134", "02134"),
    (int, 5, 5),
    (float, 5, 5.0),
    (bool, True, True),
    (None, None, None),
    (Any, {"a": [1, None]}, {"a": [1, None]}),
    (int | None, None, None),
    (Literal["a", 1], "a", "a"),
    (Unit, "k", Unit.KELVIN),
    (Place, {"lat": 1.5}, Place(lat=1.5)),
    (Place | None, None, None),
    (Span, {"start": "2026-01-02", "tags": ["x"]}, Span(datetime.date(2026, 1, 2), 1, ["x"])),
    (Extra, {"key": "k"}, {"key": "k"}),
    (Node, {"value": 1, "children": [{"value": 2}]}, Node(value=1, children=[Node(value=2)])),
    (list[Place], [{"lat": 0}], [Place(lat=0)]),
    (dict[str, list[int]], {"a": [1]}, {"a": [1]}),
    (tuple[int, str], [1, "a"], (1, "a")),
    (set[int], [1, 2, 2], {1, 2}),
    (bytes, "raw", b"raw"),
    (Sequence[str], ["a"], ["a"]),
    (pathlib.Path, "a/b", pathlib.Path("a/b")),
    (uuid.UUID, str(uuid.UUID(int=7)), uuid.UUID(int=7)),
    (Decimal, "1.50", Decimal("1.50")),
    (datetime.timedelta, "P1D", datetime.timedelta(days=1)),
    (Annotated[int, Field(ge=1, description="Above 0.")], 3, 3),
    (Annotated[Place | Extra, Field(description="Either.")], {"key": "k"}, {"key": "k"}),
]


@pytest.mark.parametrize(("hint", "written", "expected"), TYPES, ids=lambda value: str(value)[:40])
async def test_types_become_schemas_and_values(hint: Any, written: Any, expected: Any) -> None:
    """Oracles: jsonschema, for the schema itself and for the written value under it; the type's own
    equality for what arrives. A grammar can enforce each of them."""
    got: list[Any] = []

    def receive(it: Any) -> None:
        got.append(it)

    receive.__annotations__["it"] = hint
    made = tool(receive)
    schema = json.loads(json.dumps(made.parameters))
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate({"it": written})
    check_schema(schema)
    assert (await call_tool(made, {"it": written})).status == "ok"
    assert got == [expected]
    assert type(got[0]) is type(expected)


def test_a_schema_is_written_out() -> None:
    """Oracle: the schema by hand: order of keys, closed objects, types in place, no titles."""

    @tool
    def visit(
        where: Place,
        span: Span | None = None,
        unit: Unit = Unit.KELVIN,
        note: Annotated[str, Field(description="Own.", title="No", max_length=9)] = "-",
    ) -> None:
        """Visit.

        Args:
            where: The place.
            note: Not this.
        """

    place = {
        "type": "object",
        "description": "Somewhere.",
        "properties": {
            "lat": {"type": "number", "maximum": 90, "minimum": -90},
            "name": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        },
        "required": ["lat"],
        "additionalProperties": False,
    }
    span = {
        "type": "object",
        "properties": {
            "start": {"type": "string", "format": "date"},
            "days": {"type": "integer", "default": 1},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["start"],
        "additionalProperties": False,
    }
    unit = {"type": "string", "description": "Of temperature.", "enum": ["c", "k"]}
    expected = {
        "type": "object",
        "properties": {
            "where": {**place, "description": "The place."},
            "span": {"anyOf": [span, {"type": "null"}], "default": None},
            "unit": {**unit, "default": "k"},
            "note": {"type": "string", "description": "Own.", "maxLength": 9, "default": "-"},
        },
        "required": ["where"],
        "additionalProperties": False,
    }
    assert json.dumps(visit.parameters) == json.dumps(expected)  # also the order of keys


def test_only_what_must_be_defined_apart_is() -> None:
    """A recursive type, and a record that is used twice; an enum is written where it is used."""

    class Both(BaseModel):
        place: Place
        other: Place | None = None
        units: list[Unit] = []

    @tool
    def go(both: Both, node: Node, unit: Unit) -> None: ...

    schema = json.loads(json.dumps(go.parameters))
    assert list(schema["$defs"]) == ["Node", "Place"]
    both = schema["properties"]["both"]
    assert both["properties"]["place"] == {"$ref": "#/$defs/Place"}
    assert both["properties"]["units"]["items"]["enum"] == ["c", "k"]
    assert schema["properties"]["node"] == {"$ref": "#/$defs/Node"}
    assert schema["properties"]["unit"]["enum"] == ["c", "k"]
    good = {"both": {"place": {"lat": 1}}, "node": {"value": 1, "children": []}, "unit": "c"}
    assert Draft202012Validator(schema).is_valid(good)
    bad = {**good, "node": {"value": 1, "children": [{"value": "x"}]}}
    assert not Draft202012Validator(schema).is_valid(bad)


def test_names_of_pydantic_are_names_of_parameters() -> None:
    """What a model class of pydantic could not have as a field; a parameter may be called title."""

    @tool
    def odd(model_config: str, json: int, title: str, _private: int, self: bool) -> str:
        return f"{model_config} {json} {title} {_private} {self}"

    names = ["model_config", "json", "title", "_private", "self"]
    assert list(odd.parameters["properties"]) == odd.parameters["required"] == names


async def test_an_alias_is_the_models_name() -> None:
    """Oracle: the schema and the call use the alias, the function its own name."""

    @tool
    def mail(sender: Annotated[str, Field(alias="from")], to: str = Field(alias="for")) -> str:
        return f"{sender}>{to}"

    assert list(mail.parameters["properties"]) == ["from", "for"]
    assert (await call_tool(mail, {"from": "a", "for": "b"})).text == "a>b"
    assert "- from: is missing" in (await call_tool(mail, {"for": "b"})).text


async def test_defaults_are_the_functions_own() -> None:
    """A default that JSON lacks, or that the type refuses, is not shown; it is used all the same,
    as the very object. `Field(…)` as a default is one too."""
    marker = object()

    @tool
    def take(
        a: Any = marker,
        b: int = None,  # type: ignore[assignment]
        c: int = Field(4, ge=1),
        d: Annotated[int, Field(default=5)] = 6,
        e: float = float("nan"),
        *,
        f: Annotated[list[int], Field(default_factory=list)],
    ) -> str:
        return f"{a is marker} {b} {c} {d} {e} {f}"

    shown = {key: one.get("default", "none") for key, one in take.parameters["properties"].items()}
    assert shown == {"a": "none", "b": "none", "c": 4, "d": 6, "e": "none", "f": "none"}
    assert "required" not in take.parameters
    assert (await call_tool(take, {})).text == "True None 4 6 nan []"


async def test_positional_parameters_are_named_by_the_model() -> None:
    """Oracle: the function's own result; a default between two arguments is filled in."""

    @tool
    def point(x: int, y: int = 2, z: int = 3, /, *, w: int = 4) -> str:
        return f"{x} {y} {z} {w}"

    assert (await call_tool(point, {"x": 1, "z": 9, "w": 8})).text == "1 2 9 8"


PROGRAM = """
import json
from typing import Literal
from pydantic import BaseModel
from freetoken_agent import tool

class Tags(BaseModel):
    own: set[str] = {"x", "y", "z", "w"}
    more: set[str] | None = {"x", "y", "z", "w"}

@tool
def f(
    a: set[str] = {"x", "y", "z", "w"},
    b: frozenset[Literal["p", "q"]] = frozenset({"q", "p"}),
    c: set[str] | None = {"x", "y", "z", "w"},
    d: Tags | None = None,
) -> None: ...

print(json.dumps(f.schema))
"""


def test_c42_a_schema_does_not_depend_on_hash_seeds() -> None:
    """Oracle: three processes with their own seeds; sets have no order, schemas do."""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(outputs) == 1


def test_the_parameter_with_the_wrong_type_is_named() -> None:
    """Also among several, and inside of a container."""

    def many(ok: int, also: str, bad: list[type]) -> None: ...

    with pytest.raises(InvalidTool, match="parameter 'bad' of tool 'many'"):
        tool(many)


def test_a_bound_that_the_type_cannot_have_is_an_error_of_the_tool() -> None:
    """pydantic's own complaint is its value."""

    def bounded(n: Annotated[dict[str, int], Field(pattern="(")]) -> None: ...

    with pytest.raises(InvalidTool, match="parameter 'n'"):
        tool(bounded)


def test_types_of_a_tool_are_checked() -> None:
    """For type checkers a tool has its function's types; at run time it is generic over them."""
    made: Tool[[str, int], str] = tool(google, name="weather")
    assert made("Oslo", 2) == "Oslo 2"


def test_a_text_in_annotated_describes_a_parameter() -> None:
    """Oracle: the descriptions; `Field` comes first, the docstring last."""

    @tool
    def find(
        city: Annotated[str, "In English."],
        days: Annotated[int, Field(ge=1), Doc("How many.")],
        unit: Annotated[str, Field(description="c or f"), "not this"],
        plain: Annotated[int, 5],
    ) -> str:
        """Find it.

        Args:
            city: Not this.
            plain: From here.
        """
        return city

    shown = {name: one["description"] for name, one in find.parameters["properties"].items()}
    assert shown == {
        "city": "In English.",
        "days": "How many.",
        "unit": "c or f",
        "plain": "From here.",
    }
