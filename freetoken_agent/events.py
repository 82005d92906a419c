# SPDX-License-Identifier: Apache-2.0
"""What happens while a model writes, as frozen values.

One generation yields, in this order:

    PlanReady                       the price, before anything is forwarded
    PrefillProgress *               rows forwarded so far
    ThinkingDelta | TextDelta | ToolCallStarted | ToolCallDelta *
    ToolCallReady?, SegmentFinished *     each segment, durable before its event
    ReplyFinished                   always the last; also after `length` and a cancel

Deltas are whole characters: no delta ends inside a UTF-8 sequence. The text of a delta is for
display; the finished segment holds the truth.
"""

from typing import Annotated, Literal, TypedDict

from pydantic import BaseModel, ConfigDict, Field

from .segments import Reply, ReusePlan, Segment


class Place(TypedDict):
    """What every event says about where it happened."""

    session: str
    branch: str
    step: int


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True)

    session: str
    branch: str
    step: int  # which model call of the run, from 0


class PlanReady(_Event):
    """What forwarding the path will cost. Nothing has been forwarded yet."""

    type: Literal["plan_ready"] = "plan_ready"
    plan: ReusePlan


class PrefillProgress(_Event):
    """`done_tokens` of the plan's `prefill_tokens` have been forwarded. Not every pass is
    reported: ten a second, the newest count each time; the last comes before the first token."""

    type: Literal["prefill_progress"] = "prefill_progress"
    done_tokens: int
    total_tokens: int


class ThinkingDelta(_Event):
    """More text of a thought."""

    type: Literal["thinking_delta"] = "thinking_delta"
    text: str


class TextDelta(_Event):
    """More text of the answer."""

    type: Literal["text_delta"] = "text_delta"
    text: str


class ToolCallStarted(_Event):
    """The model began a call; `index` counts the calls of this reply. The name may come later."""

    type: Literal["tool_call_started"] = "tool_call_started"
    index: int
    name: str | None


class ToolCallDelta(_Event):
    """More of a call, as written. It is not to be acted on before `ToolCallReady`."""

    type: Literal["tool_call_delta"] = "tool_call_delta"
    index: int
    text: str


class ToolCallReady(_Event):
    """A whole call, durable in the session. A call that was cut never gets here."""

    type: Literal["tool_call_ready"] = "tool_call_ready"
    index: int
    call: Segment


class SegmentFinished(_Event):
    """A segment, durable in the session. `partial`: it was cut and the turn stays open."""

    type: Literal["segment_finished"] = "segment_finished"
    segment: Segment
    partial: bool


class ReplyFinished(_Event):
    """The reply is complete, or was cut by a limit or a cancel."""

    type: Literal["reply_finished"] = "reply_finished"
    reply: Reply


GenerationEvent = Annotated[
    PlanReady
    | PrefillProgress
    | ThinkingDelta
    | TextDelta
    | ToolCallStarted
    | ToolCallDelta
    | ToolCallReady
    | SegmentFinished
    | ReplyFinished,
    Field(discriminator="type"),
]
"""Any of them, for parsing them back: `TypeAdapter(GenerationEvent)`."""
