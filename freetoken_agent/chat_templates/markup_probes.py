# SPDX-License-Identifier: Apache-2.0
"""Learns, from short skeletons, what a model writes between its contents."""

from collections.abc import Mapping, Sequence

from ..call_formats.call_format import CallFormat
from ..call_formats.call_reading import learn_call_format
from ..call_formats.call_shapes import closing_after_text, opener_after_user
from ..call_formats.harmony import as_models_write, is_harmony
from ..errors import TemplateUnsupported
from .dialect import SentinelFill
from .frames import Grammar
from .items import DEFAULT_OPTIONS, Item
from .markup import Gaps, Markup, learn_markup
from .probes import CALL, OTHER_CALL, RESULT, TEXT, THOUGHT, USER
from .sentinels import sentinel


def find_markup(grammar: Grammar) -> Markup:
    """The markers that a model writes, from short skeletons."""
    gaps = find_gaps(grammar)
    markup = learn_markup(gaps, _call_format(grammar))
    return as_models_write(markup) if is_harmony(gaps) else markup


def find_gaps(grammar: Grammar) -> Gaps:
    """What stands between two contents of a turn, kind by kind."""
    shape = grammar.calls[0] if grammar.calls else None
    return Gaps(
        opener=opener_after_user(grammar),
        to_text=_gap(grammar, [USER, TEXT]),
        to_thinking=_gap(grammar, [USER, THOUGHT, TEXT], 1)
        or _gap(grammar, [USER, THOUGHT, CALL], 1),
        to_call=_gap(grammar, [USER, CALL]),
        thinking_to_text=_gap(grammar, [USER, THOUGHT, TEXT]),
        thinking_to_call=_gap(grammar, [USER, THOUGHT, CALL]),
        text_to_call=_gap(grammar, [USER, TEXT, CALL]),
        call_to_call=_gap(grammar, [USER, CALL, OTHER_CALL]),
        call_to_result=_gap(grammar, [USER, CALL, RESULT]),
        closing=closing_after_text(grammar),
        head=shape.head if shape else "",
        tail=shape.tail if shape else "",
    )


def _gap(grammar: Grammar, items: Sequence[Item], index: int = -1) -> str | None:
    """The text before an item; None if the template refuses the path or drops a neighbour."""
    try:
        rendering = grammar.skeleton(items, DEFAULT_OPTIONS)
    except TemplateUnsupported:
        return None
    left, right = rendering.extents[index - 1], rendering.extents[index]
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
        rendering = grammar.skeleton(items, DEFAULT_OPTIONS)
        pair = grammar.text(items, _PairFill(items), DEFAULT_OPTIONS)
    except TemplateUnsupported:
        return None
    extent = rendering.extents[1]
    if extent is None:
        return None
    start, end = extent
    after = len(rendering.text) - end
    return learn_call_format(rendering.text[start:end], 1, pair[start : len(pair) - after])
