# SPDX-License-Identifier: Apache-2.0
"""`sessions …` and `chat` over a real store; the model plays a script where words do not matter.

Oracles are the session's own path and ids, read through the SDK beside the command.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from freetoken_agent import LocalModel, Session, Store
from freetoken_agent.catalog import pulled
from freetoken_agent.cli.doctor import check_store
from freetoken_agent.cli.main import app
from freetoken_agent.testing import Call, ScriptedModel, Step, Think


class Bench:
    """A store with one session, and the command line on it."""

    def __init__(self, folder: Path, script: list[Step]) -> None:
        self.folder = folder
        self.model = ScriptedModel(script)

    def run(self, *arguments: str, stdin: str | None = None) -> Result:
        command = [*arguments, "--store", str(self.folder)]
        return CliRunner().invoke(app, command, input=stdin)

    def report(self, *arguments: str, code: int = 0) -> Any:
        result = self.run(*arguments, "--json")
        assert result.exit_code == code, (result.output, result.exception)
        return json.loads(result.stdout if code == 0 else result.stderr)

    def chat(self, *lines: str) -> Result:
        result = self.run("chat", "talk", stdin="\n".join(lines) + "\n")
        assert result.exit_code == 0, (result.output, result.exception)
        return result

    def look(self, name: str = "talk", branch: str = "main") -> list[str]:
        """The branch's contents, read by the SDK."""
        with Store(self.folder) as store:
            return [s.content for s in store.open(name, branch=branch).path()]

    def edit(self, change: Callable[[Session], object], name: str = "talk") -> None:
        with Store(self.folder) as store:
            change(store.open(name, self.model))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(tmp_path / "store", ["Four.", "Five.", "Six.", "Seven."])
    monkeypatch.setattr(LocalModel, "load", lambda *_, **__: nullcontext(made.model))
    monkeypatch.setenv("FREETOKEN_HOME", str(tmp_path / "home"))
    yield made


@pytest.fixture
def talk(bench: Bench) -> Bench:
    with Store(bench.folder) as store:
        s = store.create("talk", bench.model, system="Be brief.")
        s.append("user", "2+2?")
        s.append("assistant", "Three.")
        call = s.append_call("add", {"a": 2, "b": 2})
        s.append_result(call, "4")
        store.create("other", bench.model)
    return bench


def test_list_and_prefix(talk: Bench) -> None:
    """Names, branches and models as they were created."""
    found = talk.report("sessions", "list")["sessions"]
    assert [(s["name"], s["branches"], s["model"]) for s in found] == [
        ("other", ["main"], "scripted"),
        ("talk", ["main"], "scripted"),
    ]
    assert [s["name"] for s in talk.report("sessions", "list", "ta")["sessions"]] == ["talk"]


def test_show_path_frames_and_tree(talk: Bench) -> None:
    """JSON carries every segment; text numbers them; frames are there only when asked for."""
    shown = talk.report("sessions", "show", "talk")["segments"]
    assert [s["content"] for s in shown] == talk.look()
    assert [s["kind"] for s in shown] == ["system", "user", "text", "tool_call", "tool_result"]
    framed = talk.report("sessions", "show", "talk", "--frames")["segments"]
    assert [s["id"] for s in framed if s["kind"] != "frame"] == [s["id"] for s in shown]
    assert any(s["kind"] == "frame" for s in framed)
    text = talk.run("sessions", "show", "talk").stdout
    assert "add(a=2, b=2)" in text and text.count("\n") == 6
    assert "← main" in talk.run("sessions", "show", "talk", "--tree").stdout


def test_edit_by_number_then_undo_and_redo(talk: Bench) -> None:
    """The contents change and come back; the ids of unchanged segments stay."""
    before = talk.report("sessions", "show", "talk")["segments"]
    edit = talk.report("sessions", "edit", "talk", "2", "--text", "3+3?")
    assert edit["changed"] and [s["content"] for s in edit["added"]] == ["3+3?"]
    after = talk.report("sessions", "show", "talk")["segments"]
    assert [s["id"] for s in after[2:]] == [s["id"] for s in before[2:]]
    assert talk.look()[1] == "3+3?"
    talk.report("sessions", "undo", "talk")
    assert talk.look()[1] == "2+2?"
    talk.report("sessions", "undo", "talk", "--redo")
    assert talk.look()[1] == "3+3?"


def test_edit_by_the_beginning_of_an_id_and_from_standard_input(talk: Bench) -> None:
    """A prefix that is unique names the segment."""
    target = talk.report("sessions", "show", "talk")["segments"][1]["id"]
    result = talk.run("sessions", "edit", "talk", target[:8], "--text", "-", stdin="from a pipe")
    assert result.exit_code == 0 and talk.look()[1] == "from a pipe"


def test_a_dry_run_prices_and_changes_nothing(talk: Bench) -> None:
    """Same path afterwards; the report says what would be forwarded."""
    before = talk.look()
    plan = talk.report("sessions", "edit", "talk", "2", "--text", "9", "--dry-run")["plan"]
    assert plan["reused_tokens"] + plan["prefill_tokens"] == plan["input_tokens"] > 0
    talk.report("sessions", "rewind", "talk", "--to", "2", "--dry-run")
    assert talk.look() == before


def test_edited_arguments(talk: Bench) -> None:
    """The call's arguments are replaced and its result is marked stale."""
    talk.report("sessions", "edit", "talk", "4", "--arguments", '{"a": 3, "b": 3}')
    shown = talk.report("sessions", "show", "talk")["segments"]
    assert shown[3]["arguments"] == {"a": 3, "b": 3}
    assert shown[4]["stale"] and "[stale]" in talk.run("sessions", "show", "talk").stdout


def test_the_editor_edits(talk: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """$EDITOR gets the content; what it leaves becomes the segment."""
    script = tmp_path / "editor.py"
    script.write_text("import sys; p = sys.argv[1]; t = open(p).read(); open(p, 'w').write(t * 2)")
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", f"{sys.executable} {script}")
    assert talk.run("sessions", "edit", "talk", "2").exit_code == 0
    assert talk.look()[1] == "2+2?2+2?"
    monkeypatch.setenv("EDITOR", "true")
    assert "nothing to change" in talk.run("sessions", "edit", "talk", "2").stdout
    monkeypatch.setenv("EDITOR", "no-such-editor")
    assert "cannot start the editor" in talk.run("sessions", "edit", "talk", "2").stderr


def test_fork_then_rewind_the_fork_only(talk: Bench) -> None:
    """A fork before a segment ends just before it; main stays as it was."""
    before = talk.look()
    report = talk.report("sessions", "fork", "talk", "--before", "3", "--as", "b")
    assert report["branch"] == "b" and talk.look(branch="b") == before[:2]
    talk.report("sessions", "rewind", "talk", "--turns", "1", "--branch", "b")
    assert talk.look(branch="b") == before[:1] and talk.look() == before


def test_purge_removes_the_bytes(talk: Bench) -> None:
    """A canary that was edited away is in the files before, and in none of them after."""
    canary = b"CANARY-7431"
    talk.edit(lambda s: s.append("user", canary.decode()))
    talk.report("sessions", "edit", "talk", "6", "--text", "harmless")
    assert any(canary in path.read_bytes() for path in talk.folder.rglob("*.mdb"))
    tree = talk.report("sessions", "show", "talk", "--tree")["nodes"]
    (target,) = {n["segment"]["id"] for n in tree if n["segment"]["content"] == canary.decode()}
    report = talk.report("sessions", "purge", "talk", target)
    assert report["scrubbed"] and report["num_nodes"] == 1
    assert not any(canary in path.read_bytes() for path in talk.folder.rglob("*.mdb"))


def test_verify_counts_and_finds_a_flipped_byte(talk: Bench) -> None:
    """A whole store has no fault; with one stored text altered it has, and the exit status says
    so."""
    report = talk.report("sessions", "verify")
    assert report["faults"] == [] and report["counts"]["sessions"] == 2
    data = talk.folder / "sessions" / "data.mdb"
    data.write_bytes(data.read_bytes().replace(b"Be brief.", b"Be bRief."))
    result = talk.run("sessions", "verify", "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["faults"]
    check = check_store(talk.folder)
    assert check.status == "fault" and check.remedy


def test_doctor_says_that_a_store_is_whole(talk: Bench) -> None:
    """And that there is none yet."""
    assert check_store(talk.folder).status == "ok"
    assert "2 sessions" in check_store(talk.folder).found
    assert "none yet" in check_store(talk.folder / "absent").found


def test_gc_shrinks_the_files_and_keeps_every_word(talk: Bench) -> None:
    """Oracle: sizes on disk and the paths. With --keep-states 0 every state goes."""
    talk.chat("3+3?")
    talk.edit(lambda s: s.append("user", "x" * 200_000))
    with Store(talk.folder) as store:
        store.delete("other")
    before = talk.look()
    size = sum(path.stat().st_size for path in talk.folder.rglob("data.mdb"))
    talk.edit(lambda s: s.undo())
    report = talk.report("sessions", "gc")
    assert report["compacted"] and report["after"]["sessions"] <= report["before"]["sessions"]
    assert talk.look() == before[:-1]
    report = talk.report("sessions", "gc", "--keep-states", "0")
    assert talk.report("sessions", "verify")["counts"]["snapshots"] == 0
    assert report["states_dropped"] > 0
    assert sum(path.stat().st_size for path in talk.folder.rglob("data.mdb")) < size
    talk.report("sessions", "undo", "talk", "--redo")
    assert talk.look() == before


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("show", "absent"), "session_not_found"),
        (("show", "talk", "--branch", "absent"), "branch_not_found"),
        (("edit", "talk", "99", "--text", "x"), "segment_not_found"),
        (("edit", "talk", "4", "--arguments", "[1]"), "invalid_edit"),
        (("edit", "talk", "4", "--arguments", "{"), "invalid_edit"),
        (("rewind", "talk"), "invalid_edit"),
        (("undo", "talk", "-n", "99"), "nothing_to_undo"),
        (("purge", "talk", "absent"), "segment_not_found"),
    ],
)
def test_errors_have_a_code_and_change_nothing(
    talk: Bench, arguments: tuple[str, ...], code: str
) -> None:
    """Exit status 1, the error as JSON on standard error, the path as before."""
    before = talk.look()
    error = talk.report("sessions", *arguments, code=1)["error"]
    assert error["code"] == code and error["what"]
    assert talk.look() == before


def test_chat_persists_and_shows_what_was_paid(bench: Bench) -> None:
    """Two separate chats continue one session. Oracle: the ids the scripted model was given; the
    second request shares the first one's ids and the answer's five, and forwards the rest."""
    first = bench.chat("2+2?")
    assert "Four." in first.stdout
    second = bench.chat("3+2?")
    assert "Five." in second.stdout
    assert bench.look() == ["2+2?", "Four.", "3+2?", "Five."]
    one, two = (len(request.ids) for request in bench.model.requests)
    assert f"reused 0 · prefilled {one} · wrote 6" in first.stdout
    shared = one + len("Four.")
    assert f"reused {shared} · prefilled {two - shared} ·" in second.stdout


def test_chat_commands_edit_while_talking(bench: Bench) -> None:
    """Edit, rewind, answer again, undo all of it, fork, switch: oracles are the stored paths."""
    bench.chat("2+2?", "/edit 1 3+2?", "/rewind 1", "/go")
    assert bench.look() == ["3+2?", "Five."]
    bench.chat("/undo 3")
    assert bench.look() == ["2+2?", "Four."]
    bench.chat("/redo 3", "/fork 1 side", "/go", "/switch main", "/drop 2", "/plan", "/tree")
    assert bench.look(branch="side") == ["3+2?", "Six."]
    assert bench.look() == ["3+2?"]


def test_chat_shows_thinking_and_drops_it(bench: Bench) -> None:
    """A thought is streamed, stored, and `/drop thinking` removes it."""
    bench.model = ScriptedModel([[Think("Hmm."), "Four."]])
    shown = bench.chat("2+2?").stdout
    assert "Hmm." in shown and "Four." in shown
    assert bench.look() == ["2+2?", "Hmm.", "Four."]
    bench.chat("/drop thinking")
    assert bench.look() == ["2+2?", "Four."]


def test_chat_survives_errors_and_unknown_commands(bench: Bench) -> None:
    """Each line that fails says so; the next line works."""
    result = bench.chat("/go", "/nonsense", "/edit 7 x", "/undo x", "", "2+2?", "/quit", "not said")
    for code in ("nothing_to_generate", "invalid_edit", "segment_not_found"):
        assert f"[{code}]" in result.stderr
    assert bench.look() == ["2+2?", "Four."]


def test_chat_shows_a_call_that_the_model_makes(bench: Bench) -> None:
    """The call is stored; running tools is not the chat's business."""
    bench.model = ScriptedModel([Call("add", {"a": 1})])
    bench.chat("Add.")
    assert bench.report("sessions", "show", "talk")["segments"][-1]["tool"] == "add"


def test_the_default_store_is_below_home(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --store: <home>/store; FREETOKEN_STORE names another."""
    assert CliRunner().invoke(app, ["sessions", "list"]).exit_code == 0
    assert (tmp_path / "home" / "store" / "sessions").is_dir()
    monkeypatch.setenv("FREETOKEN_STORE", str(tmp_path / "elsewhere"))
    assert CliRunner().invoke(app, ["sessions", "list"]).exit_code == 0
    assert (tmp_path / "elsewhere" / "sessions").is_dir()


@pytest.mark.smollm2
def test_two_processes_share_a_conversation_on_smollm2(tmp_path: Path) -> None:
    """Real processes, the real model: what one said, the other reads and prices from disk."""
    if "smollm2" not in [model.name for model in pulled()]:
        pytest.skip("SmolLM2 is not pulled: freetoken-agent pull smollm2")
    store = ["--store", str(tmp_path / "store")]
    chat = ["chat", "c", "--system", "Be brief.", "--max-tokens", "4"]
    assert "prefilled" in cli(*chat, *store, stdin="Say hello.\n")
    path = json.loads(cli("sessions", "show", "c", "--json", *store))["segments"]
    assert [s["kind"] for s in path] == ["system", "user", "text"]
    edit = ["sessions", "edit", "c", "2", "--text", "Say goodbye.", "--dry-run", "--json"]
    plan = json.loads(cli(*edit, *store))["plan"]
    assert plan["source"] == "disk"
    same = path[0]["frame_tokens"] + path[0]["num_tokens"] + path[1]["frame_tokens"]
    assert plan["reused_tokens"] >= same


@pytest.mark.smollm2
def test_an_interrupt_keeps_what_was_written_and_the_chat_goes_on(tmp_path: Path) -> None:
    """SIGINT while the real model writes: the partial answer is stored, the next line works."""
    if "smollm2" not in [model.name for model in pulled()]:
        pytest.skip("SmolLM2 is not pulled: freetoken-agent pull smollm2")
    command = [sys.executable, "-u", "-m", "freetoken_agent.cli", "chat", "c", "--store"]
    with subprocess.Popen(
        [*command, str(tmp_path / "store"), "--max-tokens", "2000"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=0,
        # Whoever started the tests may ignore SIGINT (a shell does so for what runs behind it).
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as chat:
        assert chat.stdin is not None and chat.stdout is not None
        try:
            chat.stdin.write("Write a long story about a dragon and a clockmaker.\n")
            shown = chat.stdout.read(len("/help lists the commands\n") + 40)
            chat.send_signal(signal.SIGINT)
            rest, errors = chat.communicate("/plan\n/quit\n", timeout=120)
        finally:
            chat.kill()
    assert "stopped; /go continues" in rest and " tokens: reuse " in rest, (shown, rest, errors)
    assert "Traceback" not in errors
    path = json.loads(cli("sessions", "show", "c", "--json", "--store", str(tmp_path / "store")))
    assert [s["kind"] for s in path["segments"]] == ["user", "text"]
    assert 0 < path["segments"][1]["num_tokens"] < 1999


def cli(*arguments: str, stdin: str | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "freetoken_agent.cli", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
