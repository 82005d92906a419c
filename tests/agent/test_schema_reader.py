# SPDX-License-Identifier: Apache-2.0
"""Tools whose schema comes from elsewhere: their functions get what the schema says."""

import logging
from typing import Any

import pytest

from freetoken_agent import InvalidTool, Tool
from freetoken_agent.tool_testing import call_tool

SCHEMA = {
    "type": "object",
    "properties": {
        "rows": {"type": "array", "items": {"$ref": "#/$defs/Row"}, "maxItems": 2},
        "word": {"type": "string", "not": {"const": "no"}},
        "unit": {"enum": ["c", "f"]},
        "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
    "required": ["rows"],
    "$defs": {
        "Row": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    },
}


def made(schema: dict[str, Any]) -> Tool[[dict[str, Any]], Any]:
    return Tool.from_schema("far", schema, lambda given: given, validate_after=True)


@pytest.mark.parametrize(
    ("written", "line"),
    [
        ({}, "- rows: is missing"),
        ({"rows": [{"n": "x"}]}, """- rows[0].n: is not of type 'integer'; got "x"; expected a"""),
        ({"rows": [{}]}, "- rows[0]: 'n' is a required property; got {}; expected an object with"),
        ({"rows": [{"n": 1}] * 3}, "- rows: is too long"),
        ({"rows": [], "word": "no"}, "- word: should not be valid under {'const': 'no'}"),
        ({"rows": [], "unit": "k"}, """- unit: is not one of ['c', 'f']; got "k"; expected one"""),
        ({"rows": [], "either": "x"}, "- either: is not valid under any of the given schemas"),
        ({"rows": [{"n": "x" * 9999}]}, "- rows[0].n: is not of type 'integer'; got"),
    ],
)
async def test_arguments_are_valid_by_the_whole_schema(written: Any, line: str) -> None:
    """Oracle: the message by hand: the field, what was wrong, what it held. Keywords that no
    grammar can enforce are checked as well."""
    outcome = await call_tool(made(SCHEMA), written)
    assert outcome.status == "retry"
    assert outcome.text.splitlines()[1].startswith(line)
    assert len(outcome.text) < 500


async def test_what_is_meant_is_brought_to_the_schema_first() -> None:
    """Oracle: the value by hand."""
    written = {"rows": '[{"n": "1"}]', "unit": "C", "either": "null", "more": [1]}
    outcome = await call_tool(made(SCHEMA), written)
    assert outcome.text == '{"rows":[{"n":1}],"unit":"c","either":null,"more":[1]}'


async def test_an_object_without_keys_says_so() -> None:
    """Oracle: the message by hand."""
    outcome = await call_tool(made({"additionalProperties": False}), {"a": 1})
    assert "- a: is not known; nothing is; got 1" in outcome.text


async def test_each_schema_is_read_in_its_own_dialect() -> None:
    """Oracle: in draft 4, exclusiveMinimum is a truth value."""
    old = {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "properties": {"a": {"type": "integer", "minimum": 0, "exclusiveMinimum": True}},
    }
    assert "$schema" not in made(old).parameters, "models need not read it"
    assert (await call_tool(made(old), {"a": 1})).status == "ok"
    assert "- a: " in (await call_tool(made(old), {"a": 0})).text


@pytest.mark.parametrize(
    "inner",
    [
        {"$ref": "http://127.0.0.1:1/elsewhere"},
        {"$ref": "#/$defs/Nowhere"},
        {"type": "string", "pattern": r"^\p{L}+$"},
    ],
)
async def test_what_cannot_be_checked_here_is_the_functions_own(inner: dict[str, Any]) -> None:
    """A reference that leads out of the schema is not followed, nor a pattern of another language
    understood; the top is checked."""
    tool = made({"properties": {"a": inner}, "required": ["a"]})
    assert (await call_tool(tool, {"a": "x"})).text == '{"a":"x"}'
    assert "- a: is missing" in (await call_tool(tool, {})).text


async def test_a_schema_that_is_none_is_told_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Other people's servers have such; the top is checked."""
    with caplog.at_level(logging.WARNING):
        tool = made({"properties": {"a": {"type": "strng"}}, "required": ["a"]})
    assert "schema of tool far is not valid" in caplog.text and "strng" in caplog.text
    assert (await call_tool(tool, {"a": 5})).status == "ok"
    assert "- a: is missing" in (await call_tool(tool, {})).text


async def test_no_properties_may_be_an_empty_list() -> None:
    """As servers in PHP write it. Oracle: the schema that models see, and a call."""
    tool = made({"type": "object", "properties": []})
    assert tool.parameters == {"type": "object", "properties": {}}
    assert (await call_tool(tool, {"a": 1})).text == '{"a":1}'


@pytest.mark.parametrize(
    ("schema", "function", "message"),
    [
        ({"properties": 5}, dict, "properties of tool 'far' are none; got 5"),
        ({"properties": [1]}, dict, "properties of tool 'far' are none"),
        ([1], dict, "no JSON schema"),
        ({}, "run", "a tool is a function"),
        ({}, None, "a tool is a function"),
    ],
)
def test_what_is_no_schema_or_no_function_is_refused(
    schema: Any, function: Any, message: str
) -> None:
    """Oracle: the documented error."""
    with pytest.raises(InvalidTool, match=message):
        Tool.from_schema("far", schema, function)
