# SPDX-License-Identifier: Apache-2.0
"""SIGKILL in the middle of runs: each process begins, resumes and kills itself (run_child.py).

The tools append a line to a file for each execution: what ran, and how often, is read from there.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from freetoken_agent import Store
from freetoken_agent.branches.pairing import INTERRUPTED
from freetoken_agent.testing import ScriptedModel

CHILD = Path(__file__).with_name("run_child.py")


class Forker:
    """The process that forks those that are killed; see run_child.py."""

    def __init__(self) -> None:
        child = [sys.executable, "-W", "error", str(CHILD)]
        self._process = subprocess.Popen(
            child, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def play(self, job: dict[str, Any]) -> dict[str, Any]:
        """What the job's process said; nothing if it was to die."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        said: dict[str, Any] = {}
        line = json.loads(self._process.stdout.readline())
        if isinstance(line, dict):
            said, line = line, json.loads(self._process.stdout.readline())
        assert line == (0 if job["kill"] is None else -signal.SIGKILL), (line, job)
        return said

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


class Processes:
    """Processes that work on one store, one after the other."""

    def __init__(self, forker: Forker, folder: Path) -> None:
        self._forker = forker
        self._store, self._log = folder / "store", folder / "log"

    def begin(self, *calls: str, kill: str | None = None) -> dict[str, Any]:
        """A run whose model calls these tools at once."""
        return self._play({"calls": calls, "kill": kill})

    def go_on(self, way: str, *calls: str, say: str, kill: str | None = None) -> dict[str, Any]:
        """A run that is started in this way with another message."""
        return self._play({"way": way, "say": say, "calls": calls, "kill": kill})

    def resume(self, kill: str | None = None, /, **decisions: object) -> dict[str, Any]:
        """Resume with decisions by the tool's name."""
        ids = self.call_ids()
        by_id = {ids[name]: decision for name, decision in decisions.items()}
        return self._play({"decisions": by_id, "kill": kill})

    def executed(self) -> list[str]:
        return sorted(self._log.read_text().splitlines()) if self._log.exists() else []

    def call_ids(self) -> dict[str, str]:
        with Store(self._store) as store:
            calls = store.open("s").find(kind="tool_call")
        return {str(call.tool): str(call.call_id) for call in calls}

    def results(self) -> list[str]:
        """What stands on the path, in order."""
        with Store(self._store) as store:
            return [segment.content for segment in store.open("s").find(kind="tool_result")]

    def kinds(self) -> list[str]:
        with Store(self._store) as store:
            return [segment.kind for segment in store.open("s").path()]

    def rewind_to_call(self) -> None:
        """Go back to the last call, as a user's program would."""
        with Store(self._store) as store:
            session = store.open("s", ScriptedModel())
            session.rewind(to=session.find(kind="tool_call")[-1])

    def _play(self, job: dict[str, Any]) -> dict[str, Any]:
        paths = {"store": str(self._store), "log": str(self._log)}
        return self._forker.play({**paths, **job})


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    forker = Forker()
    yield forker
    forker.close()


@pytest.fixture
def processes(forker: Forker, tmp_path: Path) -> Processes:
    return Processes(forker, tmp_path)


@pytest.mark.parametrize("point", ["tool_call_ready", "reply_finished", "before a tool"])
def test_calls_never_started_are_executed_by_whoever_resumes(
    processes: Processes, point: str
) -> None:
    """Oracle: nothing ran before the kill, each tool once after it."""
    processes.begin("first", "second", kill=point)
    assert processes.executed() == []
    called = processes.call_ids()  # at `tool_call_ready` the model was still writing the second
    assert processes.resume()["output"] == "done"
    assert processes.executed() == sorted(called)
    assert processes.results() == [f"of {name}" for name in called]


def test_a_call_killed_while_it_ran_is_interrupted_not_run_again(processes: Processes) -> None:
    """Oracle: one execution in all."""
    processes.begin("first", kill="first runs")
    assert processes.resume() == {"finish": "stop", "output": "done", "pending": {}}
    assert processes.executed() == ["first"]
    assert processes.results() == [INTERRUPTED]


def test_a_call_killed_while_it_ran_runs_again_if_somebody_says_so(processes: Processes) -> None:
    """Oracle: a second execution, whose result is used."""
    processes.begin("first", kill="first runs")
    assert processes.resume(first=True)["output"] == "done"
    assert processes.executed() == ["first", "first"]
    assert processes.results() == ["of first"]


@pytest.mark.parametrize("way", ["run", "run_sync", "run_stream"])
@pytest.mark.parametrize("point", ["before a tool", "first runs"])
def test_s14_killed_between_call_and_result_then_prompted_again(
    processes: Processes, way: str, point: str
) -> None:
    """Oracle: the pair is closed as interrupted before what is said next, which is answered; the
    tool's own log: nothing ran behind anybody's back."""
    processes.go_on(way, "first", "second", say="go", kill=point)
    executed = processes.executed()
    assert processes.go_on(way, say="and now?")["output"] == "done"
    assert processes.results() == [INTERRUPTED, INTERRUPTED]
    assert processes.executed() == executed == ([] if point == "before a tool" else ["first"])
    assert processes.kinds()[-6:] == [
        "tool_call", "tool_call", "tool_result", "tool_result", "user", "text",
    ]  # fmt: skip


def test_rewind_forgets_that_a_call_was_started(processes: Processes) -> None:
    """Oracle: it runs again without a decision, as a call never started."""
    processes.begin("first", "second", kill="second finished")
    processes.rewind_to_call()
    assert processes.resume()["output"] == "done"
    assert processes.executed() == ["first", "first", "second", "second"]
    assert processes.results() == ["of first", "of second"]


@pytest.mark.parametrize("point", ["first finished", "second finished", "tool_result finished"])
def test_a_finished_result_is_used_though_another_call_was_killed(
    processes: Processes, point: str
) -> None:
    """Oracle: one execution of each; the unfinished one is interrupted."""
    processes.begin("first", "second", kill=point)
    assert processes.resume()["output"] == "done"
    assert processes.executed() == ["first", "second"]
    unfinished = 0 if point == "second finished" else 1
    expected = ["of first", "of second"]
    expected[unfinished] = INTERRUPTED
    assert processes.results() == expected


def test_a_kill_while_a_hook_sees_a_result_costs_no_second_execution(processes: Processes) -> None:
    """Oracle: one execution, whose result is used."""
    processes.begin("first", kill="after a tool")
    assert processes.resume()["output"] == "done"
    assert processes.executed() == ["first"] and processes.results() == ["of first"]


def test_a_kill_after_the_results_costs_no_second_execution(processes: Processes) -> None:
    """Oracle: one execution of each, and an answer."""
    processes.begin("first", "second", kill="step_finished")
    assert processes.resume()["output"] == "done"
    assert processes.executed() == ["first", "second"]


def test_an_approval_asked_in_one_process_is_granted_in_another(processes: Processes) -> None:
    """Oracle: nothing of the step ran before the decision; each call once after it."""
    processes.begin("guarded", "first", kill="approval_request")
    assert processes.executed() == []
    assert processes.resume()["pending"].keys() == {"guarded", "first"}  # nobody has decided
    assert processes.resume(guarded=True)["output"] == "done"
    assert processes.executed() == ["first", "guarded"]
    assert processes.results() == ["of guarded", "of first"]


def test_a_decision_outlives_the_process_that_was_told(processes: Processes) -> None:
    """Oracle: the second process is killed before the tool starts; the third is not asked again."""
    processes.begin("guarded", kill="approval_request")
    processes.resume("before a tool", guarded=True)
    assert processes.executed() == []
    assert processes.resume()["output"] == "done"
    assert processes.executed() == ["guarded"]


def test_an_approved_call_that_was_killed_is_not_run_again_by_itself(processes: Processes) -> None:
    """Oracle: one execution; the approval was for that one."""
    processes.begin("guarded", kill="approval_request")
    processes.resume("guarded runs", guarded=True)
    assert processes.resume()["output"] == "done"
    assert processes.executed() == ["guarded"]
    assert processes.results() == [INTERRUPTED]


def test_a_denial_outlives_a_kill(processes: Processes) -> None:
    """Oracle: the text that denied it, and no execution."""
    processes.begin("guarded", "first", kill="approval_request")
    processes.resume("before a tool", guarded="Ask Ann first.")
    assert processes.resume()["output"] == "done"
    assert processes.executed() == ["first"]
    assert processes.results() == ["Ask Ann first.", "of first"]
