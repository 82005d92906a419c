# SPDX-License-Identifier: Apache-2.0
"""What is checked when an agent is made, so that no run finds it out."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..context_rules import ContextRule
from ..errors import InvalidAgent
from ..grammars.constraint import UnsupportedSchema, check_schema
from ..model import InvalidSampling
from ..model_calls.generate_options import GenerateOptions
from ..tooling.tool_results import ResultLimit
from ..tooling.toolsets import Toolbox
from ..tools import AnyTool

if TYPE_CHECKING:
    from ..agent import Agent

# Options of `generate` that the run decides about.
_OF_THE_RUN = ("tool_choice", "allowed_tools", "output_schema", "force")
_POLICIES = ("replace", "keep", "error")
_LATER = "leave the keyword out, or check what was written afterwards (validate_after=True)"
_BY_VALIDATOR = "say it by a pydantic validator, which is run when the answer is there"


def check_agent(agent: "Agent[Any, Any]") -> None:
    """InvalidAgent, InvalidTool, ToolNameTaken, UnsupportedSchema, InvalidOutputType,
    InvalidSampling."""
    _check_kinds(agent)
    if not agent.name:
        raise InvalidAgent("an agent needs a name", value=agent.name)
    if agent.prompt_policy not in _POLICIES:
        raise InvalidAgent(
            "prompt_policy is none", value=agent.prompt_policy, limit=", ".join(_POLICIES)
        )
    instructions = agent.instructions
    if (
        instructions is not None
        and not isinstance(instructions, str)
        and not callable(instructions)
    ):
        raise InvalidAgent(
            "instructions are a text or a function", value=type(instructions).__name__
        )
    for rule in agent.context_rules:
        if not isinstance(rule, ContextRule):
            raise InvalidAgent(
                "this is no context rule", value=rule, remedy="derive it from ContextRule"
            )
    _check_sampling(agent.sampling)
    check_schemas(agent.known_tools)
    schema = agent.output.schema
    if schema is not None:
        _check("the output type", schema, _BY_VALIDATOR)


def _check_kinds(agent: "Agent[Any, Any]") -> None:
    from ..agent import Hooks, Limits

    model = agent.model
    if model is not None and not isinstance(model, str) and not hasattr(model, "generate"):
        raise InvalidAgent(
            "this is no model", value=model, remedy="pass a LocalModel, or the name of a pulled one"
        )
    kinds: tuple[tuple[str, Any, type], ...] = (
        ("name", "a text", str),
        ("sampling", "a dict of options of generate", Mapping),
        ("limits", "Limits(…)", Limits),
        ("hooks", "Hooks(…), or None", Hooks),
        ("result_limit", "ResultLimit(…)", ResultLimit),
        ("context_rules", "a list of rules", Sequence),
    )
    for name, wanted, kind in kinds:
        value = getattr(agent, name)
        if not isinstance(value, kind):
            raise InvalidAgent(f"{name} of an agent cannot be this", value=value, limit=wanted)


def check_schemas(tools: Sequence[AnyTool]) -> None:
    """UnsupportedSchema for a tool that no grammar can hold the model to."""
    for tool in tools:
        if not tool.validate_after:
            _check(f"the parameters of tool {tool.name!r}", tool.parameters, _LATER)


def check_choice(choice: str, toolbox: Toolbox) -> None:
    """InvalidSampling unless the run can do what its `tool_choice` says."""
    names = toolbox.names
    if choice in ("auto", "none") or choice in names or (choice == "required" and names):
        return
    raise InvalidSampling(
        "a call is required, but no tool may be called"
        if choice == "required"
        else "the run may not call this tool",
        value=choice,
        limit=", ".join(names) or "no tools",
        remedy="add it to the agent's tools, allow it, or name another one",
    )


def _check_sampling(sampling: Mapping[str, Any]) -> None:
    for name in _OF_THE_RUN:
        if name in sampling:
            raise InvalidAgent(
                f"{name} is no option of an agent",
                value=sampling[name],
                remedy="pass it to run(), or set output_type",
            )
    GenerateOptions.parse(sampling)


def _check(what: str, schema: Mapping[str, Any], remedy: str) -> None:
    try:
        check_schema(schema)
    except UnsupportedSchema as error:
        raise UnsupportedSchema(
            f"{what} cannot be enforced while the model writes",
            value=error.value,
            remedy=remedy,
        ) from error
