# SPDX-License-Identifier: Apache-2.0
"""Pieces of Lark grammars as llguidance reads them.

A literal of a template is cut at its control tokens: those are named by id, so that text which
only looks like one does not match, and what a content may hold never includes one.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..tokenizers.tokenizer import Tokenizer

ANY = r"(.|\n)*"
BLANKS = r"/[ \n]{0,3}/"
# What Python strips: parsers look behind it for what a turn begins with.
_SPACE = (
    r"[\t-\r\x1c-\x20\x85\xa0\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}]"
)


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
        return self._spelled(self._tokenizer.split_frame(text))

    def plain(self, text: str, end: str) -> str:
        """Plain text, whatever it looks like, and the template's own text that ends it: one lexeme
        up to the first control token."""
        parts = self._tokenizer.split_frame(end)
        if parts and isinstance(parts[0], str):
            text, parts = text + parts[0], parts[1:]
        return f"{quoted(text)} {self._spelled(parts)}".rstrip()

    def begin(self, text: str, *, blanks: bool = False) -> str:
        """A literal that wins over a content in the same place, as soon as it is there: one lexeme
        up to its first control token. `blanks`: some may precede it."""
        parts = self._tokenizer.split_frame(text)
        if not parts or isinstance(parts[0], int):
            return f"{BLANKS if blanks else ''} {self.literal(text)}".strip()
        lead = BLANKS.strip("/") if blanks else ""
        first = self.rule(f"/{lead}{_escaped(parts[0])}/", options="[lazy]")
        return f"{first} {self._spelled(parts[1:])}".rstrip()

    def until(self, text: str, content: str = "") -> str:
        """Content that ends where `text` first begins, and that text. `content`: its terminal; any
        text by default."""
        parts = self._tokenizer.split_frame(text)
        content = content or self.terminal(f"/{ANY}/")
        if isinstance(parts[0], int):
            return f"{self.rule(content)} {self.literal(text)}"
        name = self.rule(content, options=f"[suffix={quoted(parts[0])}]")
        return f"{name} {self._spelled(parts[1:])}".rstrip()

    def string(self, bounds: Sequence[str], end: str) -> str:
        """A text within these patterns, and the literal that ends it. It is read back by what it
        looks like: where a control token ends it, plain text must not look like that."""
        is_control = isinstance(self._tokenizer.split_frame(end)[0], int)
        return self.until(end, self.content([end.strip()] if is_control else [], (), bounds))

    def content(
        self, never: Sequence[str], never_first: Sequence[str], bounds: Sequence[str] = (ANY,)
    ) -> str:
        """A terminal: text within these patterns, in which the former literals do not occur, and
        that does not begin with the latter, blanks aside. Control tokens cannot stand in it."""
        barred = [f"{ANY}{_escaped(text)}{ANY}" for text in never]
        barred += [f"{_SPACE}*{_escaped(text)}{ANY}" for text in never_first]
        held = [*(f"/{bound}/" for bound in bounds), *(f"~/{pattern}/" for pattern in barred)]
        return self.terminal(" & ".join(held))

    def value(self, schema: Mapping[str, Any] | bool, spelling: Mapping[str, Any]) -> str:
        """A JSON value. `spelling`: llguidance's options, such as separators."""
        if isinstance(schema, bool):
            schema = {}
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': dict(spelling)})}")

    def text(self, start: str) -> str:
        """The grammar that begins with this body."""
        return "\n".join([f"start: {start}", *self._lines, ""])

    @staticmethod
    def _spelled(parts: Sequence[str | int]) -> str:
        return " ".join(f"<[{p}]>" if isinstance(p, int) else quoted(p) for p in parts)

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
