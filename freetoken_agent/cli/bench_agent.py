# SPDX-License-Identifier: Apache-2.0
"""What the agent layer costs: per token and per step on a model that costs nothing, and beside the
forward pass on a real one, after an edit and behind a tool that takes its time."""

import asyncio
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from freetoken_runtime.bench.timing import Figure, OnTurn, Target

from .bench_sessions import SessionSettings, loaded, words

if TYPE_CHECKING:
    from freetoken_agent import Agent, LocalModel, RunContext, Session, StepRequest

TOKEN_MS, STEP_MS = Target("at_most", 0.2), Target("at_most", 5.0)
EDITED, WARMED = Target("at_most", 1.2), Target("at_most", 1.3)
STEPS = 40
TEXT_CHARS = 4000
_TOOL_S = 2.0
_RESULT_WORDS = 260  # about as many tokens

Short = Annotated[str, Field(max_length=24)]


async def look_up(name: Short) -> str:
    """Look something up; it takes a while."""
    await asyncio.sleep(_TOOL_S)
    return words(random.Random(name), _RESULT_WORDS)


def note(text: Short) -> str:
    """Note a text."""
    return f"noted: {text}"


def measure_overhead(rounds: int, *, on_turn: OnTurn | None = None) -> list[Figure]:
    """On a scripted model and a store in memory: what a token and a step cost beside the model."""
    token_s, step_s = [], []
    for number in range(rounds):
        token_s.append(_token_s())
        step_s.append(_step_s(token_s[-1]))
        if on_turn is not None:
            on_turn(number + 1, rounds)
    return [
        Figure("agent: a decoded token", 1e3 * statistics.median(token_s), "ms", target=TOKEN_MS),
        Figure(
            "agent: a step with a call",
            1e3 * statistics.median(step_s),
            "ms",
            target=STEP_MS,
            note=f"{STEPS} steps",
        ),
    ]


def _token_s() -> float:
    from freetoken_agent import Agent
    from freetoken_agent.testing import ScriptedModel

    text = words(random.Random(0), TEXT_CHARS // 6)[:TEXT_CHARS]
    agent = Agent(ScriptedModel([text]), sampling={"max_tokens": 2 * TEXT_CHARS})
    with_agent = _seconds(lambda: agent.run_sync("go"))
    model = ScriptedModel([text])
    ids = model.tokenizer.encode_frame("<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n")
    alone = _seconds(lambda: list(_stream(model, ids)))
    return max(0.0, with_agent - alone) / len(text)


def _stream(model: Any, ids: list[int]) -> Any:
    from freetoken_agent.model import SamplingOptions

    sampling = SamplingOptions(max_tokens=2 * TEXT_CHARS, stop_ids=model.format.closers)
    return model.generate(ids, sampling)


def _step_s(token_s: float) -> float:
    from freetoken_agent import Agent, Limits
    from freetoken_agent.testing import Call, ScriptedModel

    model = ScriptedModel([*[Call("note", {"text": "a"})] * STEPS, "done"])
    agent = Agent(model, tools=[note], limits=Limits(max_steps=None))
    started = time.perf_counter()
    result = agent.run_sync("go")
    seconds = time.perf_counter() - started
    return (seconds - token_s * result.usage.output_tokens) / STEPS


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@dataclass(frozen=True)
class FirstToken:
    """How long somebody waited for a token, and how much of it was forward pass."""

    waited_s: float
    forward_s: float

    @property
    def ratio(self) -> float:
        return self.waited_s / self.forward_s


def measure_agent(
    settings: SessionSettings, folder: Path, *, on_turn: OnTurn | None = None
) -> list[Figure]:
    """On a real model: the answer after an edit in the middle of a run, and the first token behind
    a slow tool."""
    edited, warmed = [], []
    with loaded(settings, folder) as (model, store):
        for number in range(settings.rounds):
            session = store.create(f"agent {number}", model)
            warmed.append(asyncio.run(_behind_the_tool(_agent(), session, model)))
            edited.append(asyncio.run(_after_the_edit(_agent(), session, model, number)))
            if on_turn is not None:
                on_turn(number + 1, settings.rounds)
    return [
        _figure("agent: first token after an edit", edited, EDITED),
        _figure(f"agent: first token behind a tool of {_TOOL_S:g} s", warmed, WARMED),
    ]


def _figure(name: str, found: list[FirstToken], target: Target) -> Figure:
    return Figure(
        name,
        1e3 * statistics.median(one.waited_s for one in found),
        "ms",
        baseline=1e3 * statistics.median(one.forward_s for one in found),
        ratio=statistics.median(one.ratio for one in found),
        target=target,
        note="the forward pass alone",
    )


def _agent() -> "Agent[Any, str]":
    from freetoken_agent import Agent, Hooks

    return Agent(
        instructions="You are a helpful assistant.",
        tools=[look_up],
        hooks=Hooks(before_model=_one_call),
        sampling={"max_tokens": 40, "parallel_tool_calls": False},
    )


def _one_call(context: "RunContext[Any]", request: "StepRequest") -> "StepRequest":
    from freetoken_agent import StepRequest

    called = bool(context.session.find(kind="tool_call"))
    return StepRequest(tool_choice="none" if called else "look_up")


async def _behind_the_tool(
    agent: "Agent[Any, str]", session: "Session", model: "LocalModel"
) -> FirstToken:
    ended_s = forward_s = 0.0
    found = None
    async with agent.run_stream("Look up Oslo, and tell me about it.", session=session) as run:
        async for event in run:
            if event.type == "tool_finished":
                ended_s, forward_s = time.perf_counter(), model.stats().forward_s
            elif event.type == "text_delta" and ended_s and found is None:
                waited_s = time.perf_counter() - ended_s
                found = FirstToken(waited_s, model.stats().forward_s - forward_s)
    assert found is not None, "the model wrote an answer"
    return found


async def _after_the_edit(
    agent: "Agent[Any, str]", session: "Session", model: "LocalModel", number: int
) -> FirstToken:
    [result] = session.find(kind="tool_result")
    session.rewind(to=result)
    session.replace(result, words(random.Random(f"edit {number}"), _RESULT_WORDS))
    before_s, started = model.stats().forward_s, time.perf_counter()
    found = None
    async with agent.run_stream(session=session) as run:
        async for event in run:
            if event.type == "text_delta" and found is None:
                waited_s = time.perf_counter() - started
                found = FirstToken(waited_s, model.stats().forward_s - before_s)
    assert found is not None, "the model wrote an answer"
    return found
