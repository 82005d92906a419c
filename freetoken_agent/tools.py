# SPDX-License-Identifier: Apache-2.0
"""Functions that a model may call.

`@tool` reads a function's signature and docstring once, where it is defined, and refuses there what
no model could call. A `Tool` knows nothing of sessions and models; `tool_calls` runs it.
"""

import inspect
import math
import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MethodType
from typing import (
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from .errors import InvalidEdit, InvalidTool
from .runs.run_context import RunContext
from .tooling.docstrings import read_docstring
from .tooling.json_schema import ordered
from .tooling.json_values import frozen, plain
from .tooling.schema_reader import SchemaReader
from .tooling.tool_results import ResultLimit
from .tooling.tool_signature import ArgumentReader, read_signature

P = ParamSpec("P")
Rest = ParamSpec("Rest")
R = TypeVar("R")

ApprovalRule = Callable[[RunContext[Any], dict[str, Any]], bool | Awaitable[bool]]

_NOT_FOR_MODELS = ("$schema", "$id", "$comment")  # of a schema: they cost ids and say nothing
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


class ToolSettings(TypedDict, total=False):
    """Settings of a tool.

    `description`: instead of the docstring. `timeout`: seconds until the call becomes
    an error result. `needs_approval`: the run stops before the call until somebody decides; or a
    function of the `RunContext` and the arguments, plain or async, that says whether it does.
    `retries`: how often in a row the model may try again after arguments that are not valid, or a
    `ModelRetry`. `result_limit`: instead of the agent's. `validate_after`: keywords of the schema
    that no grammar can enforce are checked when the call is there, instead of being refused.
    """

    description: str
    timeout: float | None
    needs_approval: bool | ApprovalRule
    retries: int
    result_limit: ResultLimit | None
    validate_after: bool


class ToolOptions(ToolSettings, total=False):
    """Options of `@tool`: the settings, and a `name` instead of the function's own."""

    name: str


@dataclass(frozen=True, eq=False)
class Tool(Generic[P, R]):
    """A function with what a model must know of it. Calling it calls the function.

    `parameters` is the JSON schema of the arguments, an object. `takes_context`: the function's
    first parameter is a `RunContext`. `is_method`: it was defined in a class and is not bound yet;
    the attribute of an instance is a bound one. `function` is what is called. `timeout`,
    `needs_approval`, `retries`, `result_limit`, `validate_after`: see `tool`.
    """

    name: str  # letters, digits, _ and -; at most 64
    description: str  # what the model reads of it
    parameters: Mapping[str, Any] = field(repr=False)
    function: Callable[P, R] = field(repr=False)
    timeout: float | None = None  # the settings, as in `ToolSettings`
    needs_approval: bool | ApprovalRule = False
    retries: int = 1
    result_limit: ResultLimit | None = None
    validate_after: bool = False
    takes_context: bool = False
    is_method: bool = False
    reader: ArgumentReader = field(kw_only=True, repr=False)

    @property
    def schema(self) -> Mapping[str, Any]:
        """The tool in the OpenAI form, as sessions store it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {"type": "function", "function": function}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    @overload
    def __get__(self, instance: None, owner: type) -> "Tool[P, R]": ...
    @overload
    def __get__(
        self: "Tool[Concatenate[Any, Rest], R]", instance: object, owner: type | None = None
    ) -> "Tool[Rest, R]": ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> "Tool[..., R]": ...
    def __get__(self, instance: object, owner: type | None = None) -> "Tool[..., R]":
        if instance is None or not self.is_method:
            return self
        bound = MethodType(self.function, instance)
        return cast("Tool[..., R]", replace(self, function=bound, is_method=False))

    def prefixed(self, prefix: str) -> "Tool[P, R]":
        """The same tool under `prefix_name`; itself for an empty prefix."""
        if not prefix:
            return self
        return replace(self, name=_checked_name(f"{prefix}_{self.name}"))

    @classmethod
    def from_schema(
        cls,
        name: str,
        parameters: Mapping[str, Any],
        function: Callable[[dict[str, Any]], Any],
        **settings: Unpack[ToolSettings],
    ) -> "Tool[[dict[str, Any]], Any]":
        """A tool whose schema comes from elsewhere. `function` gets the arguments as one dict,
        brought to the types of the schema and valid by it. InvalidTool."""
        chosen = checked_options(settings)
        if not callable(function):
            raise InvalidTool("a tool is a function", value=function, remedy=_instead(function))
        schema = _object_schema(name, parameters)
        shown = {key: value for key, value in schema.items() if key not in _NOT_FOR_MODELS}
        return Tool(
            name=_checked_name(name),
            description=chosen.pop("description", ""),
            parameters=frozen(shown),
            function=function,
            reader=SchemaReader.of(name, schema),
            **chosen,
        )


AnyTool = Tool[..., Any]
ToolFunction = AnyTool | Callable[..., Any]


@overload
def tool(function: Callable[P, R], /, **options: Unpack[ToolOptions]) -> Tool[P, R]: ...
@overload
def tool(**options: Unpack[ToolOptions]) -> Callable[[Callable[P, R]], Tool[P, R]]: ...
def tool(function: Callable[..., Any] | None = None, /, **options: Unpack[ToolOptions]) -> Any:
    """Make a function a tool: `@tool`, `@tool(timeout=…)`, or `tool(function, name=…)`.

    The schema comes from the type hints, the descriptions from the docstring (Google, NumPy, Sphinx
    or Epydoc) or from `Annotated[…, Field(description=…)]`. A first parameter of type `RunContext`
    is given by the run. Plain functions run in a thread, async ones in the event loop. InvalidTool
    says what cannot be called by a model.
    """
    chosen = checked_options(options)
    if function is not None:
        return _make(function, chosen, sys._getframe(1).f_locals)

    def decorate(decorated: Callable[P, R]) -> Tool[P, R]:
        return _make(decorated, chosen, sys._getframe(1).f_locals)

    return decorate


def as_tool(function: ToolFunction) -> AnyTool:
    """A tool as it is; a function as the tool that `@tool` makes of it."""
    return function if isinstance(function, Tool) else _make(function, {}, {})


def _make(
    function: Callable[P, R], options: Mapping[str, Any], names: Mapping[str, Any]
) -> Tool[P, R]:
    chosen = dict(options)
    function, is_static = _callable(function)
    source = _source(function)
    name = _checked_name(chosen.pop("name", getattr(source, "__name__", "")), function)
    is_method = not is_static and _is_method(function)
    documentation = read_docstring(_docstring(source))
    signature = read_signature(name, function, documentation, names, is_method=is_method)
    return Tool(
        name=name,
        description=chosen.pop("description", documentation.description),
        parameters=frozen(signature.reader.schema),
        function=function,
        takes_context=signature.takes_context,
        is_method=is_method,
        reader=signature.reader,
        **chosen,
    )


def _object_schema(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    what = f"the parameters of tool {name!r}"
    try:
        schema = ordered(plain(parameters))
    except InvalidEdit as error:
        raise InvalidTool(f"{what} are no JSON schema", value=error.value) from error
    if schema.get("type", "object") != "object":
        raise InvalidTool(f"{what} are no object", value=schema["type"])
    if not schema.get("properties"):  # in some languages an empty object is an empty list
        schema["properties"] = {}
    if not isinstance(schema["properties"], Mapping):
        raise InvalidTool(f"the properties of tool {name!r} are none", value=schema["properties"])
    return ordered({"type": "object", **schema})


def _callable(function: Any) -> tuple[Callable[..., Any], bool]:
    """What will be called, and whether it is a static method of a class."""
    if isinstance(function, Tool):
        raise InvalidTool("this is a tool already", value=function.name, remedy="use it as it is")
    if isinstance(function, staticmethod):
        return function.__func__, True
    if isinstance(function, type | classmethod) or not callable(function):
        raise InvalidTool("a tool is a function", value=function, remedy=_instead(function))
    body = function if inspect.isroutine(_source(function)) else type(function).__call__
    if inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
        raise InvalidTool(
            "a tool returns one result, not a stream of them",
            value=getattr(function, "__name__", function),
            remedy="collect what you yield, and return it",
        )
    return function, False


def _instead(thing: object) -> str:
    """What to write instead of what is no function."""
    if isinstance(thing, classmethod):
        return "for a class method, write tool(Class.method) after the class"
    if isinstance(thing, str):
        return f"write @tool(name={thing!r}), or pass the function itself"
    if hasattr(thing, "list_tools"):
        return "pass it as one of toolsets="
    if isinstance(thing, Mapping):
        return "a schema needs a function: Tool.from_schema(name, parameters, function)"
    return "pass a function, a method of an instance, or what @tool makes of one"


def _source(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, partial):
        function = function.func
    return function


def _docstring(source: Callable[..., Any]) -> str | None:
    if inspect.isroutine(source):
        return source.__doc__
    return type(source).__call__.__doc__ or type(source).__doc__


def _is_method(function: Callable[..., Any]) -> bool:
    """Defined in the body of a class, and not bound to an instance."""
    if not inspect.isfunction(function):
        return False
    scope = function.__qualname__.rpartition(".")[0]
    first = next(iter(inspect.signature(function).parameters.values()), None)
    is_inside = bool(scope) and not scope.endswith("<locals>")
    if not is_inside or first is None:
        return False
    own = (inspect.Parameter.empty, Self, "Self", scope.rpartition(".")[2])
    return first.name == "self" or first.annotation in own


def _checked_name(name: object, function: object = None) -> str:
    if isinstance(name, str) and _NAME.fullmatch(name):
        return name
    raise InvalidTool(
        "the name of a tool is no name that models can write",
        value=name or function,
        limit="1 to 64 letters, digits, _ and -, not beginning with a digit or -",
        remedy="pass name=…",
    )


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """A copy. InvalidTool for an option that there is not, or a value that it cannot have."""
    for key, value in options.items():
        if key not in _LIMITS:
            known = ", ".join(_LIMITS)
            raise InvalidTool(
                f"tools have no option {key!r}", value=value, remedy=f"use one of {known}"
            )
        if not _is_valid(key, value):
            raise InvalidTool(f"{key} of a tool cannot be this", value=value, limit=_LIMITS[key])
    return dict(options)


_LIMITS = {
    "name": "a str",
    "description": "a str",
    "timeout": "seconds above 0, or None",
    "needs_approval": "True, False, or a function of the RunContext and the arguments",
    "retries": "an int from 0",
    "result_limit": "a ResultLimit, or None",
    "validate_after": "True or False",
}


def _is_valid(key: str, value: Any) -> bool:
    match key:
        case "name" | "description":
            return isinstance(value, str)
        case "validate_after":
            return isinstance(value, bool)
        case "needs_approval":
            return isinstance(value, bool) or (callable(value) and not isinstance(value, type))
        case "retries":
            return isinstance(value, int) and not isinstance(value, bool) and value >= 0
        case "result_limit":
            return value is None or isinstance(value, ResultLimit)
    if value is None or isinstance(value, bool) or not isinstance(value, int | float):
        return value is None
    return value > 0 and math.isfinite(value)
