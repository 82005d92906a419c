# SPDX-License-Identifier: Apache-2.0
"""`run` on agents of Python files; their models play scripts. Oracles: the session, read beside the
command, and the script."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from typer.testing import CliRunner, Result

from freetoken_agent import RunEvent, Session, Store
from freetoken_agent.cli import run as run_module
from freetoken_agent.cli.main import app
from freetoken_agent.testing import ScriptedModel

PROGRAM = """
from freetoken_agent import Agent, tool
from freetoken_agent.testing import Call, ScriptedModel


@tool(needs_approval=True)
def remove(path: str) -> str:
    return f"removed {path}"


@tool
def fail(text: str) -> str:
    raise ValueError(text)


def made(*script):
    return Agent(ScriptedModel(script), name="cleaner", tools=[remove, fail])


talker = made("Hello [b]there[/b].")
busy = made(["I try.", Call("fail", {"text": "broken"})], "It broke.")
cleaner = made(Call("remove", {"path": "a.txt"}), "Done.")
resting = made("Done.", "Later.")
without_model = Agent(name="lost")
number = 5
"""


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command adds to it is for its own process."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "agents_of_a_test.py"
    file.write_text(PROGRAM)
    return file


@pytest.fixture
def play(program: Path, tmp_path: Path) -> Any:
    def play(name: str, *rest: str, stdin: str | None = None) -> Result:
        arguments = ["run", f"{program}:{name}", *rest, "--store", str(tmp_path / "store")]
        return CliRunner().invoke(app, arguments, input=stdin)

    return play


def read(tmp_path: Path) -> Session:
    """The session as it is stored; closed again, so only what was read is known."""
    with Store(tmp_path / "store") as store:
        return store.open("kept", ScriptedModel())


def events(result: Result) -> list[Any]:
    adapter: TypeAdapter[Any] = TypeAdapter(RunEvent)
    return [adapter.validate_json(line) for line in result.stdout.splitlines()]


def test_the_tree_shows_steps_tokens_calls_and_the_answer(play: Any) -> None:
    """Oracle: the script, and the counts that the same run reports as JSON."""
    result = play("busy", "Do it")
    assert result.exit_code == 0, result.output
    for text in ("I try.", "fail(text='broken')", "raised: ValueError: broken", "It broke."):
        assert text in result.stdout
    replies = [
        e.reply for e in events(play("busy", "Do it", "--json")) if e.type == "reply_finished"
    ]
    assert len(replies) == 2
    for step, reply in enumerate(replies):
        usage = reply.usage
        counts = f"reused {usage.reused_tokens} · prefilled {usage.prefill_tokens}"
        assert f"step {step} · {counts}" in result.stdout


def test_what_a_model_says_is_no_markup(play: Any) -> None:
    """Oracle: the script's text, brackets included."""
    assert "Hello [b]there[/b]." in play("talker", "Hi").stdout


def test_json_is_one_event_a_line(play: Any) -> None:
    """Oracle: the event classes, and their order."""
    seen = [event.type for event in events(play("busy", "Do it", "--json"))]
    assert seen[0] == "plan_ready" and seen[-1] == "run_finished"
    assert seen.count("step_finished") == 2 and "tool_finished" in seen


def test_a_session_keeps_the_conversation(play: Any, tmp_path: Path) -> None:
    """Oracle: the stored path."""
    assert play("talker", "Hi", "--session", "kept").exit_code == 0
    assert play("resting", "More", "--session", "kept").exit_code == 0
    said = [s.content for s in read(tmp_path).path() if s.kind in ("user", "text")]
    assert said == ["Hi", "Hello [b]there[/b].", "More", "Done."]


def test_a_terminal_is_asked_about_approvals(
    play: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the stored result of what was answered."""
    monkeypatch.setattr(run_module, "asks", lambda: True)
    result = play("cleaner", "Clean", "--session", "kept", stdin="y\n")
    assert result.exit_code == 0 and "remove(path='a.txt')" in result.stdout
    assert "Done." in result.stdout
    [answer] = read(tmp_path).find(kind="tool_result")
    assert answer.content == "removed a.txt"


def test_what_is_to_be_allowed_is_shown_whole(
    program: Path, play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the argument, far longer than a line of the tree."""
    path = "/".join(f"folder{n}" for n in range(100))
    program.write_text(PROGRAM.replace("a.txt", path))
    monkeypatch.setattr(run_module, "asks", lambda: True)
    assert path in play("cleaner", "Clean", stdin="n\n").stdout


def test_a_reason_denies_the_call(
    play: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the model sees the reason."""
    monkeypatch.setattr(run_module, "asks", lambda: True)
    play("cleaner", "Clean", "--session", "kept", stdin="not on Mondays\n")
    [answer] = read(tmp_path).find(kind="tool_result")
    assert answer.content == "not on Mondays" and answer.error


def test_a_pending_session_goes_on_when_somebody_can_be_asked(
    play: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: nothing ran without an answer, and no message came between."""
    first = play("cleaner", "Clean", "--session", "kept")
    assert first.exit_code == 0 and "waits for approval" in first.stdout
    assert not read(tmp_path).find(kind="tool_result")
    refused = play("resting", "And now?", "--session", "kept")
    assert refused.exit_code == 1 and "wait for a decision" in refused.stderr
    monkeypatch.setattr(run_module, "asks", lambda: True)
    assert play("resting", "And now?", "--session", "kept", stdin="y\n").exit_code == 0
    said = [s.content for s in read(tmp_path).path() if s.kind in ("user", "tool_result", "text")]
    assert said == ["Clean", "removed a.txt", "Done.", "And now?", "Later."]


@pytest.mark.parametrize(
    ("code", "said"),
    [("import no_such_thing", "no_such_thing"), ("def f(:", "SyntaxError"), ("1 / 0", "1 / 0")],
)
def test_what_a_file_raises_is_shown_without_our_frames(
    program: Path, play: Any, code: str, said: str
) -> None:
    """Oracle: the author's line, and no other file."""
    program.write_text(f"# an agent\n{code}\n")
    result = play("talker", "Hi")
    assert result.exit_code == 1 and "cannot be imported" in result.stderr
    assert said in result.stderr
    files = [line for line in result.stderr.splitlines() if line.strip().startswith("File ")]
    assert len(files) == 1 and str(program) in files[0] and "line 2" in files[0]


def test_an_agent_without_a_model_is_told(play: Any) -> None:
    """Oracle: the remedy."""
    result = play("without_model", "Hi")
    assert result.exit_code == 1 and "no model" in result.stderr and "--model" in result.stderr


def test_without_a_message_a_session_is_needed(play: Any) -> None:
    """Oracle: the exit status of wrong usage."""
    assert play("talker").exit_code == 2


def test_a_pipe_gets_the_whole_answer(program: Path, play: Any) -> None:
    """Oracle: every word of the script, beyond any width."""
    words = [f"word{n}" for n in range(100)]
    program.write_text(PROGRAM.replace("Hello [b]there[/b].", " ".join(words)))
    assert re.findall(r"word\d+", play("talker", "Hi").stdout) == words


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("agents_of_a_test.py", "names no agent"),
        ("nowhere.py:agent", "no such file"),
        ("no_such_module_at_all:agent", "no such module"),
        ("{program}:number", "has no agent 'number'"),
        ("{program}:missing", "busy, cleaner"),
    ],
)
def test_a_bad_target_says_what_is_wrong(program: Path, target: str, said: str) -> None:
    """Oracle: the documented code and exit status."""
    result = CliRunner().invoke(app, ["run", target.format(program=program), "hi", "--json"])
    assert result.exit_code == 1
    error = json.loads(result.stderr)["error"]
    assert error["code"] == "invalid_agent" and said in " ".join(map(str, error.values()))
