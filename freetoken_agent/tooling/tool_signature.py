# SPDX-License-Identifier: Apache-2.0
"""From a function's signature to a schema of its arguments, and from arguments to a call of it."""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any, Protocol, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticSerializationError, SchemaError, to_json
from typing_extensions import Doc

from ..errors import InvalidTool, ModelRetry
from ..runs.run_context import RunContext
from .argument_problems import misread_in, preview, problems_in
from .coercion import coerce
from .docstrings import Documentation
from .json_schema import ordered, schema_of
from .json_values import is_plain, read, thawed, whole_characters

NO_SCHEMA = (PydanticUserError, PydanticUndefinedAnnotation, SchemaError, TypeError)
"""What pydantic raises for types that it cannot validate, or that JSON does not have."""

_VARIADIC = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


class ArgumentReader(Protocol):
    """From the arguments a model wrote to those of a Python call."""

    def read(
        self, tool: str, arguments: Mapping[str, Any] | str
    ) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments, all of them fresh values. ModelRetry, with a text for
        the model that knows the tool by this name, where they are not valid."""


@dataclass(frozen=True)
class _Parameter:
    """`field`: its name in the pydantic model, where no name of a parameter can be in the way."""

    name: str
    field: str
    annotation: Any
    python: inspect.Parameter

    @property
    def has_own_default(self) -> bool:
        """Python's default, which is passed on by leaving the argument out."""
        default = self.python.default
        return default is not inspect.Parameter.empty and not isinstance(default, FieldInfo)


@dataclass(frozen=True)
class SignatureReader:
    """Validates by pydantic, after coercion led by the schema."""

    schema: Mapping[str, Any]
    model: type[BaseModel]
    parameters: tuple[_Parameter, ...]

    def read(
        self, tool: str, arguments: Mapping[str, Any] | str
    ) -> tuple[list[Any], dict[str, Any]]:
        value = coerce(as_object(tool, arguments), self.schema, self.schema)
        try:
            # As JSON: what JSON has no type for is read from text, and nothing is shared.
            read_in = self.model.model_validate_json(json.dumps(value))
        except ValidationError as error:
            raise invalid_arguments(tool, problems_in(error, value, self.schema)) from error
        misread = misread_in(value, self.schema)
        if misread:
            raise invalid_arguments(tool, misread)
        positional: list[Any] = []
        named: dict[str, Any] = {}
        for parameter in self.parameters:
            if parameter.field in read_in.model_fields_set or not parameter.has_own_default:
                value = getattr(read_in, parameter.field)
            elif parameter.python.kind is inspect.Parameter.POSITIONAL_ONLY:
                value = parameter.python.default
            else:
                continue
            if parameter.python.kind is inspect.Parameter.POSITIONAL_ONLY:
                positional.append(value)
            else:
                named[parameter.name] = value
        return positional, named


def as_object(tool: str, arguments: Mapping[str, Any] | str) -> dict[str, Any]:
    """Arguments as an object; some models write the object into a string, at times twice."""
    value: Any = arguments
    for _ in range(2):
        if not isinstance(value, str):
            break
        try:
            value = read(value.strip() or "{}")
        except ValueError as error:
            raise invalid_arguments(tool, f"- {_unread(value, error)}") from error
    if not isinstance(value, Mapping):
        raise invalid_arguments(tool, f"- they are no JSON object but {preview(value)}")
    return {key: thawed(inner) for key, inner in whole_characters(dict(value)).items()}


def _unread(text: str, error: ValueError) -> str:
    """What is wrong with a text that should be arguments, or with the call as its template writes
    it: that is what there is of one that could not be read."""
    brace = text.find("{")
    if isinstance(error, json.JSONDecodeError) and error.pos == 0 < brace:
        try:
            json.JSONDecoder(strict=False).raw_decode(text, brace)
        except json.JSONDecodeError as inside:
            error = inside
        except RecursionError:
            pass
    if not isinstance(error, json.JSONDecodeError):
        return f"they are no JSON object: {error}"
    if error.pos == 0:
        return f"they cannot be read: {preview(text)}"
    here = error.doc[error.pos :]
    return f"they are no JSON object: {error.msg} at {preview(here) if here else 'the end'}"


def invalid_arguments(tool: str, problems: str) -> ModelRetry:
    return ModelRetry(
        f"The arguments of {tool} are not valid:\n{problems}\nCorrect them and call {tool} again."
    )


@dataclass(frozen=True)
class Signature:
    """What a function takes from a model. `takes_context`: its first parameter is a RunContext."""

    reader: SignatureReader
    takes_context: bool


def read_signature(
    tool: str,
    function: Callable[..., Any],
    documentation: Documentation,
    names: Mapping[str, Any],
    *,
    is_method: bool = False,
) -> Signature:
    """InvalidTool names the parameter that cannot be one. `names`: the local names that the hints
    may use; `is_method`: the first parameter is the instance."""
    parameters = list(_open_parameters(tool, function))
    if is_method:
        del parameters[0]
    hints = _hints(tool, function, [one.name for one in parameters], names)
    first = parameters[0] if parameters else None
    takes_context = (
        first is not None
        and first.kind is not inspect.Parameter.KEYWORD_ONLY
        and _is_context(hints.get(first.name))
    )
    if takes_context:
        del parameters[0]
    read_in = [_parameter(tool, number, one, hints) for number, one in enumerate(parameters)]
    model, schema = _model(tool, read_in, documentation)
    return Signature(SignatureReader(schema, model, tuple(read_in)), takes_context)


def _open_parameters(tool: str, function: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    """Parameters that are left to be filled; what a partial binds is no model's to choose."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise InvalidTool(
            f"tool {tool!r} has no signature", value=function, remedy="wrap it in a function"
        ) from error
    bound = function.keywords if isinstance(function, partial) else {}
    for parameter in signature.parameters.values():
        if parameter.kind in _VARIADIC:
            raise InvalidTool(
                f"tool {tool!r} takes any number of arguments",
                value=f"{_VARIADIC[parameter.kind]}{parameter.name}",
                remedy="name each parameter, or take one list or dict",
            )
        if parameter.name not in bound:
            yield parameter


def _hints(
    tool: str, function: Callable[..., Any], wanted: Sequence[str], names: Mapping[str, Any]
) -> dict[str, Any]:
    """The types of the wanted parameters; what else is annotated need not exist."""
    while isinstance(function, partial):
        function = function.func
    if not inspect.isroutine(function):
        function = type(function).__call__
    function = inspect.unwrap(function)
    written = inspect.get_annotations(function)
    some = SimpleNamespace(__annotations__={n: written[n] for n in wanted if n in written})
    scope = getattr(function, "__globals__", {})
    try:
        try:
            return get_type_hints(some, globalns=scope, include_extras=True)
        except NameError:  # a type that was defined inside of a function
            return get_type_hints(some, globalns=scope, localns=dict(names), include_extras=True)
    except (NameError, TypeError, SyntaxError) as error:
        raise InvalidTool(
            f"a type hint of tool {tool!r} cannot be resolved",
            value=str(error),
            remedy="import the type where the tool is defined, outside of TYPE_CHECKING; "
            "for a type of an enclosing function, write @tool there",
        ) from error


def _is_context(hint: Any) -> bool:
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return hint is RunContext or get_origin(hint) is RunContext


def _holds_context(hint: Any) -> bool:
    """A context, or a type that is made of one."""
    kind = get_origin(hint) or hint
    is_one = isinstance(kind, type) and issubclass(kind, RunContext)
    return is_one or any(map(_holds_context, get_args(hint)))


def _parameter(
    tool: str, number: int, parameter: inspect.Parameter, hints: Mapping[str, Any]
) -> _Parameter:
    if parameter.name not in hints:
        raise InvalidTool(
            f"a parameter of tool {tool!r} has no type",
            value=parameter.name,
            remedy="annotate it; RunContext takes what the run knows, Any every JSON value",
        )
    if _holds_context(hints[parameter.name]):
        raise InvalidTool(
            f"tool {tool!r} takes its RunContext in the wrong place",
            value=parameter.name,
            remedy="make it the first parameter, of type RunContext or RunContext[…] alone",
        )
    return _Parameter(parameter.name, f"p{number}", hints[parameter.name], parameter)


def _model(
    tool: str, parameters: Sequence[_Parameter], documentation: Documentation
) -> tuple[type[BaseModel], dict[str, Any]]:
    fields = {one.field: _field(one, documentation) for one in parameters}
    try:
        model, schema = _built(fields)
    except NO_SCHEMA as error:
        raise _culprit(tool, parameters, fields, error) from error
    shown = schema["properties"]  # in the order of the parameters
    for (name, inner), one in zip(shown.items(), parameters, strict=True):
        if one.has_own_default:
            said = {key: value for key, value in inner.items() if key != "default"}
            shown[name] = ordered({**said, **_shown_default(one)})
    return model, schema


def _built(fields: Mapping[str, Any]) -> tuple[type[BaseModel], dict[str, Any]]:
    model: type[BaseModel] = create_model(
        "arguments", __config__=ConfigDict(extra="forbid"), **fields
    )
    schema = schema_of(TypeAdapter(model))
    if "properties" not in schema:
        raise TypeError("Self stands for no type here")
    return model, schema


def _field(parameter: _Parameter, documentation: Documentation) -> tuple[Any, FieldInfo]:
    """What the user said of the parameter stays; its name and its docstring are added."""
    default = parameter.python.default
    own = default if isinstance(default, FieldInfo) else Field()
    if parameter.has_own_default:
        own = Field(default=None)  # never read: the argument is left out
    said = [own]
    if get_origin(parameter.annotation) is Annotated:
        said += [one for one in get_args(parameter.annotation) if isinstance(one, FieldInfo)]
    added: dict[str, Any] = {}
    if not any(one.alias or one.validation_alias for one in said):
        added["alias"] = parameter.name
    if not any(one.description for one in said):
        documented = documentation.parameters.get(parameter.name)
        added["description"] = _noted(parameter.annotation) or documented
    return Annotated[parameter.annotation, Field(**added)], own


def _noted(annotation: Any) -> str | None:
    """What `Annotated[…, "text"]` says, or `Doc("text")`."""
    for one in get_args(annotation)[1:] if get_origin(annotation) is Annotated else ():
        text = one.documentation if isinstance(one, Doc) else one
        if isinstance(text, str):
            return text
    return None


def _shown_default(parameter: _Parameter) -> dict[str, Any]:
    """Python's default, where JSON has it and the type allows it."""
    default = parameter.python.default
    try:
        TypeAdapter(parameter.annotation).validate_python(default)
        shown = json.loads(to_json(default))
    except (ValidationError, PydanticSerializationError):
        return {}
    if isinstance(default, set | frozenset):
        shown = sorted(shown, key=json.dumps)  # not in the order of this process
    return {"default": shown} if is_plain(shown) else {}


def _culprit(
    tool: str, parameters: Sequence[_Parameter], fields: Mapping[str, Any], error: Exception
) -> InvalidTool:
    """The same error, with the name of the first parameter that causes it alone."""
    name, cause = "", error
    remedy = "use JSON types, pydantic models, dataclasses, typing_extensions.TypedDict or enums"
    for parameter in parameters:
        try:
            _built({parameter.field: fields[parameter.field]})
        except NO_SCHEMA as alone:
            name, cause = parameter.name, alone
            break
    if isinstance(cause, PydanticUndefinedAnnotation):
        remedy = f"define {cause.name} before the tool, where pydantic finds it: in the same module"
    return InvalidTool(
        f"parameter {name!r} of tool {tool!r} has a type that no JSON schema can say",
        value=str(cause).split("\n", 1)[0],
        remedy=remedy,
    )
