# SPDX-License-Identifier: Apache-2.0
"""gpt_oss: sinks, a window in every second layer, biases everywhere, clamped experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..spec import MAX_LAYERS, LayerSpec, ModelSpec
from ..specs.attention import AttentionSpec
from ..specs.moe import ClampedGlu, ExpertSpec, MoeSpec, RouterSpec
from ..specs.rope import RopeSpec
from ..weight_source import Names, Shape, Stored, Ways
from .attention_config import FULL, SLIDING, read_kinds, read_kv_heads, read_window, used_window
from .config_reader import ConfigReader
from .llama import LLAMA_NAMES
from .moe_config import (
    EXPERTS_KEYS,
    ExpertNaming,
    expert_names,
    model_of,
    one_of_all,
    read_first,
)
from .rope_config import Rotation, read_rope, rope_of
from .weight_names import Naming, checkpoint_names, tensor

_THETA = 150_000.0
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_gpt_oss(config: Mapping[str, Any]) -> ModelSpec:
    reader = ConfigReader(config)
    context = reader.whole("max_position_embeddings", 131_072)
    reader.require("hidden_act", "silu", "swish")
    reader.get("initial_context_length")  # told again by the rope
    heads, head_dim = reader.whole("num_attention_heads"), reader.whole("head_dim", 64)
    bias = reader.flag("attention_bias", True)
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=read_kv_heads(reader, heads, absent=8),
        head_dim=head_dim,
        rope=_read_rope(reader, head_dim, context),
        qkv_bias=bias,
        output_bias=bias,
        sinks=True,
    )
    router = RouterSpec(
        num_experts=read_first(reader, EXPERTS_KEYS, 128),
        top_k=read_first(reader, ("num_experts_per_tok", "experts_per_token"), 4),
        scores="softmax_of_chosen",
        bias=True,
    )
    clamp = ClampedGlu(reader.number("swiglu_alpha", 1.702), reader.number("swiglu_limit", 7.0))
    expert = ExpertSpec(reader.whole("intermediate_size", 2880), clamp, bias=True)
    num_layers = reader.whole("num_hidden_layers", maximum=MAX_LAYERS)
    kinds = read_kinds(reader, [(SLIDING, FULL)[index % 2] for index in range(num_layers)])
    windowed = replace(attention, window=used_window(read_window(reader, 128), context))
    layers = [
        LayerSpec(windowed if kind == SLIDING else attention, MoeSpec(router, expert))
        for kind in kinds
    ]
    return model_of(reader, layers, context=context, eps=1e-5)


def _read_rope(reader: ConfigReader, head_dim: int, context: int) -> RopeSpec:
    if reader.get("rope_scaling") is None and reader.get("rope_parameters") is None:
        known = Rotation(head_dim, reader.number("rope_theta", _THETA))
        return rope_of(_DEFAULT_ROPE, known, context)
    return read_rope(reader, head_dim, context, theta=_THETA)


def _interleaved(name: str, half: int) -> ExpertNaming:
    """Every second output, from `half` on, of an expert in [E, H, 2I], or in MXFP4 blocks that are
    seen as [E, 2I, H]."""

    def naming(count: int, index: int) -> Naming:
        def ways(prefix: str, shape: Shape) -> Ways:
            inner, width = shape
            piece = Stored(
                prefix + name,
                shape=(count, width, 2 * inner),
                view=(count, width, inner, 2),
                part=((0, index, index + 1), (3, half, half + 1)),
                order=(0, 3, 2, 1),
            )
            view, part = (count, inner, 2, width), ((0, index, index + 1), (2, half, half + 1))
            blocks = Stored(f"{prefix}{name}_blocks", (count, 2 * inner, width), view, part)
            return (piece,), (blocks,)

        return ways

    return naming


def _interleaved_bias(name: str, half: int) -> ExpertNaming:
    """The same of biases in [E, 2I]."""

    def naming(count: int, index: int) -> Naming:
        def ways(prefix: str, shape: Shape) -> Ways:
            stored, view = (count, 2 * shape[0]), (count, shape[0], 2)
            part = ((0, index, index + 1), (2, half, half + 1))
            return ((Stored(prefix + name, stored, view=view, part=part),),)

        return ways

    return naming


def _transposed(name: str) -> ExpertNaming:
    """An expert's matrix in [E, in, out], or in MXFP4 blocks that are seen as [E, out, in]."""

    def naming(count: int, index: int) -> Naming:
        def ways(prefix: str, shape: Shape) -> Ways:
            stored, part = (count, *shape[::-1]), ((0, index, index + 1),)
            blocks = Stored(f"{prefix}{name}_blocks", (count, *shape), part=part)
            return (Stored(prefix + name, stored, part=part, order=(0, 2, 1)),), (blocks,)

        return ways

    return naming


_NAMES: Mapping[str, str | Naming] = {
    **LLAMA_NAMES,
    "sinks": tensor("self_attn.sinks"),
    "router": "mlp.router",
}
_GATE_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def gpt_oss_names(spec: ModelSpec) -> Names:
    parts: dict[str, ExpertNaming] = {
        "gate": _interleaved(_GATE_UP, 0),
        "up": _interleaved(_GATE_UP, 1),
        "down": _transposed(_DOWN),
        "gate.bias": _interleaved_bias(f"{_GATE_UP}_bias", 0),
        "up.bias": _interleaved_bias(f"{_GATE_UP}_bias", 1),
        "down.bias": one_of_all(f"{_DOWN}_bias"),
    }
    return checkpoint_names(spec, {**_NAMES, **expert_names(spec, **parts)})
