# SPDX-License-Identifier: Apache-2.0
"""SIGKILL at random points of edits and generations: what was acknowledged is there. Case C43."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from freetoken_agent import LocalModel, Store
from freetoken_agent.proving.proofs import Gold
from freetoken_runtime import EngineConfig

CONFIG = EngineConfig(dtype="float32", threads=1)


@dataclass(frozen=True)
class State:
    """A branch as the child had it when a step was acknowledged."""

    branch: str
    ids: list[int]


class Forker:
    """The process that forks workers; see kill_child.py."""

    def __init__(self, model: Path, *, steps: int) -> None:
        self.model = model
        self._steps = steps
        child = [sys.executable, str(Path(__file__).with_name("kill_child.py"))]
        self._process = subprocess.Popen(
            child, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def run(self, folder: Path, seed: int, *, kill_after: int | None, delay_s: float = 0) -> None:
        """Run a program in `folder`; kill it `delay_s` after that many acknowledged states."""
        folder.mkdir()
        job = {"store": str(folder / "store"), "log": str(folder / "log"), "seed": seed}
        line = json.dumps({**job, "model": str(self.model), "steps": self._steps, "threads": 1})
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        pid = int(self._process.stdout.readline())
        if kill_after is not None:
            with suppress(ProcessLookupError):  # it may have ended before the kill
                while len(read_log(folder)) < kill_after:
                    os.kill(pid, 0)
                    time.sleep(0.0005)
                time.sleep(delay_s)
                os.kill(pid, signal.SIGKILL)
        status = int(self._process.stdout.readline())
        assert status in ((0,) if kill_after is None else (0, -signal.SIGKILL)), status

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()


def read_log(folder: Path) -> list[State]:
    """The states acknowledged so far; a line cut by the kill was not."""
    log = folder / "log"
    lines = log.read_bytes().split(b"\n")[:-1] if log.exists() else []
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [State(record["branch"], record["ids"]) for record in records]


@pytest.fixture(scope="module")
def tiny_forker(tiny_folder: Path) -> Iterator[Forker]:
    forker = Forker(tiny_folder, steps=24)
    yield forker
    forker.close()


@pytest.fixture(scope="module")
def smollm2_forker(smollm2_path: Path) -> Iterator[Forker]:
    forker = Forker(smollm2_path, steps=8)
    yield forker
    forker.close()


def kill_often(
    forker: Forker, folder: Path, gold: Gold, seeds: range, *, kills: int, num_tokens: int
) -> None:
    """Kill the program of each seed `kills` times, at random points of its run."""
    restored = 0
    for seed in seeds:
        (folder / str(seed)).mkdir()
        forker.run(folder / str(seed) / "twin", seed, kill_after=None)
        whole = read_log(folder / str(seed) / "twin")
        for kill in range(kills):
            chance = random.Random(1000 * seed + kill)
            killed = folder / str(seed) / str(kill)
            after, delay_s = chance.randrange(1, len(whole)), chance.uniform(0, 0.02)
            forker.run(killed, seed, kill_after=after, delay_s=delay_s)
            with LocalModel.load(forker.model, config=CONFIG) as model:
                restored += check_killed(killed, whole, model, gold, num_tokens)
    assert restored >= len(seeds) * kills // 3, f"only {restored} stores held a head's state"


def check_killed(
    folder: Path, whole: list[State], model: LocalModel, gold: Gold, num_tokens: int
) -> bool:
    """Compare what a kill left with the undisturbed twin; returns whether a head's state was on
    disk."""
    done = read_log(folder)
    assert done == whole[: len(done)], "the program is not deterministic"
    restored = False
    with Store(folder / "store") as store:
        session = store.open("killed", model)
        heads = {state.branch: state.ids for state in done}
        begun = whole[len(done)] if len(done) < len(whole) else None
        names = {info.name for info in session.branches()}
        assert heads.keys() <= names <= heads.keys() | ({begun.branch} if begun else set())
        for name in names:
            branch = session.open_branch(name)
            ids = branch.ids()
            complete = begun is not None and ids == begun.ids and name == begun.branch
            assert complete or ids == heads[name], f"branch {name} holds half a step"
            if ids:
                restored |= model.plan(ids).source == "disk"
                gold.check(model.engine, ids, num_tokens=num_tokens)
            branch.append("user", "go on")
            usage = branch.generate_sync(max_tokens=2).usage
            assert usage.reused_tokens + usage.prefill_tokens == usage.input_tokens
    return restored


def test_c43_kills_on_the_tiny_model(tiny_forker: Forker, tiny_gold: Gold, tmp_path: Path) -> None:
    """Oracles: a twin of the same program that is not killed says what each acknowledged step must
    have left; cold prefills say what the states must be."""
    kill_often(tiny_forker, tmp_path, tiny_gold, range(9), kills=1, num_tokens=16)


@pytest.mark.smollm2
def test_c43_a_kill_on_smollm2(smollm2_forker: Forker, smollm2_gold: Gold, tmp_path: Path) -> None:
    """As above."""
    kill_often(smollm2_forker, tmp_path, smollm2_gold, range(1), kills=1, num_tokens=16)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_c43_more_kills_on_the_tiny_model(
    tiny_forker: Forker, tiny_gold: Gold, tmp_path: Path
) -> None:
    """As above: the other 36 of 45."""
    kill_often(tiny_forker, tmp_path, tiny_gold, range(100, 112), kills=3, num_tokens=64)


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.timeout(900)
def test_c43_more_kills_on_smollm2(
    smollm2_forker: Forker, smollm2_gold: Gold, tmp_path: Path
) -> None:
    """As above: the other 4 of 5."""
    kill_often(smollm2_forker, tmp_path, smollm2_gold, range(1, 2), kills=4, num_tokens=64)
