# SPDX-License-Identifier: Apache-2.0
"""Families of mixtures of experts: settings and names that their small models do not reach."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from freetoken_runtime.errors import UnsupportedConfig, WeightsMismatch
from freetoken_runtime.layers.moe import Moe, Router
from freetoken_runtime.layers.routing import Routes, route
from freetoken_runtime.models.decoder import Decoder
from freetoken_runtime.models.registry import read_spec
from freetoken_runtime.oracle import MODES, Oracle, in_passes, new_state
from freetoken_runtime.testing import build_checkpoint, family_config
from freetoken_runtime.weights import load, open_source

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = (
    "mixtral",
    "minimax_m2",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "granitemoe",
    "glm4_moe",
    "gpt_oss",
    "ernie4_5_moe",
    "deepseek_v2",
    "deepseek_v3",
)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral window": ("mixtral", {"sliding_window": 23, "head_dim": 20}),
    "minimax_m2 whole rope, tied": (
        "minimax_m2",
        {"rotary_dim": None, "tie_word_embeddings": True},
    ),
    "qwen2_moe windows, every second": (
        "qwen2_moe",
        {
            "use_sliding_window": True,
            "sliding_window": 23,
            "max_window_layers": 3,
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
            "qkv_bias": False,
        },
    ),
    "qwen3_moe window, biases": (
        "qwen3_moe",
        {
            "use_sliding_window": True,
            "sliding_window": 23,
            "norm_topk_prob": False,
            "attention_bias": True,
        },
    ),
    "olmoe normed, biases": (
        "olmoe",
        {"norm_topk_prob": True, "attention_bias": True, "num_key_value_heads": None},
    ),
    "granitemoe tied, biases": (
        "granitemoe",
        {"tie_word_embeddings": True, "attention_bias": True},
    ),
    "glm4_moe one group, biases": (
        "glm4_moe",
        {
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": False,
            "attention_bias": True,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
        },
    ),
    "gpt_oss hard clamp, full layers": (
        "gpt_oss",
        {
            "swiglu_limit": 0.5,
            "swiglu_alpha": 1.1,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "attention_bias": False,
        },
    ),
    "ernie4_5_moe every second, untied": (
        "ernie4_5_moe",
        {
            "moe_layer_interval": 2,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": -1,
            "moe_num_shared_experts": 0,
            "tie_word_embeddings": False,
        },
    ),
}
TOLERANCE = 1e-4  # of the logits' range; seen: 2e-6


@pytest.mark.parametrize("name", VARIANTS)
def test_other_settings_equal_transformers(name: str, tmp_path: Path) -> None:
    """Oracle: transformers in one cold pass, and our own reading of its configuration object."""
    family, settings = VARIANTS[name]
    model = build_checkpoint(tmp_path, family, **settings)
    loaded = load(tmp_path)
    oracle = Oracle(model, 211)
    for mode in ("prefill", "mixed"):
        assert MODES[mode](loaded.decoder, oracle) < TOLERANCE
    assert read_spec(family_config(family, **settings).to_dict()) == loaded.spec


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_read_fused_and_separate(family: str, tmp_path: Path) -> None:
    """Oracle: the same model saved as transformers holds it in memory, experts fused, against the
    checkpoint's own names: every parameter bit for bit."""
    stored, fused = tmp_path / "stored", tmp_path / "fused"
    model = build_checkpoint(stored, family)
    fused.mkdir()
    (fused / "config.json").write_bytes((stored / "config.json").read_bytes())
    state = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    save_file(state, fused / "model.safetensors")
    sources = [open_source(folder) for folder in (stored, fused)]
    names = set(load_file(stored / "model.safetensors"))
    always_fused = family in ("granitemoe", "gpt_oss")
    assert any(".experts.7." in name for name in names) != always_fused
    assert any("experts.gate_up_proj" in name for name in state)
    for name in sources[0].spec.parameter_shapes():
        assert torch.equal(*(source.read(name) for source in sources)), name


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "granitemoe"])
def test_m9_every_expert_is_there_exactly_once(family: str, tmp_path: Path) -> None:
    """Oracle: the error names what was taken away or added: a matrix of an expert, a second copy
    under the other name, a thirteenth expert."""
    build_checkpoint(tmp_path, family)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    victim = next(
        name
        for name in sorted(whole)
        if "layers.2." in name and ("expert" in name or "put_linear" in name)
    )
    save_file({name: whole[name] for name in whole if name != victim}, file)
    with pytest.raises(WeightsMismatch, match="missing"):
        open_source(tmp_path)
    number = victim.replace(".0.", ".12.")
    extra = number if number != victim else victim + "_scale"
    save_file({**whole, extra: whole[victim].clone()}, file)
    with pytest.raises(WeightsMismatch, match="not used"):
        open_source(tmp_path)
    save_file({**whole, victim: whole[victim][..., :-1].contiguous()}, file)
    with pytest.raises(WeightsMismatch, match="shape"):
        open_source(tmp_path)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
    ("mixtral", {"hidden_act": "gelu"}, "hidden_act"),
    ("mixtral", {"num_experts_per_tok": 13}, "experts per token"),
    ("mixtral", {"num_experts": 8}, "one meaning"),
    ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func"),
    ("minimax_m2", {"attn_type_list": [1, 0, 1, 1]}, "attn_type_list"),
    ("minimax_m2", {"shared_intermediate_size": 64}, "shared_intermediate_size"),
    ("qwen2_moe", {"layer_types": ["sliding_attention"] * 4}, "without a window"),
    ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers"),
    ("glm4_moe", {"n_group": 5}, "multiple"),
    ("glm4_moe", {"topk_group": 4}, "topk_group"),
    ("ernie4_5_moe", {"moe_gate": "top2_fused"}, "moe_gate"),
    ("ernie4_5_moe", {"use_bias": True}, "use_bias"),
    ("ernie4_5_moe", {"moe_layer_end_index": -2}, "moe_layer_end_index"),
    ("ernie4_5_moe", {"moe_use_aux_free": False}, "moe_use_aux_free"),
    ("gpt_oss", {"experts_per_token": 4}, "one meaning"),
    ("gpt_oss", {"swiglu_limit": -1.0}, "swiglu_limit"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
    ("granitemoe", {"normalise_experts": True}, "normalise_experts"),
]


@pytest.mark.parametrize("family,settings,named", REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_not_computed_is_refused_by_name(
    family: str, settings: dict[str, Any], named: str
) -> None:
    """Oracle: the error's type and the key or value it names."""
    config = {**family_config(family).to_dict(), **settings}
    with pytest.raises(UnsupportedConfig, match=named):
        read_spec(config)


@dataclass(frozen=True)
class Replayed(Router):
    """A router that takes the experts it took in the pass before, with weights of its own."""

    taken: list[torch.Tensor]
    replay: bool

    def routes(self, logits: torch.Tensor) -> Routes:
        if not self.replay:
            self.taken.append(super().routes(logits).chosen)
            return super().routes(logits)
        (chosen,) = self.taken
        rows, self.taken[0] = chosen[: len(logits)], chosen[len(logits) :]
        pinned = torch.zeros(logits.shape).scatter_(1, rows, 1e3)
        return route(logits, replace(self.spec, groups=None), pinned)


def set_replay(decoder: Decoder, records: list[list[torch.Tensor]], replay: bool) -> None:
    """Give every mixture of a decoder a router that writes its record, or reads it."""
    mixtures = [module for module in decoder._modules() if isinstance(module, Moe)]
    records += [[] for _ in mixtures[len(records) :]]
    for mixture, record in zip(mixtures, records, strict=True):
        own = mixture.router
        mixture.router = Replayed(own.spec, own.linear, own.correction, record, replay)


FORMS: list[dict[str, Any]] = [{"dtype": "bfloat16"}, {"quant": "int8"}, {"quant": "int4"}]


@pytest.mark.parametrize("forms", FORMS, ids=str)
@pytest.mark.parametrize("family", ["mixtral", "minimax_m2", "gpt_oss", "deepseek_v3"])
def test_forms_agree_teacher_forced(family: str, forms: dict[str, Any], tmp_path: Path) -> None:
    """Oracle: the same weights in one prefill, with the same experts. Activation rounding alone
    stays within DESIGN's limits: mean 1e-2, max 6e-2 of the range, mean KL 3e-3. (Routers of
    random models choose others for a rounding's sake, which moves single rows by much more.)"""
    build_checkpoint(tmp_path, family)
    decoder = load(tmp_path, **forms).decoder
    ids = torch.randint(3, 211, (256,), generator=torch.Generator().manual_seed(3)).tolist()
    records: list[list[torch.Tensor]] = []
    set_replay(decoder, records, replay=False)
    whole = in_passes(decoder, new_state(decoder), ids, [256])
    set_replay(decoder, records, replay=True)
    steps = in_passes(decoder, new_state(decoder), ids, [33, 7])
    assert all(len(rest) == 0 for (rest,) in records)
    difference = (steps - whole).abs() / (whole.max() - whole.min())
    kl = functional.kl_div(
        steps.log_softmax(-1), whole.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert float(difference.mean()) < 1e-2 and float(difference.max()) < 6e-2
    assert float(kl) < 3e-3
