# SPDX-License-Identifier: Apache-2.0
"""Every family against transformers, on small random models of odd dimensions."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from freetoken_runtime.config import EngineConfig, read_host, resolve
from freetoken_runtime.engine import Engine
from freetoken_runtime.family_configs import FAMILY_CONFIGS
from freetoken_runtime.models.decoder import Decoder
from freetoken_runtime.models.registry import FAMILIES, read_spec
from freetoken_runtime.oracle import MODES, Oracle, distance, forward, in_passes, new_state
from freetoken_runtime.sampler import SamplingParams
from freetoken_runtime.specs.moe import MoeSpec
from freetoken_runtime.testing import build_checkpoint, family_config
from freetoken_runtime.weights import load, open_source

pytestmark = pytest.mark.usefixtures("one_thread")  # tiny matrices: a team only costs
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 1.1,
}
# Other settings of a family, for what its small model does not reach.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2 windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 23, "max_window_layers": 2},
    ),
    "smollm3 windows": ("smollm3", {"use_sliding_window": True, "sliding_window": 23}),
    "granite biases, tied": (
        "granite",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "gemma3_text biases, untied, no cap": (
        "gemma3_text",
        {
            "attention_bias": True,
            "tie_word_embeddings": False,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": 37,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "deepseek_v2 one group, direct queries": (
        "deepseek_v2",
        {"q_lora_rank": None, "topk_method": "greedy", "attention_bias": True},
    ),
    "deepseek_v3 yarn, halves": (
        "deepseek_v3",
        {"rope_parameters": YARN, "rope_interleave": False},
    ),
}
TOLERANCE = 1e-4  # of the logits' range; seen: 3e-6


@dataclass(frozen=True)
class Built:
    family: str
    settings: dict[str, Any]
    folder: Path
    decoder: Decoder
    oracle: Oracle


@pytest.fixture(scope="module", params=[*sorted(FAMILIES), *VARIANTS])
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Built]:
    """A random model of the family, loaded, and transformers' answers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    family, settings = VARIANTS.get(request.param, (request.param, {}))
    folder = tmp_path_factory.mktemp("family")
    model = build_checkpoint(folder, family, **settings)
    yield Built(family, settings, folder, load(folder).decoder, Oracle(model, 211))
    torch.set_num_threads(before)


def test_every_family_has_a_model_to_test() -> None:
    """Oracle: the table of configurations that build in transformers."""
    assert set(FAMILIES) <= set(FAMILY_CONFIGS)


@pytest.mark.parametrize("mode", MODES)
def test_logits_equal_transformers(built: Built, mode: str) -> None:
    """Oracle: transformers in one cold pass: prefill, chunks, steps, ragged batches, passes whose
    scans are cut, and what is resumed from a cut."""
    assert MODES[mode](built.decoder, built.oracle) < TOLERANCE


@pytest.mark.parametrize("length", [63, 64, 65])
def test_m22_prefill_equals_prefill_and_a_step(built: Built, length: int) -> None:
    """Oracle: the same decoder in one pass; same greedy token."""
    ids = built.oracle.ids(length, 5)
    whole = in_passes(built.decoder, new_state(built.decoder), ids, [length])[-1]
    stepped = in_passes(built.decoder, new_state(built.decoder), ids, [length - 1, 1])[-1]
    assert distance(stepped, whole) < TOLERANCE
    assert int(stepped.argmax()) == int(whole.argmax())


def test_a_neighbour_changes_no_bit(built: Built) -> None:
    """Oracle: the sequence alone, bit for bit, through prefill and decode beside neighbours that
    come and go and share its row groups."""
    decoder, ids = built.decoder, built.oracle.ids(60, 9)

    def play(neighbours: bool) -> torch.Tensor:
        state, at, outs = new_state(decoder), 0, []
        others = [new_state(decoder) for _ in range(3)]
        for step, size in enumerate((35, 1, 1, 20, 1, 2)):
            parts: list[tuple[Any, list[int]]] = [(state, ids[at : at + size])]
            if neighbours:
                extra = [(other, built.oracle.ids(1 + 30 * (step % 2), step)) for other in others]
                parts = extra[: step % 4] + parts + extra[step % 4 :]
            parts.sort(key=lambda part: len(part[1]) < decoder.few_rows)
            results = forward(decoder, parts)
            outs.append(results[[part[0] for part in parts].index(state)])
            at += size
        return torch.cat(outs)

    assert torch.equal(play(True), play(False))


@pytest.mark.parametrize("forms", [{"dtype": "bfloat16"}, {"quant": "int8"}, {"quant": "int4"}])
def test_other_forms_compute_the_same_in_chunks(built: Built, forms: dict[str, Any]) -> None:
    """Oracle: the same weights in one prefill, teacher-forced: mean 1e-2 of the range. Where a
    router turns to another expert because its input was rounded, that row and, through recurrent
    state, those after it are another model's: there the median row tells (seen: 2.7e-2; unrelated
    logits: 0.2)."""
    decoder = load(built.folder, **forms).decoder
    mixture = any(isinstance(layer.feed_forward, MoeSpec) for layer in decoder.spec.layers)
    ids = built.oracle.path[:80]
    whole = in_passes(decoder, new_state(decoder), ids, [80])
    chunks = in_passes(decoder, new_state(decoder), ids, [33, 1, 7])
    rows = (chunks - whole).abs().mean(-1) / (whole.max() - whole.min())
    assert float(rows.median()) < 5e-2 if mixture else float(rows.mean()) < 1e-2


def test_the_spec_is_that_of_the_saved_folder(built: Built) -> None:
    """Oracle: transformers' own configuration object, all of its keys."""
    assert (
        read_spec(family_config(built.family, **built.settings).to_dict())
        == open_source(built.folder).spec
    )


def test_an_engine_generates_and_goes_on_after_an_edit(built: Built) -> None:
    """Oracle: transformers' greedy choice at every position of what was generated, cold, wherever
    its two best are further apart than rounding; counts of reused and forwarded tokens."""
    config = resolve(
        EngineConfig(threads=1, prefill_chunk=48, anchor_interval=32, ram_budget_bytes=1 << 30),
        read_host(),
    )
    first = built.oracle.ids(90, 11)
    edited = first[:50] + built.oracle.ids(30, 12)
    engine = Engine(load(built.folder), config, poison=True)
    try:
        for ids, least in ((first, 0), (edited, 32)):
            generation = engine.generate(ids, SamplingParams(max_tokens=5), anchors=[len(ids)])
            generated = [token.id for token in generation]
            usage = generation.usage
            assert usage.reused_tokens + usage.prefill_tokens == len(ids)
            assert least <= usage.reused_tokens <= 50
            logits = built.oracle.expected([*ids, *generated])[len(ids) - 1 : -1]
            best, second = logits.topk(2).values.unbind(-1)
            clear = (best - second) / (logits.max() - logits.min()) > 2 * TOLERANCE
            wrong = (logits.argmax(-1) != torch.tensor(generated)) & clear
            assert not wrong.any() and clear.sum() >= 4
    finally:
        engine.close()
