# SPDX-License-Identifier: Apache-2.0
"""What a tool returns, as text; and how much of it the model sees."""

import datetime
import enum
import json
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from freetoken_agent import InvalidTool, InvalidToolResult, ResultLimit
from freetoken_agent.tooling.tool_results import Keep, result_text


class Unit(enum.Enum):
    KELVIN = "k"


class Place(BaseModel):
    lat: float
    raw: bytes = b"text"
    name: str = Field("Åre", alias="n")


@dataclass
class Row:
    day: datetime.date
    more: "list[Row]" = field(default_factory=list)
    key: Any = None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain text", "plain text"),
        ("", ""),
        ('{"a": 1}', '{"a": 1}'),
        ("half \ud83d pair", "half \ufffd pair"),
        ("whole \U0001f600", "whole \U0001f600"),
        (None, "null"),
        (True, "true"),
        (5, "5"),
        (10**30, "1" + "0" * 30),
        (0.1, "0.1"),
        (float("nan"), '"NaN"'),
        ([float("-inf")], '["-Infinity"]'),
        ({"å": [1, "x\n", None]}, '{"å":[1,"x\\n",null]}'),
        ({1: (2, 3)}, '{"1":[2,3]}'),
        (Unit.KELVIN, '"k"'),
        (Decimal("1.50"), '"1.50"'),
        (Path("a/b"), '"a/b"'),
        (datetime.date(2026, 1, 2), '"2026-01-02"'),
        (Place(lat=1, n="Oslo"), '{"lat":1.0,"raw":"text","n":"Oslo"}'),
        (
            Row(datetime.date(2026, 1, 2), [Row(datetime.date(2026, 1, 3))]),
            '{"day":"2026-01-02","more":[{"day":"2026-01-03","more":[],"key":null}],"key":null}',
        ),
        ([Place(lat=2, n="x")], '[{"lat":2.0,"raw":"text","n":"x"}]'),
    ],
)
def test_what_is_returned_becomes_text(value: object, text: str) -> None:
    """Oracle: the text by hand."""
    assert result_text(value) == text


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=10,
    )
)  # fmt: skip
def test_json_values_keep_their_value(value: Any) -> None:
    """Oracle: the JSON of the standard library reads it back."""
    text = result_text(value)
    assert (text if isinstance(value, str) else json.loads(text)) == value


loop: list[Any] = []
loop.append(loop)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (b"text", "bytes"),
        (bytearray(b"x"), "bytearray"),
        (memoryview(b"x"), "memoryview"),
        ([1, {"a": (b"x",)}], "bytes"),
        ({b"key": 1}, "bytes"),
        (Row(datetime.date(2026, 1, 2), key={b"x"}), "bytes"),
        (object(), "object"),
        ({"a": object()}, "dict"),
        (loop, "list"),
        (len, "builtin_function_or_method"),
    ],
    ids=str,
)
def test_what_has_no_text_is_refused(value: object, named: str) -> None:
    """Bytes at any depth, what JSON lacks, and what never ends; the type is named."""
    with pytest.raises(InvalidToolResult, match=f"returned {named}") as caught:
        result_text(value)
    assert caught.value.code == "invalid_tool_result" and caught.value.remedy


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ("head", "01234\n[5 of 10 characters were left out here. Ask again.]"),
        ("tail", "[5 of 10 characters were left out here. Ask again.]\n56789"),
        ("both", "012\n[5 of 10 characters were left out here. Ask again.]\n89"),
    ],
)
def test_a_cut_says_what_went_and_how_to_get_it(keep: Keep, expected: str) -> None:
    """Oracle: the text by hand."""
    assert ResultLimit(5, keep, "Ask again.").cut("0123456789") == (expected, 5)


@settings(deadline=None)
@given(st.text(max_size=60), st.integers(1, 40), st.sampled_from(["head", "tail", "both"]))
def test_a_cut_keeps_what_it_says(text: str, max_chars: int, keep: Keep) -> None:
    """Oracle: the count in the note; the kept characters are the text's own head and tail, and as
    many as the limit. Within the limit nothing changes."""
    limit = ResultLimit(max_chars, keep, hint="")
    cut, gone = limit.cut(text)
    if len(text) <= max_chars:
        assert (cut, gone) == (text, 0)
        return
    note = f"[{gone} of {len(text)} characters were left out here.]"
    assert cut.count(note) == 1
    head, tail = cut.split(note)
    head, tail = head.removesuffix("\n"), tail.removeprefix("\n")
    assert text.startswith(head) and text.endswith(tail)
    assert len(head) + len(tail) == max_chars == len(text) - gone
    assert (keep != "head" or not tail) and (keep != "tail" or not head)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_chars": 0}, "keeps something"),
        ({"max_chars": -5}, "keeps something"),
        ({"max_chars": 2.5}, "is a number"),
        ({"max_chars": True}, "is a number"),
        ({"keep": "middle"}, "head, tail or both"),
    ],
)
def test_a_wrong_limit_is_refused(arguments: dict[str, Any], message: str) -> None:
    """Where it is made."""
    with pytest.raises(InvalidTool, match=message):
        ResultLimit(**arguments)
