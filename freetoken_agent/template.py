# SPDX-License-Identifier: Apache-2.0
"""ChatFormat: frames learned from the model's own chat template; contents -> token ids.

path      contents, each behind exactly one gap        items.py
gap       literal pieces + names and ids of calls      frames.py, gaps.py
content   transformed as the template would            contents.py
dialect   how the template wants its messages          dialect.py, probes.py
report    what it does beyond frames                   template_report.py
"""

from collections.abc import Sequence
from functools import cached_property

from .call_formats import harmony
from .call_formats.call_spelling import CallSpelling
from .call_formats.call_writing import learn_call_writing
from .call_formats.named_formats import likely, named
from .call_formats.writable_calls import check_writable
from .chat_templates.contents import ContentSource, find_transforms
from .chat_templates.dialect import THINK_OPEN, write_tags
from .chat_templates.frames import Grammar, Part
from .chat_templates.gaps import GapSource, windows_hold
from .chat_templates.items import (
    DEFAULT_OPTIONS,
    Item,
    Kind,
    Opener,
    Options,
    Piece,
    TemplateReport,
)
from .chat_templates.jinja import JinjaTemplate
from .chat_templates.markup import Markup
from .chat_templates.markup_probes import find_gaps, find_markup
from .chat_templates.probes import find_dialect
from .chat_templates.template_report import PATHS, closers, examine, thinking_options
from .errors import TemplateUnsupported
from .grammar import GrammarWriter
from .tokenizers.tokenizer import Tokenizer, encode_mixed

__all__ = [
    "ChatFormat",
    "Item",
    "Kind",
    "Opener",
    "Options",
    "Piece",
    "TemplateReport",
]


_STARTS: tuple[Kind, Kind] = ("thinking", "text")


class ChatFormat:
    """A chat template as frames. Immutable once learned; any thread may call it."""

    def __init__(
        self, template_source: str, tokenizer: Tokenizer, call_format: str | None = None
    ) -> None:
        chosen = None if call_format is None else named(call_format)
        template = JinjaTemplate(template_source, tokenizer.special_tokens)
        with template.together():
            self._learn(template, template_source, tokenizer, chosen)

    def _learn(
        self,
        template: JinjaTemplate,
        source: str,
        tokenizer: Tokenizer,
        chosen: CallSpelling | None,
    ) -> None:
        stops = [tokenizer.decode([token_id]) for token_id in sorted(tokenizer.stop_ids)]
        grammar = find_dialect(template, stops, likely(source, tokenizer), chosen)
        windows = windows_hold(grammar, PATHS)
        transforms = find_transforms(grammar)
        self._tokenizer = tokenizer
        self._grammar = grammar
        self._gaps = GapSource(grammar, windows=windows)
        self._contents = ContentSource(grammar, transforms, self._has_controls)
        self._markup = find_markup(grammar)
        self._report = examine(grammar, source, transforms, chosen=chosen, windows=windows)
        self._closers = closers(grammar, tokenizer)

    @classmethod
    def learn(
        cls, template_source: str, tokenizer: Tokenizer, *, call_format: str | None = None
    ) -> "ChatFormat":
        """Learn the frames of a template by rendering it. `call_format`: the name of the format in
        which the model writes calls, where that is not the template's (`named_formats`).
        TemplateUnsupported if it cannot, UnknownCallFormat."""
        return cls(template_source, tokenizer, call_format)

    @property
    def grammar(self) -> Grammar:
        """The template with its dialect; renders skeletons."""
        return self._grammar

    @property
    def gaps(self) -> GapSource:
        """Derives the text of gaps."""
        return self._gaps

    @property
    def report(self) -> TemplateReport:
        return self._report

    @property
    def digest(self) -> str:
        """Hex digest of the template, and the call format that was chosen instead of its own; part
        of a session's binding."""
        return self._report.digest

    @property
    def variables(self) -> frozenset[str]:
        """Names that `Options.variables` can set: what the template reads beyond messages."""
        return self._grammar.template.variables

    @property
    def markup(self) -> Markup:
        """The markers a parser of sampled ids looks for."""
        return self._markup

    @cached_property
    def writer(self) -> GrammarWriter:
        """Grammars of what a model may write; learned when it is first asked for."""
        gaps = find_gaps(self._grammar)
        writing = learn_call_writing(self._grammar, self._markup, gaps)
        if writing is None:
            return GrammarWriter(self._tokenizer, gaps, self._markup, ())
        if not harmony.is_harmony(gaps):
            return GrammarWriter(self._tokenizer, gaps, self._markup, (writing,))
        writings = harmony.writings(writing)
        return GrammarWriter(self._tokenizer, gaps, self._markup, writings, harmony.WORDS)

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
        gap of a path holds the template's beginning (BOS and so on); the preamble must be laid out
        in one run. Of items with `ids` only the gap is worked out. TemplateUnsupported if the
        template refuses, moves or drops one of the run."""
        if start >= len(items):
            return []
        gaps = self._gaps.run(items, start, options)
        pieces: list[Piece] = []
        for index, gap in enumerate(gaps, start):
            item, gap_ids = items[index], self._encode(gap)
            text, ids = item.text, item.ids
            if ids is None:
                parts = self._contents.parts(items, index, options)
                if item.kind == "tool_call":
                    check_writable(self._markup.calls, item, _text(parts))
                ids = self._encode(parts, after=gap_ids[-1:])
                text = self._tokenizer.decode(ids, after=gap_ids[-8:])
            pieces.append(Piece(_text(gap), gap_ids, text, ids))
        return pieces

    def opener(
        self,
        items: Sequence[Item],
        *,
        thinking: bool | None = None,
        options: Options = DEFAULT_OPTIONS,
    ) -> Opener:
        """What stands between the last item and what the model writes next: the generation opener,
        or the closer of a finished thought. Empty when the last content goes on. `thinking`
        switches thinking on or off where the template can (`report.thinking_switch`); where
        thoughts are inlined, True begins one."""
        last = items[-1] if items else None
        if last is not None and (last.partial or (last.kind == "text" and last.open)):
            return Opener("", (), "thinking" if last.kind == "thinking" else "text")
        if last is not None and last.kind == "thinking":
            gap = self._after_thought(items, options)
            return Opener(_text(gap), self._encode(gap), "text")
        if thinking is not None:
            options = thinking_options(options, thinking)
        gap = self._gaps.opener(items, options)
        begins = self._begins_thought(items, _text(gap), options)
        if thinking and not begins and self._report.fallback_thinking:
            gap, begins = [*gap, (write_tags(THINK_OPEN), False)], True
        return Opener(_text(gap), self._encode(gap), "thinking" if begins else "text")

    def _after_thought(self, items: Sequence[Item], options: Options) -> list[Part]:
        """The closer of a thought. Some templates show thoughts before calls only."""
        call = Item("tool_call", name="f", arguments={}, call_id="next")
        try:
            return self._gaps.single([*items, Item("text")], len(items), options)
        except TemplateUnsupported:
            return self._gaps.single([*items, call], len(items), options)

    def _begins_thought(self, items: Sequence[Item], opener: str, options: Options) -> bool:
        """Whether the opener goes as far as a thought: it is the gap before one."""
        try:
            gaps = [
                _text(self._gaps.single([*items, Item(kind, open=True)], len(items), options))
                for kind in _STARTS
            ]
        except TemplateUnsupported:
            return False
        return opener.rstrip() == gaps[0].rstrip() != gaps[1].rstrip()

    def _has_controls(self, text: str) -> bool:
        return any(isinstance(part, int) for part in self._tokenizer.split_frame(text))

    def _encode(self, parts: Sequence[Part], after: Sequence[int] = ()) -> tuple[int, ...]:
        return encode_mixed(self._tokenizer, parts, after=after[-1] if after else None)


def _text(parts: Sequence[Part]) -> str:
    return "".join(text for text, _ in parts)
