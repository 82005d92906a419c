# SPDX-License-Identifier: Apache-2.0
"""What configurations and checkpoints of gated delta nets share: qwen3_next and qwen3_5."""

from collections.abc import Mapping
from itertools import accumulate

from ..spec import FeedForwardSpec, LayerSpec, ModelSpec
from ..specs.attention import AttentionSpec
from ..specs.gated_delta import GatedDeltaSpec
from ..specs.mlp import MlpSpec
from ..specs.moe import ExpertSpec, MoeSpec, RouterSpec
from ..weight_source import Names, Shape, Stored, Ways
from .attention_config import read_kinds, read_kv_heads
from .config_reader import ConfigReader
from .moe_config import skip_router_training, usual_expert_names
from .rope_config import read_rope
from .weight_names import Naming, checkpoint_names, tensor


def read_mixture(reader: ConfigReader, num_experts: int, top_k: int, normalised: bool) -> MoeSpec:
    """The experts of a layer; `num_experts` and `top_k` stand for absent keys."""
    skip_router_training(reader)
    router = RouterSpec(
        num_experts=reader.whole("num_experts", num_experts),
        top_k=reader.whole("num_experts_per_tok", top_k),
        scores="softmax",
        normalise=normalised,
    )
    return MoeSpec(
        router,
        ExpertSpec(reader.whole("moe_intermediate_size", 512)),
        shared=MlpSpec(reader.whole("shared_expert_intermediate_size", 512)),
        shared_gate=True,
    )


def read_hybrid(
    reader: ConfigReader, family: str, feed_forwards: tuple[FeedForwardSpec, ...], kv_heads: int
) -> ModelSpec:
    """What qwen3_next and qwen3_5 share: everything but their feed-forwards. `kv_heads`: where the
    key is absent."""
    context = reader.whole("max_position_embeddings", 32_768)
    reader.require("hidden_act", "silu", "swish")
    interval = reader.whole("full_attention_interval", 4)
    by_interval = [
        "linear_attention" if (index + 1) % interval else "full_attention"
        for index in range(len(feed_forwards))
    ]
    kinds = read_kinds(reader, by_interval, ("linear_attention", "full_attention"))
    delta, attention = _read_delta(reader), _read_attention(reader, context, kv_heads)
    return ModelSpec(
        architecture=family,
        vocab_size=reader.whole("vocab_size"),
        hidden_size=reader.whole("hidden_size"),
        layers=tuple(
            LayerSpec(delta if kind == "linear_attention" else attention, feed_forward)
            for kind, feed_forward in zip(kinds, feed_forwards, strict=True)
        ),
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        norm_offset=1.0,
        tied_head=reader.flag("tie_word_embeddings"),
        context_limit=context,
    )


def _read_delta(reader: ConfigReader) -> GatedDeltaSpec:
    return GatedDeltaSpec(
        num_key_heads=reader.whole("linear_num_key_heads", 16),
        num_heads=reader.whole("linear_num_value_heads", 32),
        key_dim=reader.whole("linear_key_head_dim", 128),
        head_dim=reader.whole("linear_value_head_dim", 128),
        kernel=reader.whole("linear_conv_kernel_dim", 4),
    )


def _read_attention(reader: ConfigReader, context: int, kv_heads: int) -> AttentionSpec:
    heads, head_dim = reader.whole("num_attention_heads", 16), reader.whole("head_dim", 256)
    bias = reader.flag("attention_bias")
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=read_kv_heads(reader, heads, absent=kv_heads),
        head_dim=head_dim,
        rope=read_rope(reader, head_dim, context, partial=0.25),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        gated=True,
    )


def hybrid_names(spec: ModelSpec, delta: Mapping[str, str | Naming]) -> Names:
    """What qwen3_next and qwen3_5 share of their weights' names; `delta`: how the projections of
    gated delta nets are stored."""
    table = {**_NAMES, **_attention_names(spec), **usual_expert_names(spec), **delta}
    return checkpoint_names(spec, table)


def delta_of(spec: ModelSpec) -> GatedDeltaSpec | None:
    """The gated delta net of a model, None if it has attention only."""
    return next((x.mixer for x in spec.layers if isinstance(x.mixer, GatedDeltaSpec)), None)


def _attention_names(spec: ModelSpec) -> dict[str, Naming]:
    """q and its gate: for every head one after the other."""
    attention = next((x.mixer for x in spec.layers if isinstance(x.mixer, AttentionSpec)), None)
    if attention is None:
        return {}
    sizes = {"q": attention.head_dim, "q_gate": attention.head_dim}
    names = of_heads("self_attn.q_proj", attention.num_heads, sizes)
    biases = of_heads("self_attn.q_proj", attention.num_heads, sizes, "bias")
    return names | {f"{part}.bias": naming for part, naming in biases.items()}


def of_heads(
    module: str, heads: int, sizes: Mapping[str, int], kind: str = "weight"
) -> dict[str, Naming]:
    """Parts of a tensor in which the rows of every head stand together, `sizes` of each part."""
    total = sum(sizes.values())

    def naming(start: int, size: int) -> Naming:
        def ways(prefix: str, shape: Shape) -> Ways:
            rest = shape[1:]
            return (
                (
                    Stored(
                        f"{prefix}{module}.{kind}",
                        (heads * total, *rest),
                        view=(heads, total, *rest),
                        part=((1, start, start + size),),
                    ),
                ),
            )

        return ways

    starts = accumulate(sizes.values(), initial=0)
    parts = zip(sizes.items(), starts, strict=False)  # one more start than parts: the end
    return {part: naming(start, size) for (part, size), start in parts}


_NAMES: dict[str, str | Naming] = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "mixer_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "delta.conv": "linear_attn.conv1d",
    "delta.dt_bias": tensor("linear_attn.dt_bias"),
    "delta.a_log": tensor("linear_attn.A_log"),
    "delta.gate_norm": "linear_attn.norm",
    "delta.o": "linear_attn.out_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "router": "mlp.gate",
    "shared_router": "mlp.shared_expert_gate",
    "shared.gate": "mlp.shared_expert.gate_proj",
    "shared.up": "mlp.shared_expert.up_proj",
    "shared.down": "mlp.shared_expert.down_proj",
}
