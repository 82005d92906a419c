# SPDX-License-Identifier: Apache-2.0
"""Two processes on one store, and processes that are killed between edits."""

import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from freetoken_agent import Session, SessionConflict, Store
from freetoken_agent.branches.purging import purge_sync
from freetoken_agent.parsing import SegmentDone
from freetoken_agent.testing import ScriptedModel

PREFIX = """
    import sys
    from freetoken_agent import Store
    from freetoken_agent.testing import ScriptedModel
    model = ScriptedModel()
    store = Store(sys.argv[1])
    def say(*values):
        print(*values, flush=True)
"""


@contextmanager
def _child(folder: Path, code: str) -> Iterator[subprocess.Popen[str]]:
    source = textwrap.dedent(PREFIX) + textwrap.dedent(code)
    with subprocess.Popen(
        [sys.executable, "-c", source, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _tell(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text + "\n")
    process.stdin.flush()


def _texts(session: Session) -> list[str]:
    return [segment.text for segment in session.path()]


def test_rule10_a_second_process_conflicts_and_loses_nothing(tmp_path: Path) -> None:
    """Oracle: the texts that each process was told to write."""
    code = """
        session = store.open("s", model)
        say("open")
        sys.stdin.readline()
        session.append("user", "theirs")
        say("written", session.version)
        sys.stdin.readline()
        session.reload()
        say([s.text for s in session.path()])
    """
    with Store(tmp_path / "store") as store:
        session = store.create("s", ScriptedModel(), system="sys")
        with _child(tmp_path / "store", code) as child:
            assert _line(child) == "open"
            _tell(child, "go")
            assert _line(child).startswith("written")
            with pytest.raises(SessionConflict) as error:
                session.append("user", "ours")
            assert error.value.code == "session_conflict"
            assert _texts(session) == ["sys"]
            session.reload()
            session.append("assistant", "ours")
            assert _texts(session) == ["sys", "theirs", "ours"]
            session.undo()
            session.redo()
            _tell(child, "go")
            assert _line(child) == str(["sys", "theirs", "ours"])


def test_rule10_two_processes_write_branches_of_one_session_at_once(tmp_path: Path) -> None:
    """Oracle: each branch holds exactly its own writer's texts, in order."""
    code = """
        session = store.open("s", model, branch="theirs")
        say("open")
        for i in range(40):
            session.append("user", f"theirs {i}")
        say("done")
    """
    with Store(tmp_path / "store") as store:
        session = store.create("s", ScriptedModel())
        session.append("user", "root")
        session.fork(name="theirs")
        with _child(tmp_path / "store", code) as child:
            assert _line(child) == "open"
            for i in range(40):
                session.append("user", f"ours {i}")
            assert _line(child) == "done"
        theirs = session.open_branch("theirs")
        assert _texts(theirs) == ["root", *(f"theirs {i}" for i in range(40))]
        assert _texts(session) == ["root", *(f"ours {i}" for i in range(40))]
        ids = [segment.id for segment in (*theirs.path()[1:], *session.path()[1:])]
        assert len(set(ids)) == 80


def test_rule10_a_generation_beside_another_process_is_saved(tmp_path: Path) -> None:
    """Oracle: the other process's edit on the branch, the whole generation on its own branch."""
    code = """
        session = store.open("s", model)
        say("open")
        sys.stdin.readline()
        session.append("user", "theirs")
        say("written")
    """
    model = ScriptedModel()
    with Store(tmp_path / "store") as store:
        session = store.create("s", model)
        session.append("user", "question")
        with _child(tmp_path / "store", code) as child:
            assert _line(child) == "open"
            draft = session.begin_generation()
            _tell(child, "go")
            assert _line(child) == "written"
            draft.write(SegmentDone("thinking", (), tuple(b"hm"), "hm"), tail="open")
            draft.write(SegmentDone("text", (), tuple(b"answer"), "answer"))
            with pytest.raises(SessionConflict) as error:
                draft.finish()
        saved = session.open_branch(getattr(error.value, "branch", ""))
        assert _texts(saved) == ["question", "hm", "answer"]
        session.reload()
        assert _texts(session) == ["question", "theirs"]


def test_rule10_a_purge_beside_another_process_is_not_scrubbed_yet(tmp_path: Path) -> None:
    """Oracle: the report, and the files once somebody opens the store alone."""
    code = """
        session = store.open("s", model)
        say("open")
        sys.stdin.readline()
    """
    folder = tmp_path / "store"
    with Store(folder) as store:
        session = store.create("s", ScriptedModel())
        secret = session.append("user", "canary ZX-41")
        session.undo()
        with _child(folder, code) as child:
            assert _line(child) == "open"
            assert not purge_sync(session._handle, secret).scrubbed
            _tell(child, "bye")
            child.wait(30)
    with Store(folder) as store:
        assert store.open("s").path() == []
    held = [f for f in folder.rglob("*") if f.is_file() and b"canary" in f.read_bytes()]
    assert held == []


@pytest.mark.parametrize("seed", range(4))
def test_c43_every_acknowledged_edit_survives_a_kill(tmp_path: Path, seed: int) -> None:
    """Oracle: what the process said before it was killed, at a moment drawn at random. One more
    edit than acknowledged may be there, whole."""
    code = """
        session = store.create("s", model, system="sys")
        for i in range(10_000):
            if i % 5 == 4:
                session.rewind(turns=1)
            elif i % 5 == 3:
                with session.batch():
                    for word in ("x", "y"):
                        session.append("user", f"{word}{i}")
            elif i % 5 == 2:
                session.replace(session.path()[-1], f"replaced {i}")
            else:
                session.append("user", f"user {i}")
            say(session.version, "|".join(s.id for s in session.path()))
    """
    lines: list[str] = []
    stop_after = random.Random(seed).randrange(1, 60)
    with _child(tmp_path / "store", code) as child:
        while len(lines) < stop_after:
            lines.append(_line(child))
        child.send_signal(signal.SIGKILL)
        assert child.stdout is not None
        lines += [
            line.strip() for line in child.stdout.read().splitlines(keepends=True) if "\n" in line
        ]
    version, ids = lines[-1].split(" ", 1)
    with Store(tmp_path / "store") as store:
        session = store.open("s", ScriptedModel())
        assert session.version in (int(version), int(version) + 1)
        if session.version == int(version):
            assert "|".join(s.id for s in session.path()) == ids
        else:
            session.undo()
            assert "|".join(s.id for s in session.path()) == ids
        session.append("user", "goes on")
        assert store.open("s").ids() == session.ids()


def test_c47_a_full_disk_is_an_error_and_the_session_stays_usable(tmp_path: Path) -> None:
    """Oracle: the path before the edit that found no room, in memory and after reopening."""
    code = """
        from freetoken_agent import StoreFull
        from freetoken_storage.testing import file_size_limit
        session = store.create("s", model, system="sys")
        with file_size_limit(2 << 20):
            for i in range(200):
                before = session.ids()
                try:
                    session.append("user", "x" * 40_000)
                except StoreFull as error:
                    say(error.code, session.ids() == before)
                    break
            say(len(session.path()))
            session.plan()
        session.append("user", "room again")
        say(len(session.path()))
    """
    with _child(tmp_path / "store", code) as child:
        assert _line(child) == "store_full True"
        kept = int(_line(child))
        assert kept > 2
        assert int(_line(child)) == kept + 1
    with Store(tmp_path / "store") as store:
        assert len(store.open("s").path()) == kept + 1
