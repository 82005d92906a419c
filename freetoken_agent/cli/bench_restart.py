# SPDX-License-Identifier: Apache-2.0
"""What a restart costs: the time to the first token in a new process, with stored states and cold.

Run as a program (`python -m … FOLDER SETTINGS`) this module is that new process.
"""

import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from freetoken_runtime.bench.timing import Figure, OnTurn, Target
from freetoken_storage.errors import FreetokenError

from .bench_sessions import SessionSettings, fill, first_token, loaded

RATIO = Target("at_most", 0.03)
SESSION = "restart"


class RestartFailed(FreetokenError):
    """The new process ended with an error; its output says which."""

    code = "restart_failed"


@dataclass(frozen=True)
class Restarted:
    """What the new process saw. `ttft_s`: from the call of generate to its first token."""

    reused_tokens: int
    prefill_tokens: int
    source: str
    open_s: float
    ttft_s: float


def measure_restart(
    settings: SessionSettings, folder: Path, *, on_turn: OnTurn | None = None
) -> list[Figure]:
    """Warm and cold starts take turns, each in a new process on a copy of its own; copying has
    just read the files, so the page cache is warm."""
    original = folder / "original"
    with loaded(settings, original) as (model, store):
        session = store.create(SESSION, model, system="You are a helpful assistant.")
        fill(session, settings.tokens)
        asyncio.run(session.warm())
        asyncio.run(store.flush())
    runs: dict[str, list[Restarted]] = {"warm": [], "cold": []}
    for number in range(settings.rounds):
        for kind, seen in runs.items():
            seen.append(_restart(original, folder / f"{kind} {number}", kind == "cold", settings))
            if on_turn is not None:
                done = sum(len(runs_so_far) for runs_so_far in runs.values())
                on_turn(done, 2 * settings.rounds)
    warm_s = statistics.median(run.ttft_s for run in runs["warm"])
    cold_s = statistics.median(run.ttft_s for run in runs["cold"])
    ratios = [w.ttft_s / c.ttft_s for w, c in zip(runs["warm"], runs["cold"], strict=True)]
    one = runs["warm"][0]
    return [
        Figure(
            f"restart of {settings.tokens} tokens: first token after",
            1e3 * warm_s,
            "ms",
            baseline=1e3 * cold_s,
            ratio=statistics.median(ratios),
            target=RATIO,
            note=f"cold; {one.reused_tokens} tokens from {one.source}, {one.prefill_tokens} rows",
        ),
        Figure(
            "restart: opening the session",
            1e3 * statistics.median(run.open_s for run in runs["warm"]),
            "ms",
        ),
    ]


def _restart(original: Path, copy: Path, cold: bool, settings: SessionSettings) -> Restarted:
    ignore = shutil.ignore_patterns("states") if cold else None
    shutil.copytree(original, copy, ignore=ignore)
    command = [sys.executable, "-m", "freetoken_agent.cli.bench_restart", str(copy)]
    command.append(json.dumps(asdict(settings)))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    shutil.rmtree(copy)
    if done.returncode != 0:
        raise RestartFailed("the new process failed", value=done.stderr.strip()[-2000:])
    return Restarted(**json.loads(done.stdout))


def restarted(folder: str, settings: str) -> None:
    """The new process: load, open, ask, print."""
    with loaded(SessionSettings(**json.loads(settings)), Path(folder)) as (model, store):
        started = time.perf_counter()
        session = store.open(SESSION, model)
        open_s = time.perf_counter() - started
        plan = session.plan()
        ttft_s, reply = asyncio.run(first_token(session))
    prefilled = reply.usage.prefill_tokens
    seen = Restarted(
        reused_tokens=plan.input_tokens - prefilled,
        prefill_tokens=prefilled,
        source=plan.source,
        open_s=open_s,
        ttft_s=ttft_s,
    )
    typer.echo(json.dumps(asdict(seen)))


if __name__ == "__main__":
    restarted(*sys.argv[1:])
