# SPDX-License-Identifier: Apache-2.0
"""Fields of an agent that are none are refused where it is made, not in its first run."""

import datetime
from typing import Any

import pytest

from freetoken_agent import Agent, Hooks, InvalidAgent, UnsupportedSchema, tool
from freetoken_agent.testing import Call, ScriptedModel


@tool
def add(a: int) -> int:
    """Add."""
    return a


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", 5),
        ("model", object()),
        ("name", 5),
        ("name", ""),
        ("instructions", 5),
        ("sampling", None),
        ("sampling", [1]),
        ("limits", None),
        ("limits", {"max_steps": 3}),
        ("hooks", {"before_model": print}),
        ("hooks", print),
        ("result_limit", 100),
        ("result_limit", None),
        ("context_rules", None),
        ("context_rules", [5]),
        ("prompt_policy", "x"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(field: str, value: Any) -> None:
    """Oracle: the documented error, with the value; `replace` checks as well."""
    with pytest.raises(InvalidAgent) as caught:
        Agent(**{field: value})
    assert caught.value.code == "invalid_agent"
    with pytest.raises(InvalidAgent):
        Agent().replace(**{field: value})


@pytest.mark.parametrize("name", ["before_model", "after_tool", "on_edit"])
def test_a_hook_is_a_function(name: str) -> None:
    """Oracle: the documented error, which names the hook."""
    with pytest.raises(InvalidAgent, match=name):
        Hooks(**{name: "before"})  # type: ignore[arg-type]


def test_no_hooks_may_be_none() -> None:
    """As in other libraries. Oracle: a run with a tool."""
    model = ScriptedModel([Call("add", {"a": 1}), "one"])
    agent = Agent(model, tools=[add], hooks=None)  # type: ignore[arg-type]
    assert agent.run_sync("go").output == "one"


def test_what_no_grammar_can_enforce_has_a_remedy_of_its_place() -> None:
    """Oracle: the documented error; a tool may check later, an answer is checked by its type."""

    def take(days: dict[datetime.date, int]) -> str:
        """Take them."""
        return ""

    with pytest.raises(UnsupportedSchema, match="'take'.*propertyNames.*validate_after=True"):
        Agent(tools=[take])
    assert Agent(tools=[tool(take, validate_after=True)]).known_tools
    with pytest.raises(UnsupportedSchema, match="output type.*propertyNames.*pydantic validator"):
        Agent(output_type=dict[datetime.date, int])
