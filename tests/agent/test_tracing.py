# SPDX-License-Identifier: Apache-2.0
"""Runs as spans. Oracle: OpenTelemetry's own exporter, which keeps spans in memory."""

import asyncio
import json
from collections.abc import Callable, Sequence

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from freetoken_agent import Agent, Limits, RunLimit, Store, Summarise, tracing
from freetoken_agent.testing import Call, ScriptedModel
from freetoken_agent.tools import AnyTool, tool

Spans = Callable[[], Sequence[ReadableSpan]]


@tool
def add(a: int, b: int) -> int:
    """Add."""
    with trace.get_tracer("test").start_as_current_span("inside add"):
        return a + b


@tool
async def fail(text: str) -> str:
    """Fail."""
    raise RuntimeError(text)


@tool
async def hang() -> str:
    """Never end."""
    await asyncio.Event().wait()
    return ""


TOOLS: list[AnyTool] = [add, fail, hang]
ADD = Call("add", {"a": 1, "b": 2})


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    """Spans that have ended, by start. The provider is set for one test, which the API forbids."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return lambda: sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0)


def named(spans: Sequence[ReadableSpan], name: str) -> ReadableSpan:
    [span] = [span for span in spans if span.name == name]
    return span


def parent(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def values(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


async def test_a_run_its_model_calls_and_its_tools_are_spans(spans: Spans) -> None:
    """Oracle: the conventions' names, and the result's usage."""
    model = ScriptedModel([[ADD, Call("fail", {"text": "secret"})], "It is 3."])
    made = Agent(model, name="adder", tools=TOOLS)
    with trace.get_tracer("test").start_as_current_span("request") as request:
        result = await made.run("What is 1 + 2?")
    seen = spans()
    assert sorted(span.name for span in seen) == [
        "chat scripted", "chat scripted", "execute_tool add", "execute_tool fail", "inside add",
        "invoke_agent adder", "request",
    ]  # fmt: skip
    run = named(seen, "invoke_agent adder")
    assert parent(run) == request.get_span_context().span_id
    children = [span for span in seen if parent(span) == run.context.span_id]
    assert len(children) == 4
    assert parent(named(seen, "inside add")) == named(seen, "execute_tool add").context.span_id
    usage = result.usage
    assert values(run) == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "freetoken",
        "gen_ai.agent.name": "adder",
        "gen_ai.conversation.id": result.session.name,
        "gen_ai.request.model": "scripted",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "freetoken.usage.reused_tokens": usage.reused_tokens,
        "freetoken.usage.prefill_tokens": usage.prefill_tokens,
        "freetoken.branch": "main",
    }
    first, second = (values(span) for span in seen if span.name == "chat scripted")
    for name in ("input_tokens", "output_tokens"):
        total = values(run)[f"gen_ai.usage.{name}"]
        assert first[f"gen_ai.usage.{name}"] + second[f"gen_ai.usage.{name}"] == total  # type: ignore[operator]
    assert first["gen_ai.response.finish_reasons"] == ("tool_calls",)
    assert (first["freetoken.step"], second["freetoken.step"]) == (0, 1)
    added = values(named(seen, "execute_tool add"))
    calls = result.session.find(kind="tool_call")
    assert added == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "add",
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": calls[0].call_id,
        "freetoken.tool.status": "ok",
    }


async def test_errors_of_tools_are_the_status_of_their_spans(spans: Spans) -> None:
    """Oracle: the status; a tool's error is no error of the run. Nothing of it is said."""
    await Agent(ScriptedModel([Call("fail", {"text": "secret"}), "ok"]), tools=TOOLS).run("go")
    failed = named(spans(), "execute_tool fail")
    assert failed.status.status_code is StatusCode.ERROR
    assert values(failed)["error.type"] == "RuntimeError"
    assert named(spans(), "invoke_agent agent").status.status_code is StatusCode.UNSET
    assert not any("secret" in span.to_json() for span in spans())


async def test_an_error_that_ends_the_run_is_its_status(spans: Spans) -> None:
    """Oracle: the error's code, and the usage up to it."""
    made = Agent(ScriptedModel([ADD, ADD]), tools=TOOLS, limits=Limits(max_steps=1))
    with pytest.raises(RunLimit) as caught:
        await made.run("go")
    run = named(spans(), "invoke_agent agent")
    assert (run.status.status_code, run.status.description) == (StatusCode.ERROR, "run_limit")
    assert values(run)["error.type"] == "RunLimit"
    usage = caught.value.result.usage
    assert values(run)["gen_ai.usage.input_tokens"] == usage.input_tokens


async def test_an_error_of_the_model_is_the_status_of_its_call(spans: Spans) -> None:
    """Oracle: both spans end with it."""
    with pytest.raises(ZeroDivisionError):
        await Agent(ScriptedModel([ZeroDivisionError("no")])).run("go")
    for name in ("chat scripted", "invoke_agent agent"):
        assert named(spans(), name).status.status_code is StatusCode.ERROR


async def test_content_is_there_when_asked_for(spans: Spans) -> None:
    """Oracle: the texts, in the conventions' form."""
    made = Agent(ScriptedModel([["I add.", ADD], "3"]), tools=TOOLS, trace_content=True)
    result = await made.run("What is 1 + 2?")
    seen = spans()
    [asked] = json.loads(str(values(named(seen, "invoke_agent agent"))["gen_ai.input.messages"]))
    assert asked["parts"] == [{"type": "text", "content": "What is 1 + 2?"}]
    chat = next(span for span in seen if span.name == "chat scripted")
    [said] = json.loads(str(values(chat)["gen_ai.output.messages"]))
    call = result.session.find(kind="tool_call")[0]
    assert said["finish_reason"] == "tool_calls" and said["parts"] == [
        {"type": "text", "content": "I add."},
        {"type": "tool_call", "id": call.call_id, "name": "add", "arguments": {"a": 1, "b": 2}},
    ]
    added = values(named(seen, "execute_tool add"))
    assert json.loads(str(added["gen_ai.tool.call.arguments"])) == {"a": 1, "b": 2}
    assert added["gen_ai.tool.call.result"] == "3"


async def test_edits_of_rules_are_spans_with_the_model_call_they_took(
    spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracles: the events of the run, and the request that the model got for the summary."""
    model = ScriptedModel(["long " * 200, "short", "second"])
    made = Agent(model, context_rules=[Summarise(trigger=600, max_tokens=60)])
    result = await made.run("go")
    caplog.set_level("INFO", "freetoken_agent")
    async with made.run_stream("next", session=result.session) as run:
        [edit] = [event.edit async for event in run if event.type == "context_edited"]
    seen = spans()
    edited = named(seen, "edit_context summarise")
    assert parent(edited) == [s for s in seen if s.name == "invoke_agent agent"][-1].context.span_id
    assert values(edited) == {
        "gen_ai.provider.name": "freetoken",
        "gen_ai.conversation.id": result.session.name,
        "gen_ai.request.model": "scripted",
        "freetoken.branch": "main",
        "freetoken.edit.reason": "summarise",
        "freetoken.edit.added_segments": len(edit.added),
        "freetoken.edit.removed_segments": len(edit.removed),
        "freetoken.edit.input_tokens": edit.plan.input_tokens,
        "freetoken.edit.prefill_tokens": edit.plan.prefill_tokens,
    }
    [wrote] = [span for span in seen if parent(span) == edited.context.span_id]
    assert wrote.name == "chat scripted"
    assert values(wrote)["gen_ai.usage.input_tokens"] == len(model.requests[1].ids)
    assert values(wrote)["gen_ai.usage.output_tokens"] == len("short") + 1
    assert "edited by summarise" in caplog.text and str(edit.plan.prefill_tokens) in caplog.text


async def test_a_preamble_that_was_replaced_is_a_span(spans: Spans, memory_store: Store) -> None:
    """Oracle: the edit. A preamble that is new, or the same, is none."""
    model = ScriptedModel(["a", "b", "c"])
    made = Agent(model, instructions="One.")
    session = memory_store.create("s", model)
    for instructions in ("One.", "One.", "Two."):
        await made.replace(instructions=instructions).run("go", session=session)
    [edited] = [span for span in spans() if span.name.startswith("edit_context")]
    assert edited.name == "edit_context preamble"
    assert values(edited)["freetoken.edit.removed_segments"] == 1


async def test_a_run_that_is_left_ends_its_spans(spans: Spans, memory_store: Store) -> None:
    """Oracle: every span that began has ended, and none says error."""
    model = ScriptedModel([[Call("hang", {}), ADD]])
    session = memory_store.create("s", model)
    async with Agent(model, tools=TOOLS).run_stream("go", session=session) as run:
        async for event in run:
            if event.type == "tool_finished":
                break
    names = {span.name for span in spans()}
    assert names >= {"invoke_agent agent", "chat scripted", "execute_tool hang"}
    assert {span.status.status_code for span in spans()} == {StatusCode.UNSET}
    assert values(named(spans(), "execute_tool hang"))["freetoken.tool.status"] == "cancelled"


async def test_without_an_sdk_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: no content is put together, though it is asked for."""
    monkeypatch.setattr(tracing, "_message", lambda _: pytest.fail("a message was made"))
    made = Agent(ScriptedModel(["hi"]), trace_content=True)
    assert (await made.run("hello")).output == "hi"
