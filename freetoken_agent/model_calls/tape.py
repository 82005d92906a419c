# SPDX-License-Identifier: Apache-2.0
"""Sampled ids as text, and back: which ids a stretch of the text belongs to."""

from collections.abc import Sequence
from dataclasses import replace

from ..chat_templates.markup import Marker, Markup
from ..tokenizers.tokenizer import Tokenizer


class Tape:
    """The ids so far as text, with the span of each id.

    A control token that is (part of) a marker is one character that no decoding can give: a lone
    surrogate. `markup` is the format's, spelled in the same way.
    """

    def __init__(self, tokenizer: Tokenizer, markup: Markup, after: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._decoder = tokenizer.stream(after=after)
        self._ids = list(after[-8:])
        self._next = len(self._ids)  # the first id that is in no content or gap yet
        self._starts = [0] * len(self._ids)
        self.text = ""
        self._literals: dict[str, str] = {}  # surrogate -> literal
        self._surrogates: dict[int, str] = {}  # control id -> surrogate
        self.markup = self._spell_markup(markup)

    def feed(self, token_id: int) -> None:
        self._ids.append(token_id)
        self._starts.append(len(self.text))
        text = self._decoder.feed(token_id)
        self.text += self._surrogates.get(token_id, text)

    def flush(self) -> None:
        self.text += self._decoder.flush()

    def literal(self, start: int, end: int) -> str:
        """Text as people read it."""
        text = self.text[start:end]
        for surrogate, literal in self._literals.items():
            text = text.replace(surrogate, literal)
        return text

    def advanced(self, start: int, size: int) -> int:
        """The position behind so many characters of the literal text."""
        lengths = {surrogate: len(literal) for surrogate, literal in self._literals.items()}
        while size > 0:
            size -= lengths.get(self.text[start], 1)
            start += 1
        return start

    def cut(self, begin: int, end: int | None) -> tuple[tuple[int, ...], tuple[int, ...], str]:
        """The ids before `begin` that nothing holds yet, and those of text[begin:end] (None: to
        the very end), with the text of the latter. Both ends are snapped to ids."""
        first = self._next
        while first < len(self._ids) and self._starts[first] < begin:
            first += 1
        stop = len(self._ids)
        if end is not None:
            stop = first
            while stop < len(self._ids) and self._starts[stop] < end:
                stop += 1
        gap, ids = tuple(self._ids[self._next : first]), tuple(self._ids[first:stop])
        text = self._tokenizer.decode(ids, after=self._ids[max(0, first - 8) : first])
        self._next = stop
        return gap, ids, text

    def snapped_begin(self, begin: int, end: int) -> int:
        """The begin of a content that is known up to `end`, moved out of the middle of an id: to
        its begin if the id holds some of the content, behind it if that is only blanks; left where
        it is as long as that is open."""
        index = self._around(begin)
        if index is None:
            return begin
        if self.text[begin : min(end, self._end(index))].strip():
            return self._starts[index]
        return self._end(index) if self._end(index) <= end else begin

    def snapped_end(self, begin: int, end: int) -> int:
        """A content's end, moved out of the middle of an id: behind it if the id holds some of the
        content, to its begin if that is only blanks."""
        index = self._around(end)
        if index is None:
            return end
        shared = self.text[max(begin, self._starts[index]) : end].strip()
        return self._end(index) if shared else max(begin, self._starts[index])

    def _around(self, position: int) -> int | None:
        """The id whose text begins before the position and ends after it."""
        for index in range(len(self._ids) - 1, self._next - 1, -1):
            if self._starts[index] < position:
                return index if self._end(index) > position else None
        return None

    def _end(self, index: int) -> int:
        return self._starts[index + 1] if index + 1 < len(self._starts) else len(self.text)

    def _spell_markup(self, markup: Markup) -> Markup:
        return Markup(
            start=self._spell_markers(markup.start),
            text=self._spell_markers(markup.text),
            thinking=self._spell_markers(markup.thinking),
            after_call=self._spell_markers(markup.after_call),
            calls=markup.calls,
            call_end=self._spell(markup.call_end),
            skip_after_call=tuple(map(self._spell, markup.skip_after_call)),
            blanks=markup.blanks,
        )

    def _spell_markers(self, markers: Sequence[Marker]) -> tuple[Marker, ...]:
        return tuple(
            replace(marker, core=self._spell(marker.core), unit=self._spell(marker.unit))
            for marker in markers
        )

    def _spell(self, literal: str) -> str:
        spelled = ""
        for part in self._tokenizer.split_frame(literal):
            if isinstance(part, str):
                spelled += part
                continue
            if part not in self._surrogates:
                surrogate = chr(0xD800 + len(self._surrogates))
                self._surrogates[part] = surrogate
                self._literals[surrogate] = self._tokenizer.decode([part])
            spelled += self._surrogates[part]
        return spelled
