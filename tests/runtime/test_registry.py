# SPDX-License-Identifier: Apache-2.0
"""config.json -> spec: what is read, what is refused, and by which name."""

from typing import Any

import pytest

from freetoken_runtime.errors import (
    UnsupportedArchitecture,
    UnsupportedConfig,
)
from freetoken_runtime.models.registry import read_spec
from freetoken_runtime.spec import ModelSpec
from freetoken_runtime.specs.attention import AttentionSpec
from freetoken_runtime.specs.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from freetoken_runtime.testing import ODD_DIMENSIONS, family_config


def spec_of(model_type: str = "llama", **changes: Any) -> ModelSpec:
    return read_spec({**ODD_DIMENSIONS, "model_type": model_type, **changes})


DENSE = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "gemma3_text")


def attention_of(spec: ModelSpec, layer: int = 0) -> AttentionSpec:
    mixer = spec.layers[layer].mixer
    assert isinstance(mixer, AttentionSpec)
    return mixer


def scaling_of(spec: ModelSpec) -> RopeScaling | None:
    rope = attention_of(spec).rope
    assert rope is not None
    return rope.scaling


@pytest.mark.parametrize("family", DENSE)
def test_every_key_that_transformers_writes_is_understood(family: str) -> None:
    """Oracle: transformers' own config of each family, all keys, and its own derived values."""
    config = family_config(family)
    spec = read_spec(config.to_dict())
    mixer = attention_of(spec)
    assert (spec.vocab_size, spec.hidden_size) == (211, 60)
    assert spec.num_layers == config.num_hidden_layers
    assert (mixer.num_heads, mixer.num_kv_heads) == (6, 2)
    assert mixer.head_dim == getattr(config, "head_dim", 10)
    assert spec.norm_eps == config.rms_norm_eps
    assert spec.tied_head == config.tie_word_embeddings
    ropes = config.rope_parameters
    assert mixer.rope is not None
    assert mixer.rope.theta == ropes.get("sliding_attention", ropes)["rope_theta"]
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * spec.num_layers
    if family == "mistral":
        kinds = ["sliding_attention"] * spec.num_layers
    windows = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    assert [attention_of(spec, index).window for index in range(spec.num_layers)] == windows


@pytest.mark.parametrize("family", DENSE)
def test_absent_keys_take_the_defaults_of_transformers(family: str) -> None:
    """Oracle: the defaults in transformers' config class."""
    from transformers import AutoConfig

    sizes = {"vocab_size": 211, "hidden_size": 60, "intermediate_size": 84}
    shape = {"num_hidden_layers": 1, "num_attention_heads": 6}
    # An absent number is 8 in mistral, 4 in gemma3; null is not a number there.
    heads = {"num_key_value_heads": 6 if family in ("mistral", "gemma3_text") else None}
    config = AutoConfig.for_model(family, **sizes, **shape, **heads)
    spec = read_spec({"model_type": family, **sizes, **shape, **heads})
    assert spec.context_limit == config.max_position_embeddings
    assert spec.norm_eps == config.rms_norm_eps
    assert spec.tied_head == config.tie_word_embeddings
    assert attention_of(spec).num_kv_heads == config.num_key_value_heads == 6
    assert attention_of(spec).head_dim == getattr(config, "head_dim", 10)
    if family in ("mistral", "gemma3_text"):
        assert attention_of(spec).window == config.sliding_window == 4096


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
        ("mistral", "attention_bias", True),
        ("qwen2", "layer_types", ["full_attention", "sliding_attention"] * 2),
        ("qwen3", "mlp_bias", True),
        ("gemma3_text", "attn_logit_softcapping", 50.0),
        ("gemma3_text", "use_bidirectional_attention", True),
        ("gemma3_text", "hidden_activation", "gelu"),
        ("gemma3_text", "rope_parameters", {"rope_type": "default"}),
        ("granite", "position_embedding_type", "learned"),
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


def test_qwen_has_windows_only_where_they_are_used() -> None:
    """Oracle: transformers ignores sliding_window unless use_sliding_window is set, and then gives
    one to the layers from max_window_layers on."""
    unused = spec_of("qwen2", sliding_window=23, use_sliding_window=False)
    assert {attention_of(unused, index).window for index in range(4)} == {None}
    for family in ("qwen2", "qwen3"):
        used = spec_of(family, sliding_window=23, use_sliding_window=True, max_window_layers=3)
        assert [attention_of(used, i).window for i in range(4)] == [None, None, None, 23]
    listed = spec_of(
        "qwen2",
        sliding_window=23,
        use_sliding_window=True,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    assert [attention_of(listed, i).window for i in range(4)] == [23, None, 23, None]


def test_mistral_without_the_key_has_a_window_and_null_means_none() -> None:
    """Oracle: transformers' default of 4,096, which only matters below the context."""
    assert attention_of(spec_of("mistral", max_position_embeddings=4096)).window is None
    assert attention_of(spec_of("mistral", max_position_embeddings=8192)).window == 4096
    none = spec_of("mistral", max_position_embeddings=8192, sliding_window=None)
    assert attention_of(none).window is None


@pytest.mark.parametrize("window", [0, -1, "23", 2.5, True])
def test_a_window_that_is_no_number_of_rows_is_refused(window: Any) -> None:
    """Oracle: the message names key and value."""
    with pytest.raises(UnsupportedConfig, match="sliding_window"):
        spec_of("mistral", sliding_window=window)


@pytest.mark.parametrize("family", ["smollm3", "qwen2"])
def test_windows_without_a_size_are_refused(family: str) -> None:
    """Oracle: the message; transformers fails on such a configuration."""
    with pytest.raises(UnsupportedConfig, match="sliding_window"):
        spec_of(family, layer_types=["full_attention", "sliding_attention"] * 2)


def test_smollm3_windows_are_where_the_rope_is_not() -> None:
    """Oracle: transformers' rule for absent layer_types, and an explicit list of ropes."""
    given = {"use_sliding_window": True, "sliding_window": 23, "no_rope_layers": [1, 0, 1, 0]}
    spec = spec_of("smollm3", **given)
    mixers = [attention_of(spec, index) for index in range(4)]
    assert [mixer.rope is not None for mixer in mixers] == [True, False, True, False]
    assert [mixer.window for mixer in mixers] == [None, 23, None, 23]
    with pytest.raises(UnsupportedConfig, match="no_rope_layers"):
        spec_of("smollm3", no_rope_layers=[1, 0])


def test_older_gemma3_keys_mean_the_same() -> None:
    """Oracle: the newer spelling of one configuration, as transformers reads both."""
    linear = {"rope_type": "linear", "factor": 8.0}
    newer = {
        "full_attention": {**linear, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    }
    older = {"rope_scaling": linear, "rope_theta": 2e6, "rope_local_base_freq": 5e3}
    shared = {"sliding_window": 23, "sliding_window_pattern": 2}
    kinds = ["sliding_attention", "full_attention"] * 2
    spec = spec_of("gemma3_text", **shared, **older)
    assert spec == spec_of(
        "gemma3_text", sliding_window=23, layer_types=kinds, rope_parameters=newer
    )
    assert [attention_of(spec, index).window for index in range(4)] == [23, None, 23, None]


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
    assert scaling_of(spec_of(**older)) == LinearScaling(3.0)
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
    scaling = scaling_of(spec_of(rope_scaling=llama3))
    assert scaling == Llama3Scaling(8.0, 1.0, 4.0, 64)
    scaling = scaling_of(spec_of(rope_scaling=yarn))
    assert scaling == YarnScaling(4.0, 0.1 * 1.3862943611198906 + 1, 1024, 32.0, 1.0, True)
    mscaled = {**yarn, "mscale": 2.0, "mscale_all_dim": 1.0}
    scaling = scaling_of(spec_of(rope_scaling=mscaled))
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


def test_how_weights_are_stored_does_not_change_a_model() -> None:
    """Oracle: the spec without these keys, of a model by itself and inside a multimodal one."""
    settings = {"quant_method": "fp8"}
    assert spec_of(quantization_config=settings, compression_config=settings) == spec_of()
    text = {**ODD_DIMENSIONS, "model_type": "llama"}
    outer = {"model_type": "llava", "quantization_config": settings}
    plain = read_spec({"model_type": "llava", "text_config": text})
    assert read_spec({**outer, "text_config": {**text, "quantization_config": settings}}) == plain


def test_the_text_part_of_a_multimodal_configuration_is_read() -> None:
    """Oracle: the text configuration by itself; the head is tied as the wrapper says, and a key of
    the wrapper that nobody knows is refused."""
    text = {**ODD_DIMENSIONS, "model_type": "qwen3", "head_dim": 20}
    wrapper = {
        "model_type": "some_vision_model",
        "text_config": text,
        "vision_config": {"depth": 3},
        "image_token_id": 7,
        "mm_tokens_per_image": 256,
        "architectures": ["SomeVisionModel"],
    }
    assert read_spec(wrapper) == read_spec(text)
    assert read_spec({**wrapper, "tie_word_embeddings": True}).tied_head
    with pytest.raises(UnsupportedConfig, match="logit_magic"):
        read_spec({**wrapper, "logit_magic": 2})
