# SPDX-License-Identifier: Apache-2.0
"""Faults that were found by trying to break sessions: other writers, and what models write."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from freetoken_agent import GenerationConflict, Session, SessionBusy, Store
from freetoken_agent.cli.main import app
from freetoken_agent.parsing import SegmentDone
from freetoken_agent.testing import Raw, ScriptedModel


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(":memory:") as store:
        yield store


@pytest.fixture
def model() -> ScriptedModel:
    return ScriptedModel()


@pytest.fixture
def session(store: Store, model: ScriptedModel) -> Session:
    return store.create("s", model, system="sys")


# Threads and other writers


def test_rule10_a_batch_takes_no_edits_of_other_threads(session: Session) -> None:
    """Oracle: an edit that returned is on the path, whatever becomes of the batch."""
    outcomes: list[object] = []

    def other() -> None:
        try:
            outcomes.append(session.append("user", "theirs"))
        except SessionBusy as error:
            outcomes.append(error)

    with suppress(ValueError), session.batch():
        session.append("user", "mine")
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        raise ValueError
    assert isinstance(outcomes[0], SessionBusy)
    other()
    assert [s.text for s in session.find(kind="user")] == ["theirs"]


def _done(model: ScriptedModel, text: str) -> SegmentDone:
    return SegmentDone("text", (), tuple(model.tokenizer.encode_content(text)), text)


def test_rule10_reloading_during_a_generation_hides_no_conflict(
    tmp_path: Any, model: ScriptedModel
) -> None:
    """Oracle: the other process's message stays on the branch, the answer gets one of its own."""
    with Store(tmp_path / "store") as store:
        session = store.create("s", model)
        session.append("user", "a")
        draft = session.begin_generation()
        _in_another_process(tmp_path / "store", 'store.open("s", model).append("user", "theirs")')
        session.reload()
        draft.write(_done(model, "answer"))
        with pytest.raises(GenerationConflict) as error:
            draft.finish()
        assert [s.text for s in store.open("s").path()] == ["a", "theirs"]
        saved = store.open("s", branch=draft.branch)
        assert [s.text for s in saved.path()] == ["a", "answer"]
        assert error.value.branch == draft.branch


def test_rule10_an_answer_outlives_its_branch(tmp_path: Any, model: ScriptedModel) -> None:
    """Oracle: the answer, on a branch of its own. Another process deletes the branch meanwhile."""
    with Store(tmp_path / "store") as store:
        session = store.create("s", model)
        session.append("user", "a")
        draft = session.fork(name="side").begin_generation()
        _in_another_process(tmp_path / "store", 'store.open("s", model).delete_branch("side")')
        draft.write(_done(model, "answer"))
        with pytest.raises(GenerationConflict) as error:
            draft.finish()
        saved = store.open("s", branch=error.value.branch)
        assert [s.text for s in saved.path()] == ["a", "answer"]


def _in_another_process(folder: Path, statement: str) -> None:
    program = (
        "from freetoken_agent import Store\n"
        "from freetoken_agent.testing import ScriptedModel\n"
        f"model = ScriptedModel()\nwith Store({str(folder)!r}) as store:\n    {statement}\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_generation_that_is_left_at_exit_says_nothing() -> None:
    """Oracle: the error stream. The interpreter ends while a generation is half read."""
    program = (
        "import asyncio\n"
        "from freetoken_agent import Store\n"
        "from freetoken_agent.testing import ScriptedModel\n"
        "session = Store(':memory:').create('s', ScriptedModel(['hello']))\n"
        "session.append('user', 'Hi')\n"
        "generation = session.generate()\n"
        "async def main():\n"
        "    await generation.__anext__()\n"
        "    asyncio.ensure_future(generation.__anext__())\n"
        "    await asyncio.sleep(0)\n"
        "    asyncio.get_running_loop().stop()\n"
        "loop = asyncio.new_event_loop()\n"
        "loop.create_task(main())\n"
        "loop.run_forever()\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, timeout=60
    )
    assert b"Exception ignored" not in done.stderr, done.stderr.decode()


# What models and tools write, shown to people


HALF = '<tool_call>\n{"name": "f\\ud800", "arguments": {"n": ["\\ud800"]}}\n</tool_call><|im_end|>'


def test_s33_half_a_surrogate_pair_in_a_call_becomes_a_replacement_character(store: Store) -> None:
    """Oracle: what UTF-8 can hold. Such arguments could be neither sent nor laid out again."""
    model = ScriptedModel([Raw(HALF)])
    session = store.create("s", model)
    session.append("user", "go")
    (call,) = session.generate_sync().calls
    assert (call.tool, call.arguments) == ("f\ufffd", {"n": ["\ufffd"]})
    session.append_result(call, "done")
    json.dumps(session.to_messages("openai"), ensure_ascii=False).encode()
    assert session.rerender(model, "copy").find(kind="tool_call")[0].arguments == call.arguments


def test_content_cannot_steer_a_terminal(tmp_path: Path) -> None:
    """Oracle: no escape character in what the commands print."""
    escape = "\x1b]0;title\x07\x1b[2J\x9b31m"
    with Store(tmp_path / "store") as store:
        session = store.create("s", ScriptedModel([escape]), system=escape)
        user = session.append("user", escape)
        assert "\x1b" not in user.preview() and "\x9b" not in user.preview()
        session.append_result(session.append_call(f"f{escape}", {escape: escape}), escape)
        session.append("user", "e\u0301 👩\u200d👩\u200d👧")
        assert session.path()[-1].preview() == "e\u0301 👩\u200d👩\u200d👧"
    for command in (["show", "s"], ["show", "s", "--tree"], ["show", "s", "--json"]):
        shown = CliRunner().invoke(app, ["sessions", *command, "--store", str(tmp_path / "store")])
        assert shown.exit_code == 0, shown.output
        assert not {"\x1b", "\x07", "\x9b"} & set(shown.output), command
