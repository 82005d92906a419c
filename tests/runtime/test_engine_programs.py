# SPDX-License-Identifier: Apache-2.0
"""Random programs of edits, forks, rewinds, evictions, restarts and concurrent generations. The
oracles are those of `freetoken_runtime.engine_programs`: GOLD, a list of paths, the runner's rows.
"""

from pathlib import Path

import pytest

from freetoken_runtime import Engine, SamplingParams
from freetoken_runtime.config import EngineConfig, read_host, resolve
from freetoken_runtime.engine_programs import DatabasePrograms, Programs, run_programs
from freetoken_runtime.random_weights import random_model
from freetoken_runtime.spec import LayerSpec, ModelSpec
from freetoken_runtime.specs.attention import AttentionSpec
from freetoken_runtime.specs.convolution import ShortConvSpec
from freetoken_runtime.specs.gated_delta import GatedDeltaSpec
from freetoken_runtime.specs.mamba import Mamba2Spec
from freetoken_runtime.specs.mlp import MlpSpec
from freetoken_runtime.specs.moe import ExpertSpec, MoeSpec, RouterSpec
from freetoken_runtime.specs.rope import RopeSpec
from freetoken_runtime.weights import LoadedModel, load

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG = EngineConfig(threads=1, prefill_chunk=48, anchor_interval=40, ram_budget_bytes=1 << 30)


@pytest.fixture(scope="module")
def llama(tiny_llama: Path) -> LoadedModel:
    return load(tiny_llama)


def hybrid_spec() -> ModelSpec:
    """Window and full attention, gated delta net, Mamba-2, short convolution; experts and not."""
    rope = RopeSpec(dim=10, theta=10_000.0)
    window = AttentionSpec(6, 2, 10, rope, window=23)
    moe = MoeSpec(
        RouterSpec(num_experts=12, top_k=2, scores="softmax", normalise=True),
        ExpertSpec(36),
        shared=MlpSpec(44),
        shared_gate=True,
    )
    layers = (
        LayerSpec(GatedDeltaSpec(2, 6, key_dim=12, head_dim=20, kernel=4), moe),
        LayerSpec(window, moe),
        LayerSpec(Mamba2Spec(6, 20, 2, state_size=12, kernel=4, norm="of_gated"), moe),
        LayerSpec(ShortConvSpec(channels=60, kernel=3), MlpSpec(84)),
        LayerSpec(AttentionSpec(6, 2, 10, rope), moe),
    )
    return ModelSpec("hybrid", 211, 60, layers, 1e-6, tied_head=False, context_limit=4096)


@pytest.fixture(scope="module")
def hybrid() -> LoadedModel:
    return random_model(hybrid_spec(), seed=3)


def test_programs_in_memory(llama: LoadedModel) -> None:
    """GOLD, plans and counts over an in-memory store."""
    run_programs(Programs, llama, CONFIG, 20, 12)


def test_programs_on_disk(llama: LoadedModel) -> None:
    """GOLD, plans and counts over LMDB."""
    run_programs(DatabasePrograms, llama, CONFIG, 10, 12)


def test_programs_on_a_hybrid(hybrid: LoadedModel) -> None:
    """The same where states can be restored at anchors only, experts route and windows slide."""
    run_programs(DatabasePrograms, hybrid, CONFIG, 20, 12)


@pytest.mark.parametrize("back", [0, 1, 3])
def test_an_anchor_before_what_was_sampled(hybrid: LoadedModel, back: int) -> None:
    """Wanted when an id is sampled, so many tokens before it. Oracle: a cold prefill of the path
    that goes on from there, and the counts."""
    ids = list(range(5, 60))
    greedy = SamplingParams(max_tokens=9)
    with Engine(hybrid, resolve(CONFIG, read_host()), poison=True) as engine:
        output = [token.id for token in engine.generate(ids, greedy)]
    place = len(ids) + output.index(output[6]) - back
    path = [*ids, *output][:place] + [7, 8, 9]
    with Engine(hybrid, resolve(CONFIG, read_host()), poison=True) as engine:
        stream = engine.generate(ids, greedy, anchor_before={output[6]: back})
        assert [token.id for token in stream] == output
        assert place in engine.anchors(path)
        assert engine.plan(path).reused_tokens == place
        cold = engine.logits(path, reuse=False)
        span = float(cold.max() - cold.min())
        assert float((engine.logits(path) - cold).abs().max()) <= 1e-4 * span


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("base", [Programs, DatabasePrograms])
@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_programs_long(base: type[Programs], kind: str, request: pytest.FixtureRequest) -> None:
    """The same, 300 programs of 30 steps on each model."""
    run_programs(base, request.getfixturevalue(kind), CONFIG, 150, 30)
