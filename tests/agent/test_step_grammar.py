# SPDX-License-Identifier: Apache-2.0
"""What binds a model call: which tools, which choice, and what is refused before anything runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
from pydantic import Field

from freetoken_agent import (
    Agent,
    InvalidSampling,
    OptionUnsupported,
    Session,
    UnsupportedSchema,
)
from freetoken_agent import tool as tool_of
from freetoken_agent.grammars.constraint import check_schema
from freetoken_agent.grammars.step_grammar import step_constraint
from freetoken_agent.model_calls.generate_options import GenerateOptions
from freetoken_agent.template import Item
from freetoken_agent.testing import CHATML, Call, ScriptedModel


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


LS = tool("ls", path={"type": "string", "maxLength": 9})
CAT = tool("cat", path={"type": "string", "maxLength": 9})
ODD = tool("odd", path={"type": "string", "not": {"const": "x"}})


def leading(tools: list[dict[str, Any]], **options: Any) -> str:
    """What must come first."""
    model = ScriptedModel([])
    parsed = GenerateOptions.parse(options)
    constraint = step_constraint(model, tools, "start", parsed)
    assert constraint is not None
    return model.tokenizer.decode(list(constraint.forced()))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tool_choice": "required"}, '<tool_call>\n{"name": "'),
        ({"tool_choice": "cat"}, '<tool_call>\n{"name": "cat", "arguments": {"path": "'),
        (
            {"tool_choice": "required", "allowed_tools": ["ls"]},
            '<tool_call>\n{"name": "ls", "arguments": {"path": "',
        ),
        ({"output_schema": {"const": [1, 2]}, "tool_choice": "none"}, "[1, 2]"),
    ],
)
def test_what_a_step_must_begin_with(options: dict[str, Any], expected: str) -> None:
    """Oracle: written by hand. Thinking is switched off, so that it is no choice."""
    assert leading([LS, CAT], thinking=False, **options) == expected


def test_nothing_binds_a_step_without_tools() -> None:
    """Oracle: the rule."""
    assert step_constraint(ScriptedModel([]), [], "start", GenerateOptions.parse({})) is None


@pytest.mark.parametrize(
    "options",
    [
        {"tool_choice": "dog"},
        {"allowed_tools": ["ls", "dog"]},
        {"tool_choice": "cat", "allowed_tools": ["ls"]},
        {"tool_choice": "required", "allowed_tools": []},
    ],
)
def test_a_tool_that_is_not_offered_is_named(
    begin: Callable[..., Session], options: dict[str, Any]
) -> None:
    """Oracle: the documented error. The model was asked nothing and the session goes on."""
    session = begin("fine")
    session.set_tools([LS, CAT])
    with pytest.raises(InvalidSampling) as caught:
        session.generate_sync(**options)
    assert (
        "dog" in str(caught.value) or "cat" in str(caught.value) or "no tool" in str(caught.value)
    )
    assert session.generate_sync().text == "fine"


def test_a_schema_that_cannot_be_enforced_is_named_where_a_call_is_demanded() -> None:
    """Oracle: the keyword in the message; left to itself the model may still call the tool."""
    model = ScriptedModel([])
    with pytest.raises(UnsupportedSchema, match='"not"'):
        step_constraint(model, [LS, ODD], "start", GenerateOptions.parse({"tool_choice": "odd"}))
    assert step_constraint(model, [LS, ODD], "start", GenerateOptions.parse({})) is not None


def test_what_is_checked_afterwards_need_not_bind_the_model_where_a_call_is_demanded(
    play: Callable[..., Any],
) -> None:
    """Oracle: the run: the tool is demanded although a keyword of its schema cannot be enforced,
    its name is bound, and what breaks the keyword is told to the model."""
    seen: list[str] = []

    @tool_of(validate_after=True)
    def odd(path: Annotated[str, Field(json_schema_extra={"not": {"const": "x"}})]) -> str:
        """Look at a path."""
        seen.append(path)
        return "seen"

    model = ScriptedModel([Call("odd", {"path": "a"}), "fine"])
    sampling = {"thinking": False}
    agent: Agent[None, str] = Agent(model, name="a", tools=[odd], sampling=sampling)
    assert play(agent, "Look.", tool_choice="required").output == "fine" and seen == ["a"]
    constraint = model.requests[0].sampling.constraint
    assert constraint is not None
    assert model.tokenizer.decode(list(constraint.forced())).endswith(
        '{"name": "odd", "arguments": {"path": '
    )


@pytest.mark.parametrize("name", ["chatml", "Qwen3-Coder", "google-gemma-4-31B-it"])
def test_of_a_schema_that_cannot_be_enforced_the_rest_is(name: str) -> None:
    """Oracle: calls written by the template: one property has an unknown keyword and is free, the
    other one is still bound."""
    path = Path(__file__).parents[2].parent / f"shared/templates/{name}.jinja"
    if name != "chatml" and not path.is_file():
        pytest.skip("the folder of real templates, ../shared/templates, is not here")
    source = CHATML if name == "chatml" else path.read_text(encoding="utf-8")
    model = ScriptedModel([], template=source)
    odd = tool("odd", any={"type": "string", "not": {"const": "x"}}, count={"type": "integer"})
    for count, fits in ((3, True), ("three", False)):
        constraint = step_constraint(model, [odd], "start", GenerateOptions.parse({}))
        assert constraint is not None
        begin = model.format.opener([Item("user", "?")]).ids
        call = Item("tool_call", name="odd", arguments={"any": "a b", "count": count}, call_id="c1")
        [piece] = model.format.layout([Item("user", "?"), call], start=1)
        allowed = 0
        ids = [*piece.gap_ids[len(begin) :], *piece.ids]
        for token_id in ids:
            row = np.zeros(model.tokenizer.vocab_size, dtype=np.float32)
            constraint.mask(row)
            if row[token_id] != 0:
                break
            constraint.accept(token_id)
            allowed += 1
        assert (allowed == len(ids)) is fits, model.tokenizer.decode(ids[:allowed])


def test_a_call_cannot_be_demanded_behind_a_text_where_the_template_has_no_place_for_it() -> None:
    """Oracle: the documented error, on a template that drops a text before a call."""
    path = (
        Path(__file__).parents[2].parent / "shared/templates/meta-llama-Llama-3.1-8B-Instruct.jinja"
    )
    if not path.is_file():
        pytest.skip("the folder of real templates, ../shared/templates, is not here")
    model = ScriptedModel([], template=path.read_text(encoding="utf-8"))
    demanded = GenerateOptions.parse({"tool_choice": "required"})
    with pytest.raises(OptionUnsupported, match="no place for a call behind a text"):
        step_constraint(model, [LS], "text", demanded)
    assert step_constraint(model, [LS], "start", demanded) is not None
    assert step_constraint(ScriptedModel([]), [LS], "text", demanded) is not None


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "object", "not": {}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {}}, "contains"),
        ({"if": {}, "then": {}}, "if"),
        ({"type": "string", "format": "no such"}, "no such"),
        ({"$ref": "#/$defs/missing"}, "missing"),
    ],
)
def test_what_a_schema_lacks_support_for_is_named(schema: dict[str, Any], word: str) -> None:
    """Oracle: the keyword."""
    with pytest.raises(UnsupportedSchema, match=word) as caught:
        check_schema(schema)
    assert caught.value.code == "unsupported_schema"


def test_a_row_longer_than_the_vocabulary_is_masked_to_its_end() -> None:
    """Oracle: no id beyond the vocabulary may be drawn: models have rows for padding."""
    model = ScriptedModel([])
    constraint = step_constraint(model, [LS], "start", GenerateOptions.parse({}))
    assert constraint is not None
    row = np.zeros(model.tokenizer.vocab_size + 70, dtype=np.float32)
    constraint.mask(row)
    assert np.isneginf(row[model.tokenizer.vocab_size :]).all()
    assert (row[:256] == 0).any()


def test_what_is_allowed_does_not_depend_on_who_asked_before() -> None:
    """Oracle: a second constraint of the same demand, after the first was led astray."""
    model = ScriptedModel([])
    made = [
        step_constraint(model, [LS], "start", GenerateOptions.parse({"tool_choice": "required"}))
        for _ in range(2)
    ]
    first, second = made
    assert first is not None and second is not None
    before = list(second.forced())
    for token_id in first.forced():
        first.accept(token_id)
    assert list(second.forced()) == before


def test_an_id_forced_from_outside_that_does_not_fit_is_an_error() -> None:
    """Oracle: the documented error."""
    model = ScriptedModel([])
    constraint = step_constraint(
        model, [LS], "start", GenerateOptions.parse({"tool_choice": "required", "thinking": False})
    )
    assert constraint is not None
    with pytest.raises(InvalidSampling, match="does not fit the grammar"):
        constraint.accept(ord("x"))


def test_ids_that_the_caller_forces_free_a_step_that_nothing_else_binds() -> None:
    """Oracle: the rule; a demanded call stays one."""
    model = ScriptedModel([])
    assert step_constraint(model, [LS], "start", GenerateOptions.parse({"force": [65]})) is None
    bound = GenerateOptions.parse({"force": [65], "tool_choice": "required"})
    assert step_constraint(model, [LS], "start", bound) is not None


def test_a_pattern_that_cannot_be_enforced_is_told_whole() -> None:
    """Oracle: llguidance, which says it in several lines: the pattern, and the fault."""
    with pytest.raises(UnsupportedSchema) as refused:
        check_schema({"type": "string", "pattern": "^(?!a).*$"})
    told = str(refused.value)
    assert "^(?!a).*$" in told and "look-ahead" in told and "\n" not in told
