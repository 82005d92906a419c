# SPDX-License-Identifier: Apache-2.0
"""What a docstring says about a function and its parameters, in any of the usual shapes.

Google, NumPy, Sphinx and Epydoc are read by docstring-parser. Three things that it loses (0.18) are
put right here: a docstring that begins with its parameters, several names before one description,
and the stars of `*args`.
"""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_SECTION_FIRST = re.compile(r"(Args|Arguments|Parameters|Params|Attributes):[ \t]*\n")
_SUMMARY = "."  # stands before such a section, which is lost as the first line


@dataclass(frozen=True)
class Documentation:
    """`description`: what comes before the parameters; paragraphs stay, lines are joined."""

    description: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)


def read_docstring(text: str | None) -> Documentation:
    """The documentation in a docstring. What cannot be read as parameters is description."""
    cleaned = inspect.cleandoc(text or "")
    if not cleaned:
        return Documentation()
    from docstring_parser import ParseError, parse  # only who documents tools needs it

    headless = _SECTION_FIRST.match(cleaned) is not None
    try:
        parsed = parse(f"{_SUMMARY}\n\n{cleaned}" if headless else cleaned)
    except ParseError:
        return Documentation(_joined(cleaned))
    parameters: dict[str, str] = {}
    for param in parsed.params:
        for name in param.arg_name.split(","):
            said = _joined(param.description or "")
            if said:
                parameters[name.strip().lstrip("\\*")] = said
    short = "" if headless else parsed.short_description or ""
    return Documentation(_joined(f"{short}\n\n{parsed.long_description or ''}"), parameters)


def _joined(text: str) -> str:
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return "\n\n".join(part for part in paragraphs if part)
