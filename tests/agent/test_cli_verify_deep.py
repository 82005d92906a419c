# SPDX-License-Identifier: Apache-2.0
"""`sessions verify --deep` over a store that a tiny real model wrote. Oracle: what was planted."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from freetoken_agent import LocalModel, Session, Store
from freetoken_agent.cli.main import app
from freetoken_agent.proving.state_check import plan_check
from freetoken_agent.testing import ScriptedModel
from freetoken_runtime import EngineConfig
from freetoken_runtime.state_faults import Planter
from freetoken_storage import Database

ONE_THREAD = EngineConfig(dtype="float32", threads=1)
TEXT = "The lighthouse keeper counted the ships and wrote their names into the book. "


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A store with two sessions of about 300 tokens; one was edited, one has two branches."""
    with (
        LocalModel.load(tiny_folder, config=ONE_THREAD) as model,
        Store(tmp_path / "store") as store,
    ):
        talk = store.create("talk", model, system=TEXT)
        user = talk.append("user", TEXT * 2)
        asyncio.run(reply(talk))
        talk.replace(user, TEXT + TEXT.upper())
        asyncio.run(reply(talk))
        other = store.create("other", model, system=TEXT * 3)
        other.append("user", "Which ships?")
        fork = other.fork(name="second")
        asyncio.run(reply(other))
        fork.append("user", TEXT)
        asyncio.run(reply(fork))
        asyncio.run(store.flush())
    return tmp_path / "store"


async def reply(session: Session) -> None:
    await session.reply(max_tokens=12, temperature=1.0, seed=1)


def verify(folder: Path, model: Path, *arguments: str) -> Result:
    command = ["sessions", "verify", "--deep", *arguments, "--model", str(model)]
    return CliRunner().invoke(app, [*command, "--store", str(folder)])


def report(folder: Path, model: Path, *arguments: str, code: int = 0) -> Any:
    result = verify(folder, model, *arguments, "--json")
    assert result.exit_code == code, (result.output, result.exception)
    return json.loads(result.stdout)


def plant(folder: Path, model: Path, name: str) -> list[tuple[str, int]]:
    """Two wrong states on the path of a session's head; their kinds and positions."""
    with LocalModel.load(model, config=ONE_THREAD) as loaded, Database(folder) as database:
        loaded.attach(database.snapshots)
        (path,) = plan_check(database.sessions, loaded, [name]).paths
        planter = Planter(loaded.engine, path.ids)
        chosen = {}
        for fault in planter.faults():
            if fault.kind == "scaled":
                chosen[fault.record.kind] = fault
        for fault in chosen.values():
            planter.plant(fault)
    return sorted((fault.record.kind, fault.record.stop) for fault in chosen.values())


def test_a_healthy_store(folder: Path, tiny_folder: Path) -> None:
    """Every head is compared, and with --all what was edited away; nothing is found."""
    found = report(folder, tiny_folder)
    assert found["faults"] == [] and found["counts"]["snapshots"] > 10
    paths = {(p["session"], p["branch"]): p["result"] for p in found["states"]["paths"]}
    assert paths.keys() == {("talk", "main"), ("other", "main"), ("other", "second")}
    for result in paths.values():
        assert result["findings"] == [] and result["complete"]
        assert result["anchors"] > 1 and result["blocks"] > 3 and result["compared"] == "states"
    everything = report(folder, tiny_folder, "--all")["states"]["paths"]
    assert [p["branch"] for p in everything].count(None) == 1
    one = report(folder, tiny_folder, "talk")["states"]["paths"]
    assert [p["session"] for p in one] == ["talk"]
    assert "no fault" in verify(folder, tiny_folder).stdout


def test_wrong_states_are_named_and_leave(folder: Path, tiny_folder: Path) -> None:
    """Status 3 and places as planted; the second time there is nothing left to find, and the
    session's text is as it was."""
    with Store(folder) as store:
        before = [segment.content for segment in store.open("talk").path()]
    planted = plant(folder, tiny_folder, "talk")
    assert len(planted) == 2
    result = verify(folder, tiny_folder, "--json")
    assert result.exit_code == 3
    states = json.loads(result.stdout)["states"]
    found = [
        (f["kind"], f["position"])
        for path in states["paths"]
        if path["session"] == "talk"
        for f in path["result"]["findings"]
    ]
    assert sorted(found) == planted and not any(
        path["result"]["findings"] for path in states["paths"] if path["session"] != "talk"
    )
    assert report(folder, tiny_folder)["states"]["complete"]
    with Store(folder) as store:
        assert [segment.content for segment in store.open("talk").path()] == before


def test_the_text_names_places_and_extents(folder: Path, tiny_folder: Path) -> None:
    """One line for each finding."""
    planted = plant(folder, tiny_folder, "talk")
    result = verify(folder, tiny_folder, "talk")
    assert result.exit_code == 3 and "faults found" in result.stdout
    place = {kind: f"{position:,}" for kind, position in planted}
    assert f"talk main: anchor at {place['anchor']}: hidden row off by" in result.stdout
    assert f"to {place['block']}: layer" in result.stdout and "limit 0.0001" in result.stdout


def test_sessions_of_another_model_are_skipped(folder: Path, tiny_folder: Path) -> None:
    """And said so; the others are checked."""
    with Store(folder) as store:
        store.create("foreign", ScriptedModel(["Yes."]), system="x")
    skipped = report(folder, tiny_folder)["states"]["skipped"]
    assert [x["session"] for x in skipped] == ["foreign"] and "differ" in skipped[0]["reason"]
    missing = verify(folder, tiny_folder, "nobody")
    assert missing.exit_code == 1 and "session_not_found" in missing.stderr


def test_sessions_belong_to_deep(folder: Path) -> None:
    """Wrong usage is said, not ignored."""
    for argument in ("talk", "--all"):
        result = CliRunner().invoke(app, ["sessions", "verify", argument, "--store", str(folder)])
        assert result.exit_code == 2 and "--deep" in result.stderr


def test_interrupted(folder: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C within the first path: the report so far, and status 130."""
    from freetoken_agent.cli.output import Bar

    def press(bar: Bar, done: int, total: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Bar, "__call__", press)
    before = signal.getsignal(signal.SIGINT)
    states = report(folder, tiny_folder, code=130)["states"]
    assert not states["complete"] and len(states["paths"]) == 1
    assert signal.getsignal(signal.SIGINT) is before
