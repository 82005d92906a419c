# SPDX-License-Identifier: Apache-2.0
"""What a template does beyond frames, found by rendering short paths."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..call_formats.call_spelling import CallSpelling
from ..call_formats.named_formats import HERMES
from ..errors import TemplateUnsupported
from ..tokenizers.tokenizer import Tokenizer
from .dialect import Dialect
from .frames import Grammar
from .items import DEFAULT_OPTIONS, Item, Kind, Options, TemplateReport
from .probes import (
    ANSWER,
    CALL,
    OTHER_CALL,
    OTHER_RESULT,
    RESULT,
    SYSTEM,
    TEXT,
    THOUGHT,
    TOOLS,
    USER,
    renders,
)

# Paths on which windows are compared with whole renderings.
PATHS: Sequence[Sequence[Item]] = (
    [SYSTEM, USER, ANSWER, USER, ANSWER, USER],
    [USER, THOUGHT, ANSWER, USER, THOUGHT, ANSWER],
    [SYSTEM, USER, TEXT, CALL, RESULT, ANSWER, USER, ANSWER],
    [USER, CALL, OTHER_CALL, RESULT, OTHER_RESULT, ANSWER, USER],
    [TOOLS, USER, THOUGHT, CALL, RESULT, THOUGHT, OTHER_CALL, OTHER_RESULT, ANSWER],
    [USER, CALL, RESULT, OTHER_CALL, OTHER_RESULT, ANSWER, USER],
)
_DAY_S = 86_400.0


def closers(grammar: Grammar, tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that end an assistant turn: the tokenizer's stop ids, and the control token that the
    template writes first after an answer, unless it also stands inside a turn."""
    found = set(tokenizer.stop_ids)
    inside = _inside_turns(grammar, tokenizer)
    for items in ([USER, ANSWER], [USER, ANSWER, USER]):
        try:
            rendering = grammar.skeleton(items, DEFAULT_OPTIONS)
        except TemplateUnsupported:
            continue
        end = None if len(items) == 2 else rendering.extent(items, 2)[0]
        ids = tokenizer.encode_frame(rendering.text[rendering.extent(items, 1)[1] : end].lstrip())
        if ids and tokenizer.is_control(ids[0]) and ids[0] not in inside:
            found.add(ids[0])
    return frozenset(found)


def _inside_turns(grammar: Grammar, tokenizer: Tokenizer) -> set[int]:
    """Control ids between the contents of one assistant turn, and in its calls."""
    inside: set[int] = set()
    for turn in ([THOUGHT, ANSWER], [THOUGHT, CALL], [TEXT, CALL], [CALL, OTHER_CALL]):
        try:
            rendering = grammar.skeleton([USER, *turn], DEFAULT_OPTIONS)
        except TemplateUnsupported:
            continue
        first, last = rendering.extents[1], rendering.extents[2]
        if first is not None and last is not None:
            ids = tokenizer.encode_frame(rendering.text[first[0] : last[1]])
            inside.update(filter(tokenizer.is_control, ids))
    return inside


def examine(
    grammar: Grammar,
    source: str,
    transforms: Mapping[Kind, str],
    *,
    chosen: CallSpelling | None = None,
    windows: bool,
) -> TemplateReport:
    """The report of a template whose dialect is known. `chosen`: the call format asked for; what
    the template does itself leaves no trace in the digest."""
    dialect = grammar.dialect
    digest = hashlib.sha256(source.encode()).hexdigest()
    report = TemplateReport(
        digest=digest if chosen is None or dialect.calls else f"{digest}+{chosen.name}",
        call_format=None if dialect.calls else dialect.spelling.name,
        fallback_thinking=dialect.thinking is None,
        fallback_tools=not (dialect.calls and dialect.tools),
        drops_thinking=_drops_thinking(grammar),
        system_supported=dialect.system,
        tools_before_system=_tools_come_first(grammar),
        parallel_calls=renders(grammar, [USER, CALL, OTHER_CALL, RESULT, OTHER_RESULT]),
        moves_system=not renders(grammar, [USER, ANSWER, SYSTEM, USER]),
        dated=_is_dated(grammar),
        thinking_switch=_switches_thinking(grammar),
    )
    notes = [*_role_notes(grammar, report), *_frame_notes(grammar, report, windows)]
    notes += [
        f"{kind} content is {name}" for kind, name in transforms.items() if name != "as it is"
    ]
    return replace(report, notes=tuple(notes))


def _drops_thinking(grammar: Grammar) -> bool:
    for shown in ([USER, THOUGHT, ANSWER], [USER, THOUGHT, CALL, RESULT, ANSWER]):
        if renders(grammar, shown):
            return not renders(grammar, [*shown, USER])
    return False


def _tools_come_first(grammar: Grammar) -> bool:
    return not renders(grammar, [SYSTEM, TOOLS, USER]) and renders(grammar, [TOOLS, SYSTEM, USER])


def _is_dated(grammar: Grammar) -> bool:
    """Whether two days give two texts. A template may look at the clock only without a system
    text, or only with tools."""
    for items in ([USER], [SYSTEM, USER], [SYSTEM, TOOLS, USER], [TOOLS, SYSTEM, USER]):
        texts = {_text(grammar, items, Options(now_s=day * 40 * _DAY_S)) for day in (1, 2)}
        if len(texts) == 2:
            return True
    return False


def _switches_thinking(grammar: Grammar) -> bool:
    """Whether asking for thinking or against it changes the generation opener."""
    openers = set()
    for thinking in (True, False):
        options = thinking_options(DEFAULT_OPTIONS, thinking)
        rendering = grammar.skeleton([USER], options, generation=True)
        openers.add(rendering.text[rendering.extent([USER], 0)[1] :])
    return len(openers) == 2


def thinking_options(options: Options, thinking: bool) -> Options:
    """The options with thinking switched, by each of the names that templates give it."""
    switch = {"enable_thinking": thinking, "thinking": thinking}
    return replace(options, variables={**options.variables, **switch})


def _text(grammar: Grammar, items: Sequence[Item], options: Options = DEFAULT_OPTIONS) -> str:
    try:
        return grammar.skeleton(items, options).text
    except TemplateUnsupported:
        return ""


def _gap(grammar: Grammar, items: Sequence[Item], index: int) -> str | None:
    try:
        rendering = grammar.skeleton(items, DEFAULT_OPTIONS)
    except TemplateUnsupported:
        return None
    left, right = rendering.extents[index - 1], rendering.extents[index]
    if left is None or right is None:
        return None
    return rendering.text[left[1] : right[0]]


def _role_notes(grammar: Grammar, report: TemplateReport) -> list[str]:
    notes = []
    if report.fallback_thinking:
        notes.append("it has no thinking: thoughts are inlined as <think>…</think>")
    if report.thinking_switch:
        notes.append("thinking can be switched on and off")
    if not grammar.dialect.calls:
        notes.append(_inlined_note(grammar.dialect))
    if not grammar.dialect.tools:
        notes.append("it shows no tools: they are a block in the system text")
    if not report.system_supported:
        notes.append("it has no system role: the text leads the first user turn")
    elif not renders(grammar, [USER, THOUGHT, ANSWER]):
        notes.append("it shows thoughts before calls only")
    if report.drops_thinking:
        notes.append("it drops earlier thinking once another user message follows")
    if report.tools_before_system:
        notes.append("it puts tools before the system text")
    if not report.parallel_calls:
        notes.append(_single_call(grammar))
    if renders(grammar, [USER, CALL]) and not renders(grammar, [USER, TEXT, CALL]):
        notes.append("it drops or moves a text before a call")
    if report.moves_system and report.system_supported:
        notes.append(_later_system(grammar))
    return notes


def _inlined_note(dialect: Dialect) -> str:
    name = dialect.spelling.name
    calls = "as <tool_call>{json}</tool_call>" if name == HERMES.name else f"in the format {name}"
    results = (
        "messages of tools" if dialect.results else "user turns <tool_response>…</tool_response>"
    )
    return f"it has no calls: they are inlined {calls}, and results are {results}"


def _single_call(grammar: Grammar) -> str:
    try:
        grammar.skeleton([USER, CALL, OTHER_CALL], DEFAULT_OPTIONS)
    except TemplateUnsupported:
        verb = "refuses"
    else:
        verb = "drops"
    return f"it {verb} a second call in a message (no parallel calls): a step holds one call"


def _later_system(grammar: Grammar) -> str:
    items = [USER, ANSWER, SYSTEM, USER]
    try:
        extent = grammar.skeleton(items, DEFAULT_OPTIONS).extents[2]
    except TemplateUnsupported:
        return "it refuses a later system text"
    if extent is None:
        return "it drops a later system text"
    return "it moves a later system text"


def _frame_notes(grammar: Grammar, report: TemplateReport, windows: bool) -> list[str]:
    notes = []
    if report.dated:
        notes.append("it writes the date: the session's clock is frozen at its creation")
    if not windows:
        notes.append("its frames depend on more than two turns: each is cut from a whole rendering")
    if _gap(grammar, [USER, ANSWER], 1) != _gap(grammar, [USER, ANSWER, USER], 1):
        notes.append(
            "it frames the last answer otherwise than earlier ones (as with an empty thought)"
        )
    if len(grammar.calls) > 1:
        notes.append("it writes a call otherwise once something follows it")
    if _tools_move(grammar):
        notes.append("it moves the tools along with the last user message: they stay in place here")
    between = _gap(grammar, [USER, CALL, OTHER_CALL, RESULT, OTHER_RESULT], 4)
    after = _gap(grammar, [USER, CALL, RESULT, USER], 3)
    if between is not None and after is not None and len(between) < len(after):
        notes.append("it puts adjacent results into one turn")
    return notes


def _tools_move(grammar: Grammar) -> bool:
    first, later = [TOOLS, USER], [TOOLS, USER, ANSWER, USER]
    return renders(grammar, first) and not renders(grammar, later)
