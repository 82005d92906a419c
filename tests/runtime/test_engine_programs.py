# SPDX-License-Identifier: Apache-2.0
"""Random programs of edits, forks, rewinds, evictions, restarts and concurrent generations. The
oracles are those of `freetoken_runtime.engine_programs`: GOLD, a list of paths, the runner's rows.
"""

from pathlib import Path

import pytest

from freetoken_runtime import Engine, SamplingParams
from freetoken_runtime.config import EngineConfig, read_host, resolve
from freetoken_runtime.engine_cases import hybrid_model
from freetoken_runtime.engine_programs import DatabasePrograms, Programs, run_programs
from freetoken_runtime.weights import LoadedModel, load

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG = EngineConfig(threads=1, prefill_chunk=48, anchor_interval=40, ram_budget_bytes=1 << 30)


@pytest.fixture(scope="module")
def llama(tiny_llama: Path) -> LoadedModel:
    return load(tiny_llama)


@pytest.fixture(scope="module")
def hybrid() -> LoadedModel:
    return hybrid_model()


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
