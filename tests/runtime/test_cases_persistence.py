# SPDX-License-Identifier: Apache-2.0
"""Field cases about states on disk. GOLD: a cold prefill of identical ids."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch

from freetoken_runtime import Engine, SamplingParams
from freetoken_runtime.errors import EngineFault
from freetoken_runtime.state import digest as digests
from freetoken_runtime.testing import build_checkpoint
from freetoken_storage import Database, MemoryDatabase
from freetoken_storage.errors import StoreFull, StoreMismatch, WriteFailed
from freetoken_storage.records import Snapshot

EngineMaker = Callable[..., Engine]


def ids_of(seed: int, count: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, 211, count)]


def is_gold(engine: Engine, ids: list[int]) -> bool:
    """The engine's logits equal those of a cold prefill."""
    warm, cold = engine.logits(ids), engine.logits(ids, reuse=False)
    span = float(cold.max() - cold.min())
    return bool(torch.isfinite(warm).all()) and float((warm - cold).abs().max()) <= 1e-4 * span


def generate(engine: Engine, ids: list[int], count: int) -> list[int]:
    return [token.id for token in engine.generate(ids, SamplingParams(max_tokens=count))]


class FaultySnapshots:
    """A store whose writes raise `fault` while it is set."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.fault: Exception | None = None

    def put(self, snapshots: list[Snapshot]) -> None:
        if self.fault is not None:
            raise self.fault
        self._inner.put(snapshots)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


CHILD = """
import sys
from freetoken_runtime import Engine, EngineConfig, SamplingParams
from freetoken_storage import Database
folder, store, seed, warm = sys.argv[1:5]
import numpy as np
ids = [int(i) for i in np.random.default_rng(int(seed)).integers(3, 211, 150)]
database = Database(store)
engine = Engine.load(folder, EngineConfig(threads=1, prefill_chunk=64), database.snapshots)
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


def start_child(folder: Path, store: Path, *, seed: int, warm: bool) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", CHILD, str(folder), str(store), str(seed)]
    return subprocess.Popen(
        [*command, "warm" if warm else "cold"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def kill(child: "subprocess.Popen[str]") -> None:
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert child.stdout is not None
    child.stdout.close()


@pytest.mark.parametrize("warm, expected", [(True, 10), (False, 11)])
def test_c37_killed_and_continued(
    make_engine: EngineMaker, tiny_llama: Path, tmp_path: Path, warm: bool, expected: int
) -> None:
    """Save, SIGKILL, a new process appends 10 ids: P = 10 after a warm(), else 11; then an edit."""
    child = start_child(tiny_llama, tmp_path / "store", seed=1, warm=warm)
    assert child.stdout is not None
    saved = [int(i) for i in child.stdout.readline().split()]
    kill(child)
    with Database(tmp_path / "store") as database:
        engine = make_engine(database.snapshots)
        ids = saved + ids_of(2, 10)
        plan = engine.plan(ids)
        assert (plan.source, plan.prefill_tokens) == ("disk", expected)
        stream = engine.generate(ids, SamplingParams(max_tokens=3))
        list(stream)
        assert stream.usage.prefill_tokens == expected
        assert is_gold(engine, ids)
        edited = [*ids[:80], 5, *ids[90:]]
        assert engine.plan(edited).reused_tokens == 80
        assert is_gold(engine, edited)
        engine.close()


def kill_at_random_points(
    make_engine: EngineMaker, folder: Path, store: Path, rounds: int, seed: int
) -> None:
    rng = random.Random(seed)
    for number in range(rounds):
        child = start_child(folder, store, seed=number, warm=bool(number % 2))
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(rng.randrange(1, 4))]
        time.sleep(rng.random() * 0.03)
        kill(child)
        with Database(store) as database:
            engine = make_engine(database.snapshots)
            for line in lines:
                ids = [int(i) for i in line.split()]
                assert engine.plan(ids).prefill_tokens <= (0 if number % 2 else 1)
                assert is_gold(engine, ids)
                assert is_gold(engine, [*ids, 9, 10, 11])
            engine.close()


def test_c43_sigkill_at_random_points(
    make_engine: EngineMaker, tiny_llama: Path, tmp_path: Path
) -> None:
    """Every flushed state is there after a SIGKILL, whole, and GOLD."""
    kill_at_random_points(make_engine, tiny_llama, tmp_path / "store", 3, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_c43_sigkill_at_50_random_points(
    make_engine: EngineMaker, tiny_llama: Path, tmp_path: Path
) -> None:
    """The same store survives 50 kills."""
    kill_at_random_points(make_engine, tiny_llama, tmp_path / "store", 50, seed=2)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_c38_flipped_bytes_are_a_named_miss(
    make_engine: EngineMaker, tmp_path: Path, share: float
) -> None:
    """One flipped byte in a stored block: a miss called damaged, GOLD, a healthy process."""
    ids = ids_of(1, 640)
    with Database(tmp_path / "store") as database:
        engine = make_engine(database.snapshots)
        generate(engine, ids, 2)
        engine.flush()
        (resident,) = engine._index
        position = int(share * 640)
        block = position - position % 64
        rows = resident.sequence.view(640).copy_rows(block, block + 64)["k0"].tobytes()
        engine.close()
    flip(tmp_path / "store", rows[1000:1400])
    with Database(tmp_path / "store") as database:
        engine = make_engine(database.snapshots)
        planned = engine.plan(ids)
        stream = engine.generate(ids, SamplingParams(max_tokens=2))
        assert len(list(stream)) == 2
        usage = stream.usage
        assert usage.reused_tokens == block < planned.reused_tokens
        assert usage.prefill_tokens == 640 - block
        assert "lost: damaged" in str(usage.changed)
        assert is_gold(engine, ids) and is_gold(engine, ids_of(5, 100))
        engine.close()
    with Database(tmp_path / "store") as database:  # what was recomputed was stored again
        assert make_engine(database.snapshots).plan(ids).prefill_tokens == 0


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
    assert found, "the block was not found in the store's files"


def test_c39_other_rope_quantisation_kv_dtype_or_format_is_a_named_miss(
    make_engine: EngineMaker, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same ids, same weights, one setting changed: a full prefill, and the part is named."""
    database = MemoryDatabase()
    ids = ids_of(1, 150)
    first = make_engine(database.snapshots)
    generate(first, ids, 2)
    first.close()

    def check(engine: Engine, part: str) -> None:
        plan = engine.plan(ids)
        assert (plan.reused_tokens, plan.source) == (0, "none")
        assert plan.miss is not None and plan.miss.cause == f"fingerprint:{part}"
        short = engine.plan(ids[:40]).miss
        assert short is not None and short.cause == f"fingerprint:{part}"
        other = engine.plan(ids_of(9, 40)).miss
        assert other is not None and other.cause == "never_computed"
        assert is_gold(engine, ids)
        engine.close()

    copytree(tiny_llama, tmp_path / "rope")
    config = (tmp_path / "rope" / "config.json").read_text()
    assert '"rope_theta": 10000.0' in config
    (tmp_path / "rope" / "config.json").write_text(config.replace("10000.0", "20000.0"))
    check(make_engine(database.snapshots, folder=tmp_path / "rope"), "rope")

    quantised = make_engine(database.snapshots, quant="int8")
    miss = quantised.plan(ids).miss
    assert miss is not None
    assert (miss.position, miss.cause, miss.tokens) == (0, "fingerprint:quantisation", 150)
    stream = quantised.generate(ids, SamplingParams(max_tokens=2))
    assert len(list(stream)) == 2 and stream.usage.prefill_tokens == 150
    quantised.close()

    real = digests.fingerprint
    with monkeypatch.context() as patch:
        patch.setattr(
            "freetoken_runtime.engine.fingerprint",
            lambda parts: real({**parts, "kv_dtype": "bfloat16"}),
        )
        check(make_engine(database.snapshots), "kv_dtype")
    with monkeypatch.context() as patch:
        patch.setattr(digests, "STATE_FORMAT", "2")
        check(make_engine(database.snapshots), "format")
    assert make_engine(database.snapshots).plan(ids).prefill_tokens == 0


def test_c40_a_perturbed_tensor_reuses_nothing(make_engine: EngineMaker, tmp_path: Path) -> None:
    """Same folder, one weight changed: nothing of the old states is reused."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    build_checkpoint(folder, "llama")
    database = MemoryDatabase()
    ids = ids_of(1, 150)
    engine = make_engine(database.snapshots, folder=folder)
    generate(engine, ids, 2)
    engine.close()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] += 1e-3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    engine = make_engine(database.snapshots, folder=folder)
    plan = engine.plan(ids)
    assert plan.reused_tokens == 0
    assert plan.miss is not None and plan.miss.cause == "fingerprint:weights"
    assert is_gold(engine, ids)


def test_c42_digests_do_not_depend_on_the_hash_seed(tiny_llama: Path) -> None:
    """Two processes with different PYTHONHASHSEED name states alike."""
    program = (
        "import sys\n"
        "from freetoken_runtime import Engine, EngineConfig\n"
        "from freetoken_runtime.state.digest import as_ids, chain, digest_at\n"
        "engine = Engine.load(sys.argv[1], EngineConfig(threads=1))\n"
        "ids = as_ids(range(3, 203))\n"
        "names = chain(engine.fingerprint.digest, ids)\n"
        "sys.stdout.write(' '.join(d.hex() for d in [*names, digest_at(names, ids, 200)]))\n"
        "engine.close()\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program, str(tiny_llama)],
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1 and len(outputs.pop().split()) == 5


def test_c46_a_full_store_evicts_the_oldest_and_keeps_what_is_pinned(
    make_engine: EngineMaker, tmp_path: Path
) -> None:
    """A disk budget for a few paths: old ones go, a pinned one stays, every answer is GOLD."""
    with Database(tmp_path / "store", disk_budget_bytes=6 << 20) as database:
        engine = make_engine(database.snapshots)
        pinned = ids_of(0, 500)
        engine.warm(pinned)
        engine.flush()
        engine.pin("keep", [pinned])
        paths = [ids_of(seed, 1000) for seed in range(1, 16)]
        for path in paths:
            generate(engine, path, 2)
            engine.flush()
        assert engine.stats().store_error is None
        engine.close()
        engine = make_engine(database.snapshots)
        assert engine.plan(pinned).prefill_tokens == 0
        assert engine.plan(paths[-1]).prefill_tokens == 0
        assert engine.plan(paths[0]).reused_tokens == 0
        assert is_gold(engine, paths[0]) and is_gold(engine, pinned)
        engine.close()


def test_c47_no_space_at_commit_stops_no_generation(make_engine: EngineMaker) -> None:
    """The store is full: tokens go on, earlier snapshots are readable, the report says it."""
    database = MemoryDatabase()
    store = FaultySnapshots(database.snapshots)
    engine = make_engine(store)
    ids = ids_of(1, 150)
    generate(engine, ids, 3)
    engine.flush()
    store.fault = StoreFull("the disk is full", value="injected")
    output = generate(engine, ids_of(2, 150), 40)
    assert len(output) == 40
    with pytest.raises(StoreFull, match="the disk is full"):
        engine.flush()
    reader = make_engine(database.snapshots)
    assert reader.plan(ids).prefill_tokens == 0
    assert is_gold(reader, ids)


def test_c51_a_write_error_is_raised_and_the_old_state_is_intact(
    make_engine: EngineMaker,
) -> None:
    """flush raises what the write raised, as long as it fails; then it writes what is missing."""
    database = MemoryDatabase()
    store = FaultySnapshots(database.snapshots)
    engine = make_engine(store)
    old, new = ids_of(1, 150), ids_of(2, 150)
    engine.warm(old)
    engine.flush()
    store.fault = WriteFailed("an input/output error", value="injected")
    engine.warm(new)
    for _ in range(2):
        with pytest.raises(WriteFailed, match="injected"):
            engine.flush()
    reader = make_engine(database.snapshots)
    assert reader.plan(old).prefill_tokens == 0 and reader.plan(new).reused_tokens == 0
    store.fault = None
    engine.flush()
    assert engine.stats().store_error is None
    assert reader.plan(new).prefill_tokens == 0
    assert is_gold(reader, new) and is_gold(reader, old)


def test_write_errors_show_in_the_stats_until_a_flush_reports_them(
    make_engine: EngineMaker,
) -> None:
    """`store_error` names the fault without a flush."""
    store = FaultySnapshots(MemoryDatabase().snapshots)
    engine = make_engine(store)
    store.fault = RuntimeError("a fault of ours")
    engine.warm(ids_of(1, 20))
    deadline = time.monotonic() + 20
    while engine.stats().store_error is None and time.monotonic() < deadline:
        time.sleep(0.005)
    assert "a fault of ours" in str(engine.stats().store_error)
    with pytest.raises(EngineFault, match="a fault of ours"):
        engine.flush()
    store.fault = None
    engine.flush()
    assert engine.stats().store_error is None


def test_one_store_at_a_time(make_engine: EngineMaker) -> None:
    """A second store is refused; after detach another one may come, and gets what RAM holds."""
    first, second = MemoryDatabase(), MemoryDatabase()
    engine = make_engine(first.snapshots)
    engine.attach(first.snapshots)
    with pytest.raises(StoreMismatch) as caught:
        engine.attach(second.snapshots)
    assert caught.value.code == "store_mismatch"
    ids = ids_of(1, 100)
    engine.warm(ids)
    engine.detach()
    engine.detach()
    assert make_engine(first.snapshots).plan(ids).prefill_tokens == 0
    engine.attach(second.snapshots)
    engine.flush()
    assert make_engine(second.snapshots).plan(ids).prefill_tokens == 0


def test_a_closed_store_costs_states_only(make_engine: EngineMaker, tmp_path: Path) -> None:
    """Somebody closed the store under the engine: plans and generations go on, cold."""
    database = Database(tmp_path / "store")
    engine = make_engine(database.snapshots)
    ids = ids_of(1, 100)
    generate(engine, ids, 2)
    engine.flush()
    database.close()
    assert engine.plan(ids).prefill_tokens == 0
    assert engine.plan(ids_of(2, 100)).reused_tokens == 0
    assert len(generate(engine, ids_of(2, 100), 5)) == 5
    assert is_gold(engine, ids_of(3, 90))


def test_an_evicted_path_is_called_evicted(make_engine: EngineMaker) -> None:
    """RAM let it go and no store keeps it: the miss says so."""
    engine = make_engine()
    ids = ids_of(1, 300)
    engine.warm(ids)
    stats = engine.stats()
    engine.set_budget(ram_bytes=stats.weights_bytes + stats.working_bytes + 64 * 640)
    engine.set_budget(ram_bytes=1 << 30)
    plan = engine.plan([*ids, 4])
    assert plan.miss is not None
    assert (plan.miss.position, plan.miss.cause) == (0, "evicted")
    assert engine.stats().evicted_paths == 1
