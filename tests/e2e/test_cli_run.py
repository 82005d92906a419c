# SPDX-License-Identifier: Apache-2.0
"""`run` on SmolLM2, as a user starts it: two commands on one session, in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
from typing import Literal

from freetoken_agent import Agent, Hooks, RunContext, StepRequest, tool


@tool
async def weather(city: Literal["Oslo", "Paris", "Lima"]) -> str:
    \"\"\"The weather in a city.\"\"\"
    return f"It is 7 degrees and raining in {city}."


def before_model(context: RunContext[None], _: StepRequest) -> StepRequest:
    if context.step == 0:
        return StepRequest(tool_choice="weather")
    return StepRequest(tool_choice="none", max_tokens=24)


agent = Agent(
    "smollm2",
    instructions="You help with the weather.",
    tools=[weather],
    hooks=Hooks(before_model=before_model),
    sampling={"parallel_tool_calls": False},
)
"""


@pytest.mark.smollm2
@pytest.mark.slow
def test_an_agent_of_a_file_runs_on_smollm2(tmp_path: Path, smollm2_path: Path) -> None:
    """Oracles: the tool's own text; the counts of the second command: what the first one had
    forwarded comes from the store, in another process."""
    program = tmp_path / "weather.py"
    program.write_text(PROGRAM)

    def run(message: str) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "freetoken_agent.cli", "run", f"{program}:agent", message]
        options = ["--session", "w", "--store", str(tmp_path / "store"), "--json"]
        done = subprocess.run(
            [*command, *options],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    first = run("What is the weather in Oslo?")
    [finished] = [event for event in first if event["type"] == "tool_finished"]
    assert finished["status"] == "ok" and finished["text"].startswith("It is 7 degrees")
    second = run("And in Lima?")
    usages = [e["reply"]["usage"] for e in (*first, *second) if e["type"] == "reply_finished"]
    assert len(usages) == 4
    for usage in usages:
        assert usage["reused_tokens"] + usage["prefill_tokens"] == usage["input_tokens"]
    assert usages[0]["reused_tokens"] == 0
    before = usages[1]["input_tokens"]
    assert usages[2]["reused_tokens"] >= before and usages[2]["prefill_tokens"] < before / 4
