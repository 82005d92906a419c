# SPDX-License-Identifier: Apache-2.0
"""The type of an agent's answer: its schema for the model, and its value from the model's text."""

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model

from ..errors import InvalidOutputType, ModelRetry
from .argument_problems import misread_in, problems_in
from .coercion import coerce
from .json_schema import resolved, schema_of
from .json_values import frozen, read, whole_characters
from .tool_signature import NO_SCHEMA


@dataclass(frozen=True)
class OutputType:
    """`schema` is None for plain text. `wrapped`: the model writes `{"result": value}`, because the
    type is no object by itself (a scalar, a list, a union)."""

    type: Any
    schema: Mapping[str, Any] | None = None
    wrapped: bool = False
    _adapter: TypeAdapter[Any] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, type: Any) -> "OutputType":
        """InvalidOutputType where JSON cannot hold the type."""
        if type is str:
            return cls(str)
        if isinstance(type, list | tuple) or inspect.isroutine(type):
            raise InvalidOutputType(
                "this is no type for an answer",
                value=type,
                remedy="write a union, A | B, for one of several; call a function on result.output",
            )
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(type)
            schema = schema_of(adapter)
            wrapped = resolved(schema, schema).get("type") != "object"
            if wrapped:
                adapter = TypeAdapter(_wrapper(type))
                schema = schema_of(adapter)
        except NO_SCHEMA as error:
            raise InvalidOutputType(
                "this is no type for an answer",
                value=type,
                limit=str(error).split("\n", 1)[0],
                remedy="use JSON types, pydantic models, dataclasses, typing_extensions.TypedDict",
            ) from error
        return cls(type, frozen(schema), wrapped, adapter)

    def validate(self, text: str) -> Any:
        """The value that a whole answer stands for. ModelRetry, with a text for the model, where it
        stands for none."""
        if self.schema is None or self._adapter is None:
            return text
        try:
            value = coerce(whole_characters(read(text)), self.schema, self.schema)
        except ValueError as error:
            raise _refused(f"- it is no JSON: {error}") from error
        try:
            answer = self._adapter.validate_json(json.dumps(value))
        except ValidationError as error:
            raise _refused(problems_in(error, value, self.schema)) from error
        misread = misread_in(value, self.schema)
        if misread:
            raise _refused(misread)
        return answer.result if self.wrapped else answer


def _wrapper(type: Any) -> type[BaseModel]:
    return create_model("answer", __config__=ConfigDict(extra="forbid"), result=(type, ...))


def _refused(problems: str) -> ModelRetry:
    return ModelRetry(f"The answer is not valid:\n{problems}\nWrite the whole answer again.")
