# SPDX-License-Identifier: Apache-2.0
"""The synchronous core of a generation: one model call, pulled one batch of events at a time."""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from freetoken_storage.errors import FreetokenError

from .. import events, parsing
from ..branches.branch import StepGroup
from ..events import GenerationEvent
from ..grammars.step_grammar import holds_several_calls, step_constraint
from ..model import Model, PathPlan, PathUsage, TokenConstraint, TokenStream
from ..segments import FinishReason, Reply, ReusePlan, Segment
from .draft import Draft
from .generate_options import GenerateOptions

if TYPE_CHECKING:
    from ..session import Session

Tail = Literal["closed", "open", "partial"]
MAX_BACK = 3  # what a model remembers of the tokens it has just passed, see `Model.generate`


class ModelStep:
    """Begins at the first `advance`, which marks the branch busy, and ends with a `reply`.

    Not thread-safe, except `cancel`. Every finished segment is committed before the event that
    reports it. A whole segment waits for the next event: only that tells whether the turn goes on.
    A call can only be followed by a parallel one, since no template has a place for anything else:
    what the model writes instead ends the reply and is not kept (a cut second call is such a text,
    and so is a whole one where the step may hold one only).
    """

    def __init__(
        self,
        session: "Session",
        options: GenerateOptions,
        *,
        index: int = 0,
        group: StepGroup | None = None,
    ) -> None:
        """`index`: which model call of a run it is. `group`: the undo step that it is part of."""
        self._session = session
        self._options = options
        self._index = index
        self._group = group
        self._draft: Draft | None = None
        self._constraint: TokenConstraint | None = None
        self._plan: ReusePlan | None = None
        self._announced: PathPlan | None = None  # the same, as the model made it
        self._stream: TokenStream | None = None
        self._pending: parsing.SegmentDone | None = None
        self._segments: list[Segment] = []
        self._loose: list[int] = []  # sampled ids that no segment holds yet
        self._answer_end = ""  # where a stop text may have begun
        self._after_call = False
        self._parallel = options.parallel_tool_calls
        self._stopped = False  # by a stop text, or by what may not follow a call
        self._cancelled = threading.Event()
        self._progress: deque[tuple[int, int]] = deque(maxlen=1)  # rows done, in all
        self.prompt_done = False  # a token was sampled
        self.started = False
        self.finished = False
        self.reply: Reply | None = None

    def advance(self) -> list[GenerationEvent]:
        """The next events; blocks while the model works. [] once finished.

        What an error leaves behind is kept: the text so far stays as an open turn.
        """
        if self.finished:
            return []
        try:
            if self._draft is None:
                return self._begin()
            made: list[GenerationEvent] = []
            while not made and not self.finished:
                made = self._pull()
            return made
        except BaseException:
            self._fail()
            raise

    def prefilled(self) -> events.PrefillProgress | None:
        """How far the prompt has come, if that is news. For the reader's thread, also while
        `advance` works in another."""
        draft = self._draft
        if draft is None or not self._progress:
            return None
        done, total = self._progress.popleft()
        return events.PrefillProgress(**self._place(draft), done_tokens=done, total_tokens=total)

    def cancel(self) -> None:
        """End between two tokens. Thread-safe."""
        self._cancelled.set()
        stream = self._stream
        if stream is not None:
            stream.cancel()

    def close(self) -> None:
        """End now: keep what was read, drop what the model has sampled beyond it, release the
        branch. Before the start: never begin. Does nothing once finished."""
        draft, stream = self._draft, self._stream
        if self.finished or draft is None:
            self.finished = True
            return
        self.cancel()
        try:
            if stream is not None:
                stream.close()
            usage = _nothing_forwarded(draft) if stream is None else stream.usage
            self._finish(draft, "cancelled", usage)
        except BaseException:
            self._fail()
            raise

    def _begin(self) -> list[GenerationEvent]:
        self.started = True
        draft = self._session.begin_generation(thinking=self._options.thinking, group=self._group)
        self._draft = draft
        self._parser = parsing.StreamParser(
            draft.model.format, draft.model.tokenizer, kind=draft.kind, after=draft.ids
        )
        self._parallel = holds_several_calls(draft.model, self._options)
        self._constraint = step_constraint(draft.model, draft.tools, draft.place, self._options)
        self._plan, self._announced = draft.plan()
        return [events.PlanReady(**self._place(draft), plan=self._plan)]

    def _start(self, draft: Draft) -> TokenStream:
        ends = draft.model.format.closers | draft.model.tokenizer.stop_ids
        sampling = self._options.sampling
        self._stops = ends | sampling.stop_ids
        stream = draft.model.generate(
            draft.ids,
            replace(sampling, stop_ids=self._stops, constraint=self._constraint),
            anchors=draft.anchors,
            lasting=draft.lasting_anchors,
            anchor_after=ends | segment_closers(draft.model),
            anchor_before=call_openers(draft.model),
            on_progress=self._note_progress,
            announced=self._announced,
        )
        self._stream = stream
        if self._cancelled.is_set():  # a cancel that came while the stream was being made
            stream.cancel()
        return stream

    def _pull(self) -> list[GenerationEvent]:
        draft = self._draft
        assert draft is not None
        if self._stream is None and self._cancelled.is_set():
            return self._finish(draft, "cancelled", _nothing_forwarded(draft))
        stream = self._stream or self._start(draft)
        token = None if self._stopped else next(stream, None)
        self.prompt_done = True
        if token is None:
            stream.close()
            reason = "stop" if self._stopped else stream.finish_reason
            assert reason is not None, "an exhausted stream says why"
            return self._finish(draft, reason, stream.usage)
        if token.id in self._stops:
            return []
        self._loose.append(token.id)
        return self._take(draft, self._parser.feed(token.id))

    def _take(self, draft: Draft, parsed: Sequence[parsing.ParseEvent]) -> list[GenerationEvent]:
        made: list[GenerationEvent] = []
        for event in parsed:
            if self._after_call and not (self._parallel and _is_of_call(event)):
                self._stopped = True
                continue
            made += self._commit(draft, "open")
            place = self._place(draft)
            match event:
                case parsing.SegmentDone():
                    self._pending = event
                    del self._loose[: len(event.gap_ids) + len(event.ids)]
                    self._after_call = event.kind == "tool_call"
                    self._answer_end = ""
                case parsing.ThinkingDelta():
                    made.append(events.ThinkingDelta(**place, text=event.text))
                case parsing.TextDelta():
                    made.append(events.TextDelta(**place, text=event.text))
                    self._watch(event.text)
                case parsing.CallStarted():
                    made.append(events.ToolCallStarted(**place, index=event.index, name=event.name))
                case parsing.CallDelta():
                    made.append(events.ToolCallDelta(**place, index=event.index, text=event.text))
        return made

    def _watch(self, text: str) -> None:
        """Look for a stop text; it may have begun in an earlier delta."""
        longest = max(map(len, self._options.stop), default=0)
        if longest:
            window = self._answer_end + text
            self._stopped = any(stop in window for stop in self._options.stop)
            self._answer_end = window[max(0, len(window) - longest + 1) :]

    def _commit(self, draft: Draft, tail: Tail) -> list[GenerationEvent]:
        done, self._pending = self._pending, None
        if done is None:
            return []
        segment = draft.write(done, tail=tail)
        self._segments.append(segment)
        place = self._place(draft)
        finished = events.SegmentFinished(**place, segment=segment, partial=tail == "partial")
        if segment.kind != "tool_call":
            return [finished]
        index = sum(s.kind == "tool_call" for s in self._segments) - 1
        return [events.ToolCallReady(**place, index=index, call=segment), finished]

    def _finish(
        self, draft: Draft, reason: Literal["stop", "length", "cancelled"], usage: PathUsage
    ) -> list[GenerationEvent]:
        made = self._take(draft, self._parser.finish(reason))
        if reason == "stop":
            made += self._end_turn(draft)
        elif self._pending is not None:
            made += self._commit(draft, "partial" if self._pending.partial else "open")
        self.reply = self._reply(draft, reason, usage)
        self.finished = True
        made.append(events.ReplyFinished(**self._place(draft), reply=self.reply))
        draft.finish()
        return made

    def _end_turn(self, draft: Draft) -> list[GenerationEvent]:
        """Commit the last segment as the turn's end. An empty answer is an answer: it takes the
        ids that were sampled for it, an empty thought or blanks, as its gap."""
        made: list[GenerationEvent] = []
        empty = not self._segments and self._pending is None
        if empty or (self._loose and not self._after_call):
            made += self._commit(draft, "open")
            self._pending = parsing.SegmentDone("text", tuple(self._loose), (), "")
        return made + self._commit(draft, "closed")

    def _fail(self) -> None:
        """Keep the text so far and release the branch; the caller raises what happened."""
        if self.finished:
            return
        self.finished = True
        draft, stream = self._draft, self._stream
        if stream is not None:
            stream.close()
        if draft is None:
            return
        try:
            self._take(draft, self._parser.finish("cancelled"))
            if self._pending is not None:
                self._commit(draft, "partial" if self._pending.partial else "open")
        except FreetokenError:
            pass  # the store refused: what it acknowledged stays, the first error is the news
        finally:
            draft.release()

    def _reply(
        self, draft: Draft, reason: Literal["stop", "length", "cancelled"], usage: PathUsage
    ) -> Reply:
        assert self._plan is not None, "a step that ends was priced when it began"
        calls = tuple(s for s in self._segments if s.kind == "tool_call")
        thoughts = [s for s in self._segments if s.kind == "thinking"]
        finish: FinishReason = "tool_calls" if reason == "stop" and calls else reason
        return Reply(
            text="".join(s.text for s in self._segments if s.kind == "text"),
            thinking="".join(s.text for s in thoughts),
            calls=calls,
            segments=tuple(self._segments),
            finish_reason=finish,
            parallel_tool_calls=self._parallel,
            usage=draft.paid(usage, self._plan, sum(t.num_tokens for t in thoughts)),
        )

    def _note_progress(self, done: int, total: int) -> None:
        """In the engine's thread, between two passes, and so no more than this: to wake the reader
        and make the event here took 0.2 ms, most of it waiting for the interpreter's lock."""
        self._progress.append((done, total))

    def _place(self, draft: Draft) -> events.Place:
        return {"session": draft.session, "branch": draft.branch, "step": self._index}


def _nothing_forwarded(draft: Draft) -> PathUsage:
    """The usage of a request that the model never got."""
    return PathUsage(len(draft.ids), 0, 0)


def _is_of_call(event: parsing.ParseEvent) -> bool:
    if isinstance(event, parsing.SegmentDone):
        return event.kind == "tool_call"
    return isinstance(event, parsing.CallStarted | parsing.CallDelta)


def segment_closers(model: Model) -> frozenset[int]:
    """Control ids that the model writes right after a thought or at the end of a call: a state kept
    there serves an edit of what follows."""
    markup = model.format.markup
    literals = [marker.core for marker in markup.thinking if marker.target == "text"]
    ends = [model.tokenizer.split_frame(text)[-1:] for text in (*literals, markup.call_end) if text]
    return frozenset(part for end in ends for part in end if isinstance(part, int))


def call_openers(model: Model) -> dict[int, int]:
    """Control ids that begin a call behind a text or a thought, and how many tokens the template
    puts between: a state kept where the text ends serves an edit of the call."""
    markup, tokenizer = model.format.markup, model.tokenizer
    openers: dict[int, int] = {}
    for marker in (*markup.text, *markup.thinking):
        first = tokenizer.split_frame(marker.core)[0]
        if marker.target == "call" and isinstance(first, int):
            openers.setdefault(first, min(len(tokenizer.encode_frame(marker.lead)), MAX_BACK))
    return openers
