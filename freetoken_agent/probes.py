# SPDX-License-Identifier: Apache-2.0
"""Finds out, by rendering, how a template wants its messages and what it does to them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .call_format import CallFormat, learn_call_format
from .dialect import Dialect, SentinelFill, build_messages
from .errors import TemplateUnsupported
from .frames import Grammar, learn_call
from .items import DEFAULT_OPTIONS, Item, Options
from .jinja import JinjaTemplate
from .markup import Gaps, Markup, learn_markup
from .sentinels import sentinel

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


def find_markup(grammar: Grammar) -> Markup:
    """The markers that a model writes, from short skeletons."""
    opener = _opener(grammar)
    thought, text = Item("thinking", open=True), Item("text", open=True)
    shape = grammar.call
    return learn_markup(
        Gaps(
            opener=opener,
            to_text=_gap(grammar, [USER, text]),
            to_thinking=_gap(grammar, [USER, thought]),
            to_call=_gap(grammar, [USER, CALL]),
            thinking_to_text=_gap(grammar, [USER, thought, text]),
            thinking_to_call=_gap(grammar, [USER, thought, CALL]),
            text_to_call=_gap(grammar, [USER, text, CALL]),
            call_to_call=_gap(grammar, [USER, CALL, CALL]),
            call_to_result=_gap(grammar, [USER, CALL, RESULT]),
            head=shape.head if shape else "",
            tail=shape.tail if shape else "",
        ),
        _call_format(grammar),
    )


def _opener(grammar: Grammar) -> str:
    rendering = grammar.render([USER], DEFAULT_OPTIONS, generation=True)
    extent = rendering.extents[0]
    assert extent is not None, "a user's message was shown when the dialect was found"
    return rendering.text[extent[1] :]


def _gap(grammar: Grammar, items: Sequence[Item]) -> str | None:
    """The text before the last item; None if the template refuses or drops a neighbour."""
    try:
        rendering = grammar.render(items, DEFAULT_OPTIONS)
    except TemplateUnsupported:
        return None
    left, right = rendering.extents[-2:]
    return None if left is None or right is None else rendering.text[left[1] : right[0]]


class _PairFill(SentinelFill):
    """Calls with two arguments."""

    def arguments(self, index: int) -> Mapping[str, object]:
        return {
            sentinel("key", index): sentinel("value", index),
            sentinel("key", index + 1): sentinel("value", index + 1),
        }


def _call_format(grammar: Grammar) -> CallFormat | None:
    items = [USER, CALL]
    try:
        rendering = grammar.render(items, DEFAULT_OPTIONS)
        request = build_messages(grammar.dialect, items, _PairFill(items))
        pair = grammar.template.render(
            request.messages, tools=request.tools, variables=grammar.dialect.variables
        )
    except TemplateUnsupported:
        return None
    extent = rendering.extents[1]
    if extent is None:
        return None
    return learn_call_format(rendering.text[extent[0] : extent[1]], 1, pair)
