# SPDX-License-Identifier: Apache-2.0
"""Sampled ids -> thoughts, text and whole calls, while they stream.

The parser works on the text of the ids (control tokens that are markers stand for themselves and
cannot be imitated by text) and cuts at ids: every id goes to exactly one content or gap, in order,
and how the ids arrive in calls of `feed` changes nothing. Markers and the blanks that belong to
them go to the gap; a call keeps its markers, since it is one unit. An id that holds both sides of a
cut stays with the content.

A call that is cut short is text. So is one that is malformed, unless its name was read and its end
was written: that one is a call without arguments, or with repaired ones where they are certain.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .call_formats.call_format import CallFormat, ParsedCall
from .chat_templates.markup import Marker, held_back, longest
from .model_calls.tape import Tape
from .template import ChatFormat
from .tokenizers.tokenizer import Tokenizer
from .tooling.json_values import whole_characters

FinishReason = Literal["stop", "length", "cancelled"]
Note = Literal["", "cut_call", "repaired"]


@dataclass(frozen=True)
class ThinkingDelta:
    """More of a thought."""

    text: str


@dataclass(frozen=True)
class TextDelta:
    """More of the answer."""

    text: str


@dataclass(frozen=True)
class CallStarted:
    """A call whose name is known; `index` counts the calls of this parser from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class CallDelta:
    """More of a call's unit, as written."""

    index: int
    text: str


@dataclass(frozen=True)
class SegmentDone:
    """A whole content. `gap_ids`: sampled ids before it that are frame. `partial`: it was cut.
    `note`: the text holds the beginning of a call that was cut, or the arguments of a malformed
    call were repaired. `texts`: see `ParsedCall`. Arguments that are None could not be."""

    kind: Literal["thinking", "text", "tool_call"]
    gap_ids: tuple[int, ...]
    ids: tuple[int, ...]
    text: str
    name: str | None = None
    arguments: dict[str, object] | None = None
    call_id: str | None = None
    partial: bool = False
    note: Note = ""
    texts: Mapping[str, str] | None = None


ParseEvent = ThinkingDelta | TextDelta | CallStarted | CallDelta | SegmentDone
_Said = Literal["thinking", "text"]
_Mode = Literal["start", "text", "thinking", "call", "after_call"]


class StreamParser:
    """Reads what follows an opener. `kind`: what the opener leaves the model to write first;
    `after`: the ids before. One use, one thread."""

    def __init__(
        self,
        format: ChatFormat,
        tokenizer: Tokenizer,
        *,
        kind: Literal["text", "thinking"] = "text",
        after: Sequence[int] = (),
    ) -> None:
        self._tape = Tape(tokenizer, format.markup, after)
        self._markup = self._tape.markup
        self._mode: _Mode = "thinking" if kind == "thinking" else "start"
        self._begin = 0  # where the content, or the search for one, begins on the tape
        self._search = 0  # markers before this were looked at
        self._emitted = 0  # deltas were given up to here
        self._unit = 0  # where the call begins, once its literal was seen
        self._unit_literal = ""
        self._blanks = False  # blanks before the call are not part of it
        self._prior_end = 0  # where the content before the call ends
        self._taken = 0  # ids up to here belong to a content
        # blanks of the last marker, or of the opener, that may still come
        self._trail = self._markup.blanks if kind == "text" else ""
        self._ended = False  # nothing more can complete a marker
        self._calls = 0
        self._call_started = False
        self._events: list[ParseEvent] = []

    def feed(self, token_id: int) -> list[ParseEvent]:
        """What became known with this id. Do not feed the stop id."""
        self._tape.feed(token_id)
        while self._step():
            pass
        return self._take()

    def finish(self, reason: FinishReason) -> list[ParseEvent]:
        """What is left. Ids of an unfinished marker and of blanks alone belong to no content."""
        self._tape.flush()
        self._ended = True
        while self._step():
            pass
        partial = reason != "stop"
        if self._mode == "call" and not partial and self._close_call(len(self._tape.text)):
            return self._take()
        note: Note = "cut_call" if self._mode == "call" and partial else ""
        if self._mode == "call":
            self._demote()
        if self._mode in ("start", "after_call"):
            self._mode = "text"
        text = self._tape.text[self._begin :]
        if text.strip():
            self._snap_begin(len(self._tape.text))
            self._delta(len(self._tape.text))
            kind: _Said = "thinking" if self._mode == "thinking" else "text"
            self._done(kind, self._begin, None, partial=partial, note=note)
        return self._take()

    def _take(self) -> list[ParseEvent]:
        events, self._events = self._events, []
        return events

    def _step(self) -> bool:
        """One transition; False when more ids are needed."""
        if self._trail and not self._eat_trail():
            return False
        if self._mode == "start":
            return self._at_start(self._markup.start)
        if self._mode == "after_call":
            if self._skip_closer():
                return True
            return not self._closer_may_come() and self._at_start(self._markup.after_call)
        if self._mode == "call":
            return self._in_call()
        markers = self._markup.thinking if self._mode == "thinking" else self._markup.text
        return self._in_content(markers)

    def _eat_trail(self) -> bool:
        """Take the blanks that the last marker ends with, as far as they come."""
        text = self._tape.text
        while self._trail and self._begin < len(text) and text[self._begin] == self._trail[0]:
            self._begin += 1
            self._trail = self._trail[1:]
        self._search = self._emitted = max(self._begin, self._emitted)
        if self._begin == len(text):
            return False
        self._trail = ""
        return True

    def _at_start(self, markers: Sequence[Marker]) -> bool:
        """Before any content: a marker, or the beginning of a text."""
        rest = self._tape.text[self._begin :]
        stripped = rest.lstrip()
        if not stripped:
            return False
        at = self._begin + len(rest) - len(stripped)
        if not self._ended and any(marker.core.startswith(stripped) for marker in markers):
            whole = any(marker.core == stripped for marker in markers)
            return whole and self._at_marker(markers, at)
        if not self._at_marker(markers, at):
            self._mode = "text"
        return True

    def _at_marker(self, markers: Sequence[Marker], at: int) -> bool:
        """Enter the longest marker that stands at `at`, unless a longer one may still come."""
        rest = self._tape.text[at:]
        for marker in markers:
            if rest.startswith(marker.core):
                self._enter(marker, self._begin, at)
                return True
            if not self._ended and marker.core.startswith(rest):
                return False
        return False

    def _skip_closer(self) -> bool:
        rest = self._tape.text[self._begin :]
        stripped = rest.lstrip()
        for closer in self._markup.skip_after_call:
            if stripped.startswith(closer):
                self._begin += len(rest) - len(stripped) + len(closer)
                self._search = self._emitted = self._begin
                return True
        return False

    def _closer_may_come(self) -> bool:
        rest = self._tape.text[self._begin :].lstrip()
        closers = self._markup.skip_after_call
        return bool(rest) and not self._ended and any(c.startswith(rest) for c in closers)

    def _in_content(self, markers: Sequence[Marker]) -> bool:
        """Inside a text or a thought: up to the first whole marker, or as far as is certain."""
        text = self._tape.text
        found = [(text.find(marker.core, self._search), marker) for marker in markers]
        hits = [(at, marker) for at, marker in found if at >= 0]
        if not hits:
            seen = text[min(self._search, self._emitted) :]
            certain = len(text) - held_back(seen, markers)
            self._snap_begin(certain)
            self._delta(certain)
            self._search = max(self._search, len(text) - longest(markers) + 1)
            return False
        at, marker = min(hits, key=lambda hit: (hit[0], -len(hit[1].core)))
        longer = (other.core for other in markers if len(other.core) > len(marker.core))
        if not self._ended and any(core.startswith(text[at:]) for core in longer):
            return False
        self._snap_begin(at)
        end = at
        for blank in reversed(marker.lead):
            if end > self._begin and text[end - 1] == blank:
                end -= 1
        if text[self._begin : end].strip():
            end = self._tape.snapped_end(self._begin, end)
        else:
            end = self._begin
        self._delta(end)
        self._enter(marker, end, at)
        return True

    def _snap_begin(self, end: int) -> None:
        """Nothing was said yet: the content, known up to `end`, begins at an id."""
        if self._emitted == self._begin:
            begin = max(self._begin, self._taken)
            self._begin = self._emitted = self._tape.snapped_begin(begin, max(begin, end))

    def _enter(self, marker: Marker, end: int, at: int) -> None:
        """The content before ended at `end`; the marker stands at `at`."""
        has_content = self._mode in ("text", "thinking") and end > self._begin
        if marker.target == "call":
            if has_content and self._mode == "thinking":
                self._done("thinking", self._begin, end)
                self._begin = end
            elif not has_content:
                self._begin = end
            self._unit = at + len(marker.core) if marker.behind else at
            self._blanks = marker.behind
            self._unit_literal = marker.unit
            self._call_started = False
            self._search = at + len(marker.core)
            self._emitted = at
            self._prior_end = end
            self._mode = "call"
            return
        if has_content:
            self._done("thinking" if self._mode == "thinking" else "text", self._begin, end)
        self._begin = self._search = self._emitted = at + len(marker.core)
        self._trail = marker.trail
        self._mode = "thinking" if marker.target == "thinking" else "text"
        if marker.target == "text":
            self._mode = "start" if marker in self._markup.thinking else "text"

    def _in_call(self) -> bool:
        calls = self._markup.calls
        assert calls is not None, "markers of calls exist only with a call format"
        text = self._tape.text
        if self._unit_literal:
            unit_at = text.find(self._unit_literal, self._unit)
            if unit_at < 0:
                return False
            self._unit = self._emitted = unit_at
            self._unit_literal = ""
        if self._blanks:
            rest = text[self._unit :]
            self._unit += len(rest) - len(rest.lstrip())
            self._emitted = max(self._emitted, self._unit)
            self._blanks = not rest.strip()
        if not self._call_started:
            name = calls.name_so_far(self._tape.literal(self._unit, len(text)))
            if name is not None:
                self._call_started = True
                self._events.append(CallStarted(self._calls, name))
        if self._call_started and len(text) > self._emitted:
            self._events.append(
                CallDelta(self._calls, self._tape.literal(self._emitted, len(text)))
            )
            self._emitted = len(text)
        closer = self._markup.call_end
        if not closer:
            return self._closes_itself(calls)
        at = text.find(closer, self._search)
        if at < 0:
            self._search = max(self._search, len(text) - len(closer) + 1)
            return False
        self._search = at + len(closer)
        if self._close_call(self._search):
            return True
        if not calls.open_string(self._tape.literal(self._unit, at)):
            self._end_malformed(calls, at)
        return True

    def _closes_itself(self, calls: CallFormat) -> bool:
        """Finish a call that no tag ends, if its last bracket was written. What an id holds behind
        it may be the end of the section, or the beginning of the next call."""
        fresh = self._tape.text[max(self._search, self._unit) :]
        self._search = len(self._tape.text)
        if "}" not in fresh and ")" not in fresh:
            return False
        size = calls.ends_at(self._tape.literal(self._unit, self._search))
        return size is not None and self._close_call(self._tape.advanced(self._unit, size))

    def _close_call(self, end: int) -> bool:
        """Finish the call if its unit, up to `end`, reads as one."""
        calls = self._markup.calls
        assert calls is not None
        parsed = calls.parse(self._tape.literal(self._unit, end))
        if parsed is None:
            return False
        self._leave_call(parsed.name, parsed, end)
        return True

    def _end_malformed(self, calls: CallFormat, at: int) -> None:
        """The end of a call was written, but what stands before it does not read as one."""
        repaired = calls.repaired(self._tape.literal(self._unit, self._search))
        name = repaired.name if repaired else calls.name_so_far(self._tape.literal(self._unit, at))
        if name:
            self._leave_call(name, repaired, self._search)
        else:
            self._demote()

    def _leave_call(self, name: str, call: ParsedCall | None, end: int) -> None:
        self._taken = self._tape.snapped_end(self._unit, end)
        if self._prior_end > self._begin:
            self._done("text", self._begin, self._prior_end)
        self._done_call(name, call, self._taken)
        self._begin = self._search = self._emitted = end
        self._mode = "after_call"

    def _demote(self) -> None:
        """What looked like a call is text: it joins the text before it."""
        self._mode = "text"
        self._emitted = self._prior_end if self._prior_end > self._begin else self._begin
        self._search = max(self._search, self._unit + 1)

    def _delta(self, end: int) -> None:
        if end <= self._emitted:
            return
        text = self._tape.literal(self._emitted, end)
        self._emitted = end
        kind = ThinkingDelta if self._mode == "thinking" else TextDelta
        self._events.append(kind(text))

    def _done(
        self, kind: _Said, begin: int, end: int | None, *, partial: bool = False, note: Note = ""
    ) -> None:
        said = self._tape.literal(begin, len(self._tape.text) if end is None else end)
        gap, ids, text = self._tape.cut(begin, end)
        self._taken = max(self._taken, len(self._tape.text) if end is None else end)
        if not ids:
            return  # all of it is in an id of the content before
        if (more := text.removeprefix(said)) and len(more) < len(text):  # half a character
            self._events.append(ThinkingDelta(more) if kind == "thinking" else TextDelta(more))
        self._events.append(SegmentDone(kind, gap, ids, text, partial=partial, note=note))

    def _done_call(self, name: str, call: ParsedCall | None, end: int) -> None:
        if not self._call_started:
            self._events.append(CallStarted(self._calls, name))
        gap, ids, text = self._tape.cut(self._tape.snapped_begin(self._unit, end), end)
        done = SegmentDone("tool_call", gap, ids, text, whole_characters(name))
        if call is not None:
            arguments, texts = whole_characters([dict(call.arguments), call.texts])
            note: Note = "repaired" if call.repaired else ""
            done = replace(done, arguments=arguments, texts=texts, note=note, call_id=call.call_id)
        self._events.append(done)
        self._calls += 1


def parse_turn(
    format: ChatFormat,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    *,
    kind: Literal["text", "thinking"] = "text",
    reason: FinishReason = "stop",
) -> list[ParseEvent]:
    """Every event of a turn that is already there; `ids` without the stop id."""
    parser = StreamParser(format, tokenizer, kind=kind)
    events = [event for token_id in ids for event in parser.feed(token_id)]
    return events + parser.finish(reason)
