# SPDX-License-Identifier: Apache-2.0
"""Where each content lands in a rendering, and the literal text between neighbours.

A call is a unit: its extent reaches from `head` before its first slot to `tail` after its last.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .dialect import Dialect, SentinelFill, build_messages
from .errors import TemplateUnsupported
from .items import Item, Options
from .jinja import JinjaTemplate
from .sentinels import Mark, Slot, find_marks


@dataclass(frozen=True)
class CallShape:
    """The literal ends of a call and the order of its slots, learned from the template."""

    slots: tuple[Slot, ...]
    head: str
    tail: str


@dataclass(frozen=True)
class Rendering:
    """A skeleton: its text, and of each item its extent, None where the template dropped it."""

    text: str
    extents: tuple[tuple[int, int] | None, ...]
    strings: tuple[str, ...]  # originals of the masked strings of tool schemas


@dataclass(frozen=True)
class Grammar:
    """A template with what has been learned about it."""

    template: JinjaTemplate
    dialect: Dialect
    call: CallShape | None = None

    def render(
        self, items: Sequence[Item], options: Options, *, generation: bool = False
    ) -> Rendering:
        """The skeleton of a path. TemplateUnsupported if the template refuses it."""
        fill = SentinelFill(items)
        request = build_messages(self.dialect, items, fill)
        text = self.template.render(
            request.messages,
            tools=request.tools,
            add_generation_prompt=generation,
            variables={**self.dialect.variables, **options.variables},
            now_s=options.now_s,
        )
        return Rendering(text, self._extents(text, items), tuple(fill.strings))

    def _extents(self, text: str, items: Sequence[Item]) -> tuple[tuple[int, int] | None, ...]:
        marks: dict[int, list[Mark]] = {}
        strings: list[Mark] = []
        for mark in find_marks(text):
            if mark.slot == "string":
                strings.append(mark)
            else:
                marks.setdefault(mark.number, []).append(mark)
        extents: list[tuple[int, int] | None] = []
        for index, item in enumerate(items):
            if item.kind == "tool_call":
                extents.append(self._call_extent(text, marks.get(index, [])))
                continue
            found = [mark for mark in marks.get(index, []) if mark.slot == "content"]
            if item.kind == "tools" and not found:
                extents.append(_region(text, strings))
            else:
                extents.append((found[0].start, found[0].end) if len(found) == 1 else None)
        return tuple(extents)

    def _call_extent(self, text: str, marks: list[Mark]) -> tuple[int, int] | None:
        shape = self.call
        if shape is None:
            return (marks[0].start, marks[-1].end) if marks else None
        marks = marks[: len(shape.slots)]
        if tuple(mark.slot for mark in marks) != shape.slots:
            return None
        start, end = marks[0].start, marks[-1].end
        if not (text.endswith(shape.head, 0, start) and text.startswith(shape.tail, end)):
            return None
        return start - len(shape.head), end + len(shape.tail)


def _region(text: str, strings: Sequence[Mark]) -> tuple[int, int] | None:
    """Tools as the template writes them: the hull of their strings, widened to whole lines or to
    the tags around them."""
    if not strings:
        return None
    start, end = strings[0].start, strings[-1].end
    while start and text[start - 1] not in "\n>]":
        start -= 1
    while end < len(text) and text[end] not in "\n<[":
        end += 1
    return start, end


def fill_gap(gap: str, items: Sequence[Item]) -> list[tuple[str, bool]]:
    """A gap's text with the names and ids of its calls put back, as (text, is_content) parts."""
    parts: list[tuple[str, bool]] = []
    position = 0
    for mark in find_marks(gap):
        parts.append((gap[position : mark.start], False))
        item = items[mark.number] if mark.number < len(items) else None
        if item is None or mark.slot not in ("name", "id"):
            raise TemplateUnsupported(
                "the chat template repeats a content", value=gap[mark.start : mark.end]
            )
        parts.append(((item.name if mark.slot == "name" else item.call_id) or "", True))
        position = mark.end
    parts.append((gap[position:], False))
    return [part for part in parts if part[0]]


def learn_call(grammar: Grammar, options: Options) -> CallShape | None:
    """The unit of a call: what all contexts share around its slots. None if it is not rendered."""
    user = Item("user")
    call = Item("tool_call", name="f", arguments={}, call_id="x")
    contexts = (
        [user, call],
        [user, Item("text"), call],
        [user, call, call],
    )
    heads: list[str] = []
    tails: list[str] = []
    slots: tuple[Slot, ...] | None = None
    for items in contexts:
        try:
            text = grammar.render(items, options).text
        except TemplateUnsupported:
            continue
        for index, item in enumerate(items):
            if item.kind != "tool_call":
                continue
            marks = [mark for mark in find_marks(text) if mark.number == index]
            if not marks:
                continue
            found = tuple(mark.slot for mark in marks)
            if slots is None:
                slots = found
            if found != slots:
                continue
            others = [mark for mark in find_marks(text) if mark.number != index]
            left = max((m.end for m in others if m.end <= marks[0].start), default=0)
            right = min((m.start for m in others if m.start >= marks[-1].end), default=len(text))
            heads.append(text[left : marks[0].start])
            tails.append(text[marks[-1].end : right])
    if slots is None or not {"name", "key", "value"} <= set(slots):
        return None
    head = _common_prefix([text[::-1] for text in heads])[::-1]
    tail = _common_prefix(tails)
    return CallShape(slots, _cut_head(head), _cut_tail(tail))


def _common_prefix(texts: Sequence[str]) -> str:
    shortest = min(texts, key=len)
    for index, character in enumerate(shortest):
        if any(text[index] != character for text in texts):
            return shortest[:index]
    return shortest


def _cut_head(text: str) -> str:
    """From the first whole tag or bracket on; blanks before it stay in the gap."""
    return text.lstrip()


def _cut_tail(text: str) -> str:
    return text.rstrip()
