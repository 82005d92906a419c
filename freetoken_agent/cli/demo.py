# SPDX-License-Identifier: Apache-2.0
"""`demo`: what this project does, told on a real model, with times measured while it is told.

The acts run in processes of their own (`demo_acts`), because one of them is killed with SIGKILL.
Every claim that is printed was checked; one that does not hold ends the demo with an error.
"""

import json as jsonlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from .demo_acts import DemoFailed, claim
from .opening import ModelName
from .output import Json, console, emit, error_console, wants_json

Facts = dict[str, Any]

_DELTAS_BEFORE_THE_KILL = 5


def demo_command(model: ModelName = "smollm2", json: Json = False) -> None:
    """A conversation, an edit, a kill, a new process and an agent: with prices and times."""
    story = Story(model)
    with tempfile.TemporaryDirectory(prefix="freetoken-demo-") as folder:
        store, cold_store = Path(folder) / "store", Path(folder) / "cold"
        story.play("edit", store, kill=True)
        shutil.copytree(store, cold_store, ignore=shutil.ignore_patterns("states"))
        story.play("continue", store)
        story.play("cold", cold_store)
        story.play("agent", store)
    told = story.told
    _say("")
    emit(told, _summary(told))


class Story:
    """Plays acts and tells them as they happen. `told`: the last facts of each kind."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.told: dict[str, Facts] = {}

    def play(self, act: str, store: Path, *, kill: bool = False) -> None:
        """One act in a process of its own; with `kill`, SIGKILL ends it while it writes."""
        deltas = 0
        with _process(act, store, self._model) as child:
            for facts in _lines(child):
                self._tell(facts)
                deltas += facts["act"] == "writing"
                if kill and deltas == _DELTAS_BEFORE_THE_KILL:
                    child.send_signal(signal.SIGKILL)
            status = child.wait()
        expected = -signal.SIGKILL if kill else 0
        claim(status == expected, f"the process of {act!r} ended so", status=status)
        if kill:
            _say("\n\n[bold red]SIGKILL[/] while it was writing")

    def _tell(self, facts: Facts) -> None:
        self.told[facts["act"]] = facts
        match facts["act"]:
            case "loaded":
                _say(f"\n[bold]A process loads the model[/] ({facts['load_s']:.1f} s)")
            case "first":
                _say(f"\n[cyan]user[/]    {facts['question']}")
                _say("[yellow]tool[/]    read_notes(trip='Oslo') → 28 lines")
                _say(f"[yellow]tool[/]    get_weather(city='Oslo') → {facts['result']}")
                _answer(facts)
            case "edited":
                _say("\n[bold]The tool was wrong. Drop the answer, correct the result:[/]")
                _say(f"[yellow]tool[/]    get_weather(city='Oslo') → {facts['result']}")
                _say(
                    f"  [dim]the plan: {facts['input']} tokens, reuse {facts['reused']}, "
                    f"forward {facts['prefilled']}; "
                    f"the edit took {facts['edit_s'] * 1e3:.1f} ms[/]"
                )
            case "second":
                _answer(facts)
                _say("  [dim]as planned[/]")
            case "acknowledged":
                _say(f"\n[cyan]user[/]    {facts['question']}\n[green]model[/]   ", end="")
            case "writing":
                _say(facts["text"], end="", markup=False)
            case "reopened":
                _say(f"[bold]and reopens the session[/] ({facts['open_s'] * 1e3:.0f} ms)")
                _check_nothing_lost(self.told["acknowledged"], facts)
            case "continued":
                _answer(facts)
            case "cold":
                _say("[bold]and has the same tokens without any stored state[/]")
                _answer(facts)
                _check_same_answer(self.told["continued"], facts)
            case _:
                self._tell_agent(facts)

    def _tell_agent(self, facts: Facts) -> None:
        if facts["act"] == "agent":
            _say(f"\n[bold]An agent[/]\n[cyan]user[/]    {facts['question']}")
            for (name, arguments), result in zip(facts["calls"], facts["results"], strict=True):
                said = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
                _say(f"[yellow]tool[/]    {name}({said}) → {result}")
            _answer(facts)
            return
        _say("\n[bold]The weather is corrected, in the middle of its run:[/]")
        _say(f"[yellow]tool[/]    get_weather → {facts['result']}")
        _answer(facts)
        _say(f"  [dim]{facts['planned']} were planned[/]")


@contextmanager
def _process(act: str, store: Path, model: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "freetoken_agent.cli.demo_acts", act, str(store), model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def _lines(child: "subprocess.Popen[str]") -> Iterator[Facts]:
    assert child.stdout is not None
    for line in child.stdout:
        facts = jsonlib.loads(line)
        if facts["act"] == "error":
            raise DemoFailed(facts["message"], value=facts["code"])
        yield facts


def _check_nothing_lost(before: Facts, after: Facts) -> None:
    claim(
        before["segments"] == after["segments"] and before["ids"] == after["ids"],
        "every acknowledged segment and token is there after the kill",
        before=len(before["segments"]),
        after=len(after["segments"]),
    )
    _say(f"  all {len(after['segments'])} acknowledged segments are there, token for token")


def _check_same_answer(continued: Facts, cold: Facts) -> None:
    claim(
        continued["text"] == cold["text"],
        "the answer equals that of a cold prefill of the same tokens",
        continued=continued["text"],
        cold=cold["text"],
    )
    _say("  its answer is the same, token for token")


def _answer(facts: Facts) -> None:
    _say("[green]model[/]   ", end="")
    _say(facts["text"].strip(), markup=False)
    _say(
        f"  [dim]reused {facts['reused']}, prefilled {facts['prefilled']}, "
        f"first token after {facts['ttft_s']:.2f} s[/]"
    )


def _summary(told: dict[str, Facts]) -> Table:
    table = Table("", "reused", "prefilled", "first token after", box=None, pad_edge=False)
    rows = {
        "first": "first answer",
        "second": "after the edit",
        "continued": "after the kill, new process",
        "cold": "the same, cold",
        "agent": "an agent's run, three model calls",
        "corrected": "after an edit in its middle",
    }
    for act, label in rows.items():
        facts = told[act]
        time_s = f"{facts['ttft_s']:.3f} s"
        table.add_row(label, str(facts["reused"]), str(facts["prefilled"]), time_s)
    return table


def _say(text: str, *, end: str = "\n", markup: bool = True) -> None:
    """The story goes to standard output, or to standard error beside a JSON report."""
    out = error_console() if wants_json() else console()
    out.print(text, end=end, markup=markup)
