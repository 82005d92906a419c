# SPDX-License-Identifier: Apache-2.0
"""Configurations of the Mamba-2 and convolution hybrids: what each key becomes, and what is
refused."""

from typing import Any

import pytest

from freetoken_runtime.errors import UnsupportedConfig
from freetoken_runtime.models.registry import read_spec
from freetoken_runtime.spec import ModelSpec
from freetoken_runtime.specs.attention import AttentionSpec
from freetoken_runtime.specs.convolution import ShortConvSpec
from freetoken_runtime.specs.mamba import Mamba2Spec
from freetoken_runtime.specs.mlp import MlpSpec
from freetoken_runtime.specs.moe import LatentSpec, MoeSpec
from freetoken_runtime.specs.parallel import ParallelSpec
from freetoken_runtime.testing import family_config

FAMILIES = ("granitemoehybrid", "nemotron_h", "lfm2_moe", "falcon_h1")
INFINITE = {"__float__": "Infinity"}


def config_of(family: str, **settings: Any) -> dict[str, Any]:
    """The keys a small model's config.json has, with `settings` on top."""
    saved: dict[str, Any] = family_config(family).to_dict()
    return {**saved, **settings}


def spec_of(family: str, **settings: Any) -> ModelSpec:
    return read_spec(config_of(family, **settings))


def kinds(spec: ModelSpec) -> list[str]:
    return [type(x.mixer or x.feed_forward).__name__ for x in spec.layers]


@pytest.mark.parametrize("family", FAMILIES)
def test_unknown_keys_are_refused(family: str) -> None:
    """Oracle: a key nobody knows; the message names it."""
    with pytest.raises(UnsupportedConfig, match="'mamba_of_tomorrow'"):
        spec_of(family, mamba_of_tomorrow=1)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("granitemoehybrid", "hidden_act", "gelu"),
        ("granitemoehybrid", "position_embedding_type", "alibi"),
        ("granitemoehybrid", "normalization_function", "layernorm"),
        ("granitemoehybrid", "mamba_d_head", 21),
        ("granitemoehybrid", "mamba_n_groups", 4),
        ("granitemoehybrid", "layer_types", ["mamba", "mamba", "window", "mamba"]),
        ("granitemoehybrid", "layer_types", ["mamba"] * 3),
        ("granitemoehybrid", "time_step_limit", [0.5, 0.1]),
        ("granitemoehybrid", "time_step_limit", [0.5]),
        ("granitemoehybrid", "time_step_limit", "none"),
        ("granitemoehybrid", "time_step_limit", [0.0, {"__float__": "NaN"}]),
        ("nemotron_h", "mlp_hidden_act", "silu"),
        ("nemotron_h", "attention_bias", True),
        ("nemotron_h", "mamba_proj_bias", True),
        ("nemotron_h", "time_step_limit", [0.0, 0.1]),
        ("nemotron_h", "sliding_window", 128),
        ("nemotron_h", "n_shared_experts", 2),
        ("nemotron_h", "layers_block_type", ["mamba", "conv"]),
        ("lfm2_moe", "layer_types", ["conv", "mamba", "conv", "conv"]),
        ("lfm2_moe", "layer_types", None),
        ("falcon_h1", "attn_layer_indices", [1]),
        ("falcon_h1", "mamba_use_mlp", False),
        ("falcon_h1", "mamba_d_ssm", 121),
        ("falcon_h1", "mlp_multipliers", [1.0]),
        ("falcon_h1", "ssm_multipliers", [1.0, 1.0, 1.0, 1.0, float("inf")]),
        ("falcon_h1", "ssm_multipliers", 2.0),
    ],
)
def test_what_changes_the_maths_and_is_not_supported_is_refused(
    family: str, key: str, value: Any
) -> None:
    """Oracle: transformers computes something else with it, or cannot build it either."""
    spec_of(family)
    with pytest.raises(UnsupportedConfig):
        spec_of(family, **{key: value})


@pytest.mark.parametrize("limits", [None, [0.0, INFINITE], [0.0, float("inf")], (0, INFINITE)])
def test_step_sizes_without_a_limit_in_every_spelling(limits: Any) -> None:
    """Oracle: the first spelling; transformers saves infinity as an object."""
    assert spec_of("granitemoehybrid", time_step_limit=limits) == spec_of("granitemoehybrid")


def test_step_limits_are_read() -> None:
    """Oracle: the numbers in the configuration; nemotron_h has a lower limit only."""
    granite = spec_of("granitemoehybrid", time_step_limit=[0.01, 0.2]).layers[0].mixer
    assert isinstance(granite, Mamba2Spec) and (granite.dt_min, granite.dt_max) == (0.01, 0.2)
    nemotron = spec_of("nemotron_h", time_step_min=0.02, time_step_max=0.3).layers[0].mixer
    assert isinstance(nemotron, Mamba2Spec)
    assert (nemotron.dt_min, nemotron.dt_max) == (0.02, float("inf"))


def test_nemotron_layers_have_one_block_each_in_three_spellings() -> None:
    """Oracle: the pattern of letters, the older names and the newer ones name the same layers."""
    names = ["mamba", "moe", "attention", "mlp", "mamba", "moe"]
    newer = {"mamba": "linear_attention", "attention": "full_attention"}
    config = config_of("nemotron_h", num_hidden_layers=6)
    config.pop("layers_block_type")
    config.pop("layer_types", None)
    specs = [
        read_spec({**config, **keys})
        for keys in (
            {"hybrid_override_pattern": "ME*-ME"},
            {"layers_block_type": names},
            {"layer_types": [newer.get(name, name) for name in names]},
        )
    ]
    assert specs[0] == specs[1] == specs[2]
    assert kinds(specs[0]) == [
        "Mamba2Spec",
        "MoeSpec",
        "AttentionSpec",
        "MlpSpec",
        "Mamba2Spec",
        "MoeSpec",
    ]
    assert all((x.mixer is None) is not (x.feed_forward is None) for x in specs[0].layers)
    with pytest.raises(UnsupportedConfig):
        read_spec({**config, "hybrid_override_pattern": "MX*-ME"})


def test_nemotron_experts_may_work_on_a_latent_projection() -> None:
    """Oracle: the keys; its biases are those of the MLPs."""
    spec = spec_of("nemotron_h", moe_latent_size=28, mlp_bias=True, n_group=1, topk_group=1)
    mixture = spec.layers[1].feed_forward
    assert isinstance(mixture, MoeSpec)
    assert mixture.latent == LatentSpec(28, bias=True)
    assert mixture.shared is not None and mixture.shared.bias and not mixture.shared.gated
    assert not mixture.expert.bias and mixture.router.groups is None


def test_granite_turns_positions_only_where_it_says_so() -> None:
    """Oracle: `position_embedding_type`, whatever the rope keys say."""
    for value, turned in ((None, False), ("nope", False), ("rope", True)):
        mixer = spec_of("granitemoehybrid", position_embedding_type=value).layers[2].mixer
        assert isinstance(mixer, AttentionSpec)
        assert (mixer.rope is not None) is turned
        assert mixer.scale == 0.2


def test_granite_without_experts_keeps_its_shared_mlp() -> None:
    """Oracle: the width of the shared MLP, alone and beside experts."""
    spec = spec_of("granitemoehybrid", num_local_experts=0)
    assert [layer.feed_forward for layer in spec.layers] == [MlpSpec(44)] * 4
    mixture = spec_of("granitemoehybrid").layers[0].feed_forward
    assert isinstance(mixture, MoeSpec) and mixture.shared == MlpSpec(44)


def test_granite_without_layer_types_is_all_mamba() -> None:
    """Oracle: transformers' default."""
    config = config_of("granitemoehybrid")
    del config["layer_types"]
    assert kinds(read_spec(config)) == ["Mamba2Spec"] * 4


def test_lfm2_layers_are_dense_first_and_turn_a_million() -> None:
    """Oracle: `num_dense_layers`, 0 included, and transformers' default of rope_theta."""
    config = config_of("lfm2_moe")
    config.pop("rope_parameters")
    spec = read_spec(config)
    assert [type(x.feed_forward) for x in spec.layers] == [MlpSpec, MoeSpec, MoeSpec, MoeSpec]
    assert kinds(spec) == ["ShortConvSpec", "ShortConvSpec", "AttentionSpec", "ShortConvSpec"]
    attention = spec.layers[2].mixer
    assert isinstance(attention, AttentionSpec) and attention.rope is not None
    assert attention.rope.theta == 1_000_000.0 and attention.qk_norm == "head"
    spec = spec_of("lfm2_moe", num_dense_layers=0, conv_L_cache=5, conv_bias=True)
    assert all(isinstance(x.feed_forward, MoeSpec) for x in spec.layers)
    assert spec.layers[0].mixer == ShortConvSpec(60, 5, bias=True)


def test_falcon_multipliers_reach_their_places() -> None:
    """Oracle: the configuration of the test model, multiplier by multiplier."""
    spec = spec_of("falcon_h1", mamba_rms_norm=True, mamba_norm_before_gate=False)
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, ParallelSpec)
    assert (mixer.attention_in, mixer.attention_out) == (0.7, 0.8)
    assert (mixer.mamba_in, mixer.mamba_out) == (1.2, 0.5)
    assert mixer.mamba.multipliers == (0.8, 1.1, 0.9, 1.2, 0.7)
    assert mixer.mamba.norm == "of_gated"
    assert mixer.attention.scale == pytest.approx(0.6 * 20**-0.5)
    assert (spec.embedding_multiplier, spec.logit_multiplier) == (3.0, 0.5)
    mlp = spec.layers[0].feed_forward
    assert isinstance(mlp, MlpSpec)
    assert (mlp.gate_multiplier, mlp.output_multiplier) == (0.9, 0.4)


def test_falcon_keeps_rows_and_overwrites_in_one_layer() -> None:
    """Oracle: by hand: two rows of 2 heads of 20, the tail of 3 rows of 168 channels and 6 heads
    of 20 by 12."""
    mixer = spec_of("falcon_h1").layers[0].mixer
    assert isinstance(mixer, ParallelSpec)
    assert mixer.mamba.norm is None and mixer.rope == mixer.attention.rope
    state = mixer.state()
    assert [(x.name, x.shape) for x in state.rows] == [("k", (2, 20)), ("v", (2, 20))]
    assert [(x.name, x.shape) for x in state.fixed] == [("conv", (3, 168)), ("ssm", (6, 20, 12))]
    assert state.bytes_per_token() == 4 * 2 * 40
    assert state.bytes_per_anchor() == 4 * (3 * 168 + 6 * 20 * 12)


def test_falcon_without_a_width_expands_the_hidden_size() -> None:
    """Oracle: mamba_expand · hidden_size = 120 for null, 1024 where the key is absent."""
    config = config_of("falcon_h1", mamba_d_ssm=None, mamba_expand=2)
    mixer = read_spec(config).layers[0].mixer
    assert isinstance(mixer, ParallelSpec) and mixer.mamba.width == 120
    del config["mamba_d_ssm"]
    with pytest.raises(UnsupportedConfig, match="width"):
        read_spec(config)
