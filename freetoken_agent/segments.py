# SPDX-License-Identifier: Apache-2.0
"""What sessions hand out: frozen pydantic models, all of them snapshots.

A `Segment` names an instance by `id`, which stays the same wherever it is still used. The fields
`turn frame_tokens stale anchored` describe the place where it was looked up; a segment that was
not looked up on a path (an earlier version) has their defaults.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from .errors import UnsupportedContent

SegmentKind = Literal[
    "system", "tools", "user", "thinking", "text", "tool_call", "tool_result", "frame"
]
Role = Literal["system", "user", "assistant", "tool"]
Source = Literal["caller", "model", "interrupted"]
FinishReason = Literal["stop", "length", "cancelled", "tool_calls"]
MissPart = Literal["frame", "content", "opener"]
MissChange = Literal["edited", "inserted", "removed", "framed", "diverged"]

ROLES: Mapping[str, Role] = {
    "system": "system",
    "tools": "system",
    "user": "user",
    "thinking": "assistant",
    "text": "assistant",
    "tool_call": "assistant",
    "tool_result": "tool",
    "frame": "system",
}


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class Part(_Frozen):
    """A piece of content. Text is the only type so far."""

    type: Literal["text"] = "text"
    text: str  # what the model reads


Content = str | Sequence[Part | Mapping[str, Any]]
"""A text, or its parts: `Part`, or dicts like it."""


def as_text(content: Content) -> str:
    """The text of a content: parts are joined as they are. UnsupportedContent for anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes | bytearray):
        raise _unsupported(type(content).__name__)
    return "".join(_part_text(part) for part in content)


def _part_text(part: object) -> str:
    if isinstance(part, Part):
        return part.text
    if isinstance(part, Mapping) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    kind = part.get("type") if isinstance(part, Mapping) else None
    raise _unsupported(kind if isinstance(kind, str) else type(part).__name__)


def visible(text: str) -> str:
    """The text with U+FFFD for what would steer a terminal or could not be written: control
    characters, other than tabs and newlines, and halves of surrogate pairs."""
    return "".join(
        "\ufffd" if c not in "\t\n" and unicodedata.category(c) in ("Cc", "Cs") else c for c in text
    )


def _unsupported(value: str) -> UnsupportedContent:
    return UnsupportedContent(
        "content is a str or a sequence of text parts",
        value=value,
        remedy='pass text, Part(text=…) or {"type": "text", "text": …}',
    )


class Segment(_Frozen):
    """A run of token ids with a meaning.

    `content` is what the caller gave (a generated segment: its text), `text` the ids decoded in
    the context of their predecessors. `frame_tokens` counts the gap before it. `origin` is the
    first segment of its line of replacements, `replaces` the previous one. `stale`: the arguments
    of the call it answers were edited. `anchored`: a model state can be restored at its end.

    A snapshot does not change, `arguments` and `meta` included (TypeError, at any depth): what is
    to be changed is a `copy.deepcopy` of them.
    """

    id: str  # unique in its session, on every branch
    kind: SegmentKind  # what it is
    role: Role  # whose message it belongs to
    content: str
    text: str
    turn: int | None = None  # from 0; None before the first user message
    tool: str | None = None  # of a call and its result: the tool's name
    call_id: str | None = None  # of a call and its result: what pairs them
    arguments: Mapping[str, Any] | None = None
    error: bool = False  # of a result: the call failed
    num_tokens: int  # its own, without the frame before it
    frame_tokens: int = 0
    origin: str
    replaces: str | None = None
    stale: bool = False
    source: Source = "caller"  # who wrote it
    meta: Mapping[str, Any] = {}
    anchored: bool = False

    def preview(self, n: int = 60) -> str:
        """One line of at most `n` characters for people."""
        line = visible(" ".join(self.text.split()))
        return line if len(line) <= n else line[: max(n - 1, 0)] + "…"


class Turn(_Frozen):
    """A user message and everything up to the next one. `index` counts from 0."""

    index: int
    segments: tuple[Segment, ...]  # the user message first

    @property
    def num_tokens(self) -> int:
        """Contents and the frames before them."""
        return sum(s.num_tokens + s.frame_tokens for s in self.segments)


class Miss(_Frozen):
    """Why no more is reused: up to `position` the path is known, and `tokens` must be forwarded.

    `segment`: the first that differs; it holds the position, in its `content` or in the `frame`
    before it. None in the generation `opener`.

    `cause`: what is missing there.

    different_ids       a known path goes on with other ids: see `change`
    never_computed      nothing known goes on from here
    no_anchor           all is known, but the state at the end was not kept
    evicted             it was known and gave way to other states
    damaged             it was stored and failed its checksum
    fingerprint:<part>  it was computed by a model that differs in <part>
    context_overflow    the path is longer than the model's context, by `tokens`
    no_weights          the model was loaded without its weights

    `change`: how other ids came there; `was` stands there on the known path. None where this
    session holds no such path (another one does, or a purge took it).

    edited    `segment` replaces `was` (or the two replace the same one)
    inserted  `was` comes later on this path
    removed   `was` is not on this path; `segment` came later there
    framed    the segment is the same; the template puts other ids before it
    diverged  neither of these: another question, branch or version

    `anchor`: the position whose state is restored, at or before `position`; None: nothing is. `gap`
    of the tokens would have been saved by an anchor at `position`; `dropped` is the deepest anchor
    in that gap that was there and gave way to the memory budget.
    """

    position: int
    segment: Segment | None
    part: MissPart  # where in the segment the position is
    cause: str
    change: MissChange | None = None
    was: Segment | None = None
    tokens: int
    anchor: int | None = None
    gap: int = 0
    dropped: int | None = None

    def explain(self) -> str:
        """The same in a sentence for people."""
        return f"{self._where()}{self._why()}{self._denser()}"

    def _where(self) -> str:
        if self.segment is None:
            return "the generation opener"
        frame = "the frame before " if self.part == "frame" else ""
        return f"{frame}{_named(self.segment)}"

    def _why(self) -> str:
        kind, _, part = self.cause.partition(":")
        if kind == "fingerprint":
            return f": computed by a model of other {part.replace('_', ' ')}"
        if self.was is None or self.change is None or self.change == "framed":
            return f": {_CAUSES.get(self.cause, self.cause)}"
        return f": {_CHANGES[self.change].format(was=_named(self.was))}"

    def _denser(self) -> str:
        if not self.gap:
            return ""
        anchor = "nothing" if self.anchor is None else f"the state at {self.anchor}"
        said = f"; restores {anchor}, an anchor at {self.position} would save {self.gap} tokens"
        if self.dropped is not None:
            said += f" (one at {self.dropped} gave way to the memory budget)"
        return said


_CAUSES = {
    "different_ids": "other ids were computed there",
    "never_computed": "new from here",
    "no_anchor": "known, but its state was not kept",
    "evicted": "its state was evicted",
    "damaged": "its stored state is damaged",
    "context_overflow": "beyond the model's context",
    "no_weights": "the model has no weights",
}
_CHANGES: Mapping[MissChange, str] = {
    "edited": "replaces {was}",
    "inserted": "inserted before {was}",
    "removed": "follows where {was} was removed",
    "diverged": "stands where another branch or version has {was}",
}


def _named(segment: Segment) -> str:
    return f"{segment.kind} {segment.id}"


class ReusePlan(_Frozen):
    """What forwarding a path would cost; `reused_tokens + prefill_tokens == input_tokens`.

    A path longer than the model's context cannot be forwarded: its miss has the cause
    `context_overflow` and `predicted_s` is infinite.
    """

    input_tokens: int
    reused_tokens: int
    prefill_tokens: int
    source: Literal["ram", "disk", "none"]  # where the reused state lies
    anchor: int | None  # the position of the state that is restored; None: none is
    miss: Miss | None  # why no more is reused; None: nothing is forwarded
    predicted_s: float


class Usage(_Frozen):
    """What happened. `changed` says what ran between plan and forward pass, if it mattered. `miss`
    says why the tokens that were not reused were not; it is the plan's if nothing ran in between.
    `input_tokens == reused_tokens + prefill_tokens + unforwarded_tokens`."""

    input_tokens: int
    reused_tokens: int
    prefill_tokens: int
    output_tokens: int = 0  # sampled, thoughts and calls included
    thinking_tokens: int = 0  # those of them in thoughts
    ttft_s: float = 0.0  # seconds from the call to the first token
    decode_s: float = 0.0  # seconds from the first token to the last
    changed: str | None = None
    miss: Miss | None = None

    def __add__(self, later: "Usage") -> "Usage":
        """Both together: counts and decoding times are summed; the time to the first token is the
        first one's, and so is the reason for what it forwarded."""
        return Usage(
            input_tokens=self.input_tokens + later.input_tokens,
            reused_tokens=self.reused_tokens + later.reused_tokens,
            prefill_tokens=self.prefill_tokens + later.prefill_tokens,
            output_tokens=self.output_tokens + later.output_tokens,
            thinking_tokens=self.thinking_tokens + later.thinking_tokens,
            ttft_s=self.ttft_s,
            decode_s=self.decode_s + later.decode_s,
            changed=self.changed or later.changed,
            miss=self.miss,
        )

    @property
    def unforwarded_tokens(self) -> int:
        """Tokens of the path that a cancel left out; 0 once a token was sampled."""
        return self.input_tokens - self.reused_tokens - self.prefill_tokens


class Reply(_Frozen):
    """One model call's outcome. `segments` are all it wrote, in order; `calls` the tool calls."""

    text: str  # of the answer; texts beside calls included
    thinking: str  # of its thoughts
    calls: tuple[Segment, ...]
    segments: tuple[Segment, ...]
    finish_reason: FinishReason  # `tool_calls`: it ended with calls
    usage: Usage  # what it cost
    # whether several calls were possible: not where one was asked for, nor where the chat template
    # has no place for a second one, whatever was asked for
    parallel_tool_calls: bool = True


class Edit(_Frozen):
    """What an edit changed; falsy when that is nothing. `plan` prices the path after it.

    `log_id` numbers the step in the branch's log; None for a dry run or when nothing changed.
    """

    added: tuple[Segment, ...] = ()  # on the path now
    removed: tuple[Segment, ...] = ()  # no longer on the path
    plan: ReusePlan
    log_id: int | None = None
    changed: bool  # what `bool()` of it says

    def __bool__(self) -> bool:
        return self.changed


class BranchInfo(_Frozen):
    """A branch as stored. `head` is the id of its last segment."""

    name: str  # of the branch
    version: int  # how many commits it has had
    num_segments: int  # of its path
    head: str | None
    current: bool  # the branch of the handle that was asked


class TreeNode(_Frozen):
    """A segment at a place. `parent` indexes `Tree.nodes`; `branches` have their head here."""

    segment: Segment  # as it is there
    parent: int | None
    branches: tuple[str, ...] = ()
    on_path: bool = False  # of the handle that was asked


class Tree(_Frozen):
    """Every place of a session that is still stored, parents before children.

    Indices are positions in this snapshot, not ids of anything. The same segment appears at
    several places when an edit before it gave it a new predecessor.
    """

    nodes: tuple[TreeNode, ...]  # parents first
    empty_branches: tuple[str, ...] = ()  # branches whose path is empty

    def children(self, index: int | None) -> tuple[int, ...]:
        """Indices below a node; None for the root."""
        return tuple(i for i, node in enumerate(self.nodes) if node.parent == index)


class Diff(_Frozen):
    """How another path differs from this one.

    The first `common_segments` (`common_tokens`) are shared as they are. `replaced` pairs versions
    of one origin (here, there); `removed` is only here, `added` only there.
    """

    common_segments: int
    common_tokens: int
    added: tuple[Segment, ...] = ()
    removed: tuple[Segment, ...] = ()
    replaced: tuple[tuple[Segment, Segment], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.replaced)


class SessionInfo(_Frozen):
    """A session in a store's list. Times are seconds since the epoch."""

    name: str  # of the session
    created_s: float  # when it was made
    updated_s: float  # when it was last written
    branches: tuple[str, ...]  # their names
    model: str  # the name of the model it was made with
    meta: dict[str, Any] = {}  # what its creator attached


class PurgeReport(_Frozen):
    """What a purge removed, and where the same text is still held: copies that somebody made are
    listed, never touched.

    `cleared_segments`: later versions that lost what they had inherited of the purged one's meta
    data. `other_segments`: their text, call or meta data contain the text; also versions that the
    purged one replaced and that have entries of its meta data. `other_places`: what of the session
    itself contains it (session meta, template options, labels of undo steps, branch names).
    `scrubbed`: the bytes have left the files; False when another process holds the store (the next
    exclusive opening finishes the work).
    """

    segments: tuple[str, ...]  # ids that no longer exist
    num_nodes: int  # places in the tree that went
    num_states: int  # of the model, in RAM and on disk
    num_log_entries: int  # undo steps that went
    cleared_segments: tuple[str, ...] = ()
    other_segments: tuple[str, ...]
    other_places: tuple[str, ...] = ()
    other_sessions: tuple[str, ...]  # whose segments contain the text
    scrubbed: bool
