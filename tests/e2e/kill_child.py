# SPDX-License-Identifier: Apache-2.0
"""Forks a worker per job, so that it can be killed without paying for imports each time.

stdin: one JSON job a line, {"store", "model", "log", "seed", "steps", "threads"}
stdout: the worker's pid, then its exit status
log: one JSON line per acknowledged step, {"step", "branch", "ids"}, written before the next begins

A worker's program depends on the seed alone, so a second, undisturbed worker says what each step
must lead to.
"""

import asyncio
import json
import os
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import freetoken_runtime.engine  # noqa: F401  (imported before the forks)
from freetoken_agent import LocalModel, Session, Store
from freetoken_agent.events import SegmentFinished
from freetoken_runtime import EngineConfig

Acknowledge = Callable[[Session], None]


class Program:
    """Random edits and generations on the branches of one session."""

    def __init__(self, session: Session, seed: int, acknowledge: Acknowledge) -> None:
        self._branches = [session]
        self._random = random.Random(seed)
        self._acknowledge = acknowledge

    async def step(self) -> None:
        session = self._random.choice(self._branches)
        action = self._random.choice(
            [self._say, self._say, self._tool, self._edit, self._remove, self._back, self._branch]
        )
        await action(session)

    def _words(self, count: int) -> str:
        return " ".join(f"{self._random.randrange(1000):03}" for _ in range(count))

    async def _say(self, session: Session) -> None:
        session.append("user", self._words(self._random.randrange(1, 20)))
        self._acknowledge(session)
        async with session.generate(max_tokens=self._random.randrange(1, 12)) as generation:
            async for event in generation:
                if isinstance(event, SegmentFinished):
                    self._acknowledge(session)

    async def _tool(self, session: Session) -> None:
        with session.batch():
            call = session.append_call("ls", {"path": self._words(1)})
            session.append_result(call, self._words(self._random.randrange(1, 30)))
        self._acknowledge(session)

    async def _edit(self, session: Session) -> None:
        targets = session.find(kind="user") + session.find(kind="tool_result")
        if targets:
            session.replace(self._random.choice(targets), self._words(5))
            self._acknowledge(session)

    async def _remove(self, session: Session) -> None:
        targets = session.find(kind="tool_result") + session.find(kind="system")
        if targets:
            session.delete(self._random.choice(targets))
            self._acknowledge(session)

    async def _back(self, session: Session) -> None:
        if len(session.path()) > 3 and session.version > 2:
            session.undo()
            self._acknowledge(session)

    async def _branch(self, session: Session) -> None:
        if len(self._branches) < 3 and len(session.path()) > 1:
            fork = session.fork(name=f"b{len(self._branches)}")
            self._branches.append(fork)
            self._acknowledge(fork)


async def run(job: Mapping[str, Any]) -> None:
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    step = 0

    def acknowledge(session: Session) -> None:
        line = {"step": step, "branch": session.branch, "ids": session.ids()}
        os.write(log, json.dumps(line).encode() + b"\n")

    config = EngineConfig(dtype="float32", threads=job["threads"])
    with LocalModel.load(job["model"], config=config) as model, Store(job["store"]) as store:
        session = store.create("killed", model, system="You are helpful.")
        program = Program(session, job["seed"], acknowledge)
        acknowledge(session)
        for step in range(1, job["steps"] + 1):
            await program.step()
            if step % 5 == 0:
                await store.flush()


def main() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            asyncio.run(run(json.loads(line)))
            os._exit(0)
        os.write(1, f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        os.write(1, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)  # nothing to tidy up, and the interpreter's own tidying takes seconds


if __name__ == "__main__":
    main()
