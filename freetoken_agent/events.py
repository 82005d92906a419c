# SPDX-License-Identifier: Apache-2.0
"""What happens while a model writes, as frozen values.

One generation yields, in this order:

    PlanReady                       the price, before anything is forwarded
    PrefillProgress *               rows forwarded so far
    ThinkingDelta | TextDelta | ToolCallStarted | ToolCallDelta *
    ToolCallReady?, SegmentFinished *     each segment, durable before its event
    ReplyFinished                   always the last; also after `length` and a cancel

A run of an agent yields these for each of its model calls, and in between

    ContextEdited *                 before a model call: what was edited, and its price
    ApprovalRequest *               a call that somebody must decide about; then the run ends
    ToolFinished *                  as calls end; the result is durable
    SegmentFinished *               results enter the path, in call order
    StepFinished                    the model call, its tools included
    RunFinished                     always the last

Deltas are whole characters: no delta ends inside a UTF-8 sequence. The text of a delta is for
display; the finished segment holds the truth.
"""

from typing import Annotated, Literal, TypedDict

from pydantic import BaseModel, ConfigDict, Field

from .segments import Edit, Reply, ReusePlan, Segment, Usage

RunFinishReason = Literal["stop", "length", "cancelled", "pending", "limit"]
"""stop       the model answered
length     the answer was cut by `max_tokens`
cancelled  somebody cancelled the run
pending    calls wait for a decision
limit      a limit was reached, and `on_limit="answer"` asked for an answer without tools"""


class Place(TypedDict):
    """What every event says about where it happened."""

    session: str
    branch: str
    step: int


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True)

    session: str  # the session's name
    branch: str  # the branch's name
    step: int  # which model call of the run, from 0


class PlanReady(_Event):
    """What forwarding the path will cost. Nothing has been forwarded yet."""

    type: Literal["plan_ready"] = "plan_ready"
    plan: ReusePlan  # the price


class PrefillProgress(_Event):
    """`done_tokens` of the plan's `prefill_tokens` have been forwarded. Not every pass is
    reported: ten a second, the newest count each time; the last comes before the first token."""

    type: Literal["prefill_progress"] = "prefill_progress"
    done_tokens: int
    total_tokens: int  # the plan's `prefill_tokens`


class ThinkingDelta(_Event):
    """More text of a thought."""

    type: Literal["thinking_delta"] = "thinking_delta"
    text: str  # whole characters


class TextDelta(_Event):
    """More text of the answer."""

    type: Literal["text_delta"] = "text_delta"
    text: str  # whole characters


class ToolCallStarted(_Event):
    """The model began a call; `index` counts the calls of this reply. The name may come later."""

    type: Literal["tool_call_started"] = "tool_call_started"
    index: int
    name: str | None  # None: it is not written yet


class ToolCallDelta(_Event):
    """More of a call, as written. It is not to be acted on before `ToolCallReady`."""

    type: Literal["tool_call_delta"] = "tool_call_delta"
    index: int  # of the call in this reply, from 0
    text: str  # in the syntax of the model's template


class ToolCallReady(_Event):
    """A whole call, durable in the session. A call that was cut never gets here."""

    type: Literal["tool_call_ready"] = "tool_call_ready"
    index: int  # of the call in this reply, from 0
    call: Segment  # with its `call_id` and arguments


class SegmentFinished(_Event):
    """A segment, durable in the session. `partial`: it was cut and the turn stays open."""

    type: Literal["segment_finished"] = "segment_finished"
    segment: Segment  # as it is on the path
    partial: bool


class ReplyFinished(_Event):
    """The reply is complete, or was cut by a limit or a cancel."""

    type: Literal["reply_finished"] = "reply_finished"
    reply: Reply  # the whole of it


class ApprovalRequest(_Event):
    """A call that waits for `agent.resume(session, decisions={call.call_id: True})`."""

    type: Literal["approval_request"] = "approval_request"
    call: Segment


class ToolFinished(_Event):
    """A call has ended and its result is durable, though not on the path yet. `text` is what the
    model will see, unless a hook changes it; `status` as in `ToolOutcome`."""

    type: Literal["tool_finished"] = "tool_finished"
    call: Segment  # what was asked
    text: str
    status: str
    elapsed_s: float  # how long the tool ran


class ContextEdited(_Event):
    """The run changed its context: `reason` names the rule, or the preamble. `edit.plan` prices the
    path as it is now."""

    type: Literal["context_edited"] = "context_edited"
    reason: str
    edit: Edit


class StepFinished(_Event):
    """A model call and what followed from it are done; editing is allowed until the next pull."""

    type: Literal["step_finished"] = "step_finished"
    reply: Reply  # of the model call


class RunFinished(_Event):
    """The run has ended; `Run.result` says how."""

    type: Literal["run_finished"] = "run_finished"
    finish_reason: RunFinishReason  # see `RunFinishReason`
    usage: Usage  # of all model calls of the run together


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

RunEvent = Annotated[
    PlanReady
    | PrefillProgress
    | ThinkingDelta
    | TextDelta
    | ToolCallStarted
    | ToolCallDelta
    | ToolCallReady
    | SegmentFinished
    | ReplyFinished
    | ApprovalRequest
    | ToolFinished
    | ContextEdited
    | StepFinished
    | RunFinished,
    Field(discriminator="type"),
]
"""Any event of a run."""
