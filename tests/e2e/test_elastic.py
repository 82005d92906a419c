# SPDX-License-Identifier: Apache-2.0
"""A session that grows to 16,000 tokens and goes back, beside one that decodes, while the budget is
halved and doubled. Oracles: an engine with all weights in memory; the kernel's RssAnon."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

# Two attention layers' worth of rows and experts of about 400 KB: a long context and the experts
# take about as much memory. In a process of its own, so that its memory is its own.
SCENARIO = """
import json, sys
from dataclasses import asdict
from pathlib import Path
import torch
torch.set_num_threads(1)
from freetoken_runtime.bench.elastic import ElasticSettings, Runs
from freetoken_runtime.conversion import convert
from freetoken_runtime.random_weights import RandomWeights
from freetoken_runtime.spec import LayerSpec, ModelSpec
from freetoken_runtime.specs.attention import AttentionSpec
from freetoken_runtime.specs.moe import ExpertSpec, MoeSpec, RouterSpec
from freetoken_runtime.specs.rope import RopeSpec

folder, tokens = Path(sys.argv[1]), int(sys.argv[2])
attention = AttentionSpec(2, 1, 32, RopeSpec(dim=32, theta=1e6), qk_norm="head")
router = RouterSpec(24, 2, "softmax", normalise=True)
layers = (LayerSpec(attention, MoeSpec(router, ExpertSpec(512))),) * 3
spec = ModelSpec("qwen3_moe", 211, 64, layers, 1e-6, tied_head=True, context_limit=1 << 15)
source = RandomWeights(spec, seed=0)
source.check()
convert(source, folder, files={})
settings = ElasticSettings(tokens, answer_tokens=8, beside_tokens=32, threads=1)
runs = Runs(settings, folder, None)
outcomes = {"elastic": runs.elastic(), "still": runs.still(), "resident": runs.resident()}
stages = [(stage.tokens, stage.budget) for stage in settings.stages]
print(json.dumps([stages, runs.budget_bytes, {k: asdict(x) for k, x in outcomes.items()}]))
"""


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("elastic") / "model"
    # The library's own store of compiled kernels, one for every number of rows, is kept small: it
    # is no memory that moves.
    caches = {"LRU_CACHE_CAPACITY": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "2"}
    environment = {**os.environ, **caches, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCENARIO, str(folder), "16000"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_tokens_are_those_of_an_engine_in_memory(scenario: Any) -> None:
    """Every id of both sessions, with slots that move, with slots that stay, and without any."""
    stages, _, runs = scenario
    assert max(tokens for tokens, _ in stages) == 16_000
    assert {budget for _, budget in stages} == {0.5, 1.0}
    session, beside = runs["resident"]["tokens"]
    assert (len(session), len(beside)) == (8 * len(stages), 32 * len(stages))
    assert runs["elastic"]["tokens"] == runs["still"]["tokens"] == [session, beside]


def test_the_budget_is_kept(scenario: Any) -> None:
    """What is counted never exceeds the budget of the moment; RssAnon never what weights, working
    memory, slots and states may take, and the kernels that are kept, a tenth of the budget."""
    _, budget, runs = scenario
    for name in ("elastic", "still"):
        assert runs[name]["over_bytes"] == 0
        assert runs[name]["stats"]["state_bytes"] <= runs[name]["stats"]["state_limit_bytes"]
    assert 0 < runs["elastic"]["rss_bytes"] <= 1.1 * budget


def test_what_slots_give_goes_back_to_the_system(scenario: Any) -> None:
    """RssAnon with few slots, at 16,000 tokens on half of the budget, against that with all slots
    at as many tokens: what lies between them are the slots, but for 1 or 2 MiB of kernels."""
    _, _, runs = scenario
    slots, rss = runs["elastic"]["slots"], runs["elastic"]["resting_bytes"]
    slot_bytes = runs["elastic"]["stats"]["experts"]["slot_bytes"] // slots[-1]
    assert (slots[5] - slots[4]) * slot_bytes > 8 << 20
    assert rss[5] - rss[4] >= 0.6 * (slots[5] - slots[4]) * slot_bytes


def test_slots_give_way_and_come_back(scenario: Any) -> None:
    """Slots shrink turn by turn while the context grows on half of the budget, are many again when
    there is room, and never fewer than were needed; those that were pinned never move."""
    stages, _, runs = scenario
    slots = runs["elastic"]["slots"]
    growing = [n for n, (_, budget) in zip(slots[:5], stages[:5], strict=True) if budget == 0.5]
    assert growing[-1] == min(growing) < growing[0]
    assert slots[5] == slots[6] == slots[-1] == 72
    assert runs["elastic"]["stats"]["moves"]["count"] >= 2
    assert len(set(runs["still"]["slots"])) == 1
    assert runs["still"]["stats"]["moves"]["count"] == 0
