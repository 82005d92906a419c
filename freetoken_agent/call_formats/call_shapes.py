# SPDX-License-Identifier: Apache-2.0
"""Where a call begins and ends: what every context shares around its slots, cut to whole tags.

Contexts are: with and without a text before, one call and two, followed by something or not. What
differs between them, the markers of a whole section included, belongs to gaps.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..chat_templates.frames import CallShape, Grammar
from ..chat_templates.items import DEFAULT_OPTIONS, Item
from ..chat_templates.sentinels import Slot, find_marks
from ..errors import TemplateUnsupported

_USER, _TEXT = Item("user"), Item("text", open=True)
_CALL = Item("tool_call", name="f", arguments={}, call_id="x")
_CONTEXTS = (
    [_USER, _CALL],
    [_USER, _TEXT, _CALL],
    [_USER, _CALL, _CALL],
    [_USER, _CALL, _USER],
    [_USER, _TEXT, _CALL, _USER],
    [_USER, _CALL, _CALL, _USER],
)


@dataclass(frozen=True)
class _Sight:
    """One call seen in one context: its slots and the literals on both sides, up to whatever
    content or call comes next. `joint`: whether the right side is the next call's left side."""

    slots: tuple[Slot, ...]
    left: str
    right: str
    joint: bool


def learn_call_shapes(grammar: Grammar, stops: Sequence[str]) -> tuple[CallShape, ...]:
    """The shapes of a call, longest slots first; () if the template does not show calls whole.
    `stops`: literals of tokens that end a turn; a unit ends before them."""
    opener = opener_after_user(grammar)
    sights = [sight for items in _CONTEXTS for sight in _sights(grammar, items, opener)]
    shapes = []
    for slots in dict.fromkeys(sight.slots for sight in sights):
        if not {"name", "key", "value"} <= set(slots):
            return ()
        shape = _shape(slots, [sight for sight in sights if sight.slots == slots])
        shapes.append(
            replace(shape, tail=_before_closer(shape.tail, closing_after_text(grammar), stops))
        )
    return tuple(sorted(shapes, key=lambda shape: -len(shape.slots)))


def opener_after_user(grammar: Grammar) -> str:
    """The generation opener after a user's message."""
    rendering = grammar.skeleton([_USER], DEFAULT_OPTIONS, generation=True)
    return rendering.text[rendering.extent([_USER], 0)[1] :]


def _sights(grammar: Grammar, items: Sequence[Item], opener: str) -> list[_Sight]:
    try:
        text = grammar.skeleton(items, DEFAULT_OPTIONS).text
    except TemplateUnsupported:
        return []
    marks = find_marks(text)
    sights = []
    for index, item in enumerate(items):
        own = [mark for mark in marks if mark.number == index]
        if item.kind != "tool_call" or not own:
            continue
        start, end = own[0].start, own[-1].end
        slots = {mark.slot for mark in own}
        left = max((m.end for m in marks if m.end <= start and m.number != index), default=0)
        right = min((m.start for m in marks if m.start >= end and m.number != index), default=None)
        sights.append(
            _Sight(
                tuple(mark.slot for mark in own),
                text[left:start].removeprefix(opener),  # never part of a call
                text[end:right],
                any(m.start == right and m.number == index + 1 and m.slot in slots for m in marks),
            )
        )
    return sights


def _shape(slots: tuple[Slot, ...], sights: Sequence[_Sight]) -> CallShape:
    head = _whole_tags_after(_common_prefix([sight.left[::-1] for sight in sights])[::-1])
    tail = _whole_tags_before(_common_prefix([sight.right for sight in sights]))
    for sight in sights:
        if sight.joint:  # both must fit between two calls
            while len(head) + len(tail) > len(sight.right) and head:
                head = _whole_tags_after(head[1:])
    return CallShape(slots, head, tail)


def _common_prefix(texts: Sequence[str]) -> str:
    shortest = min(texts, key=len)
    for index, character in enumerate(shortest):
        if any(text[index] != character for text in texts):
            return shortest[:index]
    return shortest


def _whole_tags_after(text: str) -> str:
    """Without the end of a tag that begins before, and without leading blanks."""
    match = re.match(r"[^<>]*>|[^\[\]]*\](?!\s*\})", text)
    return (text[match.end() :] if match else text).lstrip()


def _whole_tags_before(text: str) -> str:
    """Without the beginning of a tag that ends after, and without trailing blanks."""
    match = re.search(r"<[^<>]*$|\[[^\[\]]*$", text)
    return (text[: match.start()] if match else text).rstrip()


def closing_after_text(grammar: Grammar) -> str:
    """What the template writes after an answer."""
    items = [_USER, _TEXT]
    rendering = grammar.skeleton(items, DEFAULT_OPTIONS)
    return rendering.text[rendering.extent(items, 1)[1] :]


def _before_closer(tail: str, closing: str, stops: Sequence[str]) -> str:
    """Where only one call fits into a turn, every context ends with the turn's closer, which is
    not part of the call."""
    shared = _whole_tags_after(_common_prefix([tail[::-1], closing.rstrip()[::-1]])[::-1])
    tail = tail[: len(tail) - len(shared)]
    for stop in stops:
        if stop and stop in tail:
            tail = tail[: tail.index(stop)]
    return tail.rstrip()
