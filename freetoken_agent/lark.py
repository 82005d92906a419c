# SPDX-License-Identifier: Apache-2.0
"""Pieces of Lark grammars as llguidance reads them.

A literal of a template is cut at its control tokens: those are named by id, so that text which
only looks like one does not match, and what a content may hold never includes one.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .tokenizer import Tokenizer

ANY = r"(.|\n)*"


class Rules:
    """The rules of one grammar. Grows while it is written; `text()` is the whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lines: list[str] = []
        self._names: dict[str, str] = {}  # body -> name

    def rule(self, body: str, *, options: str = "") -> str:
        """A rule with this body; equal bodies share one. Returns its name."""
        return self._named("r", f"{options}: {body}")

    def forward(self) -> str:
        """The name of a rule that `define` gives its body later."""
        name = f"f{len(self._names)}"
        self._names[name] = name
        return name

    def define(self, name: str, body: str) -> None:
        self._lines.append(f"{name}: {body}")

    def terminal(self, pattern: str) -> str:
        """A terminal: one lexeme, longest match."""
        return self._named("T", f": {pattern}")

    def literal(self, text: str) -> str:
        """A template's own text; '' for none."""
        parts = self._tokenizer.split_frame(text)
        return " ".join(f"<[{p}]>" if isinstance(p, int) else quoted(p) for p in parts)

    def until(self, text: str, pattern: str = ANY) -> str:
        """Content that ends where `text` first begins, and that text."""
        parts = self._tokenizer.split_frame(text)
        if isinstance(parts[0], int):
            content = self.rule(self.terminal(f"/{pattern}/"))
            return f"{content} {self.literal(text)}"
        name = self.rule(f"/{pattern}/", options=f"[suffix={quoted(parts[0])}]")
        rest = " ".join(f"<[{p}]>" if isinstance(p, int) else quoted(p) for p in parts[1:])
        return f"{name} {rest}".rstrip()

    def without(self, texts: Sequence[str]) -> str:
        """Content in which none of these begins. Control tokens cannot stand in it anyway."""
        plain = [text for text in map(self._leading, texts) if text]
        barred = "".join(f" & ~/{ANY}{_escaped(text)}{ANY}/" for text in dict.fromkeys(plain))
        return self.rule(self.terminal(f"/{ANY}/{barred}"))

    def not_beginning(self, text: str) -> str:
        """Content that does not begin with this text."""
        plain = self._leading(text)
        barred = f" & ~/{_escaped(plain)}{ANY}/" if plain else ""
        return self.rule(self.terminal(f"/{ANY}/{barred}"))

    def value(self, schema: Mapping[str, Any] | bool, spelling: Mapping[str, Any]) -> str:
        """A JSON value. `spelling`: llguidance's options, such as separators."""
        if isinstance(schema, bool):
            schema = {}
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': dict(spelling)})}")

    def text(self, start: str) -> str:
        """The grammar that begins with this body."""
        return "\n".join([f"start: {start}", *self._lines, ""])

    def _leading(self, text: str) -> str:
        """The plain text with which a literal begins."""
        first = self._tokenizer.split_frame(text)[:1]
        return first[0] if first and isinstance(first[0], str) else ""

    def _named(self, prefix: str, definition: str) -> str:
        known = self._names.get(prefix + definition)
        if known is None:
            known = self._names[prefix + definition] = f"{prefix}{len(self._names)}"
            self._lines.append(known + definition)
        return known


def quoted(text: str) -> str:
    """A string in the grammar."""
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """A text as a regular expression between slashes."""
    out = []
    for character in text:
        if character == "\n":
            out.append(r"\n")
        elif character.isalnum() or character in " _<>=\"':;,%&@!#~`" or ord(character) > 127:
            out.append(character)
        else:
            out.append("\\" + character)
    return "".join(out)
