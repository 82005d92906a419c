# SPDX-License-Identifier: Apache-2.0
"""The acts of `demo`, each run in a process of its own: `python -m … ACT STORE MODEL`.

An act prints one JSON object per line, what it did with measured times, and checks every claim
before it prints it. `edit` does not return: it goes on writing until its parent kills it.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel, Field

from freetoken_agent.model_calls.generate_options import GenerateKwargs
from freetoken_storage.errors import FreetokenError

if TYPE_CHECKING:
    from freetoken_agent import (
        LocalModel,
        Reply,
        Result,
        ReusePlan,
        RunContext,
        Session,
        StepRequest,
        Store,
    )

SESSION = "trip"
SYSTEM = "You are a helpful travel assistant."
QUESTION = "I fly to Oslo tomorrow. What should I pack?"
WRONG = '{"forecast": "sunny, 24 degrees"}'
RIGHT = '{"forecast": "heavy snow, -8 degrees"}'
FOLLOW_UP = "And what do I need for the evening?"
SUNNY = "Tomorrow there will be bright sunshine in Oslo, 24 degrees."
SNOW = "Tomorrow there will be heavy snow in Oslo, -8 degrees."
AGENT_QUESTION = "I fly to Oslo tomorrow. What will the weather be like, and where do I sleep?"
# greedy; a small model would otherwise repeat the tool's own words
ASK: GenerateKwargs = {"max_tokens": 40, "repetition_penalty": 1.1}
Name = Annotated[str, Field(max_length=24)]
Line = Annotated[str, Field(max_length=60)]


class Trip(BaseModel):
    """What the agent answers. A model this small, left to itself, says the last result again."""

    weather: Line
    hotel: Line


class DemoFailed(FreetokenError):
    """A claim of the demo did not hold on this machine."""

    code = "demo_failed"


def notes() -> str:
    """A long tool result, so that what is reused weighs something."""
    places = ("the harbour", "a museum", "the old town", "a client", "the island", "the library")
    meals = ("fish soup", "waffles", "a sandwich", "dumplings", "nothing planned")
    lines = [
        f"day {day}, {hour}:00: {places[(day * 5 + hour) % 6]}, walk {day + hour % 7} km, "
        f"then {meals[(day + hour) % 5]}; ticket number {day * 7919 + hour}"
        for day in range(1, 8)
        for hour in (9, 12, 15, 18)
    ]
    return "\n".join(lines)


def claim(holds: bool, text: str, **values: object) -> None:
    """`text` is true, or the demo ends here and says what was seen instead."""
    if not holds:
        raise DemoFailed(f"claimed, but not so: {text}", value=values)


def tell(act: str, **facts: Any) -> None:
    """One line to the parent, at once: the next instant may be the kill."""
    typer.echo(json.dumps({"act": act} | facts))
    sys.stdout.flush()


def check_price(plan: "ReusePlan", reply: "Reply", what: str) -> None:
    """What was announced is what was paid."""
    usage = reply.usage
    paid = (usage.input_tokens, usage.reused_tokens, usage.prefill_tokens)
    predicted = (plan.input_tokens, plan.reused_tokens, plan.prefill_tokens)
    claim(predicted == paid, f"{what}: predicted = paid", predicted=predicted, paid=paid)
    claim(
        usage.reused_tokens + usage.prefill_tokens == usage.input_tokens,
        f"{what}: reused + prefilled = input",
        usage=paid,
    )


def answered(reply: "Reply") -> dict[str, Any]:
    return {
        "text": reply.text,
        "reused": reply.usage.reused_tokens,
        "prefilled": reply.usage.prefill_tokens,
        "ttft_s": reply.usage.ttft_s,
    }


def ran(result: "Result[Trip]") -> dict[str, Any]:
    claim(result.output is not None, "the agent answered", finish_reason=result.finish_reason)
    said = {} if result.output is None else result.output.model_dump()
    return {
        "text": "\n        ".join(f"{field}: {value}" for field, value in said.items()),
        "reused": result.usage.reused_tokens,
        "prefilled": result.usage.prefill_tokens,
        "ttft_s": result.usage.ttft_s,
    }


def get_weather(city: Name) -> str:
    """Tell the weather of tomorrow in a city."""
    return SUNNY


def find_hotel(city: Name) -> str:
    """Find a hotel in a city."""
    return "The Grand Hotel in Oslo has rooms for 120 euros."


def one_tool_after_another(context: "RunContext[None]", request: "StepRequest") -> "StepRequest":
    """A model this small starts no call by itself: each tool is demanded once."""
    called = {segment.tool for segment in context.session.find(kind="tool_call")}
    missing = [name for name in ("get_weather", "find_hotel") if name not in called]
    return replace(request, tool_choice=missing[0] if missing else "none")


def act_edit(store: "Store", model: "LocalModel") -> None:
    """A conversation with tools, the price of an edit, the edit, the second answer; then a third
    answer that never ends."""
    s = store.create(SESSION, model, system=SYSTEM)
    s.append("user", QUESTION)
    s.append_result(s.append_call("read_notes", {"trip": "Oslo"}), notes())
    result = s.append_result(s.append_call("get_weather", {"city": "Oslo"}), WRONG)
    plan = s.plan()
    first = s.generate_sync(**ASK)
    check_price(plan, first, "the first answer")
    tell("first", question=QUESTION, result=WRONG, segments=len(s.path()), **answered(first))

    with s.batch("correct the weather"):
        s.rewind(to=result)
        price = s.replace(result, RIGHT, dry_run=True).plan
        started = time.perf_counter()
        s.replace(result, RIGHT)
    edit_s = time.perf_counter() - started
    tell(
        "edited",
        result=RIGHT,
        edit_s=edit_s,
        input=price.input_tokens,
        reused=price.reused_tokens,
        prefilled=price.prefill_tokens,
    )
    second = s.generate_sync(**ASK)
    check_price(price, second, "the answer after the edit")
    claim(second.usage.reused_tokens > second.usage.prefill_tokens, "most tokens were reused")
    tell("second", **answered(second))

    s.append("user", FOLLOW_UP)
    asyncio.run(store.flush())
    ids = s.ids()
    segments = [segment.id for segment in s.path()]
    tell("acknowledged", segments=segments, ids=ids, question=FOLLOW_UP)
    asyncio.run(_write_until_killed(s))


async def _write_until_killed(session: "Session") -> None:
    async with session.generate(max_tokens=1000, temperature=1.0, seed=1) as generation:
        async for event in generation:
            if event.type == "text_delta":
                tell("writing", text=event.text)
    raise DemoFailed("the third answer ended before the kill", remedy="run the demo again")


def act_continue(store: "Store", model: "LocalModel") -> None:
    """The session after the kill, continued in a new process."""
    started = time.perf_counter()
    s = store.open(SESSION, model)
    open_s = time.perf_counter() - started
    tell("reopened", segments=[x.id for x in s.path()], ids=s.ids(), open_s=open_s)
    plan = s.plan()
    reply = s.generate_sync(**ASK)
    check_price(plan, reply, "the answer after the kill")
    claim(plan.source == "disk", "the state came from disk", source=plan.source)
    tell("continued", source=plan.source, **answered(reply))


def act_agent(store: "Store", model: "LocalModel") -> None:
    """An agent that uses two tools, an edit of the first one's result, and the second answer."""
    from freetoken_agent import Agent, Hooks

    agent = Agent(
        name="travel",
        instructions=SYSTEM,
        tools=[get_weather, find_hotel],
        hooks=Hooks(before_model=one_tool_after_another),
        output_type=Trip,
        sampling={**ASK, "max_tokens": 160, "parallel_tool_calls": False},
    )
    s = store.create("agent", model)
    first = agent.run_sync(AGENT_QUESTION, session=s)
    calls = [(call.tool, dict(call.arguments or {})) for call in s.find(kind="tool_call")]
    claim([name for name, _ in calls] == ["get_weather", "find_hotel"], "two tools", calls=calls)
    results = s.find(kind="tool_result")
    returned = [result.content for result in results]
    told = {"question": AGENT_QUESTION, "calls": calls, "results": returned}
    tell("agent", **told, steps=first.steps, **ran(first))

    with s.batch("correct the weather"):
        s.rewind(to=results[-1])
        price = s.replace(results[0], SNOW, dry_run=True).plan
        s.replace(results[0], SNOW)
    second = agent.run_sync(session=s)
    claim(
        (second.usage.prefill_tokens, second.usage.reused_tokens)
        == (price.prefill_tokens, price.reused_tokens),
        "the agent's second answer: predicted = paid",
        predicted=price.prefill_tokens,
        paid=second.usage.prefill_tokens,
    )
    tell("corrected", result=SNOW, planned=price.prefill_tokens, **ran(second))


def act_cold(store: "Store", model: "LocalModel") -> None:
    """The same ids without any stored state."""
    s = store.open(SESSION, model)
    reply = s.generate_sync(**ASK)
    claim(reply.usage.reused_tokens == 0, "a cold prefill reuses nothing")
    tell("cold", **answered(reply))


ACTS: dict[str, Callable[["Store", "LocalModel"], None]] = {
    "edit": act_edit,
    "continue": act_continue,
    "cold": act_cold,
    "agent": act_agent,
}


def main(act: str, folder: str, model: str) -> None:
    """Load, play, leave. An error becomes the last line, for the parent to show."""
    from freetoken_agent import LocalModel, Store

    try:
        started = time.perf_counter()
        with LocalModel.load(model) as loaded, Store(Path(folder)) as store:
            tell("loaded", load_s=time.perf_counter() - started)
            ACTS[act](store, loaded)
    except FreetokenError as error:
        tell("error", code=error.code, message=str(error))
        raise SystemExit(1) from error


if __name__ == "__main__":
    main(*sys.argv[1:])
