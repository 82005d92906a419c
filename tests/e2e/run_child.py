# SPDX-License-Identifier: Apache-2.0
"""Forks a process per job: it begins a run or resumes one, and kills itself at a named point.

stdin: one JSON job a line, {"store", "log", "kill": POINT | null, and "calls": [tool…] of a run
    that begins, or "decisions": {…} of one that is resumed, or "say" of one that goes on; "way":
    how the run is started, `run_stream` unless given}
stdout: {"finish", "output", "pending"} of a run that lived to its end, then the exit status
log: one line per execution of a tool, written by the tool itself
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freetoken_agent import Agent, Hooks, Result, RunEvent, Session, Store
from freetoken_agent.testing import Call, ScriptedModel
from freetoken_agent.tools import AnyTool, tool


class Child:
    """The agent of all these processes; `kill` says where this one dies."""

    def __init__(self, log: Path, kill: str | None) -> None:
        self._log = log
        self._kill = kill

    def agent(self, model: ScriptedModel) -> Agent[Any, str]:
        tools: list[AnyTool] = [
            tool(self.first),
            tool(self.second),
            tool(self.guarded, needs_approval=True),
        ]
        hooks = Hooks(before_tool=self._before_tool, after_tool=self._after_tool)
        return Agent(model, tools=tools, hooks=hooks)

    async def first(self) -> str:
        """Goes on for ever where the second one is to end before it."""
        self._executed("first")
        self._die_at("first runs")
        if self._kill == "second finished":
            await asyncio.Event().wait()
        return "of first"

    async def second(self) -> str:
        """Goes on for ever where the first one is to end before it."""
        self._executed("second")
        if self._kill in ("first finished", "tool_result finished"):
            await asyncio.Event().wait()
        return "of second"

    def guarded(self) -> str:
        """Needs approval."""
        self._executed("guarded")
        self._die_at("guarded runs")
        return "of guarded"

    async def play(
        self, agent: Agent[Any, str], session: Session, job: Mapping[str, Any]
    ) -> Result[str]:
        if job.get("way") == "run":
            return await agent.run(job.get("say", "go"), session=session)
        if "decisions" in job:
            stream = agent.resume_stream(session, job["decisions"])
        else:
            stream = agent.run_stream(job.get("say", "go"), session=session)
        async with stream as run:
            async for event in run:
                self._die_at(point_of(event))
            return run.result

    def _before_tool(self, *_: object) -> None:
        self._die_at("before a tool")

    def _after_tool(self, *_: object) -> None:
        self._die_at("after a tool")

    def _die_at(self, point: str) -> None:
        if point == self._kill:
            os.kill(os.getpid(), signal.SIGKILL)

    def _executed(self, name: str) -> None:
        with self._log.open("a") as log:
            log.write(name + "\n")


def point_of(event: RunEvent) -> str:
    """The name of the moment at which a reader has this event."""
    if event.type == "tool_finished":
        return f"{event.call.tool} finished"
    if event.type == "segment_finished":
        return f"{event.segment.kind} finished"
    return event.type


def play_job(job: Mapping[str, Any]) -> None:
    child = Child(Path(job["log"]), job["kill"])
    calls = [Call(name, {}) for name in job.get("calls", [])]
    model = ScriptedModel([calls, "done"] if calls else ["done"])
    with Store(job["store"]) as store:
        session = store.create("s", model, exist_ok=True)
        agent = child.agent(model)
        if job.get("way") == "run_sync":
            result = agent.run_sync(job.get("say", "go"), session=session)
        else:
            result = asyncio.run(child.play(agent, session, job))
    pending = {call.tool: call.call_id for call in result.pending}
    said = {"finish": result.finish_reason, "output": result.output, "pending": pending}
    os.write(1, json.dumps(said).encode() + b"\n")


def main() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                play_job(json.loads(line))
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        os.write(1, f"{os.waitstatus_to_exitcode(status)}\n".encode())


if __name__ == "__main__":
    main()
