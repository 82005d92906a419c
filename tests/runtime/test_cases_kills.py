# SPDX-License-Identifier: Apache-2.0
"""Field cases about states on disk, on a model of attention layers and on a hybrid of every kind of
state with experts. GOLD: a cold prefill of identical ids in an engine that knows nothing."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from freetoken_runtime import SamplingParams
from freetoken_runtime.engine_cases import CheckedEngine, close_to, ids_of
from freetoken_storage import Database

CheckedMaker = Callable[..., CheckedEngine]
MODELS = ["full", "hybrid"]
both = pytest.mark.parametrize("kind", MODELS)

CHILD = """
import sys
import numpy as np
from freetoken_runtime import Engine, SamplingParams
from freetoken_runtime.config import read_host, resolve
from freetoken_runtime.engine_cases import CONFIG, hybrid_model, ids_of
from freetoken_runtime.weights import load
from freetoken_storage import Database
folder, store, seed, warm = sys.argv[1:5]
ids = ids_of(int(seed), 150)
database = Database(store)
model = hybrid_model() if folder == "hybrid" else load(folder)
engine = Engine(model, resolve(CONFIG, read_host()))
engine.attach(database.snapshots)
for round in range(1000):
    tokens = [t.id for t in engine.generate(ids, SamplingParams(max_tokens=6))]
    ids += tokens
    if warm == "warm":
        engine.warm(ids)
    engine.flush()
    sys.stdout.write(" ".join(map(str, ids)) + "\\n")
    sys.stdout.flush()
    rng = np.random.default_rng(round)
    ids = ids[: int(rng.integers(100, len(ids)))] + [int(i) for i in rng.integers(3, 211, 40)]
"""


@pytest.fixture
def origin(kind: str, kind_folder: Callable[[str], Path]) -> str:
    """What a child process loads the model from."""
    return "hybrid" if kind == "hybrid" else str(kind_folder(kind))


def start_child(origin: str, store: Path, *, seed: int, warm: bool) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", CHILD, origin, str(store), str(seed)]
    return subprocess.Popen(
        [*command, "warm" if warm else "cold"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def saved_ids(child: "subprocess.Popen[str]") -> list[int]:
    """The path of the next state that the child has acknowledged."""
    assert child.stdout is not None
    return [int(i) for i in child.stdout.readline().split()]


def kill(child: "subprocess.Popen[str]") -> None:
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert child.stdout is not None
    child.stdout.close()


def ask(engine: CheckedEngine, ids: list[int]) -> int:
    """P, as planned and as counted; GOLD."""
    planned = engine.engine.plan(ids)
    stream = engine.engine.generate(ids, SamplingParams(max_tokens=1))
    assert len(list(stream)) == 1
    assert stream.usage.prefill_tokens == planned.prefill_tokens
    assert close_to(engine.engine.logits(ids), engine.cold(ids, 1).logits)
    return stream.usage.prefill_tokens


@both
@pytest.mark.parametrize("warm, expected", [(True, 10), (False, 11)])
def test_c37_killed_and_continued(
    checked: CheckedMaker, origin: str, tmp_path: Path, warm: bool, expected: int
) -> None:
    """Save, SIGKILL, a new process appends 10 ids: P = 10 after a warm(), else 11; then an edit."""
    child = start_child(origin, tmp_path / "store", seed=1, warm=warm)
    saved = saved_ids(child)
    kill(child)
    with Database(tmp_path / "store") as database:
        engine = checked(database.snapshots)
        ids = saved + ids_of(2, 10)
        assert engine.engine.plan(ids).source == "disk"
        assert ask(engine, ids) == expected
        edited = [*ids[:80], 5, *ids[90:]]
        assert ids[80] != 5
        assert ask(engine, edited) == len(edited) - engine.nearest(80)
        engine.close()


def kill_at_random_points(
    checked: CheckedMaker, origin: str, store: Path, rounds: int, seed: int
) -> None:
    rng = random.Random(seed)
    for number in range(rounds):
        warm = bool(number % 2)
        child = start_child(origin, store, seed=number, warm=warm)
        acknowledged = [saved_ids(child) for _ in range(rng.randrange(1, 4))]
        time.sleep(rng.random() * 0.03)
        kill(child)
        with Database(store) as database:
            engine = checked(database.snapshots)
            for ids in acknowledged:
                # The last sampled id was not forwarded, so where only anchors serve, the one
                # before the path's end is the last.
                assert ask(engine, ids) <= (0 if warm else 1)
                assert ask(engine, [*ids, 9, 10, 11]) <= 3
                edited = [*ids[:97], 3 if ids[97] != 3 else 4, *ids[98:]]
                assert ask(engine, edited) <= len(ids) - engine.nearest(97)
            engine.close()


@both
def test_c43_sigkill_at_random_points(checked: CheckedMaker, origin: str, tmp_path: Path) -> None:
    """Every flushed state is there after a SIGKILL, whole, and GOLD."""
    kill_at_random_points(checked, origin, tmp_path / "store", 2, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@both
def test_c43_sigkill_at_50_random_points(
    checked: CheckedMaker, origin: str, tmp_path: Path
) -> None:
    """The same store survives 50 kills."""
    kill_at_random_points(checked, origin, tmp_path / "store", 50, seed=2)


@both
@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_c38_flipped_bytes_of_a_block_are_a_named_miss(
    checked: CheckedMaker, tmp_path: Path, share: float
) -> None:
    """One flipped byte in a stored block: a miss called damaged, GOLD, a healthy process."""
    ids = ids_of(1, 640)
    with Database(tmp_path / "store") as database:
        engine = checked(database.snapshots)
        engine.generate(ids, 2)
        (resident,) = engine.engine._index
        position = int(share * 640)
        block = position - position % 64
        rows = resident.sequence.view(640).copy_rows(block, block + 64)["k0"].tobytes()
        engine.close()
    flip(tmp_path / "store", rows[1000:1400])
    miss_once(checked, tmp_path / "store", ids, engine.nearest(block))


@pytest.mark.parametrize("kind", ["gated_delta", "hybrid"])
@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_c38_flipped_bytes_of_an_anchor_are_a_named_miss(
    checked: CheckedMaker, tmp_path: Path, share: float
) -> None:
    """The same in what the last anchor holds: the one before it serves."""
    ids = ids_of(1, 640)
    with Database(tmp_path / "store") as database:
        engine = checked(database.snapshots)
        engine.warm(ids)
        (resident,) = engine.engine._index
        fixed = resident.sequence.anchors[640].fixed
        data = max((t for buffers in fixed for t in buffers), key=torch.Tensor.numel)
        data_bytes = data.numpy().tobytes()
        engine.close()
    start = int(share * (len(data_bytes) - 200))
    flip(tmp_path / "store", data_bytes[start : start + 200])
    miss_once(checked, tmp_path / "store", ids, 600)


def miss_once(checked: CheckedMaker, store: Path, ids: list[int], reused: int) -> None:
    """The path costs what `reused` tokens leave, is GOLD, and is whole in the next process."""
    with Database(store) as database:
        engine = checked(database.snapshots)
        planned = engine.engine.plan(ids)
        assert planned.prefill_tokens == 0
        stream = engine.engine.generate(ids, SamplingParams(max_tokens=2))
        assert len(list(stream)) == 2
        usage = stream.usage
        assert (usage.reused_tokens, usage.prefill_tokens) == (reused, 640 - reused)
        assert "lost: damaged" in str(usage.changed)
        assert ask(engine, ids) == 0 and ask(engine, ids_of(5, 100)) == 100
        engine.close()
    with Database(store) as database:  # what was recomputed was stored again
        engine = checked(database.snapshots)
        assert ask(engine, ids) == 0
        engine.close()


def flip(store: Path, needle: bytes) -> None:
    """Flip one bit in every place where the store's files hold these bytes."""
    found = 0
    for file in store.rglob("data.mdb"):
        data = bytearray(file.read_bytes())
        at = data.find(needle)
        while at >= 0:
            data[at + 7] ^= 0x10
            found += 1
            at = data.find(needle, at + 1)
        file.write_bytes(data)
    assert found, "the bytes were not found in the store's files"
