# SPDX-License-Identifier: Apache-2.0
"""What a machine of given speeds allows for a model. Oracles: the formulas worked out here by hand,
and what an engine of the same budget really does with its memory."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from freetoken_runtime import Engine, EngineConfig
from freetoken_runtime.bench import speeds
from freetoken_runtime.bench.offload_model import shapes
from freetoken_runtime.bench.speeds import Speed, measure_kernel, measure_reads, scratch_file
from freetoken_runtime.config import Host, Quant, ResolvedConfig, read_host, resolve
from freetoken_runtime.errors import BudgetTooSmall
from freetoken_runtime.experts.choice import usual_level
from freetoken_runtime.experts.records import ExpertForm
from freetoken_runtime.prospects import (
    Speeds,
    advice,
    demands_of,
    form_of,
    in_int4,
    needs_of,
    probed_expert,
    prospect,
)
from freetoken_runtime.spec import LayerSpec, ModelSpec
from freetoken_runtime.specs.attention import AttentionSpec
from freetoken_runtime.specs.mlp import MlpSpec
from freetoken_runtime.specs.moe import ExpertSpec, MoeSpec, RouterSpec
from freetoken_runtime.specs.rope import RopeSpec
from freetoken_runtime.testing import build_checkpoint
from freetoken_runtime.weights import load, open_source

LAYERS, EXPERTS, TOP_K, HIDDEN, INNER, VOCAB = 4, 64, 8, 1024, 512, 8192
EXPERT_BYTES = 4 * 3 * HIDDEN * INNER  # in fp32
SPEEDS = Speeds(kernel=20e9, disk=1e9, many_rows=200e9)


def mixture() -> ModelSpec:
    attention = AttentionSpec(8, 2, 128, RopeSpec(dim=128, theta=1e4))
    feed_forward = MoeSpec(RouterSpec(EXPERTS, TOP_K, "softmax"), ExpertSpec(INNER))
    return ModelSpec(
        architecture="mixtral",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        layers=(LayerSpec(attention, feed_forward),) * LAYERS,
        norm_eps=1e-6,
        tied_head=False,
        context_limit=4096,
    )


def config(budget_bytes: int, quant: Quant | None = None) -> ResolvedConfig:
    asked = EngineConfig(ram_budget_bytes=budget_bytes, quant=quant, threads=1, prefill_chunk=64)
    return resolve(asked, Host(cores=2, memory_bytes=8 << 30, threads=None))


DENSE = 4 * (
    LAYERS * (HIDDEN * 8 * 128 * 2 + HIDDEN * 2 * 128 * 2 + EXPERTS * HIDDEN + 2 * HIDDEN)
    + VOCAB * HIDDEN  # the head; of the embedding a token reads one row
    + HIDDEN
)


def test_what_a_token_needs() -> None:
    """Oracle: sums over the shapes."""
    needs = needs_of(mixture(), config(1 << 30))
    assert needs.dense_bytes == DENSE
    assert needs.token_experts_bytes == LAYERS * TOP_K * EXPERT_BYTES
    assert (needs.experts, needs.experts_bytes) == (LAYERS * EXPERTS, 256 * EXPERT_BYTES)
    matrices = HIDDEN * 8 * 128 * 2 + HIDDEN * 2 * 128 * 2 + EXPERTS * HIDDEN
    assert needs.flops == 2 * LAYERS * (matrices + TOP_K * 3 * HIDDEN * INNER)


def test_tokens_per_second_follow_the_formula() -> None:
    """Oracle: (dense + L·k·S) / B_ram + L·k·S·(1 - hit) / B_disk."""
    found = prospect(mixture(), config(1 << 30), "disk", SPEEDS, (0.6, 0.9))
    assert [pace.hit_rate for pace in found.paces[1:]] == [0.6, 0.9, 1.0]
    for pace in found.paces:
        read = LAYERS * TOP_K * EXPERT_BYTES
        memory_s = (DENSE + read) / 20e9
        disk_s = read * (1 - pace.hit_rate) / 1e9
        assert pace.tokens_per_s == pytest.approx(1 / (memory_s + disk_s))
        assert pace.waiting == pytest.approx(disk_s / (memory_s + disk_s), abs=1e-12)
    assert found.even_hit_rate == found.slots / 256 == found.paces[0].hit_rate


def test_slots_are_those_of_the_plan_and_grow_with_the_budget() -> None:
    """Oracle: bytes. Slots take what they hold, and nothing is over the budget."""
    slots = []
    for budget in (300 << 20, 600 << 20, 1200 << 20):
        found = prospect(mixture(), config(budget), "disk", SPEEDS)
        assert found.plan is not None
        assert found.plan.slots_bytes == found.slots * EXPERT_BYTES
        parts = found.plan.weights_bytes + found.plan.working_bytes + found.plan.slots_bytes
        assert parts + found.plan.states_bytes == budget
        slots.append(found.slots)
    assert TOP_K < slots[0] < slots[1] < slots[2] < 256
    none = prospect(mixture(), config(100 << 20), "disk", SPEEDS)
    assert none.plan is None and none.problem is not None and "at least" in none.problem
    assert none.paces == ()


def test_long_prompts_wait_for_the_slower_of_disk_and_cores() -> None:
    """Oracle: the two times of a chunk, worked out."""
    slow = replace(SPEEDS, disk=1e6)
    found, waits = (prospect(mixture(), config(1 << 30), "disk", x) for x in (SPEEDS, slow))
    read_s = 256 * EXPERT_BYTES * (1 - waits.even_hit_rate) / 1e6
    assert waits.prompt_rate == pytest.approx(64 / read_s)
    assert found.prompt_rate > 100 * waits.prompt_rate
    whole = prospect(mixture(), config(4 << 30), "none", slow)
    assert whole.prompt_rate == pytest.approx(200e9 / whole.needs.flops)
    assert [pace.hit_rate for pace in whole.paces] == [1.0]


def test_a_disk_that_was_not_measured_is_not_guessed() -> None:
    """Oracle: no tokens per second where something would have to be read."""
    found = prospect(mixture(), config(1 << 30), "disk", replace(SPEEDS, disk=None), (0.5,))
    assert [pace.tokens_per_s for pace in found.paces[:2]] == [0.0, 0.0]
    assert found.paces[-1].tokens_per_s > 50


@pytest.mark.parametrize(
    ("budget", "quant", "converted", "says"),
    [
        (40 << 20, None, False, "does not fit: give it more memory"),
        (260 << 20, None, False, "converted with --quant int4"),
        (600 << 20, None, False, "instead of"),
        (4 << 30, "int4", False, "all of it fits"),
        (260 << 20, "int4", False, "convert it"),
        (260 << 20, "int4", True, "the disk sets the pace"),
    ],
)
def test_advice(budget: int, quant: Quant | None, converted: bool, says: str) -> None:
    """Oracle: the rule beside each line: what does not fit, what int4 would do, what bounds."""
    spec, settings = mixture(), config(budget, quant)
    level = "disk" if prospect(spec, settings, "none", SPEEDS).plan is None else "none"
    found = prospect(spec, settings, level, SPEEDS)  # type: ignore[arg-type]
    line = advice(found, converted, in_int4(spec, settings, SPEEDS))
    assert says in line and "\n" not in line, line


def test_advice_does_not_follow_the_hit_rates_that_were_asked_for() -> None:
    """Oracle: the same line without them; one lies below the even rate."""
    settings = config(600 << 20)
    int4 = in_int4(mixture(), settings, SPEEDS)
    lines = {
        advice(prospect(mixture(), settings, "disk", SPEEDS, rates), False, int4)
        for rates in ((), (0.01, 0.5))
    }
    assert len(lines) == 1


def test_memory_sets_the_pace_of_a_fast_disk() -> None:
    """Oracle: the shares of a token's time."""
    fast = replace(SPEEDS, disk=500e9)
    found = prospect(mixture(), config(260 << 20, "int4"), "disk", fast)
    assert found.paces[0].waiting < 0.5
    line = advice(found, True, in_int4(mixture(), config(260 << 20), fast))
    assert line.startswith("memory sets the pace")


@pytest.mark.parametrize("quant", [None, "int4"])
def test_an_engine_divides_its_memory_as_foretold(quant: Quant | None, tmp_path: Path) -> None:
    """Oracle: engines of the same budgets: with all in memory, with a third of the experts out of
    it, and one that is refused."""
    sizes = {"hidden_size": 240, "intermediate_size": 512, "num_hidden_layers": 3}
    build_checkpoint(tmp_path, "mixtral", **sizes, num_local_experts=24)
    spec = open_source(tmp_path).spec
    whole = prospect(spec, config(8 << 30, quant), "none", SPEEDS).plan
    assert whole is not None
    most = whole.weights_bytes + whole.working_bytes
    third = needs_of(spec, config(8 << 30, quant)).experts_bytes // 3
    for budget, level in ((8 << 30, "none"), (most - third, "disk"), (most // 2, "disk")):
        asked = EngineConfig(ram_budget_bytes=budget, quant=quant, threads=1, prefill_chunk=64)
        settings = resolve(asked, read_host())
        assert usual_level(open_source(tmp_path), settings) == level
        found = prospect(spec, settings, level, SPEEDS)
        if found.plan is None:
            assert budget == most // 2
            with pytest.raises(BudgetTooSmall):
                Engine.load(tmp_path, asked)
            continue
        with Engine.load(tmp_path, asked) as engine:
            stats = engine.stats()
        assert (stats.experts.level, stats.working_bytes) == (level, found.plan.working_bytes)
        assert abs(stats.experts.slots - found.slots) <= 0.15 * found.slots
        if level == "none":
            assert stats.weights_bytes == pytest.approx(found.plan.weights_bytes, rel=0.03)


def test_demands_are_those_of_a_loaded_model(tmp_path: Path) -> None:
    """Oracle: the store of a model that was loaded."""
    build_checkpoint(tmp_path, "glm4_moe")
    settings = config(1 << 30)
    assert demands_of(open_source(tmp_path).spec, settings) == (
        load(tmp_path, offload="disk").experts.demands()
    )


def test_speeds_are_measured(tmp_path: Path) -> None:
    """Oracle: physics, loosely: positive, ordered, below what any memory does. And the files are
    read past the cache where the file system can."""
    form = ExpertForm.of(ExpertSpec(256), 512, "int4", torch.float32, 32)
    kernel = measure_kernel(form, 1)
    assert kernel.format.startswith("int4") and kernel.expert_bytes == form.layout.size_bytes
    for speed in (kernel.few, kernel.many):
        assert 0 < speed.least <= speed.median <= speed.most < 1e14
    assert measure_reads([], 4096) is None
    with scratch_file(tmp_path, 8 << 20) as file:
        assert file.stat().st_size == 8 << 20
        reads = measure_reads([file], 1 << 20)
    assert reads is not None and reads.record_bytes == 1 << 20 and reads.speed.least > 0
    assert list(tmp_path.iterdir()) == []


def test_large_experts_are_measured_by_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the bytes. Else a feed-forward of gigabytes would be built several times."""
    monkeypatch.setattr(speeds, "_LARGEST_BYTES", 1 << 20)
    large = ExpertForm.of(ExpertSpec(2048), 1024, "int4", torch.float32, 32)
    assert large.layout.size_bytes > 3 << 20
    kernel = measure_kernel(large, 1)
    assert 15 << 16 < kernel.expert_bytes <= 1 << 20
    with scratch_file(tmp_path, 8 << 20) as file:
        reads = measure_reads([file], 1 << 30)
    assert reads is not None and reads.record_bytes == 1 << 20


def test_noise_is_said() -> None:
    """Oracle: a third."""
    assert Speed.of([1.0, 1.5, 1.2]).noisy and not Speed.of([1.0, 1.3, 1.1]).noisy
    assert Speed.of([1.0, 1.5, 1.2]).median == 1.2


def test_the_kernel_is_measured_with_an_expert_of_the_model() -> None:
    """Or with the feed-forward of one that has none. Oracle: the specs."""
    spec = mixture()
    assert probed_expert(spec) == (ExpertSpec(INNER), HIDDEN)
    layers = tuple(replace(layer, feed_forward=MlpSpec(640)) for layer in spec.layers)
    assert probed_expert(replace(spec, layers=layers)) == (ExpertSpec(640), HIDDEN)
    assert form_of(ExpertSpec(INNER), HIDDEN, config(1 << 30)).layout.size_bytes == EXPERT_BYTES


def test_the_worked_example_of_the_page_on_offloading() -> None:
    """Oracle: the page's own table, with the speeds that it names."""
    page = (Path(__file__).parents[2] / "docs" / "offload.md").read_text()
    rows = re.findall(
        r"^\| (\d+) GiB \| ([\d,]+) \| ([\d,]+) tokens \| (\d+) % \|(.*)\|$", page, re.M
    )
    assert len(rows) == 4 and "reads 30 GB/s" in page and "disk 3.2 GB/s" in page
    spec = replace(shapes(48, 128), vocab_size=151_936)
    for budget, slots, tokens, even, told in rows:
        asked = EngineConfig(ram_budget_bytes=int(budget) << 30, quant="int4", threads=2)
        settings = resolve(asked, Host(cores=2, memory_bytes=32 << 30, threads=None), spec)
        found = prospect(spec, settings, "disk", Speeds(30e9, 3.2e9, 320e9), (0.6, 0.9))
        assert found.plan is not None and found.slots == int(slots.replace(",", ""))
        held = found.plan.states_bytes // found.plan.token_bytes
        assert held == int(tokens.replace(",", ""))
        assert round(100 * found.even_hit_rate) == int(even)
        paces = {pace.hit_rate: pace.tokens_per_s for pace in found.paces}
        wanted = [paces[rate] for rate in (found.even_hit_rate, 0.6, 0.9)]
        assert [f"{pace:.1f}" for pace in wanted] == told.replace(" ", "").split("|"), budget
