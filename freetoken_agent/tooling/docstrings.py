# SPDX-License-Identifier: Apache-2.0
"""What a docstring says about a function and its parameters, in any of the usual shapes.

Google, NumPy, Sphinx and Epydoc are read by docstring-parser. Three things that it loses (0.18) are
put right here: a docstring that begins with its parameters, several names before one description,
and the stars of `*args`.
"""

import inspect
import re
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from docstring_parser import Docstring

_SECTION_FIRST = re.compile(r"\s*((?:Args|Arguments|Parameters|Params):)[ \t]*\n")
_SUMMARY = "."  # stands before such a section, which is lost as the first line


@dataclass(frozen=True)
class Documentation:
    """`description`: what comes before the parameters; paragraphs stay, lines are joined."""

    description: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)


def read_docstring(text: str | None) -> Documentation:
    """The documentation in a docstring. What cannot be read as parameters is description."""
    text = text or ""
    first = _SECTION_FIRST.match(text)
    cleaned = inspect.cleandoc(text) if first is None else _with_summary(first, text)
    if not cleaned:
        return Documentation()
    parsed = _parsed(cleaned)
    if parsed is None:
        return Documentation(_joined(cleaned))
    parameters: dict[str, str] = {}
    for param in parsed.params:
        for name in param.arg_name.split(","):
            said = _joined(param.description or "")
            if said:
                parameters[name.strip().lstrip("\\*")] = said
    short = parsed.short_description or "" if first is None else ""
    return Documentation(_joined(f"{short}\n\n{parsed.long_description or ''}"), parameters)


def _parsed(text: str) -> "Docstring | None":
    """In the style that finds most; None if all fail. What one cannot read, another may."""
    from docstring_parser import DocstringStyle, ParseError, parse  # only tools need it

    found = []
    for style in DocstringStyle:
        with suppress(ParseError, IndexError):  # the second for `:: :type`
            if style is not DocstringStyle.AUTO:
                found.append(parse(text, style))
    return max(found, key=lambda one: len(one.meta), default=None)


def _with_summary(section: re.Match[str], text: str) -> str:
    """A first line has no indentation to compare with; its section is indented once more if need
    be."""
    body = inspect.cleandoc("\n" + text[section.end() :])
    if not body.startswith(" "):
        body = textwrap.indent(body, "    ")
    return f"{_SUMMARY}\n\n{section[1]}\n{body}"


def _joined(text: str) -> str:
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return "\n\n".join(part for part in paragraphs if part)
