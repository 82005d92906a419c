# SPDX-License-Identifier: Apache-2.0
"""The type of an answer: its schema, and its value from text."""

import datetime
import json
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field, RootModel
from typing_extensions import TypedDict

from freetoken_agent import InvalidOutputType, ModelRetry
from freetoken_agent.tooling.output_type import OutputType


class Place(BaseModel):
    """Somewhere."""

    lat: float = Field(ge=-90)
    near: "list[Place]" = []


@dataclass
class Span:
    start: datetime.date
    days: int = 1


class Row(TypedDict):
    key: str


class Rows(RootModel[list[int]]):
    pass


CASES: list[tuple[Any, bool, Any, Any]] = [
    # type, wrapped, what the model writes, the value
    (Place, False, {"lat": 1, "near": [{"lat": "2"}]}, Place(lat=1, near=[Place(lat=2)])),
    (Span, False, {"start": "2026-01-02"}, Span(datetime.date(2026, 1, 2))),
    (Row, False, {"key": "k"}, {"key": "k"}),
    (dict[str, int], False, {"a": "1"}, {"a": 1}),
    (int, True, 5, 5),
    (bool, True, "True", True),
    (None, True, None, None),
    (list[Place], True, [{"lat": 1}], [Place(lat=1)]),
    (Rows, True, [1, 2], Rows([1, 2])),
    (tuple[int, str], True, [1, "a"], (1, "a")),
    (Literal["yes", "no"], True, "no", "no"),
    (Place | Row, True, {"key": "k"}, {"key": "k"}),
    (int | str, True, "02134", "02134"),
    (str | None, True, "x", "x"),
    (Any, True, [1], [1]),
]


@pytest.mark.parametrize(("kind", "wrapped", "written", "value"), CASES, ids=lambda v: str(v)[:30])
def test_a_type_has_a_schema_and_reads_values(
    kind: Any, wrapped: bool, written: Any, value: Any
) -> None:
    """Oracles: jsonschema, for the schema; the type's own equality, for the value. What is no
    object by itself is wrapped into one."""
    output = OutputType.of(kind)
    schema = json.loads(json.dumps(output.schema))
    Draft202012Validator.check_schema(schema)
    assert output.wrapped == wrapped
    if wrapped:
        assert list(schema["properties"]) == schema["required"] == ["result"]
        assert schema["additionalProperties"] is False
        written = {"result": written}
    read = output.validate(f"\n {json.dumps(written)} ")
    assert read == value and type(read) is type(value)


def test_plain_text_is_itself() -> None:
    """No schema, nothing to be wrong."""
    output = OutputType.of(str)
    assert (output.schema, output.wrapped) == (None, False)
    assert output.validate("{not json") == "{not json"


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        (Place, '{"lat": ', "- it is no JSON: "),
        (Place, "It is at 59.9 north.", "- it is no JSON: "),
        (Place, "[" * 2000, "- it is no JSON: it is too deep"),
        (Place, '{"lat": -91}', "- lat: should be greater than or equal to -90; got -91; expected"),
        (Place, '{"near": [{}]}', "- near[0].lat: is missing; expected a number, at least -90"),
        (Place, "[]", "- the value: should be an object; got []; expected an object with lat"),
        (int, "5", "- the value: should be an object; got 5; expected an object with result"),
        (int, '{"result": "x"}', '- result: should be a valid integer, unable to parse string'),
        (int, '{"result": 1, "why": 2}', "- why: is not known; known are: result; got 2"),
        (list[Place], '{"result": [{"lat": "x"}]}', "- result[0].lat: should be a valid number"),
        (Literal["yes", "no"], '{"result": "maybe"}', 'expected one of "yes", "no"'),
    ],
)  # fmt: skip
def test_an_invalid_answer_is_told_to_the_model(kind: Any, text: str, told: str) -> None:
    """Oracle: the field and what is expected there, in the message."""
    with pytest.raises(ModelRetry) as caught:
        OutputType.of(kind).validate(text)
    message = str(caught.value)
    assert told in message
    assert message.startswith("The answer is not valid:\n- ")
    assert message.endswith("\nWrite the whole answer again.")


class Unknown:
    """Pydantic knows nothing of it."""


@pytest.mark.parametrize("kind", [Unknown, list[Unknown], type, "Missing"], ids=str)
def test_a_type_that_json_cannot_hold_is_refused(kind: Any) -> None:
    """Oracle: the documented error, with the type as its value."""
    with pytest.raises(InvalidOutputType) as caught:
        OutputType.of(kind)
    assert caught.value.value is kind
    assert caught.value.code == "invalid_output_type" and caught.value.remedy


@pytest.mark.parametrize("kind", [[Place, Span], (Place, Span), lambda: 5, len], ids=str)
def test_what_other_libraries_take_is_told_what_to_write(kind: Any) -> None:
    """A list of types is no union here, and a function no type, though pydantic would take it for
    the arguments of its call."""
    with pytest.raises(InvalidOutputType, match=r"A \| B.*result\.output") as caught:
        OutputType.of(kind)
    assert caught.value.value is kind
