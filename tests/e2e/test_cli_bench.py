# SPDX-License-Identifier: Apache-2.0
"""`bench …` on the tiny model: that it measures what it says, not how fast anything is."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from freetoken_agent.cli.bench import _number
from freetoken_agent.cli.main import app
from freetoken_runtime.bench import timing


@pytest.fixture(autouse=True)
def no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_SETTLE_S", 0.0)


def bench(model: Path, *arguments: str) -> dict[str, Any]:
    """The figures of a report by name; what every report holds is checked here."""
    command = ["bench", *arguments, "--model", str(model), "--threads", "1", "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, (result.output, result.exception)
    report = json.loads(result.stdout)
    assert report["threads"] == 1 and report["machine"]["cpu"] and report["seconds"] > 0
    figures = {figure["name"]: figure for figure in report["figures"]}
    for figure in figures.values():
        judged = figure["value"] if figure["ratio"] is None else figure["ratio"]
        met = figure["met"]
        match figure["target"]:
            case None:
                assert met is None
            case {"sense": "at_least", "value": value}:
                assert met == (judged >= value)
            case {"sense": "at_most", "value": value}:
                assert met == (judged <= value)
            case {"sense": "equal", "value": value}:
                assert met == (judged == value)
    assert report["missed"] == [name for name, figure in figures.items() if figure["met"] is False]
    return figures


def test_prefill_beside_transformers(tiny_folder: Path) -> None:
    """Every weight form has a rate and a ratio to the baseline of the same run."""
    figures = bench(tiny_folder, "prefill", "--tokens", "40", "--rounds", "1")
    assert len(figures) == 3
    for figure in figures.values():
        assert figure["ratio"] == pytest.approx(figure["value"] / figure["baseline"])
    assert figures["prefill 40 tokens, fp32"]["target"] == {"sense": "at_least", "value": 1.1}


def test_decode_beside_transformers_and_beside_a_hog(tiny_folder: Path) -> None:
    """Three forms against the baseline, and each against its own quiet speed."""
    figures = bench(tiny_folder, "decode", "--tokens", "6", "--rounds", "1")
    assert figures["decode, int4"]["target"]["value"] == 2.5
    assert figures["decode, int8"]["target"]["value"] == 1.8
    hogged = figures["decode, int4 beside a hog"]
    assert hogged["target"]["value"] == 0.4
    assert hogged["baseline"] == figures["decode, int4"]["value"]


def test_edit_forwards_what_was_planned(tiny_folder: Path) -> None:
    """Rows beside the plan are zero, and an edit further back forwards more."""
    figures = bench(tiny_folder, "edit", "--tokens", "2500", "--rounds", "1", "--persist-mib", "1")
    rows = [figures[f"edit at {part}%: rows forwarded"]["value"] for part in (10, 50, 90)]
    assert rows[0] > rows[1] > rows[2] > 0
    for part in (10, 50, 90):
        assert figures[f"edit at {part}%: rows beside the plan"]["value"] == 0
        assert figures[f"edit at {part}%: added to the forward pass"]["value"] > 0
    (commit,) = (figure for name, figure in figures.items() if name.startswith("edit's commit"))
    assert commit["value"] > 0 and commit["target"]["value"] == 100


def test_restart_reads_from_disk_what_a_cold_start_forwards(tiny_folder: Path) -> None:
    """The note says how much came from disk; the baseline is the cold start of the same run."""
    figures = bench(tiny_folder, "restart", "--tokens", "600", "--rounds", "1")
    (name,) = (name for name in figures if "first token" in name)
    assert figures[name]["target"] == {"sense": "at_most", "value": 0.03}
    tokens, _, rest = figures[name]["note"].removeprefix("cold; ").partition(" tokens from disk, ")
    assert int(tokens) >= 600 and int(rest.removesuffix(" rows")) < 50


def test_a_fork_copies_no_state(tiny_folder: Path) -> None:
    """Oracle: the engine's own count of state bytes before and after."""
    figures = bench(tiny_folder, "fork", "--tokens", "600", "--rounds", "2")
    assert figures["fork of 600 tokens: state copied"]["value"] == 0
    assert figures["fork of 600 tokens, with its commit"]["target"]["value"] == 10


def test_the_table_names_machine_and_targets(tiny_folder: Path) -> None:
    """What a person sees; under --strict a missed target would be exit status 3."""
    command = ["bench", "fork", "--tokens", "300", "--rounds", "1", "--model", str(tiny_folder)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0
    assert "state copied" in result.stdout and "= 0" in result.stdout and "met" in result.stdout
    assert "threads of" in result.stdout


def test_strict_reports_a_missed_target(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that nothing can reach: exit status 3, and the report names the figure."""
    from freetoken_agent.cli import bench_sessions

    monkeypatch.setattr(bench_sessions, "FORK_MS", timing.Target("at_most", 0.0))
    command = ["bench", "fork", "--tokens", "300", "--rounds", "1", "--strict", "--json"]
    result = CliRunner().invoke(app, [*command, "--model", str(tiny_folder)])
    assert result.exit_code == 3
    assert json.loads(result.stdout)["missed"] == ["fork of 300 tokens, with its commit"]


def test_small_figures_are_not_rounded_to_nothing() -> None:
    """Oracle: the numbers as a reader expects them."""
    shown = {value: _number(value) for value in (0.0, 1.4e-4, -0.05, 0.1, 1335.52)}
    assert list(shown.values()) == ["0.0", "0.00014", "-0.05", "0.1", "1,335.5"]
