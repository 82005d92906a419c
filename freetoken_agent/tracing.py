# SPDX-License-Identifier: Apache-2.0
"""Runs as OpenTelemetry spans, by its `gen_ai` conventions.

    invoke_agent NAME            a run; its usage, summed
      chat MODEL                 a model call; tokens, and how many were reused
      execute_tool NAME          a tool
      edit_context REASON        an edit by a context rule, or of the preamble; what it comes to
        chat MODEL               the model call that a rule made for it

Only the API is used: without an SDK nothing is recorded. Names are constants here, because the
package that lists them deprecates them.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry import context, trace
from opentelemetry.trace import Span, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from .segments import Edit, Reply, Usage
from .tooling.tool_calls import ToolCall, ToolOutcome

if TYPE_CHECKING:
    from .session import Session

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
AGENT_NAME = "gen_ai.agent.name"
CONVERSATION = "gen_ai.conversation.id"
REQUEST_MODEL = "gen_ai.request.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
TOOL_NAME = "gen_ai.tool.name"
TOOL_TYPE = "gen_ai.tool.type"
TOOL_CALL_ID = "gen_ai.tool.call.id"
TOOL_ARGUMENTS = "gen_ai.tool.call.arguments"
TOOL_RESULT = "gen_ai.tool.call.result"
ERROR_TYPE = "error.type"

BRANCH = "freetoken.branch"
STEP = "freetoken.step"
REUSED_TOKENS = "freetoken.usage.reused_tokens"
PREFILL_TOKENS = "freetoken.usage.prefill_tokens"
TOOL_STATUS = "freetoken.tool.status"
EDIT_REASON = "freetoken.edit.reason"
EDIT_ADDED = "freetoken.edit.added_segments"
EDIT_REMOVED = "freetoken.edit.removed_segments"
EDIT_INPUT_TOKENS = "freetoken.edit.input_tokens"
EDIT_PREFILL_TOKENS = "freetoken.edit.prefill_tokens"

_PROVIDER = "freetoken"


class RunTrace:
    """The spans of one run. `content`: whether they hold what was said, the arguments and the
    results of tools, too. Model calls and tools are children of the run's span; a tool's own span
    is the current one while it works."""

    def __init__(self, agent: str, *, content: bool) -> None:
        self._agent = agent
        self._content = content
        self._tracer = trace.get_tracer("freetoken_agent")
        self._run: Span = trace.INVALID_SPAN
        self._session: dict[str, AttributeValue] = {}
        self._tools: dict[int, Span] = {}  # by the identity of the call, which is held meanwhile

    @contextmanager
    def run(self, content: str | None) -> Iterator[None]:
        """The whole run."""
        self._run = self._tracer.start_span(f"invoke_agent {self._agent}")
        self._set(self._run, {OPERATION: "invoke_agent", AGENT_NAME: self._agent})
        if content is not None:
            said = [{"role": "user", "parts": [{"type": "text", "content": content}]}]
            self._say(self._run, INPUT_MESSAGES, said)
        with _ending(self._run):
            yield

    def opened(self, session: "Session") -> None:
        """Where the run takes place, once that is known."""
        place = {CONVERSATION: session.name, BRANCH: session.branch}
        self._session = {PROVIDER: _PROVIDER, REQUEST_MODEL: session.model.name, **place}
        self._set(self._run, self._session)

    def used(self, usage: Usage) -> None:
        """The run's usage so far."""
        self._set(self._run, _tokens(usage))

    def finished(self, reason: str) -> None:
        self._set(self._run, {FINISH_REASONS: [reason]})

    @contextmanager
    def model_call(self, step: int) -> Iterator[Callable[[Reply], None]]:
        """A model call; what it yields is told the reply."""
        span = self._begin(f"chat {self._session[REQUEST_MODEL]!s}")
        self._set(span, {OPERATION: "chat", STEP: step, **self._session})

        def replied(reply: Reply) -> None:
            self._set(span, {FINISH_REASONS: [reply.finish_reason], **_tokens(reply.usage)})
            if span.is_recording() and self._content:
                self._say(span, OUTPUT_MESSAGES, [_message(reply)])

        with _ending(span):
            yield replied

    @contextmanager
    def edit(self, reason: str) -> Iterator[Callable[[Edit], None]]:
        """An edit that the run makes; what it yields is told of it, if something changed."""
        span = self._begin(f"edit_context {reason}")
        self._set(span, {EDIT_REASON: reason, **self._session})

        def made(edit: Edit) -> None:
            counts = {EDIT_ADDED: len(edit.added), EDIT_REMOVED: len(edit.removed)}
            plan = edit.plan
            prices = {
                EDIT_INPUT_TOKENS: plan.input_tokens,
                EDIT_PREFILL_TOKENS: plan.prefill_tokens,
            }
            self._set(span, {**counts, **prices})

        with trace.use_span(span, record_exception=False, set_status_on_exception=False):
            with _ending(span):
                yield made

    def edited(self, reason: str, edit: Edit) -> None:
        """An edit that has been made."""
        with self.edit(reason) as made:
            made(edit)

    @contextmanager
    def rule_call(self) -> Iterator[Callable[[Usage], None]]:
        """A model call for the edit that is being made; what it yields is told its usage."""
        span = self._tracer.start_span(f"chat {self._session[REQUEST_MODEL]!s}")
        self._set(span, {OPERATION: "chat", **self._session})
        with _ending(span):
            yield lambda usage: self._set(span, _tokens(usage))

    async def tool_started(self, call: ToolCall) -> None:
        """To be awaited in the task in which the tool will run."""
        span = self._begin(f"execute_tool {call.name}")
        self._tools[id(call)] = span
        if not span.is_recording():
            return
        named = {OPERATION: "execute_tool", TOOL_NAME: call.name, TOOL_TYPE: "function"}
        self._set(span, {**named, TOOL_CALL_ID: call.id})
        self._say(span, TOOL_ARGUMENTS, call.arguments)
        context.attach(trace.set_span_in_context(span))  # the task ends with the tool

    def tool_ended(self, outcome: ToolOutcome) -> None:
        span = self._tools.pop(id(outcome.call))
        self._set(span, {TOOL_STATUS: outcome.status})
        if outcome.is_error:
            raised = outcome.exception
            error_type = outcome.status if raised is None else type(raised).__qualname__
            self._set(span, {ERROR_TYPE: error_type})
            span.set_status(Status(StatusCode.ERROR, outcome.text if self._content else None))
        self._say(span, TOOL_RESULT, outcome.text)
        span.end()

    def tools_left(self) -> None:
        """End the spans of tools that a cancel stopped."""
        for span in self._tools.values():
            self._set(span, {TOOL_STATUS: "cancelled"})
            span.end()
        self._tools.clear()

    def _begin(self, name: str) -> Span:
        return self._tracer.start_span(name, trace.set_span_in_context(self._run))

    def _set(self, span: Span, attributes: Mapping[str, AttributeValue]) -> None:
        if span.is_recording():
            span.set_attributes(attributes)

    def _say(self, span: Span, name: str, content: object) -> None:
        if self._content and span.is_recording():
            text = content if isinstance(content, str) else json.dumps(content, default=dict)
            span.set_attribute(name, text)


@contextmanager
def _ending(span: Span) -> Iterator[None]:
    """End the span whatever happens; what is raised is its status. A reader that leaves early and
    a cancelled task are no errors."""
    try:
        yield
    except Exception as error:
        if span.is_recording():
            span.set_attribute(ERROR_TYPE, type(error).__qualname__)
            span.set_status(Status(StatusCode.ERROR, getattr(error, "code", None)))
        raise
    finally:
        span.end()


def _tokens(usage: Usage) -> dict[str, AttributeValue]:
    return {
        INPUT_TOKENS: usage.input_tokens,
        OUTPUT_TOKENS: usage.output_tokens,
        REUSED_TOKENS: usage.reused_tokens,
        PREFILL_TOKENS: usage.prefill_tokens,
    }


def _message(reply: Reply) -> dict[str, object]:
    """A reply in the conventions' form."""
    parts: list[dict[str, object]] = []
    for segment in reply.segments:
        if segment.kind == "tool_call":
            arguments = segment.text if segment.arguments is None else dict(segment.arguments)
            part = {"id": segment.call_id, "name": segment.tool, "arguments": arguments}
            parts.append({"type": "tool_call", **part})
        else:
            kind = "reasoning" if segment.kind == "thinking" else "text"
            parts.append({"type": kind, "content": segment.content})
    return {"role": "assistant", "parts": parts, "finish_reason": reply.finish_reason}
