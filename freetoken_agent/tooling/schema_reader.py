# SPDX-License-Identifier: Apache-2.0
"""Arguments by a schema that comes from elsewhere: brought to its types, then checked by
`jsonschema`, so that the function gets what the schema says."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .argument_problems import ProblemsAt, preview, problem_lines
from .coercion import coerce
from .tool_signature import as_object, invalid_arguments

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

_SAID_CHARS = 200
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SchemaReader:
    """Gives the arguments as one dict. A schema that is none by its own dialect, or names one that
    cannot be found here, is checked at its top only: which keys are required and known."""

    schema: Mapping[str, Any]
    validator: "Validator | None"

    @classmethod
    def of(cls, tool: str, schema: Mapping[str, Any]) -> "SchemaReader":
        from jsonschema import Draft202012Validator, SchemaError  # 0.1 s; few programs need it
        from jsonschema.validators import validator_for
        from referencing import Registry

        dialect = validator_for(schema, default=Draft202012Validator)
        try:
            dialect.check_schema(schema)
        except SchemaError as error:
            said = error.message
            _log.warning("the schema of tool %s is not valid, and hardly checked: %s", tool, said)
            return cls(schema, None)
        return cls(schema, dialect(schema, registry=Registry()))  # which asks no network

    def read(
        self, tool: str, arguments: Mapping[str, Any] | str
    ) -> tuple[list[Any], dict[str, Any]]:
        value = coerce(as_object(tool, arguments), self.schema, self.schema)
        problems = self._problems_at_the_top(value) or self._problems(value)
        if problems:
            raise invalid_arguments(tool, problems)
        return [value], {}

    def _problems_at_the_top(self, value: Mapping[str, Any]) -> str:
        known = self.schema.get("properties", {})
        problems = [
            f"- {key}: is missing" for key in self.schema.get("required", ()) if key not in value
        ]
        if self.schema.get("additionalProperties") is False:
            what = f"known are: {', '.join(known)}" if known else "nothing is"
            problems += [
                f"- {key}: is not known; {what}; got {preview(value[key])}"
                for key in value
                if key not in known
            ]
        return "\n".join(problems)

    def _problems(self, value: Mapping[str, Any]) -> str:
        from referencing.exceptions import Unresolvable

        if self.validator is None:
            return ""
        found: ProblemsAt = {}
        try:
            for error in self.validator.iter_errors(value):
                said = error.message.removeprefix(repr(error.instance)).strip()[:_SAID_CHARS]
                found.setdefault(tuple(error.absolute_path), []).append(said)
        except (Unresolvable, re.error):  # a pattern in the words of another language
            return ""
        return problem_lines(found, value, self.schema)
