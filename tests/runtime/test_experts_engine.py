# SPDX-License-Identifier: Apache-2.0
"""Engines whose experts come from RAM or disk. Oracles: an engine with all weights in memory, bit
for bit; arithmetic on what it reports; the machine of `freetoken_runtime.engine_programs`."""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from freetoken_runtime import Engine, EngineConfig, SamplingParams
from freetoken_runtime.config import read_host, resolve
from freetoken_runtime.engine_cases import ids_of
from freetoken_runtime.engine_programs import DatabasePrograms, run_programs
from freetoken_runtime.errors import BudgetTooSmall, InvalidConfig
from freetoken_runtime.models.registry import FAMILIES, read_family
from freetoken_runtime.specs.moe import MoeSpec
from freetoken_runtime.testing import build_checkpoint, family_config
from freetoken_runtime.weights import load, open_source
from freetoken_storage import MemoryDatabase

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG = EngineConfig(threads=1, prefill_chunk=48, anchor_interval=40, ram_budget_bytes=1 << 30)
HYBRID = "qwen3_next"  # gated delta net, attention, experts and a shared one in every layer
Folders = Callable[[str], Path]
Engines = Callable[..., Engine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folders: dict[str, Path] = {}

    def build(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family)
            build_checkpoint(folders[family], family)
        return folders[family]

    return build


@pytest.fixture
def engines(folder: Folders) -> Iterator[Engines]:
    """`engines(family, **fields)`: an engine whose free slots and fresh rows are NaN."""
    made: list[Engine] = []

    def make(family: str = HYBRID, **fields: Any) -> Engine:
        config = resolve(replace(CONFIG, **fields), read_host())
        model = load(folder(family), offload=config.offload or "none", quant=config.quant)
        made.append(Engine(model, config, poison=True))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def router(family: str) -> tuple[int, int] | None:
    """(experts, experts per row) of a family's small model; None if it has none."""
    _, spec = read_family(family_config(family).to_dict())
    mixtures = {x.feed_forward for x in spec.layers if isinstance(x.feed_forward, MoeSpec)}
    found = {(mixture.router.num_experts, mixture.router.top_k) for mixture in mixtures}
    assert len(found) <= 1, family
    return found.pop() if found else None


@dataclass(frozen=True)
class Offloaded:
    """One way to hold experts, and how many sequences run at once."""

    family: str
    level: str
    slots: int
    batch: int


MIXTURES = tuple(family for family in sorted(FAMILIES) if router(family))
WAYS = tuple(product(("ram", "disk"), (2, 4, 6, 12), (1, 4)))  # slots: k, 2k, E/2, E
EVERY = [Offloaded(family, *way) for family in MIXTURES for way in WAYS]


@pytest.fixture(scope="module")
def halves(folder: Folders, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The same in bf16, so that RAM holds experts in another form than what computes."""
    folders: dict[str, Path] = {}

    def build(family: str) -> Path:
        if family not in folders:
            path = folders[family] = tmp_path_factory.mktemp(f"{family}-half")
            (path / "config.json").write_bytes((folder(family) / "config.json").read_bytes())
            for file in folder(family).glob("*.safetensors"):
                tensors = {name: x.bfloat16() for name, x in load_file(file).items()}
                save_file(tensors, path / file.name)
        return folders[family]

    return build


def answers(path: Path, batch: int, **fields: Any) -> list[Any]:
    """The tokens of `batch` prompts that run at once, and the logits behind each."""
    config = resolve(replace(CONFIG, max_batch=4, **fields), read_host())
    model = load(path, offload=config.offload or "none")
    with Engine(model, config, poison=True) as engine:
        prompts = [ids_of(seed, 60 - 9 * seed) for seed in range(batch)]
        streams = [engine.generate(ids, SamplingParams(max_tokens=5)) for ids in prompts]
        tokens = [[token.id for token in stream] for stream in streams]
        logits = [engine.logits([*ids, *new]) for ids, new in zip(prompts, tokens, strict=True)]
        counts = engine.stats().experts
        assert (counts.level, counts.slots) == (config.offload, config.expert_slots or 0)
        assert (counts.misses > 0) == (counts.level != "none")
    return [tokens, torch.stack(logits)]


def test_every_mixture_has_twelve_experts_and_takes_two() -> None:
    """So that slots of k, 2k, E/2 and E are 2, 4, 6 and 12. Oracle: the specs."""
    assert len(MIXTURES) == 17 and {router(family) for family in MIXTURES} == {(12, 2)}


def check(halves: Folders, way: Offloaded, expected: list[Any]) -> None:
    fields = {"offload": way.level, "expert_slots": way.slots}
    found = answers(halves(way.family), way.batch, **fields)
    assert found[0] == expected[0] and torch.equal(found[1], expected[1]), way


@pytest.mark.parametrize("way", random.Random(4).sample(EVERY, 10), ids=str)
def test_m16_offload_gives_the_bits_of_an_engine_in_memory(halves: Folders, way: Offloaded) -> None:
    """Ten of all ways; the next test takes all of them."""
    check(halves, way, answers(halves(way.family), way.batch, offload="none"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", MIXTURES)
def test_m16_every_way_gives_the_bits_of_an_engine_in_memory(halves: Folders, family: str) -> None:
    """RAM and disk, k to E slots, one sequence and four at once."""
    path = halves(family)
    expected = {batch: answers(path, batch, offload="none") for batch in (1, 4)}
    for way in EVERY:
        if way.family == family:
            check(halves, way, expected[way.batch])


def output(engine: Engine, ids: list[int], count: int = 8) -> list[int]:
    return [token.id for token in engine.generate(ids, SamplingParams(max_tokens=count))]


def test_m14_a_long_prompt_with_barely_k_slots(engines: Engines) -> None:
    """2,000 tokens in chunks, two slots for 48 experts: the logits of an engine in memory."""
    ids = ids_of(1, 2000)
    settings = {"prefill_chunk": 500, "anchor_interval": 1000}
    expected = engines("mixtral", **settings).logits(ids)
    engine = engines("mixtral", offload="disk", expert_slots=2, **settings)
    assert torch.equal(engine.logits(ids), expected)
    counts = engine.stats().experts
    assert counts.slots == 2 and counts.waves > 4 * 4 * 5


@pytest.mark.parametrize("quant", [None, "int4"])
def test_m25_four_streams_of_which_one_is_left(engines: Engines, quant: str | None) -> None:
    """Concurrent generations on a few slots, the third cancelled after two tokens: each of the
    others gives what it gives alone in memory, and so does the third up to there."""
    paths = [ids_of(seed, 30 + 17 * seed) for seed in range(4)]
    alone = engines(quant=quant)
    expected = [output(alone, path, 20) for path in paths]
    engine = engines(quant=quant, offload="disk", expert_slots=4)
    streams = [engine.generate(path, SamplingParams(max_tokens=20)) for path in paths]
    left = [next(streams[2]).id, next(streams[2]).id]
    streams[2].cancel()
    left += [token.id for token in streams[2]]
    assert left == expected[2][: len(left)]
    for index in (0, 1, 3):
        assert [token.id for token in streams[index]] == expected[index]


@pytest.mark.parametrize("family", [HYBRID, "granitemoehybrid", "deepseek_v3"])
def test_m16_edits_forks_and_restarts_on_disk(engines: Engines, family: str) -> None:
    """A conversation that is edited in the middle, forked and reopened: every answer is that of an
    engine in memory that went the same way, and states go from one to the other."""
    base = ids_of(3, 150)
    edited = [*base[:70], 9, 9, *base[80:]]
    forks = [base[:100] + ids_of(seed, 20) for seed in (4, 5)]
    answers, stores = [], []
    for fields in ({}, {"offload": "disk", "expert_slots": 6}):
        store = MemoryDatabase()
        engine = engines(family, **fields)
        engine.attach(store.snapshots)
        answers.append([output(engine, path) for path in (base, edited, *forks)])
        logits = engine.logits(forks[1])
        engine.flush()
        stores.append((store, logits, engine.fingerprint))
        engine.close()
    assert answers[0] == answers[1]
    assert torch.equal(stores[0][1], stores[1][1])
    assert stores[0][2] == stores[1][2]
    # What one wrote, the other goes on from.
    path = [*base, *answers[0][0]]
    for (store, _, _), fields in zip(
        stores, ({"offload": "disk", "expert_slots": 6}, {}), strict=True
    ):
        engine = engines(family, **fields)
        engine.attach(store.snapshots)
        assert engine.plan(path).source == "disk" and engine.plan(path).reused_tokens > 140
        answers.append([output(engine, path)])
    assert answers[2] == answers[3]


def test_programs_with_experts_on_disk(folder: Folders) -> None:
    """Random edits, forks, rewinds, evictions, restarts and concurrent generations on a hybrid;
    GOLD, the ledger and the runner's rows."""
    model = load(folder(HYBRID), offload="disk")
    config = replace(CONFIG, expert_slots=7)
    run_programs(DatabasePrograms, model, config, 4, 12)
    assert model.experts.counts.slots == 7 and model.experts.counts.read_bytes > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("slots", [2, 12, 30])
def test_programs_with_experts_on_disk_long(folder: Folders, slots: int) -> None:
    """The same, 60 programs of 30 steps for each number of slots."""
    model = load(folder(HYBRID), offload="disk")
    run_programs(DatabasePrograms, model, replace(CONFIG, expert_slots=slots), 60, 30)


def test_m28_what_an_engine_reports_adds_up(engines: Engines) -> None:
    """Slots, states, weights and working memory stay within the budget while it changes; slots
    take three quarters of what is left, up to the number of experts. Bits stay."""
    engine = engines(offload="disk")
    ids = ids_of(1, 100)
    expected = engines().logits(ids, reuse=False)
    few = engines(offload="disk", expert_slots=2)
    size = few.stats().experts.slot_bytes // 2
    least = few.stats().weights_bytes + few.stats().working_bytes - 2 * size
    for left, slots in ((70, 48), (27, 20), (40, 30), (16, 12), (60, 45)):
        engine.set_budget(ram_bytes=least + left * size)
        engine.warm(ids)
        stats = engine.stats()
        assert stats.experts.slots == slots, left
        assert stats.experts.slot_bytes == slots * size
        used = stats.weights_bytes + stats.working_bytes + stats.state_bytes
        assert used <= stats.ram_budget_bytes
        assert torch.equal(engine.logits(ids, reuse=False), expected)
    with pytest.raises(BudgetTooSmall, match=r"slots for experts \d+"):
        engine.set_budget(ram_bytes=least)


def test_experts_go_to_disk_where_the_model_does_not_fit(folder: Folders) -> None:
    """Nothing asked: in memory if that fits the budget, from disk if not; asked, as asked. The
    logits are the same, and a dense model is refused as ever."""
    path, ids = folder("mixtral"), ids_of(2, 60)
    with Engine.load(path, replace(CONFIG, prefill_chunk=8, max_batch=1)) as engine:
        stats, expected = engine.stats(), engine.logits(ids)
        assert stats.experts.level == "none" and stats.experts.slots == 0
    working = stats.working_bytes
    tight = working + stats.weights_bytes * 3 // 4
    small = replace(CONFIG, prefill_chunk=8, max_batch=1, ram_budget_bytes=tight)
    with Engine.load(path, small) as engine:
        stats = engine.stats()
        assert stats.experts.level == "disk" and 2 <= stats.experts.slots < 48
        assert torch.equal(engine.logits(ids), expected)
        assert any("without checksums" in note for note in engine.notes)
    with pytest.raises(BudgetTooSmall):
        Engine.load(path, replace(small, offload="none"))
    with Engine.load(path, replace(small, offload="disk", expert_slots=3)) as engine:
        assert engine.stats().experts.slots == 3
    with pytest.raises(BudgetTooSmall):
        Engine.load(folder("llama"), replace(small, ram_budget_bytes=working))


def test_settings_outside_their_limits_are_refused(engines: Engines) -> None:
    """Oracle: the errors' types and what they name."""
    with pytest.raises(InvalidConfig, match="offload"):
        EngineConfig(offload="gpu")  # type: ignore[arg-type]
    for slots in (0, -1, 1 << 30, True):
        with pytest.raises(InvalidConfig, match="expert_slots"):
            EngineConfig(expert_slots=slots)
    with pytest.raises(InvalidConfig, match=r"one row; got 1; limit: >= 2"):
        engines(offload="disk", expert_slots=1)


def test_m9_every_parameter_is_read_once_or_deferred(folder: Folders) -> None:
    """Oracle: the source's own list. Experts count as read when they get a place to come from."""
    source = open_source(folder(HYBRID))
    load(source, offload="disk")
    assert not source._unread
    with pytest.raises(AssertionError):
        source.defer("layers.0.experts.3.gate")


MEASURE = """
import sys

def anonymous_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

import torch
import freetoken_runtime.engine
from freetoken_runtime import Engine, EngineConfig, SamplingParams

folder, budget = sys.argv[1], int(sys.argv[2])
before = anonymous_bytes()
config = EngineConfig(threads=1, ram_budget_bytes=budget, prefill_chunk=64, max_batch=2)
engine = Engine.load(folder, config)
peak = 0
for seed in range(6):
    ids = [3 + (seed * 31 + i * 7) % 200 for i in range(300)]
    for token in engine.generate(ids, SamplingParams(max_tokens=10)):
        peak = max(peak, anonymous_bytes() - before)
many = engine.stats().experts
engine.set_budget(ram_bytes=budget * 3 // 4)
few = engine.stats().experts
left = anonymous_bytes() - before
print(peak, left, many.slots, few.slots, many.slot_bytes // many.slots, many.level)
engine.close()
"""


def test_c54_a_model_larger_than_its_budget_stays_within_it(tmp_path: Path) -> None:
    """Oracle: the kernel's RssAnon. 113 MB of experts in a budget of 96 MiB: at no token more than
    the budget and a tenth; what a smaller budget takes from slots goes back to the system."""
    settings = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32}
    build_checkpoint(tmp_path, "mixtral", num_hidden_layers=3, num_local_experts=24, **settings)
    budget = 96 << 20
    command = [sys.executable, "-c", MEASURE, str(tmp_path), str(budget)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *figures, level = done.stdout.split()
    peak, left, many, few, size = map(int, figures)
    assert level == "disk" and size >= 1572864 and 72 > many > few + 8
    assert many * size <= peak <= 1.1 * budget
    assert left <= peak - 0.8 * (many - few) * size
