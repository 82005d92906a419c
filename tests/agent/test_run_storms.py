# SPDX-License-Identifier: Apache-2.0
"""Runs that are stopped anywhere, in any way, decided about at random, resumed and gone on from."""

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any

import pytest

from freetoken_agent import (
    Agent,
    Limits,
    NothingToGenerate,
    RunLimit,
    Segment,
    Session,
    Store,
    ToolFailed,
)
from freetoken_agent.runs.run_tools import DENIED, TOO_MANY
from freetoken_agent.testing import Call, Request, ScriptedModel
from freetoken_agent.tools import tool

Check = Callable[[Session], None]


class Storm:
    """One session under random runs. The tools note each execution by a number of its own."""

    def __init__(self, seed: int, store: Store, check_pairs: Check) -> None:
        self._rng = random.Random(seed)
        self._check_pairs = check_pairs
        self._executed: list[int] = []
        self._numbers: Iterator[int] = count()
        model = ScriptedModel([self._step] * 400)
        limits = Limits(max_steps=4, on_limit=self._rng.choice(["raise", "answer"]))
        self._agent: Agent[Any, str] = Agent(model, tools=self._tools(), limits=limits)
        self._session = store.create("s", model)

    async def run(self, turns: int) -> None:
        for _ in range(turns):
            task = asyncio.create_task(self._turn())
            with suppress(RunLimit, NothingToGenerate, asyncio.CancelledError):
                await task
            self._check()

    def _tools(self) -> list[Any]:
        @tool
        async def work(number: int) -> str:
            """Work."""
            self._executed.append(number)
            await asyncio.sleep(self._rng.choice([0, 0, 0.001]))
            if self._rng.random() < 0.2:
                raise ToolFailed(f"done, but not well: {number}")
            return f"done: {number}"

        @tool(needs_approval=True)
        def guarded(number: int) -> str:
            """Work that somebody must allow."""
            self._executed.append(number)
            return f"done: {number}"

        return [work, guarded]

    def _step(self, _: Request) -> Any:
        names = [self._rng.choice(["work", "work", "guarded"]) for _ in range(3)]
        calls = [Call(name, {"number": next(self._numbers)}) for name in names]
        return calls[: self._rng.randint(1, 3)] if self._rng.random() < 0.5 else "answer"

    async def _turn(self) -> None:
        """Begin a run or resume one, and stop it at some event, or not at all."""
        waiting = self._session.begin_run().open_calls()
        if waiting and self._rng.random() < 0.7:
            stream = self._agent.resume_stream(self._session, self._decisions(waiting))
        else:
            stream = self._agent.run_stream("go", session=self._session)
        how = self._rng.choice(["leave", "cancel", "after_step", "task", "nothing"])
        left = self._rng.randint(1, 25)
        async with stream as run:
            async for event in run:
                left -= not event.type.endswith("_delta")
                if left > 0:
                    continue
                match how:
                    case "leave":
                        return
                    case "cancel":
                        run.cancel()
                    case "after_step":
                        run.cancel("after_step")
                    case "task":
                        task = asyncio.current_task()
                        assert task is not None
                        task.cancel()

    def _decisions(self, waiting: list[Segment]) -> dict[str, bool | str]:
        """About some of the calls that nobody has decided about."""
        writer = self._session.begin_run()
        choices: list[bool | str] = [True, False, "not that one"]
        return {
            str(call.call_id): self._rng.choice(choices)
            for call in waiting
            if call.tool == "guarded" and writer.mark_of(call) is None and self._rng.random() < 0.6
        }

    def _check(self) -> None:
        """Pairs; no second execution; a result says "done" of what was executed, and that it was
        not allowed of what was not; no task is left."""
        self._check_pairs(self._session)
        assert len(self._executed) == len(set(self._executed))
        path = self._session.path()
        calls = {s.call_id: s for s in path if s.kind == "tool_call"}
        for result in self._session.find(kind="tool_result"):
            arguments = calls[result.call_id].arguments
            assert arguments is not None
            was_executed = arguments["number"] in self._executed
            if result.content.startswith("done"):
                assert was_executed and result.content.endswith(f": {arguments['number']}")
            elif result.content in (DENIED, TOO_MANY, "not that one"):
                assert not was_executed
        assert asyncio.all_tasks() == {asyncio.current_task()}


def storm(seed: int, check_pairs: Check) -> None:
    with Store(":memory:") as store:
        asyncio.run(Storm(seed, store, check_pairs).run(12))


@pytest.mark.parametrize("seed", range(25))
def test_s11_runs_that_are_stopped_anywhere_keep_every_invariant(
    check_pairs: Check, seed: int
) -> None:
    """Oracles: the tools' own list of executions, and the pairs."""
    storm(seed, check_pairs)


@pytest.mark.slow
def test_s11_many_runs_that_are_stopped_anywhere(check_pairs: Check) -> None:
    """The same, more often."""
    for seed in range(25, 325):
        storm(seed, check_pairs)
