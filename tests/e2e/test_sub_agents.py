# SPDX-License-Identifier: Apache-2.0
"""Sub-agents on forks of one point, at the same time, on a real engine."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from freetoken_agent import Agent, Hooks, LocalModel, Reply, RunContext, Store
from freetoken_agent.tools import tool
from freetoken_runtime import EngineConfig

CONFIG = EngineConfig(dtype="float32", threads=1)
PREAMBLE = "You look things up. " * 40


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@pytest.mark.parametrize("known", [True, False], ids=["known", "cold"])
async def test_three_sub_agents_forward_what_they_share_once(
    folder_of: Callable[[str], Path], family: str, known: bool
) -> None:
    """Oracle: the rows that the engine counts over all requests, and those that each model call
    paid. Each agent waits in its tool until the others are in theirs, so that they do run at the
    same time. Cold: nobody has forwarded what they share when the three begin."""
    everybody = asyncio.Barrier(3)
    replies: dict[str, list[Reply]] = {}

    @tool
    async def meet(place: Literal["here", "there"]) -> str:
        """Wait for the others."""
        await everybody.wait()
        return place

    def note(context: RunContext[Any], reply: Reply) -> None:
        replies.setdefault(context.session.branch, []).append(reply)

    made: Agent[Any, Any] = Agent(
        tools=[meet],
        prompt_policy="keep",
        hooks=Hooks(after_model=note),
        sampling={"max_tokens": 80, "thinking": False, "parallel_tool_calls": False},
    )
    with LocalModel.load(folder_of(family), config=CONFIG) as model, Store(":memory:") as store:
        main = store.create("s", model, system=PREAMBLE, tools=[meet])
        main.append("user", "Remember: " + "facts " * 30)
        main.append("assistant", "I do.")
        if known:
            await main.warm()
        shared = len(main.ids())
        before = model.stats().forward_rows
        forks = [main.fork(name=f"sub{number}") for number in range(3)]
        asked = [f"Look at part {number}." for number in range(3)]
        runs = (
            made.run(content, session=fork, tool_choice="required")
            for content, fork in zip(asked, forks, strict=True)
        )
        results = await asyncio.gather(*runs)
        rows = model.stats().forward_rows - before

    assert [len(r.session.find(kind="tool_result")) for r in results] == [1, 1, 1]
    first = [told[0].usage for told in replies.values()]
    later = [told[1].usage for told in replies.values()]
    own = [usage.input_tokens - shared for usage in first]
    assert sum(u.prefill_tokens for u in first) <= (0 if known else shared) + sum(own)
    assert all(usage.prefill_tokens < shared / 4 for usage in later)
    paid = sum(result.usage.prefill_tokens for result in results)
    written = sum(result.usage.output_tokens for result in results)
    # What was sampled last is forwarded later, or never; warming while tools run pays for some.
    assert paid + written - 2 * len(results) <= rows <= paid + written
    assert (rows < shared) is known
