# SPDX-License-Identifier: Apache-2.0
"""Hybrids of delta rules: what each configuration key becomes, what is refused, and every way in
which checkpoints store them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from freetoken_runtime.errors import UnsupportedConfig, WeightsMismatch
from freetoken_runtime.models.registry import read_spec
from freetoken_runtime.oracle import MODES, Oracle
from freetoken_runtime.spec import ModelSpec
from freetoken_runtime.specs.attention import AttentionSpec, MlaSpec
from freetoken_runtime.specs.gated_delta import GatedDeltaSpec, KdaSpec
from freetoken_runtime.specs.mlp import MlpSpec
from freetoken_runtime.specs.moe import ExpertGroups, MoeSpec
from freetoken_runtime.testing import build_checkpoint, family_config
from freetoken_runtime.weights import load, open_source

pytestmark = pytest.mark.usefixtures("one_thread")
FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear")
Tensors = dict[str, torch.Tensor]

# As checkpoints spell them, without what concerns training and tokens.
QWEN_35B: dict[str, Any] = {
    "model_type": "qwen3_5_moe",
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "image_token_id": 248056,
    "tie_word_embeddings": False,
    "vision_config": {"depth": 27, "hidden_size": 1152},
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "attention_bias": False,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "moe_intermediate_size": 512,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "output_gate_type": "swish",
        "output_router_logits": False,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 248320,
    },
}
KIMI_48B: dict[str, Any] = {
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [x for x in range(1, 27) if x % 4],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def spec_of(family: str, **settings: Any) -> ModelSpec:
    """From the keys a small model's config.json has, with `settings` on top."""
    saved: dict[str, Any] = family_config(family).to_dict()
    return read_spec({**saved, **settings})


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def test_qwen3_6_35b_a3b_is_read_as_published() -> None:
    """Oracle: the architecture as its authors describe it, and arithmetic on its shapes."""
    spec = read_spec(QWEN_35B)
    kinds = [type(x.mixer) for x in spec.layers]
    assert kinds == ([GatedDeltaSpec] * 3 + [AttentionSpec]) * 10
    assert spec.norm_offset == 1.0 and not spec.tied_head and spec.context_limit == 262_144
    delta, attention, mixture = (
        spec.layers[0].mixer,
        spec.layers[3].mixer,
        spec.layers[0].feed_forward,
    )
    assert delta == GatedDeltaSpec(
        num_key_heads=16, num_heads=32, key_dim=128, head_dim=128, kernel=4
    )
    assert isinstance(attention, AttentionSpec) and attention.rope is not None
    assert attention.gated and attention.rope.dim == 64 and attention.rope.theta == 1e7
    assert isinstance(mixture, MoeSpec) and mixture.router.normalise and mixture.shared_gate
    assert (mixture.router.num_experts, mixture.router.top_k) == (256, 8)
    states = spec.states()
    assert states[0].bytes_per_anchor() == 4 * (32 * 128 * 128 + 3 * 8192)
    assert states[3].bytes_per_token() == 4 * 2 * 2 * 256
    parameters = sum(torch.Size(shape).numel() for shape in spec.parameter_shapes().values())
    assert 34e9 < parameters < 36e9


def test_kimi_linear_48b_a3b_is_read_as_published() -> None:
    """Oracle: the architecture as its authors describe it, and arithmetic on its shapes."""
    spec = read_spec(KIMI_48B)
    latent = [index for index, x in enumerate(spec.layers) if isinstance(x.mixer, MlaSpec)]
    assert latent == [3, 7, 11, 15, 19, 23, 26]
    assert spec.layers[0].mixer == KdaSpec(num_heads=32, head_dim=128, kernel=4)
    mixer = spec.layers[3].mixer
    assert isinstance(mixer, MlaSpec) and mixer.q_rank is None and mixer.rope is None
    assert spec.layers[0].feed_forward == MlpSpec(9216)
    mixture = spec.layers[1].feed_forward
    assert isinstance(mixture, MoeSpec) and mixture.shared == MlpSpec(1024)
    assert mixture.router.groups is None and mixture.router.scale == 2.446
    assert spec.states()[3].bytes_per_token() == 4 * (512 + 64)
    parameters = sum(torch.Size(shape).numel() for shape in spec.parameter_shapes().values())
    assert 47e9 < parameters < 50e9


@pytest.mark.parametrize("family", FAMILIES)
def test_unknown_keys_are_refused(family: str) -> None:
    """Oracle: a key nobody knows; the message names it."""
    with pytest.raises(UnsupportedConfig, match="'delta_of_tomorrow'"):
        spec_of(family, delta_of_tomorrow=1)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("qwen3_next", "hidden_act", "gelu"),
        ("qwen3_next", "linear_num_value_heads", 5),
        ("qwen3_next", "layer_types", ["linear_attention"] * 3),
        ("qwen3_next", "layer_types", ["linear_attention"] * 3 + ["sliding_attention"]),
        ("qwen3_next", "mlp_only_layers", "all"),
        ("qwen3_next", "use_sliding_window", True),
        ("qwen3_5_text", "attn_output_gate", False),
        ("qwen3_5_text", "mamba_ssm_dtype", "bfloat16"),
        ("qwen3_5_text", "output_gate_type", "sigmoid"),
        ("qwen3_5_moe_text", "norm_topk_prob", False),
        ("qwen3_5_moe_text", "mlp_only_layers", [1]),
        ("qwen3_5_moe_text", "decoder_sparse_step", 2),
        ("kimi_linear", "hidden_act", "gelu"),
        ("kimi_linear", "mla_use_nope", False),
        ("kimi_linear", "moe_router_activation_func", "softmax"),
        ("kimi_linear", "moe_layer_freq", 2),
        ("kimi_linear", "rope_scaling", {"rope_type": "yarn", "factor": 2.0}),
        ("kimi_linear", "use_grouped_topk", False),
        ("kimi_linear", "linear_attn_config", ["kda"]),
        ("kimi_linear", "linear_attn_config", {"kda_layers": [1, 2], "full_attn_layers": [3]}),
        ("kimi_linear", "linear_attn_config", {"kda_layers": [1, 2, 3, 4], "gate": 1}),
        ("kimi_linear", "mlp_layer_types", ["dense", "sparse", "sparse", "thin"]),
        ("kimi_linear", "mlp_layer_types", ["dense"]),
        ("kimi_linear", "n_group", 4),
    ],
)
def test_what_changes_the_maths_is_refused(family: str, key: str, value: Any) -> None:
    """Oracle: values that this architecture cannot compute."""
    with pytest.raises(UnsupportedConfig):
        spec_of(family, **{key: value})


def test_defaults_are_those_of_transformers() -> None:
    """Oracle: transformers' configuration objects, which fill in what a file leaves out."""
    keys: tuple[str, ...]
    keys = ("layer_types", "num_key_value_heads", "rope_parameters", "norm_topk_prob")
    saved = family_config("qwen3_next", num_key_value_heads=2, norm_topk_prob=True).to_dict()
    assert read_spec(without(saved, *keys)) == read_spec(saved)
    saved = family_config("kimi_linear", layer_types=None).to_dict()
    keys = (
        "layer_types",
        "mlp_layer_types",
        "q_lora_rank",
        "moe_renormalize",
        "num_shared_experts",
    )
    assert read_spec(without(saved, *keys)) == read_spec(saved)
    assert isinstance(read_spec(saved).layers[0].mixer, KdaSpec)


def test_the_spellings_of_kimi_linear() -> None:
    """Oracle: the same numbers under the names that checkpoints and other families use."""
    ours = {"n_group": 3, "topk_group": 2, "norm_topk_prob": False, "num_experts_per_tok": 3}
    theirs = {"num_expert_group": 3, "moe_renormalize": False, "num_experts_per_token": 3}
    base = without(KIMI_48B, *theirs, "num_experts") | {"topk_group": 2, "num_experts": 12}
    assert read_spec(base | ours) == read_spec(base | theirs)
    mixture = read_spec(base | ours).layers[1].feed_forward
    assert isinstance(mixture, MoeSpec) and not mixture.router.normalise
    assert mixture.router.groups == ExpertGroups(3, 2, "sum_of_two_largest")
    with pytest.raises(UnsupportedConfig, match="differ"):
        read_spec(KIMI_48B | {"n_group": 3})


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "biases, dense layers among mixtures": (
        "qwen3_next",
        {"attention_bias": True, "mlp_only_layers": [0], "decoder_sparse_step": 2},
    ),
    "attention first, weights as they are": (
        "qwen3_next",
        {"layer_types": ["full_attention"] + ["linear_attention"] * 3, "norm_topk_prob": False},
    ),
    "tied, another kernel": (
        "qwen3_5_text",
        {"tie_word_embeddings": True, "linear_conv_kernel_dim": 2, "linear_num_key_heads": 3},
    ),
    "attention only": ("qwen3_5_text", {"layer_types": ["full_attention"] * 4}),
    "scaled rope": (
        "qwen3_5_moe_text",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.25,
            }
        },
    ),
    "one group, two shared experts": (
        "kimi_linear",
        {
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "linear_conv_kernel_dim": 3,
            "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
        },
    ),
    "latent attention only": ("kimi_linear", {"layer_types": ["full_attention"] * 4}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_equal_transformers(variant: str, tmp_path: Path) -> None:
    """Oracle: transformers in one cold pass, 1e-4 of the range (seen: 4e-6)."""
    family, settings = VARIANTS[variant]
    model = build_checkpoint(tmp_path, family, **settings)
    decoder, oracle = load(tmp_path).decoder, Oracle(model, 211)
    for mode in ("prefill", "mixed", "resumed"):
        assert MODES[mode](decoder, oracle) < 1e-4


def parameters(folder: Path) -> Tensors:
    source = open_source(folder)
    read = {name: source.read(name) for name in source.spec.parameter_shapes()}
    source.finish()
    return read


def rewrite(folder: Path, edit: Callable[[Tensors], Tensors]) -> None:
    tensors = edit(load_file(folder / "model.safetensors"))
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")


def fused(tensors: Tensors, module: str, parts: tuple[str, str, str]) -> Tensors:
    """Experts of every layer in two tensors, as transformers has them in memory."""
    result = {name: x for name, x in tensors.items() if f".{module}." not in name}
    layers = {name.split(f".{module}.")[0] for name in tensors} - tensors.keys()
    for layer in sorted(layers):
        gate, up, down = (
            torch.stack([tensors[f"{layer}.{module}.{e}.{part}.weight"] for e in range(12)])
            for part in parts
        )
        result[f"{layer}.{module}.gate_up_proj"] = torch.cat((gate, up), 1)
        result[f"{layer}.{module}.down_proj"] = down
    return result


@pytest.mark.parametrize(
    ("family", "module", "parts"),
    [
        ("qwen3_next", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
        ("qwen3_5_moe_text", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
        ("kimi_linear", "block_sparse_moe.experts", ("w1", "w3", "w2")),
    ],
)
def test_fused_and_separate_experts_are_the_same(
    family: str, module: str, parts: tuple[str, str, str], tmp_path: Path
) -> None:
    """Oracle: the parameters as read from separate experts, bit for bit."""
    build_checkpoint(tmp_path, family)
    expected = parameters(tmp_path)
    rewrite(tmp_path, lambda tensors: fused(tensors, module, parts))
    stored = load_file(tmp_path / "model.safetensors")
    assert any(name.endswith("experts.gate_up_proj") for name in stored)
    assert not any(".experts.0." in name for name in stored)
    read = parameters(tmp_path)
    assert all(torch.equal(read[name], x) for name, x in expected.items())


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_qwen3_5_inside_its_multimodal_model(family: str, tmp_path: Path) -> None:
    """Oracle: the text model alone, bit for bit. Towers and multi-token prediction are left out and
    reported, experts are fused, as published; a tensor of the text part too many is an error."""
    build_checkpoint(tmp_path, family)
    expected, spec = parameters(tmp_path), open_source(tmp_path).spec
    names = ("gate_proj", "up_proj", "down_proj")

    def wrap(tensors: Tensors) -> Tensors:
        wrapped = {
            name.replace("model.", "model.language_model."): x
            for name, x in fused(tensors, "mlp.experts", names).items()
        }
        others = ("model.visual.blocks.0.attn.qkv.weight", "mtp.fc.weight", "mtp.norm.weight")
        return wrapped | {name: torch.ones(3, 2) for name in others}

    rewrite(tmp_path, wrap)
    file = tmp_path / "config.json"
    outer = family.removesuffix("_text")
    config = {**QWEN_35B, "model_type": outer, "text_config": json.loads(file.read_text())}
    file.write_text(json.dumps(config))
    read, source = parameters(tmp_path), open_source(tmp_path)
    assert source.spec == spec
    assert all(torch.equal(read[name], x) for name, x in expected.items())
    assert sorted(source.notes) == [
        "1 tensors were left out: vision",
        "2 tensors were left out: multi-token prediction",
    ]
    extra = "model.language_model.layers.0.linear_attn.in_proj_w.weight"
    rewrite(tmp_path, lambda tensors: tensors | {extra: torch.ones(2)})
    with pytest.raises(WeightsMismatch, match="in_proj_w"):
        open_source(tmp_path)


def test_dense_layers_of_kimi_linear_may_be_named_mlp(tmp_path: Path) -> None:
    """Oracle: the parameters as read from transformers' names; published checkpoints differ."""
    build_checkpoint(tmp_path, "kimi_linear")
    expected = parameters(tmp_path)

    def renamed(tensors: Tensors) -> Tensors:
        first = "model.layers.0.block_sparse_moe."
        return {name.replace(first, "model.layers.0.mlp."): x for name, x in tensors.items()}

    rewrite(tmp_path, renamed)
    assert "model.layers.0.mlp.gate_proj.weight" in load_file(tmp_path / "model.safetensors")
    read = parameters(tmp_path)
    assert all(torch.equal(read[name], x) for name, x in expected.items())
