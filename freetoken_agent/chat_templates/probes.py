# SPDX-License-Identifier: Apache-2.0
"""Finds out, by rendering, how a template wants its messages."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..call_formats.call_shapes import learn_call_shapes
from ..call_formats.call_spelling import CallSpelling
from ..errors import TemplateUnsupported
from .dialect import Dialect
from .frames import CallShape, Grammar
from .gaps import SAMPLE_TOOLS
from .items import DEFAULT_OPTIONS, Item, Options
from .jinja import JinjaTemplate

SYSTEM, USER = Item("system"), Item("user")
THOUGHT, TEXT, ANSWER = Item("thinking", open=True), Item("text", open=True), Item("text")
CALL = Item("tool_call", name="f", arguments={}, call_id="x")
RESULT = Item("tool_result", name="f", call_id="x")
OTHER_CALL, OTHER_RESULT = replace(CALL, call_id="y"), replace(RESULT, call_id="y")
TOOLS = Item("tools", SAMPLE_TOOLS)
_THINKING_FIELDS = ("reasoning_content", "thinking", "reasoning", "thought")
_VARIABLES: tuple[dict[str, object], ...] = ({}, {"thinking": True}, {"enable_thinking": True})


def renders(grammar: Grammar, items: Sequence[Item], options: Options = DEFAULT_OPTIONS) -> bool:
    """Whether the template shows every item once, in order."""
    try:
        extents = grammar.skeleton(items, options).extents
    except TemplateUnsupported:
        return False
    position = 0
    for extent in extents:
        if extent is None or extent[0] < position:
            return False
        position = extent[1]
    return True


def find_dialect(
    template: JinjaTemplate,
    stops: Sequence[str],
    fallback: CallSpelling,
    chosen: CallSpelling | None = None,
) -> Grammar:
    """The first dialect in which the template shows each kind; a kind it shows in none is inlined.

    `stops`: literals of the tokens that end a turn. `fallback`: how calls are inlined; with
    `chosen` they are, unless the template writes them so itself. TemplateUnsupported if the
    template cannot even render a user's message and an answer.
    """
    grammar = _with(Grammar(template, Dialect()), tools=False, calls=False, thinking=None)
    bare = _first(_variants(grammar, no_tools=(None, ())), [[USER, ANSWER]])
    if bare is None:
        grammar.skeleton([USER, ANSWER], DEFAULT_OPTIONS)  # raises with the template's own words
        raise TemplateUnsupported(
            "the chat template cannot be learned: it does not show a user's message and an answer",
            remedy="use a template that renders both once, in order",
        )
    grammar = bare
    if not renders(grammar, [SYSTEM, USER]):
        grammar = _with(grammar, system=False)
    grammar = _calls(grammar, stops, fallback, chosen)
    grammar = _thinking(grammar)
    candidates = _variants(_with(grammar, tools=True), no_tools=(grammar.dialect.no_tools,))
    preambles = [[TOOLS, USER], [SYSTEM, TOOLS, USER], [TOOLS, SYSTEM, USER]]
    return _first(candidates, preambles) or grammar


def _with(grammar: Grammar, **changes: object) -> Grammar:
    return replace(grammar, dialect=replace(grammar.dialect, **changes))  # type: ignore[arg-type]


def _variants(grammar: Grammar, **values: Sequence[object]) -> Iterator[Grammar]:
    """The grammar with every combination of the given values of its dialect's fields."""
    for combination in itertools.product(*values.values()):
        yield _with(grammar, **dict(zip(values, combination, strict=True)))


def _first(candidates: Iterator[Grammar], paths: Sequence[Sequence[Item]]) -> Grammar | None:
    """The first grammar that shows the first path whole; if none does, the next path; and so on."""
    tried = list(candidates)
    for items in paths:
        for candidate in tried:
            if renders(candidate, items):
                return candidate
    return None


def _thinking(grammar: Grammar) -> Grammar:
    candidates = _variants(grammar, variables=_VARIABLES, thinking=_THINKING_FIELDS)
    return _first(candidates, [[USER, THOUGHT, TEXT], [USER, THOUGHT, CALL]]) or grammar


def _calls(
    grammar: Grammar, stops: Sequence[str], fallback: CallSpelling, chosen: CallSpelling | None
) -> Grammar:
    shown = _shown_calls(grammar, stops)
    if shown is not None and (chosen is None or _writes(shown, chosen)):
        return shown
    return _inlined(grammar, chosen or fallback)


def _shown_calls(grammar: Grammar, stops: Sequence[str]) -> Grammar | None:
    """The grammar in which the template shows calls and their results."""
    candidates = _variants(
        _with(grammar, calls=True), arguments=("object", "string"), empty_content=("", None)
    )
    for candidate in candidates:
        shapes = learn_call_shapes(candidate, stops)
        if any("\\" in shape.head + shape.tail for shape in shapes):
            continue  # a string escaped twice: this template wants the other form of arguments
        candidate = replace(candidate, calls=shapes)
        if shapes and renders(candidate, [USER, CALL, RESULT]):
            return candidate
    return None


def _writes(grammar: Grammar, spelling: CallSpelling) -> bool:
    """Whether the template's own calls are those of the spelling."""
    extents = (rendering := grammar.skeleton([USER, CALL], DEFAULT_OPTIONS)).extents
    inlined = _inlined(grammar, spelling).skeleton([USER, CALL], DEFAULT_OPTIONS)
    units = [
        None if extent is None else shown.text[extent[0] : extent[1]]
        for shown, extent in ((rendering, extents[1]), (inlined, inlined.extents[1]))
    ]
    return units[0] is not None and units[0] == units[1]


def _inlined(grammar: Grammar, spelling: CallSpelling) -> Grammar:
    """Calls in the content; results as the template has them behind such a call, if it does."""
    inlined = replace(
        _with(grammar, calls=False, results=False, spelling=spelling),
        calls=(CallShape(*spelling.ends),),
    )
    shown = _with(inlined, results=True)
    paths = [[USER, CALL, RESULT, ANSWER, USER]]
    if spelling.between is not None:
        paths.append([USER, CALL, OTHER_CALL, RESULT, OTHER_RESULT])
    if spelling.tool_role and all(renders(shown, path) for path in paths):
        return shown
    return inlined
