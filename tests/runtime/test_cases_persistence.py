# SPDX-License-Identifier: Apache-2.0
"""Field cases about what a store holds, for whom, and what happens when it cannot: on attention
layers and on hybrids. GOLD: a cold prefill of identical ids."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from freetoken_runtime import Engine, SamplingParams
from freetoken_runtime.engine_cases import CheckedEngine, close_to, ids_of
from freetoken_runtime.errors import EngineFault
from freetoken_runtime.state import digest as digests
from freetoken_runtime.testing import build_checkpoint
from freetoken_runtime.weights import load
from freetoken_storage import Database, MemoryDatabase
from freetoken_storage.errors import StoreFull, StoreMismatch, WriteFailed
from freetoken_storage.records import Snapshot

EngineMaker = Callable[..., Engine]
CheckedMaker = Callable[..., CheckedEngine]
both = pytest.mark.parametrize("kind", ["full", "hybrid"])


def is_gold(engine: Engine, ids: list[int]) -> bool:
    """The engine's logits equal those of a cold prefill."""
    return close_to(engine.logits(ids), engine.logits(ids, reuse=False))


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


@pytest.mark.parametrize("kind", ["full", "gated_delta"])
def test_c39_other_rope_quantisation_kv_dtype_or_format_is_a_named_miss(
    checked: CheckedMaker,
    kind: str,
    kind_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Same ids, same weights, one setting changed: a full prefill, and the part is named."""
    database = MemoryDatabase()
    ids = ids_of(1, 150)
    first = checked(database.snapshots)
    first.generate(ids, 2)
    first.close()

    def check(engine: CheckedEngine, part: str, *, gold: bool = True) -> None:
        plan = engine.engine.plan(ids)
        assert (plan.reused_tokens, plan.source) == (0, "none")
        assert plan.miss is not None
        assert (plan.miss.position, plan.miss.cause) == (0, f"fingerprint:{part}")
        short = engine.engine.plan(ids[:40]).miss
        assert short is not None and short.cause == f"fingerprint:{part}"
        other = engine.engine.plan(ids_of(9, 40)).miss
        assert other is not None and other.cause == "never_computed"
        assert engine.warm(ids) == 150
        assert not gold or is_gold(engine.engine, ids)
        engine.close()

    copytree(kind_folder(kind), tmp_path / "rope")
    config = (tmp_path / "rope" / "config.json").read_text()
    assert '"rope_theta": 10000.0' in config
    (tmp_path / "rope" / "config.json").write_text(config.replace("10000.0", "20000.0"))
    check(CheckedEngine(tmp_path / "rope", database.snapshots), "rope")
    quantised = load(kind_folder(kind), quant="int8")
    check(CheckedEngine(quantised, database.snapshots, quant="int8"), "quantisation", gold=False)
    real = digests.fingerprint
    with monkeypatch.context() as patch:
        patch.setattr(
            "freetoken_runtime.engine.fingerprint",
            lambda parts: real({**parts, "kv_dtype": "bfloat16"}),
        )
        check(checked(database.snapshots), "kv_dtype")
    with monkeypatch.context() as patch:
        patch.setattr(digests, "STATE_FORMAT", "2")
        check(checked(database.snapshots), "format")
    assert checked(database.snapshots).engine.plan(ids).prefill_tokens == 0


@pytest.mark.parametrize(
    "family, tensor",
    [
        ("llama", "model.layers.1.mlp.up_proj.weight"),
        ("qwen3_next", "model.layers.0.linear_attn.A_log"),
        ("qwen3_next", "model.layers.3.mlp.gate.weight"),
    ],
)
def test_c40_a_perturbed_tensor_reuses_nothing(
    make_engine: EngineMaker, tmp_path: Path, family: str, tensor: str
) -> None:
    """Same folder, one weight changed: nothing of the old states is reused."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    build_checkpoint(folder, family)
    database = MemoryDatabase()
    ids = ids_of(1, 150)
    engine = make_engine(database.snapshots, folder=folder)
    generate(engine, ids, 2)
    engine.close()
    tensors = load_file(folder / "model.safetensors")
    tensors[tensor].view(-1)[1] += 1e-3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    engine = make_engine(database.snapshots, folder=folder)
    plan = engine.plan(ids)
    assert plan.reused_tokens == 0
    assert plan.miss is not None and plan.miss.cause == "fingerprint:weights"
    assert is_gold(engine, ids)


def test_c42_digests_do_not_depend_on_the_hash_seed(kind_folder: Callable[[str], Path]) -> None:
    """Two processes with different PYTHONHASHSEED name states alike, blocks and anchors, and lay
    them out alike."""
    program = (
        "import sys\n"
        "from freetoken_runtime import Engine\n"
        "from freetoken_runtime.config import read_host, resolve\n"
        "from freetoken_runtime.engine_cases import CONFIG, hybrid_model\n"
        "from freetoken_runtime.state.digest import anchor_digest, as_ids, chain, digest_at\n"
        "from freetoken_runtime.weights import load\n"
        "ids = as_ids(range(3, 203))\n"
        "for model in (load(sys.argv[1]), hybrid_model()):\n"
        "    with Engine(model, resolve(CONFIG, read_host())) as engine:\n"
        "        names = chain(engine.fingerprint.digest, ids)\n"
        "        last = digest_at(names, ids, 200)\n"
        "        names = [*names, last, anchor_digest(last)]\n"
        "        sys.stdout.write(' '.join(d.hex() for d in names) + ' ')\n"
        "        groups = engine._pool.layout.groups\n"
        "        sys.stdout.write(str([g.layers for g in groups]).replace(' ', '') + ' ')\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program, str(kind_folder("full"))],
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1 and len(outputs.pop().split()) == 2 * 7


@both
def test_c46_a_full_store_evicts_the_oldest_and_keeps_what_is_pinned(
    checked: CheckedMaker, tmp_path: Path
) -> None:
    """A disk budget for a few paths: old ones go, a pinned one stays, every answer is GOLD."""
    with Database(tmp_path / "store", disk_budget_bytes=6 << 20) as database:
        engine = checked(database.snapshots, anchor_interval=250).engine
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
        engine = checked(database.snapshots, anchor_interval=250).engine
        assert engine.plan(pinned).prefill_tokens == 0
        assert engine.plan(paths[-1]).prefill_tokens == 0
        assert engine.plan(paths[0]).reused_tokens == 0
        assert is_gold(engine, paths[0]) and is_gold(engine, pinned)
        engine.close()


@both
def test_c47_no_space_at_commit_stops_no_generation(checked: CheckedMaker) -> None:
    """The store is full: tokens go on, earlier snapshots are readable, the report says it."""
    database = MemoryDatabase()
    store = FaultySnapshots(database.snapshots)
    engine = checked(store).engine
    ids = ids_of(1, 150)
    generate(engine, ids, 3)
    engine.flush()
    store.fault = StoreFull("the disk is full", value="injected")
    output = generate(engine, ids_of(2, 150), 40)
    assert len(output) == 40
    with pytest.raises(StoreFull, match="the disk is full"):
        engine.flush()
    reader = checked(database.snapshots).engine
    assert reader.plan(ids).prefill_tokens == 0
    assert is_gold(reader, ids)


@both
def test_c51_a_write_error_is_raised_and_the_old_state_is_intact(
    checked: CheckedMaker,
) -> None:
    """flush raises what the write raised, as long as it fails; then it writes what is missing."""
    database = MemoryDatabase()
    store = FaultySnapshots(database.snapshots)
    engine = checked(store).engine
    old, new = ids_of(1, 150), ids_of(2, 150)
    engine.warm(old)
    engine.flush()
    store.fault = WriteFailed("an input/output error", value="injected")
    engine.warm(new)
    for _ in range(2):
        with pytest.raises(WriteFailed, match="injected"):
            engine.flush()
    reader = checked(database.snapshots).engine
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
