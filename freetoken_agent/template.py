# SPDX-License-Identifier: Apache-2.0
"""ChatFormat: frames learned from the model's own chat template; contents -> token ids."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .dialect import Fill, RealFill, SentinelFill, build_messages, parse_tools
from .errors import TemplateUnsupported
from .frames import Grammar, Rendering, fill_gap
from .items import DEFAULT_OPTIONS, Item, Kind, Opener, Options, Piece, TemplateReport
from .jinja import JinjaTemplate
from .markup import Markup
from .probes import TOOLS, USER, find_dialect, find_markup, renders
from .sentinels import align, mask_strings
from .tokenizer import Tokenizer, encode_mixed

__all__ = [
    "ChatFormat",
    "Item",
    "Kind",
    "Opener",
    "Options",
    "Piece",
    "TemplateReport",
]


class ChatFormat:
    """A chat template as frames. Immutable once learned; any thread may call it."""

    def __init__(self, grammar: Grammar, tokenizer: Tokenizer, report: TemplateReport) -> None:
        self._grammar = grammar
        self._tokenizer = tokenizer
        self._report = report
        self._closers = self._find_closers()
        self._markup = find_markup(grammar)

    @classmethod
    def learn(cls, template_source: str, tokenizer: Tokenizer) -> "ChatFormat":
        """Learn the frames of a template by rendering it. TemplateUnsupported if it cannot."""
        template = JinjaTemplate(template_source, tokenizer.special_tokens)
        grammar = find_dialect(template)
        digest = hashlib.sha256(template_source.encode()).hexdigest()
        report = TemplateReport(
            digest=digest,
            fallback_thinking=grammar.dialect.thinking is None,
            fallback_tools=not grammar.dialect.calls or not grammar.dialect.tools,
            system_supported=grammar.dialect.system,
            tools_before_system=_tools_come_first(grammar),
            dated=template.uses_clock,
        )
        return cls(grammar, tokenizer, report)

    @property
    def report(self) -> TemplateReport:
        return self._report

    @property
    def digest(self) -> str:
        """Hex digest of the template; part of a session's binding."""
        return self._report.digest

    @property
    def markup(self) -> Markup:
        """The markers a parser of sampled ids looks for."""
        return self._markup

    @property
    def closers(self) -> frozenset[int]:
        """Ids that end an assistant turn."""
        return self._closers

    @property
    def preamble_order(self) -> tuple[Kind, Kind]:
        """The order in which the template lays out the preamble, and a path must hold it."""
        if self._report.tools_before_system:
            return "tools", "system"
        return "system", "tools"

    def layout(
        self, items: Sequence[Item], *, start: int = 0, options: Options = DEFAULT_OPTIONS
    ) -> list[Piece]:
        """Lay out items[start:] of a path in one run; gaps look at nothing after the run. The first
        gap of a path holds the template's beginning (BOS and so on). Items with `ids` keep them.
        TemplateUnsupported if the template refuses, moves or drops one of them."""
        if start >= len(items):
            return []
        rendering = self._skeleton(items, options)
        pieces: list[Piece] = []
        for index in range(start, len(items)):
            left = _extent(rendering, items, index - 1)[1] if index else 0
            right = _extent(rendering, items, index)[0]
            if right < left:
                raise TemplateUnsupported(
                    f"the template moves a {items[index].kind} before its predecessor",
                    remedy="change the order",
                )
            gap = fill_gap(rendering.text[left:right], items)
            parts = self._content(items, index, options)
            ids = items[index].ids
            pieces.append(
                Piece(
                    gap_text="".join(text for text, _ in gap),
                    gap_ids=encode_mixed(self._tokenizer, gap),
                    text="".join(text for text, _ in parts),
                    ids=encode_mixed(self._tokenizer, parts) if ids is None else ids,
                )
            )
        return pieces

    def opener(
        self,
        items: Sequence[Item],
        *,
        thinking: bool | None = None,
        options: Options = DEFAULT_OPTIONS,
    ) -> Opener:
        """What stands between the last item and what the model writes next: the generation opener,
        or the closer of a finished thought. Empty when the last content goes on."""
        last = items[-1] if items else None
        if last is not None and last.partial:
            return Opener("", (), "thinking" if last.kind == "thinking" else "text")
        if last is not None and last.kind == "text" and last.open:
            return Opener("", (), "text")
        if last is not None and last.kind == "thinking":
            piece = self.layout([*items, Item("text")], start=len(items), options=options)[0]
            return Opener(piece.gap_text, piece.gap_ids, "text")
        if thinking is not None:
            options = replace(options, variables={"enable_thinking": thinking, **options.variables})
        rendering = self._grammar.render(items, options, generation=True)
        left = _extent(rendering, items, len(items) - 1)[1] if items else 0
        gap = fill_gap(rendering.text[left:], items)
        text = "".join(part for part, _ in gap)
        tail = text.rstrip()
        begins = self._thought_begins
        return Opener(
            text,
            encode_mixed(self._tokenizer, gap),
            "thinking" if begins and tail.endswith(begins) else "text",
        )

    @property
    def _thought_begins(self) -> str:
        return "<think>"

    def _find_closers(self) -> frozenset[int]:
        items = [Item("user"), Item("text")]
        rendering = self._grammar.render(items, DEFAULT_OPTIONS)
        ids = self._tokenizer.encode_frame(rendering.text[_extent(rendering, items, 1)[1] :])
        closers = set(self._tokenizer.stop_ids)
        if ids and self._tokenizer.is_control(ids[0]):
            closers.add(ids[0])
        return frozenset(closers)

    def _skeleton(self, items: Sequence[Item], options: Options) -> Rendering:
        try:
            return self._grammar.render(items, options)
        except TemplateUnsupported:
            if any(item.kind == "user" for item in items):
                raise
            # Some templates refuse a path that has no question yet; what follows a gap does not
            # change it.
            rendering = self._grammar.render([*items, Item("user")], options)
            return replace(rendering, extents=rendering.extents[:-1])

    def _content(
        self, items: Sequence[Item], index: int, options: Options
    ) -> list[tuple[str, bool]]:
        item = items[index]
        if item.kind == "tool_call":
            return self._call(item, options)
        if item.kind == "tools" and self._grammar.dialect.tools:
            return self._tools(items, options)
        if item.kind == "tools":
            schemas = parse_tools(item.text)
            return [("\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas), True)]
        return [(item.text, True)]

    def _call(self, item: Item, options: Options) -> list[tuple[str, bool]]:
        context = [Item("user"), replace(item, name=item.name or "")]
        skeleton = self._grammar.render(context, options)
        extent = _extent(skeleton, context, 1)
        before, after = skeleton.text[: extent[0]], skeleton.text[extent[1] :]
        strings: list[str] = []
        masked = [
            context[0],
            replace(
                item,
                name=mask_strings(item.name or "", strings),
                arguments=mask_strings(item.arguments or {}, strings),
            ),
        ]
        real = self._unit(context, before, after, options)
        parts = align(self._unit(masked, before, after, options), real, strings)
        return [(real, True)] if parts is None else parts

    def _tools(self, items: Sequence[Item], options: Options) -> list[tuple[str, bool]]:
        """The region of the tools: real and masked renderings of the same preamble, aligned."""
        context = [item for item in items[:2] if item.kind in ("system", "tools")] + [Item("user")]
        index = next(i for i, item in enumerate(context) if item.kind == "tools")
        skeleton = self._grammar.render(context, options)
        start, end = _extent(skeleton, context, index)
        before, after = skeleton.text[:start], skeleton.text[end:]
        real = self._render(context, _Mixed(context, index), options)
        if not (real.startswith(before) and real.endswith(after)):
            raise TemplateUnsupported(
                "the chat template writes these tools in a way of its own",
                remedy="rename the tools or their parameters",
            )
        region = real[start : len(real) - len(after)]
        parts = align(skeleton.text[start:end], region, skeleton.strings)
        return [(region, True)] if parts is None else parts

    def _unit(self, context: Sequence[Item], before: str, after: str, options: Options) -> str:
        text = self._render(context, _Mixed(context, 1), options)
        if not (text.startswith(before) and text.endswith(after)):
            raise TemplateUnsupported(
                "the chat template writes this call in a way of its own",
                value=context[1].name,
                remedy="rename the tool",
            )
        return text[len(before) : len(text) - len(after)]

    def _render(self, items: Sequence[Item], fill: Fill, options: Options) -> str:
        request = build_messages(self._grammar.dialect, items, fill)
        return self._grammar.template.render(
            request.messages,
            tools=request.tools,
            variables={**self._grammar.dialect.variables, **options.variables},
            now_s=options.now_s,
        )


class _Mixed(SentinelFill):
    """Sentinels, except for the call or the tools at `index`, which are real."""

    def __init__(self, items: Sequence[Item], index: int) -> None:
        super().__init__(items)
        self._index = index
        self._real = RealFill(items)

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


def _extent(rendering: Rendering, items: Sequence[Item], index: int) -> tuple[int, int]:
    extent = rendering.extents[index]
    if extent is None:
        raise TemplateUnsupported(
            f"the chat template drops or repeats a {items[index].kind} here",
            remedy="change the order, or leave it out",
        )
    return extent


def _tools_come_first(grammar: Grammar) -> bool:
    return not renders(grammar, [Item("system"), TOOLS, USER]) and renders(
        grammar, [TOOLS, Item("system"), USER]
    )
