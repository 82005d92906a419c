# SPDX-License-Identifier: Apache-2.0
"""Finds out, by rendering, how a template wants its messages and what it does to them."""

from collections.abc import Sequence
from dataclasses import replace

from .dialect import Dialect
from .errors import TemplateUnsupported
from .frames import Grammar, learn_call
from .items import DEFAULT_OPTIONS, Item, Options
from .jinja import JinjaTemplate

USER = Item("user")
CALL = Item("tool_call", name="f", arguments={}, call_id="x")
RESULT = Item("tool_result", name="f", call_id="x")
TOOLS = Item(
    "tools",
    '[{"type": "function", "function": {"name": "lookup", "description": "Look up.", '
    '"parameters": {"type": "object", "properties": {"word": {"type": "string", '
    '"description": "What."}}, "required": ["word"]}}}]',
)
_FIELDS = ("reasoning_content", "thinking", "reasoning")


def renders(grammar: Grammar, items: Sequence[Item], options: Options = DEFAULT_OPTIONS) -> bool:
    """Whether the template shows every item once, in order."""
    try:
        extents = grammar.render(items, options).extents
    except TemplateUnsupported:
        return False
    position = 0
    for extent in extents:
        if extent is None or extent[0] < position:
            return False
        position = extent[1]
    return True


def find_dialect(template: JinjaTemplate) -> Grammar:
    """The first dialect in which the template shows each kind; a kind it shows in none is inlined.

    TemplateUnsupported if it cannot even render a user's message and an answer.
    """
    grammar = Grammar(template, Dialect(tools=False, calls=False, thinking=None))
    if not renders(grammar, [USER, Item("text")]):
        grammar.render(
            [USER, Item("text")], DEFAULT_OPTIONS
        )  # raises with the template's own words
        raise TemplateUnsupported(
            "the chat template cannot be learned: it does not show a user's message and an answer",
            remedy="use a template that renders both once, in order",
        )
    if not renders(grammar, [Item("system"), USER]):
        grammar = _with(grammar, system=False)
    grammar = _thinking(grammar)
    grammar = _calls(grammar)
    return _tools(grammar)


def _with(grammar: Grammar, **changes: object) -> Grammar:
    return replace(grammar, dialect=replace(grammar.dialect, **changes))  # type: ignore[arg-type]


def _thinking(grammar: Grammar) -> Grammar:
    for field_name in _FIELDS:
        candidate = _with(grammar, thinking=field_name)
        if renders(candidate, [USER, Item("thinking", open=True), Item("text")]):
            return candidate
    return grammar


def _calls(grammar: Grammar) -> Grammar:
    for arguments in ("object", "string"):
        for empty in ("", None):
            candidate = _with(grammar, calls=True, arguments=arguments, empty_content=empty)
            shape = learn_call(candidate, DEFAULT_OPTIONS)
            if shape is None or "\\" in shape.head + shape.tail:
                continue
            candidate = replace(candidate, call=shape)
            if renders(candidate, [USER, CALL, RESULT]):
                return candidate
    shape = learn_call(grammar, DEFAULT_OPTIONS)
    return replace(grammar, call=shape)


def _tools(grammar: Grammar) -> Grammar:
    for no_tools in (None, ()):
        candidate = _with(grammar, tools=True, no_tools=no_tools)
        if not renders(candidate, [USER, Item("text")]):
            continue
        for preamble in (
            [TOOLS, USER],
            [Item("system"), TOOLS, USER],
            [TOOLS, Item("system"), USER],
        ):
            if renders(candidate, preamble):
                return candidate
    return grammar
