# SPDX-License-Identifier: Apache-2.0
"""What a template does to contents, and the text of calls and tools.

A transform per kind is found by probes: a template may trim a content or escape it for JSON. It is
applied here, so the stored text is what the template would have rendered. Calls and tools are
rendered for real, and once more with the user's strings masked: only what both share can hold
control tokens.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import TemplateUnsupported
from .dialect import RealFill, SentinelFill, parse_tools
from .frames import Grammar, Part
from .gaps import message_start, preamble_length
from .items import DEFAULT_OPTIONS, Item, Kind, Options
from .sentinels import Masker, align

Transform = Callable[[str], str]


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _escaped_ascii(text: str) -> str:
    return json.dumps(text)[1:-1]


TRANSFORMS: Mapping[str, Transform] = {
    "as it is": lambda text: text,
    "trimmed": str.strip,
    "trimmed at the start": str.lstrip,
    "trimmed at the end": str.rstrip,
    "without newlines around": lambda text: text.strip("\n"),
    "without newlines at the start": lambda text: text.lstrip("\n"),
    "without newlines at the end": lambda text: text.rstrip("\n"),
    "escaped for JSON": _escaped,
    "escaped for JSON as ASCII": _escaped_ascii,
    "trimmed and escaped for JSON": lambda text: _escaped(text.strip()),
}
_PROBES = (
    '\n a "quoted" \\ word\n\tand <b>more</b> & {braces}\u00e9 \n\n',
    "plain",
    "  two words  ",
    "\n\nlines\n\n",
)
_USER, _TEXT = Item("user"), Item("text", open=True)
_CALL = Item("tool_call", name="f", arguments={}, call_id="x")
_PLACES: Mapping[Kind, tuple[Sequence[Item], int]] = {  # a short path, and the item to look at
    "system": ([Item("system"), _USER], 0),
    "user": ([_USER], 0),
    "thinking": ([_USER, Item("thinking", open=True), _TEXT], 1),
    "text": ([_USER, Item("text")], 1),
    "tool_result": ([_USER, _CALL, Item("tool_result", name="f", call_id="x")], 2),
}


class _OneReal(SentinelFill):
    """Sentinels, except for the item at `index`, which is real."""

    def __init__(self, items: Sequence[Item], index: int) -> None:
        super().__init__(items)
        self._index = index
        self._real = RealFill(items)

    def content(self, index: int) -> str:
        return self._real.content(index) if index == self._index else super().content(index)

    def name(self, index: int) -> str:
        return self._real.name(index) if index == self._index else super().name(index)

    def call_id(self, index: int) -> str:
        return self._real.call_id(index) if index == self._index else super().call_id(index)

    def arguments(self, index: int) -> Mapping[str, object]:
        if index == self._index:
            return self._real.arguments(index)
        return super().arguments(index)

    def tools(self, index: int) -> list[dict[str, Any]]:
        return self._real.tools(index) if index == self._index else super().tools(index)


def real_text(grammar: Grammar, items: Sequence[Item], index: int, options: Options) -> str | None:
    """What the template makes of one item, all others being sentinels; None if the item changes
    the text around it."""
    skeleton = grammar.skeleton(items, options)
    start, end = skeleton.extent(items, index)
    before, after = skeleton.text[:start], skeleton.text[end:]
    text = grammar.text(items, _OneReal(items, index), options)
    fits = text.startswith(before) and text.endswith(after) and len(text) >= start + len(after)
    return text[start : len(text) - len(after)] if fits else None


def find_transforms(grammar: Grammar) -> dict[Kind, str]:
    """The name of each kind's transform. A kind that the template shows nowhere, or transforms in
    a way of its own, is left out: the former is never laid out, the latter is rendered each time.
    """
    found: dict[Kind, str] = {}
    for kind, (place, index) in _PLACES.items():
        name = _transform(grammar, place, index)
        if name is not None:
            found[kind] = name
    return found


def _transform(grammar: Grammar, place: Sequence[Item], index: int) -> str | None:
    candidates = list(TRANSFORMS)
    for probe in _PROBES:
        items = list(place)
        items[index] = replace(items[index], text=probe)
        try:
            seen = real_text(grammar, items, index, DEFAULT_OPTIONS)
        except TemplateUnsupported:
            return None
        candidates = [name for name in candidates if TRANSFORMS[name](probe) == seen]
    return candidates[0] if candidates else None


class ContentSource:
    """The text of each content as (text, is_content) parts. Immutable.

    `has_controls`: whether a template literal holds control tokens.
    """

    def __init__(
        self,
        grammar: Grammar,
        transforms: Mapping[Kind, str],
        has_controls: Callable[[str], bool],
    ) -> None:
        self._grammar = grammar
        self._has_controls = has_controls
        self._transforms = {kind: TRANSFORMS[name] for kind, name in transforms.items()}

    def parts(self, items: Sequence[Item], index: int, options: Options) -> list[Part]:
        """The content of an item in its path. TemplateUnsupported."""
        item = items[index]
        if item.kind == "tool_call":
            return self._call(items, index, options)
        if item.kind == "tools":
            return self._tools(items, index, options)
        transform = self._transforms.get(item.kind)
        if transform is not None:
            return [(transform(item.text), True)]
        place, at = list(_PLACES[item.kind][0]), _PLACES[item.kind][1]
        place[at] = replace(place[at], text=item.text)
        text = real_text(self._grammar, place, at, options)
        if text is None:
            raise TemplateUnsupported(
                f"the chat template reads meaning into this {item.kind}",
                value=item.text[:80],
                remedy="word it differently",
            )
        return [(text, True)]

    def _call(self, items: Sequence[Item], index: int, options: Options) -> list[Part]:
        """The unit of a call: behind the calls of its message, and followed as in the path."""
        start = message_start(items, index)
        calls = [item for item in items[start:index] if item.kind == "tool_call"]
        if not self._grammar.dialect.calls:
            return self._inlined(items[index], len(calls))
        place = [_USER, *calls, items[index]]
        at = len(place) - 1
        if index + 1 < len(items):
            place.append(_USER)
            try:
                return self._unit(place, at, options)
            except TemplateUnsupported:
                place.pop()
        return self._unit(place, at, options)

    def _inlined(self, call: Item, number: int) -> list[Part]:
        """A call that the template sees as a text, and must not read: some cut a message at a tag
        that may stand in the arguments."""
        spelling = self._grammar.dialect.spelling
        name, arguments = call.name or "", call.arguments or {}
        masker = Masker([name, arguments])
        masked, real = (
            spelling.unmasked(spelling.written(shown, call.call_id or "", number, filled))
            for shown, filled in (
                (masker.mask(name), masker.mask(arguments)),
                (name, arguments),
            )
        )
        parts = self._split(masked, real, masker.strings)
        assert parts is not None, f"{real!r} is not {masked!r} filled in"
        return parts

    def _unit(self, place: list[Item], at: int, options: Options) -> list[Part]:
        call = place[at]
        masker = Masker([call.name or "", call.arguments or {}])
        masked = list(place)
        masked[at] = replace(
            call, name=masker.mask(call.name or ""), arguments=masker.mask(call.arguments or {})
        )
        real = real_text(self._grammar, place, at, options)
        if real is None:
            raise TemplateUnsupported(
                "the chat template writes this call in a way of its own",
                value=call.name,
                remedy="rename the tool",
            )
        skeleton = real_text(self._grammar, masked, at, options)
        parts = self._split(skeleton, real, masker.strings)
        if parts is None:
            raise TemplateUnsupported(
                "the chat template rewrites the arguments of this call",
                value=call.name,
                remedy="rename the tool or its parameters",
            )
        return parts

    def _split(
        self, masked: str | None, real: str | None, strings: Sequence[str]
    ) -> list[Part] | None:
        """Literals and contents of a rendering; all content where they cannot be told apart and
        the literals hold no control tokens."""
        if masked is None or real is None:
            return None
        parts = align(masked, real, strings)
        if parts is None and not self._has_controls(masked):
            return [(real, True)]
        return parts

    def _tools(self, items: Sequence[Item], index: int, options: Options) -> list[Part]:
        """The region of the tools, in the preamble alone."""
        schemas = parse_tools(items[index].text)
        if not schemas:
            return []
        if not self._grammar.dialect.tools:
            lines = (json.dumps(schema, ensure_ascii=False) for schema in schemas)
            return [("\n".join(lines), True)]
        place = [*items[: preamble_length(items)], Item("user")]
        skeleton = self._grammar.skeleton(place, options)
        real = real_text(self._grammar, place, index, options)
        start, end = skeleton.extent(place, index)
        parts = self._split(skeleton.text[start:end], real, skeleton.strings)
        if parts is None:
            raise TemplateUnsupported(
                "the chat template reads meaning into these tools",
                remedy="rename the tools or their parameters",
            )
        return parts
