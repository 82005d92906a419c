# SPDX-License-Identifier: Apache-2.0
"""`run` on a real terminal: a pseudo-terminal, into which keys are pressed. Oracles: the script,
the exit status, the stored session."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from freetoken_agent import Session, Store
from freetoken_agent.testing import ScriptedModel

PROGRAM = """
import asyncio
from freetoken_agent import Agent, tool
from freetoken_agent.testing import Call, ScriptedModel


@tool(needs_approval=True)
def remove(path: str) -> str:
    return f"removed {path}"


@tool
async def wait(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "waited"


@tool
def fail(text: str) -> str:
    raise ValueError(text)


def made(*script):
    return Agent(ScriptedModel(script), name="cleaner", tools=[remove, wait, fail])


cleaner = made(["I clean.", Call("remove", {"path": "a.txt"})], "Done.")
waiter = made(Call("wait", {"seconds": 60.0}), "Done.")
failing = made([Call("fail", {"text": "broken"}), Call("wait", {"seconds": 0.2})], "It broke.")
talker = made(" ".join(f"word{n}" for n in range(120)))
"""
PIECES = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")
Keys = Sequence[tuple[str, str]]  # what is waited for, and what is pressed then
Terminal = Callable[..., tuple[int, str]]


@pytest.fixture
def terminal(tmp_path: Path) -> Terminal:
    """`terminal(agent, *arguments, keys=…, columns=…)`: the exit status, and what stands on the
    terminal in the end, with what has left it at the top."""
    program = tmp_path / "agents_of_a_test.py"
    program.write_text(PROGRAM)

    def terminal(name: str, *rest: str, keys: Keys = (), columns: int = 80) -> tuple[int, str]:
        command = [sys.executable, "-m", "freetoken_agent.cli", "run", f"{program}:{name}", *rest]
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        kept = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
        process = subprocess.Popen(
            [*command, "--store", str(tmp_path / "store")],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**kept, "TERM": "xterm"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # for Ctrl-C
        )
        os.close(theirs)
        try:
            written = press(ours, keys)
            return process.wait(60), written
        finally:
            process.kill()
            process.wait()
            os.close(ours)

    return terminal


def press(terminal: int, keys: Keys) -> str:
    """Press the keys, each when what it waits for is there; returns what is seen in the end."""
    waiting, out, seen = list(keys), b"", 0
    end = time.monotonic() + 90
    while time.monotonic() < end:
        if not select.select([terminal], [], [], 1)[0]:
            continue
        try:
            read = os.read(terminal, 1 << 16)
        except OSError:  # Linux says so when the last writer has gone
            read = b""
        if not read:
            assert not waiting, out.decode()
            return seen_of(out.decode())
        out += read
        if waiting and waiting[0][0].encode() in out[seen:]:
            seen = len(out)
            os.write(terminal, waiting.pop(0)[1].encode())
    raise AssertionError(f"the command did not end: {out.decode()}")


def seen_of(written: str) -> str:
    """What a terminal makes of it: new lines, and those that are written again."""
    lines, row, column = [""], 0, 0
    for number, code, move, text in PIECES.findall(written):
        if code == "A":
            row -= int(number or 1)
        elif code == "K":
            lines[row] = ""
        elif move == "\r":
            column = 0
        elif move == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif text:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + text + line[column + len(text) :]
            column += len(text)
    return "\n".join(line.rstrip() for line in lines).rstrip("\n")


def last_tree(seen: str) -> list[str]:
    """The lines of the last run."""
    lines = seen.splitlines()
    return lines[max(n for n, line in enumerate(lines) if line in ("cleaner", "kept")) :]


def read(tmp_path: Path) -> Session:
    with Store(tmp_path / "store") as store:
        return store.open("kept", ScriptedModel())


def test_a_call_is_allowed_at_the_prompt(terminal: Terminal, tmp_path: Path) -> None:
    """Oracle: both trees, and the stored result."""
    keys = [("or why not]", "\r"), ("or why not]", "y\r")]
    status, written = terminal("cleaner", "Clean", "--session", "kept", keys=keys)
    assert status == 0, written
    for text in ("I clean.", "waits for approval", "→ removed a.txt", "Done."):
        assert text in written
    tree = last_tree(written)
    assert tree[1].startswith("├── remove(path='a.txt')"), "the call is there in the second tree"
    assert read(tmp_path).find(kind="tool_result")[0].content == "removed a.txt"


def test_a_reason_is_shown_with_the_call_that_it_denies(terminal: Terminal) -> None:
    """Oracle: the second tree."""
    status, written = terminal("cleaner", "Clean", keys=[("or why not]", "not today\r")])
    assert status == 0
    assert "\n".join(last_tree(written)[1:3]) == "├── remove(path='a.txt')\n│   └── → not today"


@pytest.mark.parametrize("key", ["\x03", "\x04"], ids=["Ctrl-C", "Ctrl-D"])
def test_leaving_the_prompt_leaves_the_call_pending(
    terminal: Terminal, tmp_path: Path, key: str
) -> None:
    """Oracle: the exit status of an interrupt; the next command asks again."""
    keys = [("or why not]", key)]
    status, written = terminal("cleaner", "Clean", "--session", "kept", keys=keys)
    assert status == 130 and written.endswith("\ninterrupted"), written
    assert not read(tmp_path).find(kind="tool_result")
    status, _ = terminal("talker", "--session", "kept", keys=[("or why not]", "y\r")])
    assert status == 0
    assert read(tmp_path).find(kind="tool_result")[0].content == "removed a.txt"


def test_ctrl_c_ends_a_tool_and_the_session_goes_on(terminal: Terminal, tmp_path: Path) -> None:
    """Oracle: the exit status; what is said next closes the call."""
    keys = [("wait(seconds=60.0)", "\x03")]
    status, written = terminal("waiter", "Wait", "--session", "kept", keys=keys)
    assert status == 130 and "Traceback" not in written
    assert terminal("talker", "--session", "kept")[0] == 0
    [answer] = read(tmp_path).find(kind="tool_result")
    assert answer.error and "Interrupted" in answer.content


def test_a_long_answer_is_wrapped_and_whole(terminal: Terminal) -> None:
    """Oracles: every word of the script, in order; the terminal's width. It has more lines than the
    terminal, which shows the newest while it grows."""
    status, written = terminal("talker", "Talk", columns=30)
    tree = last_tree(written)
    assert status == 0 and max(map(len, tree)) <= 30 and len(tree) > 24
    words = re.findall(r"word\d+", " ".join(tree))
    assert words == [f"word{n}" for n in range(120)]


def test_tracebacks_of_tools_are_shown_when_asked_for(terminal: Terminal) -> None:
    """Oracle: the tool's own line; the tree says what it raised in any case."""
    status, quiet = terminal("failing", "Fail")
    assert status == 0 and "raised: ValueError: broken" in quiet and "Traceback" not in quiet
    status, loud = terminal("failing", "Fail", "--verbose")
    assert status == 0 and "raise ValueError(text)" in loud
    assert last_tree(loud)[1:] and "Traceback" not in "".join(last_tree(loud))
