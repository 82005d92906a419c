# SPDX-License-Identifier: Apache-2.0
"""The constraint of one model call, from its options and the tools of its path."""

from collections.abc import Mapping
from typing import Any

from ..grammar import Choice, Demand, Place, ToolShape
from ..model import InvalidSampling, Model
from ..model_calls.generate_options import GenerateOptions, OptionUnsupported
from .constraint import GrammarConstraint, UnsupportedSchema, check_schema, vocabulary

_WORDS: dict[str, Choice] = {"auto": "auto", "none": "none", "required": "required"}
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


def step_constraint(
    model: Model, tools: list[dict[str, Any]], place: Place, options: GenerateOptions
) -> GrammarConstraint | None:
    """None where nothing binds the model. InvalidSampling for a tool that the path does not offer,
    OptionUnsupported where the template's calls cannot be enforced, UnsupportedSchema."""
    shapes = {shape.name: shape for shape in map(_shape, tools)}
    allowed = _allowed(shapes, options)
    choice = _WORDS.get(options.tool_choice, "required")
    if choice == "required" and not allowed:
        raise InvalidSampling(
            "a call is required, but no tool may be called",
            value=options.tool_choice,
            remedy="set_tools(), or allow one of them",
        )
    if not shapes and options.output_schema is None:
        return None
    bound = options.allowed_tools is not None or options.output_schema is not None
    if options.sampling.force and choice == "auto" and not bound:
        return None  # what the caller forces need not be what the model may write
    writer = model.format.writer
    if choice != "none" and shapes and not writer.writes_calls:
        if choice == "auto" and options.allowed_tools is None and options.output_schema is None:
            return None  # what was written is checked, as calls of such a template always are
        raise OptionUnsupported(
            "calls of this chat template cannot be enforced",
            value=options.tool_choice,
            limit="tool_choice='auto' or 'none' without allowed_tools",
            remedy="use a template that shows calls whole",
        )
    if place == "text" and choice == "required" and not writer.calls_after_text:
        raise OptionUnsupported(
            "this chat template has no place for a call behind a text",
            value=options.tool_choice,
            limit="tool_choice='auto' or 'none' where a text goes on",
            remedy="delete the text, or let the model end its turn and ask again",
        )
    if options.output_schema is not None:
        check_schema(options.output_schema)
    demand = Demand(
        place,
        choice,
        tuple(
            _enforced(
                shape, strict=choice == "required" and shape.name not in options.checked_after
            )
            for shape in allowed
        ),
        holds_several_calls(model, options),
        options.output_schema,
        _thinks(model, options),
    )
    stops = model.format.closers | model.tokenizer.stop_ids
    return vocabulary(model.tokenizer, stops).constraint(writer.lark(demand))


def holds_several_calls(model: Model, options: GenerateOptions) -> bool:
    """Whether a step may hold more than one call: as it was asked for, and if the template has a
    place for a second one."""
    return options.parallel_tool_calls and model.format.report.parallel_calls


def _thinks(model: Model, options: GenerateOptions) -> bool:
    """Whether the model may begin a thought by itself. Where thoughts are only inlined, it was
    never taught to, and does so only when asked."""
    if options.thinking is None:
        return not model.format.report.fallback_thinking
    return options.thinking


def _allowed(shapes: Mapping[str, ToolShape], options: GenerateOptions) -> list[ToolShape]:
    names = list(shapes) if options.allowed_tools is None else list(options.allowed_tools)
    if options.tool_choice not in _WORDS:
        names = [name for name in names if name == options.tool_choice]
        if not names:
            raise _unknown(options.tool_choice, shapes, options)
    for name in names:
        if name not in shapes:
            raise _unknown(name, shapes, options)
    return [shapes[name] for name in names]


def _unknown(
    name: str, shapes: Mapping[str, ToolShape], options: GenerateOptions
) -> InvalidSampling:
    known = list(shapes) if options.allowed_tools is None else list(options.allowed_tools)
    return InvalidSampling(
        "the path does not offer this tool",
        value=name,
        limit=", ".join(known) or "no tools",
        remedy="set_tools() with it, or name another one",
    )


def _shape(tool: Mapping[str, Any]) -> ToolShape:
    function = tool.get("function", tool)
    return ToolShape(function["name"], function.get("parameters") or _NO_PARAMETERS)


def _enforced(shape: ToolShape, *, strict: bool) -> ToolShape:
    """A tool with what of its schema can be enforced; the rest is checked afterwards. If `strict`,
    UnsupportedSchema unless that is all of it."""
    try:
        check_schema(shape.parameters)
    except UnsupportedSchema:
        if strict:
            raise
        return ToolShape(shape.name, _relaxed(shape.parameters))
    return shape


def _relaxed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an object, with any value for those of its properties that have a keyword which
    cannot be enforced; every property, if that is not enough."""
    defined = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    properties = schema.get("properties", {})
    kept = {
        name: inner if _enforceable({**defined, **inner}) else {}
        for name, inner in properties.items()
        if isinstance(inner, Mapping)
    }
    named: dict[str, Any] = {"type": "object", "required": list(schema.get("required", ()))}
    if schema.get("additionalProperties", not properties) is not False:
        named["additionalProperties"] = True
    relaxed = {**named, **defined, "properties": kept}
    return relaxed if _enforceable(relaxed) else {**named, "properties": dict.fromkeys(kept, {})}


def _enforceable(schema: Mapping[str, Any]) -> bool:
    try:
        check_schema(schema)
    except UnsupportedSchema:
        return False
    return True
