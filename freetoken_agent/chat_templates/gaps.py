# SPDX-License-Identifier: Apache-2.0
"""The gap between two neighbours, from the smallest path that shows it.

A *window* keeps the preamble, one user message before the left neighbour, the left neighbour's own
messages and the right neighbour; gaps from windows are cached by the window's kinds. A template
whose windows were seen to differ from whole renderings is always rendered whole.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from ..errors import TemplateUnsupported
from .frames import Extent, Grammar, Part, Rendering, fill_gap, gap_marks
from .items import ASSISTANT_KINDS, DEFAULT_OPTIONS, Item, Kind, Options, same_message
from .sentinels import find_marks, sentinel

PREAMBLE_KINDS = frozenset(("system", "tools"))
_MAX_CACHED = 4096
SAMPLE_TOOLS = (
    '[{"type": "function", "function": {"name": "lookup", "description": "Look up.", '
    '"parameters": {"type": "object", "properties": {"word": {"type": "string", '
    '"description": "What."}}, "required": ["word"]}}}]'
)
_WORDS: Mapping[Kind, str] = {
    "thinking": "thought",
    "text": "text",
    "tool_call": "tool call",
    "tool_result": "result",
    "user": "user message",
    "system": "system text",
    "tools": "tool list",
}
_SECOND_CALL = "second call"
_TOGETHER, _NEITHER = "thought together with a text", "text or thought"
_OMISSIONS: Mapping[str, str] = {
    "text": "leave the text out of the message, or delete() it first",
    "thought": "leave the thought out of the message, or delete() it first",
    _TOGETHER: "leave one of the two out of the message, or delete() it first",
    _NEITHER: "leave both out of the message, or delete() them first",
    _SECOND_CALL: "append the result of the first one before it",
}
_ANY_CALL = Item("tool_call", name="f", arguments={}, call_id="lent")


def preamble_length(items: Sequence[Item]) -> int:
    """How many system and tools items lead the path."""
    count = 0
    while count < len(items) and items[count].kind in PREAMBLE_KINDS:
        count += 1
    return count


def message_start(items: Sequence[Item], index: int) -> int:
    """Where the group of messages around an item begins: an assistant's message, or adjacent
    results together with the calls they answer."""
    start = index
    while start and items[start].kind == "tool_result" and items[start - 1].kind == "tool_result":
        start -= 1
    if items[start].kind == "tool_result" and start:
        start -= 1
    while start and same_message(items[start - 1], items[start]):
        start -= 1
    return start


def window(items: Sequence[Item], index: int) -> list[int]:
    """Indices that decide the gap before items[index]; index may be one past the end."""
    preamble = preamble_length(items)
    kept = list(range(min(preamble, index)))
    if index <= preamble:
        return [*kept, index] if index < len(items) else kept
    start = message_start(items, index - 1)
    if items[index - 1].kind == "system" and start > preamble:
        start = message_start(items, start - 1)
    if items[start].kind != "user":
        users = [i for i in range(preamble, start) if items[i].kind == "user"]
        kept += users[-1:]
    kept += range(max(start, preamble), index)
    return [*kept, index] if index < len(items) else kept


class GapSource:
    """Derives gaps. Thread-safe: the cache only ever gains equal values."""

    def __init__(self, grammar: Grammar, *, windows: bool) -> None:
        self._grammar = grammar
        self._windows = windows
        self._cache: dict[tuple[object, ...], str] = {}

    @property
    def windows(self) -> bool:
        """Whether gaps come from windows."""
        return self._windows

    def run(self, items: Sequence[Item], start: int, options: Options) -> list[list[Part]]:
        """The gaps before items[start:], from one rendering of the whole path where the template
        shows both neighbours there, else from the path up to the right neighbour."""
        alone = len(items) - start == 1
        if alone and self._windows and start > preamble_length(items):
            return [self._explained(items, start, options)]
        try:
            rendering = self._whole(items, options)
        except TemplateUnsupported:
            return [self._explained(items, index, options) for index in range(start, len(items))]
        return [
            self._from_run(rendering, items, index, options) for index in range(start, len(items))
        ]

    def _explained(self, items: Sequence[Item], index: int, options: Options) -> list[Part]:
        """As `single`; where the template keeps two kinds of content not in one message, its error
        says which."""
        try:
            return self.single(items, index, options)
        except TemplateUnsupported as error:
            unwanted = self._unwanted(items, index, options)
            if not unwanted:
                raise
            here = _WORDS[items[index].kind]
            raise TemplateUnsupported(
                f"the chat template keeps no {unwanted} beside a {here} in one assistant message",
                value=error.value or error.what,
                remedy=_OMISSIONS[unwanted],
            ) from error

    def _unwanted(self, items: Sequence[Item], index: int, options: Options) -> str:
        """What the item's own message must not hold for the template to have a place for it, in
        words; "" if that is not it."""
        message = items[message_start(items, index) : index]
        calls = [i for i in message if i.kind == "tool_call"]
        if items[index].kind == "tool_call" and calls:
            without_calls = self._holds_without(items, index, ("tool_call",), options)
            return _SECOND_CALL if without_calls else ""
        text, thinking = (any(i.kind == kind for i in message) for kind in ("text", "thinking"))
        without_text = text and self._holds_without(items, index, ("text",), options)
        without_thought = thinking and self._holds_without(items, index, ("thinking",), options)
        if without_text and without_thought:
            return _TOGETHER
        if without_text or without_thought:
            return "text" if without_text else "thought"
        both = text and thinking
        if both and self._holds_without(items, index, ("text", "thinking"), options):
            return _NEITHER
        return ""

    def _holds_without(
        self, items: Sequence[Item], index: int, kinds: Sequence[Kind], options: Options
    ) -> bool:
        start = message_start(items, index)
        kept = [i for i in items[start:index] if i.kind not in kinds]
        shown = [*items[:start], *kept, items[index]]
        try:
            self.single(shown, len(shown) - 1, options)
        except TemplateUnsupported:
            return False
        return True

    def single(self, items: Sequence[Item], index: int, options: Options) -> list[Part]:
        """The gap before one item, looking at nothing after it."""
        _check_turn(items, index)
        try:
            return self._single(items, index, options)
        except TemplateUnsupported:
            if index < len(items) and same_message(items[index - 1], items[index]):
                raise  # what does not belong together is not put together
            held = _held(items[:index])
            if held is None:
                raise
            with suppress(TemplateUnsupported):
                return self._single([*held, *items[index:]], len(held), options)
            raise

    def _single(self, items: Sequence[Item], index: int, options: Options) -> list[Part]:
        if self._windows and index > preamble_length(items):
            shown = window(items, index)
            text = self._windowed([items[i] for i in shown], options, generation=False)
            return fill_gap(text, [items[i] for i in shown])
        shown = list(range(index + 1))
        text = self._cut([items[i] for i in shown], options, generation=False)
        return fill_gap(text, items)

    def opener(self, items: Sequence[Item], options: Options) -> list[Part]:
        """The generation opener after the last item."""
        try:
            return self._opener(items, options)
        except TemplateUnsupported:
            held = _held(items)
            if held is None:
                raise
            with suppress(TemplateUnsupported):
                return self._opener(held, options)
            raise

    def _opener(self, items: Sequence[Item], options: Options) -> list[Part]:
        if self._windows and len(items) > preamble_length(items):
            shown = window(items, len(items))
            text = self._windowed([items[i] for i in shown], options, generation=True)
        else:
            shown = list(range(len(items)))
            text = self._cut(items, options, generation=True)
        return fill_gap(text, [items[i] for i in shown])

    def _windowed(self, items: Sequence[Item], options: Options, *, generation: bool) -> str:
        key = (
            generation,
            tuple((item.kind, item.open, item.partial, item.call_id) for item in _anonymous(items)),
            json.dumps([options.variables, options.now_s], sort_keys=True, default=repr),
        )
        text = self._cache.get(key)
        if text is None:
            samples = [
                replace(item, text=SAMPLE_TOOLS)
                if item.kind == "tools" and item.text not in ("", "[]")
                else item
                for item in items
            ]
            text = self._cut(samples, options, generation=generation)
            if len(self._cache) >= _MAX_CACHED:
                self._cache.clear()
            self._cache[key] = text
        return text

    def _cut(self, items: Sequence[Item], options: Options, *, generation: bool) -> str:
        """The text after the last item (the opener) or before it."""
        left = len(items) - 1 if generation else len(items) - 2
        rendering = self._whole(items, options, generation=generation)
        begin = rendering.extent(items, left)[1] if left >= 0 else 0
        end = None if generation else rendering.extent(items, left + 1)[0]
        if end is not None and end < begin:
            raise _moved(items[left + 1])
        text = rendering.text[begin:end]
        if gap_marks(text) and (preamble := preamble_length(items)) and left >= preamble:
            # The template moves the preamble behind the left neighbour. Frames keep it where it
            # was first laid out, so what belongs here is the gap of a path without one.
            return _renumber(self._cut(items[preamble:], options, generation=generation), preamble)
        return text

    def _from_run(
        self, rendering: Rendering, items: Sequence[Item], index: int, options: Options
    ) -> list[Part]:
        _check_turn(items, index)
        left: Extent | None = (0, 0) if index == 0 else rendering.extents[index - 1]
        right = rendering.extents[index]
        if left is not None and right is not None and left[1] <= right[0]:
            text = rendering.text[left[1] : right[0]]
            if not gap_marks(text):
                return fill_gap(text, items)
        return self._explained(items, index, options)

    def _whole(
        self, items: Sequence[Item], options: Options, *, generation: bool = False
    ) -> Rendering:
        if generation:
            return self._grammar.skeleton(items, options, generation=True)
        refusal: TemplateUnsupported | None = None
        rendering = None
        for lent in _lent(items):
            try:
                rendering = self._grammar.skeleton([*items, *lent], options)
            except TemplateUnsupported as error:
                refusal = refusal or error
                continue
            rendering = replace(rendering, extents=rendering.extents[: len(items)])
            if rendering.extents[-1] is not None:
                return rendering
        if rendering is None:
            assert refusal is not None, "without a rendering there was a refusal"
            raise refusal
        return rendering


def _held(items: Sequence[Item]) -> list[Item] | None:
    """A path that a template holds, with the frames of this one: models write thoughts and texts
    before calls, and thoughts without an answer, whether their template has a place for them or
    not. None if there is nothing to change."""
    held: list[Item] = []
    start = 0
    for stop in range(1, len(items) + 1):
        if stop < len(items) and same_message(items[stop - 1], items[stop]):
            continue
        message, start = items[start:stop], stop
        calls = [item for item in message if item.kind == "tool_call"]
        if not calls and message[-1].kind == "thinking":
            calls = [replace(message[-1], kind="text")]
        held += calls or message
    return held if held != list(items) else None


def _lent(items: Sequence[Item]) -> list[list[Item]]:
    """What may stand behind a path so that the template shows its last item: some show or accept
    nothing before the first question, or show a thought only beside a text or a call. What follows
    a gap does not change it."""
    if items[-1].kind == "thinking":
        return [[], [Item("text")], [_ANY_CALL]]
    if any(item.kind == "user" for item in items):
        return [[]]
    return [[], [Item("user")]]


def _check_turn(items: Sequence[Item], index: int) -> None:
    """In an open turn the template has places for a thought, a text and calls, in that order."""
    if index == 0:
        return
    left, right = items[index - 1], items[index]
    if left.open and right.kind in ASSISTANT_KINDS and not same_message(left, right):
        raise TemplateUnsupported(
            f"a {right.kind} has no place after a {left.kind} in one assistant turn",
            remedy="close the turn first",
        )


def _anonymous(items: Sequence[Item]) -> list[Item]:
    """Call ids by order of appearance: a window's gap depends on who answers whom, not on names."""
    numbers: dict[str | None, str] = {}
    return [
        replace(item, call_id=numbers.setdefault(item.call_id, str(len(numbers))))
        if item.kind in ("tool_call", "tool_result")
        else item
        for item in items
    ]


def _renumber(text: str, shift: int) -> str:
    """Sentinels of a path without its preamble, numbered as with it."""
    parts, position = [], 0
    for mark in find_marks(text):
        parts += [text[position : mark.start], sentinel(mark.slot, mark.number + shift)]
        position = mark.end
    return "".join(parts) + text[position:]


def _moved(item: Item) -> TemplateUnsupported:
    return TemplateUnsupported(
        f"the chat template moves a {item.kind} before its predecessor",
        remedy="put it at the start, or leave it out",
    )


def windows_hold(grammar: Grammar, paths: Sequence[Sequence[Item]]) -> bool:
    """Whether windows give the gaps that whole renderings give, on these paths. Where the template
    refuses the whole path there is nothing to compare."""
    windowed, whole = GapSource(grammar, windows=True), GapSource(grammar, windows=False)
    for items in paths:
        for index in range(1, len(items) + 1):
            wanted = _try(whole, items[: index + 1], index)
            if wanted is not None and wanted != _try(windowed, items[: index + 1], index):
                return False
    return True


def _try(source: GapSource, items: Sequence[Item], index: int) -> list[Part] | None:
    try:
        if index == len(items):
            return source.opener(items, DEFAULT_OPTIONS)
        return source.single(items, index, DEFAULT_OPTIONS)
    except TemplateUnsupported:
        return None
