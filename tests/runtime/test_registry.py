# SPDX-License-Identifier: Apache-2.0
"""config.json -> spec: what is read, what is refused, and by which name."""

from typing import Any

import pytest

from freetoken_runtime.errors import UnsupportedArchitecture, UnsupportedConfig
from freetoken_runtime.models.registry import FAMILIES, read_spec
from freetoken_runtime.spec import ModelSpec
from freetoken_runtime.specs.rope import LinearScaling, Llama3Scaling, YarnScaling
from freetoken_runtime.testing import ODD_DIMENSIONS


def spec_of(model_type: str = "llama", **changes: Any) -> ModelSpec:
    return read_spec({**ODD_DIMENSIONS, "model_type": model_type, **changes})


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_that_transformers_writes_is_understood(family: str) -> None:
    """Oracle: transformers' own config of each family, all keys, and its own derived values."""
    from transformers import AutoConfig

    window = {"sliding_window": None} if family == "mistral" else {}
    config = AutoConfig.for_model(family, **{**ODD_DIMENSIONS, **window})
    spec = read_spec(config.to_dict())
    mixer = spec.layers[0].mixer
    assert (spec.vocab_size, spec.hidden_size, spec.num_layers) == (211, 60, 4)
    assert (mixer.num_heads, mixer.num_kv_heads) == (6, 2)
    assert mixer.head_dim == getattr(config, "head_dim", 10)
    assert spec.norm_eps == config.rms_norm_eps
    assert spec.tied_head == config.tie_word_embeddings
    assert mixer.rope.theta == config.rope_parameters["rope_theta"]


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_keys_take_the_defaults_of_transformers(family: str) -> None:
    """Oracle: the defaults in transformers' config class."""
    from transformers import AutoConfig

    sizes = {"vocab_size": 211, "hidden_size": 60, "intermediate_size": 84}
    shape = {"num_hidden_layers": 1, "num_attention_heads": 6}
    window = {"sliding_window": None} if family == "mistral" else {}
    heads = {"num_key_value_heads": 6 if family == "mistral" else None}
    config = AutoConfig.for_model(family, **sizes, **shape, **heads, **window)
    spec = read_spec({"model_type": family, **sizes, **shape, **heads, **window})
    assert spec.context_limit == config.max_position_embeddings
    assert spec.norm_eps == config.rms_norm_eps
    assert spec.tied_head == config.tie_word_embeddings
    assert spec.layers[0].mixer.num_kv_heads == config.num_key_value_heads == 6
    assert spec.layers[0].mixer.head_dim == getattr(config, "head_dim", 10)


@pytest.mark.parametrize("model_type", ["gpt2", "mamba2", None, 7, ["llama"]])
def test_an_unknown_architecture_is_named_with_what_is_supported(model_type: Any) -> None:
    """Oracle: the message."""
    with pytest.raises(UnsupportedArchitecture) as error:
        read_spec({**ODD_DIMENSIONS, "model_type": model_type})
    assert error.value.code == "unsupported_architecture"
    assert all(name in str(error.value) for name in (repr(model_type), "llama", "qwen3"))


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llama", "attn_logit_softcapping", 30.0),
        ("llama", "hidden_act", "gelu"),
        ("llama", "partial_rotary_factor", 0.5),
        ("llama", "rope_interleaved", True),
        ("llama", "sliding_window", 23),
        ("mistral", "sliding_window", 23),
        ("mistral", "attention_bias", True),
        ("qwen2", "layer_types", ["full_attention", "sliding_attention"] * 2),
        ("qwen3", "mlp_bias", True),
        ("qwen3", "num_experts", 8),
        ("llama", "rms_norm_eps", "small"),
        ("llama", "rms_norm_eps", -1e-6),
        ("llama", "num_hidden_layers", 0),
        ("llama", "vocab_size", 1.5),
        ("llama", "tie_word_embeddings", "yes"),
        ("llama", "num_key_value_heads", 4),
        ("llama", "head_dim", 9),
    ],
)
def test_a_key_that_changes_the_maths_is_refused_by_name(family: str, key: str, value: Any) -> None:
    """Oracle: the message names the key, or what it breaks, and the value."""
    with pytest.raises(UnsupportedConfig) as error:
        spec_of(family, **{key: value, "sliding_window": None} | {key: value})
    assert error.value.code == "unsupported_config"
    assert key in str(error.value)


def test_a_window_of_qwen_is_refused_only_where_it_is_used() -> None:
    """Oracle: transformers ignores sliding_window unless use_sliding_window is set."""
    assert spec_of("qwen2", sliding_window=23, use_sliding_window=False).num_layers == 4
    with pytest.raises(UnsupportedConfig, match="sliding_window"):
        spec_of("qwen2", sliding_window=23, use_sliding_window=True)


def test_mistral_without_the_key_has_a_window_and_null_means_none() -> None:
    """Oracle: transformers' default of 4,096, which only matters below the context."""
    assert spec_of("mistral", max_position_embeddings=4096).context_limit == 4096
    assert spec_of("mistral", max_position_embeddings=8192, sliding_window=None).num_layers == 4
    with pytest.raises(UnsupportedConfig, match="sliding_window"):
        spec_of("mistral", max_position_embeddings=8192)


@pytest.mark.parametrize(
    ("family", "key"), [("llama", "intermediate_size"), ("qwen3", "num_key_value_heads")]
)
def test_a_missing_required_key_is_named(family: str, key: str) -> None:
    """Oracle: the message. (An absent num_key_value_heads is a different number per family in
    transformers, and no checkpoint relies on it.)"""
    config = {**ODD_DIMENSIONS, "model_type": family}
    del config[key]
    with pytest.raises(UnsupportedConfig, match=f"'{key}' is missing"):
        read_spec(config)


def test_bookkeeping_keys_do_no_harm() -> None:
    """Oracle: the spec without them."""
    extra: dict[str, Any] = {"_name_or_path": "x", "torch_dtype": "bfloat16", "temperature": 0.7}
    assert spec_of(**extra, use_cache=True, transformers_version="4.1") == spec_of()


def test_both_spellings_of_rope_give_one_spec() -> None:
    """Oracle: each other."""
    linear = {"rope_type": "linear", "factor": 3.0, "rope_theta": 5e5}
    older: dict[str, Any] = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 3.0}}
    assert spec_of(rope_parameters=linear) == spec_of(**older)
    assert spec_of(**older).layers[0].mixer.rope.scaling == LinearScaling(3.0)
    assert spec_of(rope_theta=5e5) == spec_of(rope_parameters={"rope_theta": 5e5})


def test_scaled_ropes_are_read_whole() -> None:
    """Oracle: the numbers given, and YaRN's attention factor from its paper's formula."""
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    scaling = spec_of(rope_scaling=llama3).layers[0].mixer.rope.scaling
    assert scaling == Llama3Scaling(8.0, 1.0, 4.0, 64)
    scaling = spec_of(rope_scaling=yarn).layers[0].mixer.rope.scaling
    assert scaling == YarnScaling(4.0, 0.1 * 1.3862943611198906 + 1, 1024, 32.0, 1.0, True)
    mscaled = {**yarn, "mscale": 2.0, "mscale_all_dim": 1.0}
    scaling = spec_of(rope_scaling=mscaled).layers[0].mixer.rope.scaling
    assert isinstance(scaling, YarnScaling) and scaling.attention_factor == pytest.approx(1.1217511)


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "longrope"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": -2.0}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"rope_type": "linear", "factor": 2.0, "wobble": 1}, "wobble"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
        ([1, 2], "rope parameters"),
    ],
)
def test_other_ropes_are_refused_by_name(rope: Any, named: str) -> None:
    """Oracle: the message."""
    with pytest.raises(UnsupportedConfig, match=named):
        spec_of(rope_parameters=rope)
