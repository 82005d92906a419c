# SPDX-License-Identifier: Apache-2.0
"""Tool lists as sessions store them: one JSON text, in the OpenAI form."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from ..errors import InvalidEdit
from .json_values import plain


@runtime_checkable
class HasSchema(Protocol):
    """Anything that knows its own tool schema."""

    @property
    def schema(self) -> Mapping[str, Any]: ...


ToolLike = Mapping[str, Any] | HasSchema


def tools_text(tools: Sequence[ToolLike]) -> str | None:
    """The JSON text of a tool list; None for an empty one. InvalidEdit names what is wrong."""
    if not tools:
        return None
    if isinstance(tools, str | Mapping) or not isinstance(tools, Iterable):
        raise InvalidEdit("tools are a list of schemas", value=type(tools).__name__)
    schemas = [_schema(tool) for tool in tools]
    names = [schema["function"]["name"] for schema in schemas]
    for name in names:
        if names.count(name) > 1:
            raise InvalidEdit("two tools have the same name", value=name)
    return json.dumps(schemas, ensure_ascii=False)


def _schema(tool: ToolLike) -> dict[str, Any]:
    raw = tool.schema if isinstance(tool, HasSchema) else tool
    if not isinstance(raw, Mapping):
        raise InvalidEdit("a tool is a JSON schema", value=type(raw).__name__)
    function = raw.get("function", raw) if raw.get("type", "function") == "function" else None
    if not isinstance(function, Mapping):
        raise InvalidEdit("only tools of type function are known", value=raw.get("type"))
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidEdit("a tool needs a name", value=name)
    parameters = function.get("parameters", {"type": "object", "properties": {}})
    if not isinstance(parameters, Mapping):
        raise InvalidEdit(f"the parameters of tool {name!r} are not a schema", value=parameters)
    flat = {key: value for key, value in function.items() if key != "type"}
    return {"type": "function", "function": plain({**flat, "parameters": parameters})}
