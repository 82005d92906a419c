# SPDX-License-Identifier: Apache-2.0
"""`bench …`: figures of this machine, each with what it is held against.

A ratio compares neighbours in time of one run. Nothing here is remembered between runs.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from freetoken_agent.catalog import resolve
from freetoken_runtime.bench.machine import Machine, read_machine
from freetoken_runtime.bench.timing import Figure, OnTurn, Target

from .bench_elastic import ELASTIC_MODEL, elastic_measures
from .bench_experts import EXPERTS_MODEL, experts_measures
from .bench_load import Form, LoadChoice, Shape, load_measures
from .bench_measures import Measure
from .bench_offload import OffloadSettings, Part, offload_measures
from .bench_sessions import SessionSettings, measure_edit, measure_fork, measure_load
from .opening import ModelName
from .output import EXIT_FAULT_FOUND, Json, command, emit, progress

app = typer.Typer(no_args_is_help=True, help="Measure this machine; figures have targets.")

Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Compute threads.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="How often each turn is taken.")]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="Length of what is measured.")]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with 3 if a target is missed.")]

HYBRID_HELP = (
    "Instead: anchors, an edit and a restart on twice as many tokens of a hybrid mixture with "
    "random weights (9 GB of memory)."
)

PART_HELP = "Only this: decoding, or double buffering in this form; may be repeated."
LOAD_FOLDER_HELP = (
    "Where the prepared models (7 GB) are kept and looked for; else they are temporary."
)
FOLDER_HELP = "Where the prepared models (9 GB) are kept and looked for; else they are temporary."
LOAD_MODEL = "random weights, shapes of Qwen3-0.6B and Qwen3-30B-A3B"
OFFLOAD_MODEL = "random weights, shapes of Qwen3-30B-A3B"


_VERDICTS = {True: Text("met", "green"), False: Text("missed", "bold red"), None: Text("")}


@dataclass(frozen=True)
class BenchReport:
    """What was measured, where, and how long it took."""

    model: str
    machine: Machine
    threads: int
    seconds: float
    figures: tuple[Figure, ...]


@app.command("prefill")
@command
def bench_prefill(
    tokens: Tokens = 1024,
    rounds: Rounds = 5,
    threads: Threads = None,
    model: ModelName = "smollm2",
    strict: Strict = False,
    json: Json = False,
) -> None:
    """Prefill against transformers fp32."""
    _run({"prefill": _prefill(model, tokens, rounds, threads)}, model, threads, strict)


@app.command("decode")
@command
def bench_decode(
    tokens: Tokens = 64,
    rounds: Rounds = 5,
    threads: Threads = None,
    model: ModelName = "smollm2",
    strict: Strict = False,
    json: Json = False,
) -> None:
    """Decode in every weight form against transformers bf16, and beside a busy process."""
    _run({"decode": _decode(model, tokens, rounds, threads)}, model, threads, strict)


@app.command("edit")
@command
def bench_edit(
    tokens: Tokens = 4000,
    rounds: Rounds = 5,
    persist_mib: Annotated[int, typer.Option("--persist-mib", min=1)] = 512,
    hybrid: Annotated[bool, typer.Option("--hybrid", help=HYBRID_HELP)] = False,
    threads: Threads = None,
    model: ModelName = "smollm2",
    strict: Strict = False,
    json: Json = False,
) -> None:
    """An edit at 10, 50 and 90 %, and edits while the disk and the engine are busy."""
    if hybrid:
        measures = {"hybrid": _hybrid(2 * tokens, rounds, threads)}
        return _run(measures, "random weights, shapes of Qwen3.6-35B-A3B", threads, strict)
    settings = SessionSettings(
        model, tokens, rounds, persist_bytes=persist_mib << 20, threads=threads
    )
    _run(_edits(settings), model, threads, strict)


@app.command("restart")
@command
def bench_restart(
    tokens: Tokens = 4000,
    rounds: Rounds = 3,
    threads: Threads = None,
    model: ModelName = "smollm2",
    strict: Strict = False,
    json: Json = False,
) -> None:
    """First token in a new process, with stored states and cold."""
    settings = SessionSettings(model, tokens, rounds, threads=threads)
    _run(_restarts(settings), model, threads, strict)


@app.command("fork")
@command
def bench_fork(
    tokens: Tokens = 4000,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="How many forks.")] = 20,
    threads: Threads = None,
    model: ModelName = "smollm2",
    strict: Strict = False,
    json: Json = False,
) -> None:
    """A fork with its commit; it must copy no state."""
    settings = SessionSettings(model, tokens, forks=rounds, threads=threads)
    _run(_forks(settings), model, threads, strict)


@app.command("agent")
@command
def bench_agent(
    rounds: Rounds = 5,
    threads: Threads = None,
    model: ModelName = "smollm2",
    strict: Strict = False,
    json: Json = False,
) -> None:
    """What the agent layer costs: per token, per step, after an edit, behind a slow tool."""
    _run(_agents(SessionSettings(model, rounds=rounds, threads=threads)), model, threads, strict)


@app.command("experts")
@command
def bench_experts(
    folder: Annotated[Path | None, typer.Option("--folder", help="Keeps the models.")] = None,
    rounds: Rounds = 3,
    threads: Threads = None,
    strict: Strict = False,
    json: Json = False,
) -> None:
    """A mixture in memory, in every form, against transformers bf16, and beside a busy process."""
    _run(experts_measures(folder, rounds, threads), EXPERTS_MODEL, threads, strict)


@app.command("elastic")
@command
def bench_elastic(
    tokens: Tokens = 16_000,
    threads: Threads = None,
    strict: Strict = False,
    json: Json = False,
) -> None:
    """A session that grows and goes back beside one that decodes, on half and on all of a budget:
    with memory that moves between experts and states, and without."""
    _run(elastic_measures(tokens, threads), ELASTIC_MODEL, threads, strict)


@app.command("load")
@command
def bench_load(
    shape: Annotated[list[Shape] | None, typer.Option("--shape", help="Only this one.")] = None,
    form: Annotated[list[Form] | None, typer.Option("--form", help="Only this one.")] = None,
    folder: Annotated[Path | None, typer.Option("--folder", help=LOAD_FOLDER_HELP)] = None,
    rounds: Rounds = 3,
    threads: Threads = None,
    strict: Strict = False,
    json: Json = False,
) -> None:
    """From the start of a process to its first token: converted weights against safetensors."""
    choice = LoadChoice(tuple(shape or Shape), tuple(form or Form), folder, rounds, threads)
    _run(load_measures(choice), LOAD_MODEL, threads, strict)


@app.command("offload")
@command
def bench_offload(
    part: Annotated[list[Part] | None, typer.Option("--part", help=PART_HELP)] = None,
    folder: Annotated[Path | None, typer.Option("--folder", help=FOLDER_HELP)] = None,
    rounds: Rounds = 6,
    threads: Threads = None,
    strict: Strict = False,
    json: Json = False,
) -> None:
    """Experts from the disk: decoding against what memory and disk allow; long prefills."""
    settings = OffloadSettings(tuple(part or Part), folder, rounds, threads)
    _run(offload_measures(settings), OFFLOAD_MODEL, threads, strict)


@app.command("all")
@command
def bench_all(
    threads: Threads = None,
    model: ModelName = "smollm2",
    strict: Strict = False,
    json: Json = False,
) -> None:
    """Everything, one after another."""
    settings = SessionSettings(model, threads=threads)
    measures = {
        "prefill": _prefill(model, 1024, 5, threads),
        "decode": _decode(model, 64, 5, threads),
    }
    measures |= _edits(settings) | _restarts(settings) | _forks(settings) | _agents(settings)
    _run(measures, model, threads, strict)


def _prefill(model: str, tokens: int, rounds: int, threads: int | None) -> Measure:
    def measure(on_turn: OnTurn) -> list[Figure]:
        from freetoken_runtime.bench import prefill

        settings = prefill.PrefillSettings(tokens, rounds, threads=threads)
        return prefill.measure(resolve(model), settings, on_turn=on_turn)

    return measure


def _decode(model: str, tokens: int, rounds: int, threads: int | None) -> Measure:
    def measure(on_turn: OnTurn) -> list[Figure]:
        from freetoken_runtime.bench import decode

        settings = decode.DecodeSettings(tokens=tokens, rounds=rounds, threads=threads)
        return decode.measure(resolve(model), settings, on_turn=on_turn)

    return measure


def _hybrid(tokens: int, rounds: int, threads: int | None) -> Measure:
    def measure(on_turn: OnTurn) -> list[Figure]:
        from freetoken_runtime.bench import hybrid

        settings = hybrid.HybridSettings(tokens, rounds, threads)
        with tempfile.TemporaryDirectory(prefix="freetoken-bench-") as folder:
            return hybrid.measure(settings, Path(folder), on_turn=on_turn)

    return measure


def _in_a_folder(measure: Callable[..., list[Figure]], settings: SessionSettings) -> Measure:
    def run(on_turn: OnTurn) -> list[Figure]:
        with tempfile.TemporaryDirectory(prefix="freetoken-bench-") as folder:
            return measure(settings, Path(folder), on_turn=on_turn)

    return run


def _edits(settings: SessionSettings) -> dict[str, Measure]:
    return {
        "edit": _in_a_folder(measure_edit, settings),
        "edit under load": _in_a_folder(measure_load, settings),
    }


def _agents(settings: SessionSettings) -> dict[str, Measure]:
    from .bench_agent import measure_agent, measure_overhead

    def overhead(on_turn: OnTurn) -> list[Figure]:
        return measure_overhead(settings.rounds, on_turn=on_turn)

    return {"agent": overhead, "agent on a model": _in_a_folder(measure_agent, settings)}


def _restarts(settings: SessionSettings) -> dict[str, Measure]:
    from .bench_restart import measure_restart

    return {"restart": _in_a_folder(measure_restart, settings)}


def _forks(settings: SessionSettings) -> dict[str, Measure]:
    return {"fork": _in_a_folder(measure_fork, settings)}


def _run(measures: dict[str, Measure], model: str, threads: int | None, strict: bool) -> None:
    started = time.perf_counter()
    machine = read_machine()
    figures: list[Figure] = []
    with progress("") as bar:
        for label, measure in measures.items():
            bar.label(label)
            figures += measure(bar)
    report = BenchReport(
        model=model,
        machine=machine,
        threads=threads or machine.torch_threads,
        seconds=time.perf_counter() - started,
        figures=tuple(figures),
    )
    missed = [figure.name for figure in figures if figure.met is False]
    emit(_as_json(report, missed), _view(report))
    if strict and missed:
        raise typer.Exit(EXIT_FAULT_FOUND)


def _as_json(report: BenchReport, missed: list[str]) -> dict[str, Any]:
    figures = [vars(figure) | {"met": figure.met} for figure in report.figures]
    return vars(report) | {"figures": figures, "missed": missed}


def _view(report: BenchReport) -> Group:
    table = Table("figure", "value", "against", "ratio", "target", "", box=None, pad_edge=False)
    for figure in report.figures:
        against = "" if figure.baseline is None else f"{_number(figure.baseline)} ({figure.note})"
        table.add_row(
            figure.name,
            f"{_number(figure.value)} {figure.unit}",
            against or figure.note,
            "" if figure.ratio is None else f"{figure.ratio:.3g}",
            _target_text(figure.target),
            _VERDICTS[figure.met],
        )
    machine = report.machine
    where = f"{machine.cpu}, {report.threads} threads of {machine.logical_cpus} CPUs"
    load = "" if machine.load_1m is None else f", load {machine.load_1m:.1f} at the start"
    return Group(table, f"\n{report.model} on {where}{load}; {report.seconds:.0f} s")


def _number(value: float) -> str:
    """Errors are small, and none of them is 0.0."""
    return f"{value:,.1f}" if value == 0 or abs(value) >= 0.1 else f"{value:.2g}"


def _target_text(target: Target | None) -> str:
    if target is None:
        return ""
    sign = {"at_least": "≥", "at_most": "≤", "equal": "="}[target.sense]
    return f"{sign} {target.value:g}"
