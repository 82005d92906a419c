# SPDX-License-Identifier: Apache-2.0
"""Where each content lands in a rendering, and the literal text between neighbours.

A skeleton is a rendering with sentinels for contents. A call is a unit: its extent reaches from
`head` before its first slot to `tail` after its last.

    <|im_end|>\\n<|im_start|>assistant\\n <tool_call>\\n{"name": "Zn…", … "Zv…"}}\\n</tool_call>
    '------------ gap --------------'  '------------------ unit -----------------'
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import TemplateUnsupported
from .dialect import Dialect, Fill, SentinelFill, build_messages, write_tags
from .items import Item, Options
from .jinja import JinjaTemplate
from .sentinels import Mark, Slot, find_marks

Extent = tuple[int, int]
Part = tuple[str, bool]  # text, and whether it is content


@dataclass(frozen=True)
class CallShape:
    """The literal ends of a call around one order of its slots."""

    slots: tuple[Slot, ...]
    head: str
    tail: str


@dataclass(frozen=True)
class Rendering:
    """A skeleton: its text, and of each item its extent, None where the template dropped it or
    shows it twice. `strings`: originals of the masked strings of tool schemas."""

    text: str
    extents: tuple[Extent | None, ...]
    strings: tuple[str, ...]

    def extent(self, items: Sequence[Item], index: int) -> Extent:
        """The extent of an item that must be there."""
        extent = self.extents[index]
        if extent is None:
            raise TemplateUnsupported(
                f"the chat template drops or repeats a {items[index].kind} here",
                remedy="leave it out, or put it elsewhere",
            )
        return extent


@dataclass(frozen=True)
class Grammar:
    """A template with what has been learned about it. Immutable; any thread may render."""

    template: JinjaTemplate
    dialect: Dialect
    calls: tuple[CallShape, ...] = ()

    def text(
        self, items: Sequence[Item], fill: Fill, options: Options, *, generation: bool = False
    ) -> str:
        """A rendering with `fill` in the place of contents. TemplateUnsupported."""
        request = build_messages(self.dialect, items, fill)
        text = self.template.render(
            request.messages,
            tools=request.tools,
            add_generation_prompt=generation,
            variables={**self.dialect.variables, **options.variables},
            now_s=options.now_s,
        )
        return self.dialect.spelling.unmasked(write_tags(text))

    def skeleton(
        self, items: Sequence[Item], options: Options, *, generation: bool = False
    ) -> Rendering:
        """The rendering with sentinels. TemplateUnsupported if the template refuses the path."""
        fill = SentinelFill(items)
        text = self.text(items, fill, options, generation=generation)
        return Rendering(text, self._extents(text, items), tuple(fill.strings))

    def _extents(self, text: str, items: Sequence[Item]) -> tuple[Extent | None, ...]:
        marks: dict[int, list[Mark]] = {}
        strings: list[Mark] = []
        for mark in find_marks(text):
            if mark.slot == "string":
                strings.append(mark)
            else:
                marks.setdefault(mark.number, []).append(mark)
        extents: list[Extent | None] = []
        for index, item in enumerate(items):
            if item.kind == "tools" and item.text.strip() in ("", "[]"):
                before = extents[-1] if extents else (0, 0)
                extents.append(before and (before[1], before[1]))  # nothing, where it would be
            else:
                extents.append(self._extent(text, item, marks.get(index, []), strings))
        return tuple(extents)

    def _extent(
        self, text: str, item: Item, marks: Sequence[Mark], strings: Sequence[Mark]
    ) -> Extent | None:
        if item.kind == "tool_call":
            return self._call_extent(text, marks)
        found = [mark for mark in marks if mark.slot == "content"]
        if item.kind == "tools" and not found:
            return _region(text, strings)
        return (found[0].start, found[0].end) if len(found) == 1 else None

    def _call_extent(self, text: str, marks: Sequence[Mark]) -> Extent | None:
        for shape in self.calls:
            used = marks[: len(shape.slots)]
            if tuple(mark.slot for mark in used) != shape.slots:
                continue
            start, end = used[0].start, used[-1].end
            if text.endswith(shape.head, 0, start) and text.startswith(shape.tail, end):
                return start - len(shape.head), end + len(shape.tail)
        return None


def _region(text: str, strings: Sequence[Mark]) -> Extent | None:
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


def gap_marks(gap: str) -> list[Mark]:
    """Sentinels in a gap that do not belong there: contents and schema strings."""
    return [mark for mark in find_marks(gap) if mark.slot not in ("name", "id")]


def fill_gap(gap: str, items: Sequence[Item]) -> list[Part]:
    """A gap's text with the names and ids of its calls put back. Sentinels number `items`."""
    parts: list[Part] = []
    position = 0
    for mark in find_marks(gap):
        item = items[mark.number] if mark.number < len(items) else None
        if item is None or mark.slot not in ("name", "id"):
            raise TemplateUnsupported(
                "the chat template moves or repeats a content between two others",
                value=mark.slot,
                remedy="put it elsewhere",
            )
        parts.append((gap[position : mark.start], False))
        parts.append(((item.name if mark.slot == "name" else item.call_id) or "", True))
        position = mark.end
    parts.append((gap[position:], False))
    return [part for part in parts if part[0]]
