# SPDX-License-Identifier: Apache-2.0
"""What configurations and checkpoints of mixtures of experts share."""

from collections.abc import Callable, Sequence

from ..errors import UnsupportedConfig
from ..spec import LayerSpec, ModelSpec
from ..specs.mlp import MlpSpec
from ..specs.moe import ExpertGroups, MoeSpec, RouterSpec
from ..weight_source import Shape, Stored, Ways
from .config_reader import ConfigReader
from .weight_names import Naming, either

# Of the training of a router; none reaches a logit.
ROUTER_TRAINING_KEYS = (
    "aux_loss_alpha",
    "output_router_logits",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "seq_aux",
)
EXPERTS_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")


def skip_router_training(reader: ConfigReader) -> None:
    for key in ROUTER_TRAINING_KEYS:
        reader.get(key)


def read_layer_indices(reader: ConfigReader, key: str, num_layers: int) -> frozenset[int]:
    """A list of layers by number; none if it is absent or null."""
    indices = reader.get(key, [])
    if not isinstance(indices, list) or not all(type(index) is int for index in indices):
        raise UnsupportedConfig(f"config key {key!r}", value=indices, limit="a list of layers")
    return frozenset(index for index in indices if 0 <= index < num_layers)


def read_sparse_layers(reader: ConfigReader, num_layers: int) -> list[bool]:
    """Which layers are mixtures in the Qwen families: every `decoder_sparse_step`-th, but for
    `mlp_only_layers`."""
    dense = read_layer_indices(reader, "mlp_only_layers", num_layers)
    step = reader.whole("decoder_sparse_step", 1)
    return [index not in dense and (index + 1) % step == 0 for index in range(num_layers)]


def read_first(reader: ConfigReader, keys: tuple[str, ...], default: int) -> int:
    """The number under any of several spellings, which must agree."""
    values = {key: reader.whole(key) for key in keys if reader.get(key) is not None}
    if len(set(values.values())) > 1:
        raise UnsupportedConfig("config keys of one meaning differ", value=values)
    return next(iter(values.values()), default)


def read_softmax_router(reader: ConfigReader, num_experts: int, top_k: int) -> RouterSpec:
    """Softmax over all experts, the largest taken; `norm_topk_prob` tells whether their weights
    are normalised. The numbers are defaults."""
    return RouterSpec(
        num_experts=read_first(reader, EXPERTS_KEYS, num_experts),
        top_k=reader.whole("num_experts_per_tok", top_k),
        scores="softmax",
        normalise=reader.flag("norm_topk_prob"),
    )


def read_sigmoid_router(
    reader: ConfigReader, num_experts: int, top_k: int, groups: tuple[int, int], scale: float
) -> RouterSpec:
    """DeepSeek-V3's: sigmoid with a correction, within the groups whose two best sum up highest.
    The numbers are defaults; `groups`: how many, and how many of them are chosen from."""
    count, chosen = reader.whole("n_group", groups[0]), reader.whole("topk_group", groups[1])
    limit = ExpertGroups(count, chosen, "sum_of_two_largest")
    return RouterSpec(
        num_experts=read_first(reader, EXPERTS_KEYS, num_experts),
        top_k=reader.whole("num_experts_per_tok", top_k),
        scores="sigmoid",
        normalise=reader.flag("norm_topk_prob", True),
        correction=True,
        groups=None if count == 1 else limit,
        sum_added=1e-20,
        scale=reader.number("routed_scaling_factor", scale),
    )


def read_shared(reader: ConfigReader, key: str, default: int, inner: int) -> MlpSpec | None:
    """Shared experts, as one of their total width. `key`: how many."""
    count = read_count(reader, key, default)
    return MlpSpec(count * inner) if count else None


def read_count(reader: ConfigReader, key: str, default: int) -> int:
    """A whole number that may be 0."""
    return 0 if reader.get(key) == 0 else reader.whole(key, default)


def model_of(
    reader: ConfigReader,
    layers: Sequence[LayerSpec],
    *,
    context: int,
    eps: float,
    tied: bool = False,
) -> ModelSpec:
    """The model of these layers, with what all configurations spell alike, once every key is read.
    `eps` and `tied` are defaults."""
    spec = ModelSpec(
        architecture=str(reader.get("model_type")),
        vocab_size=reader.whole("vocab_size"),
        hidden_size=reader.whole("hidden_size"),
        layers=tuple(layers),
        norm_eps=reader.number("rms_norm_eps", eps),
        tied_head=reader.flag("tie_word_embeddings", tied),
        context_limit=context,
    )
    skip_router_training(reader)
    reader.finish()
    return spec


# (number of experts, index) -> the naming of that expert's part.
ExpertNaming = Callable[[int, int], str | Naming]


def expert_names(spec: ModelSpec, **parts: ExpertNaming) -> dict[str, str | Naming]:
    """Table entries `experts.<index>.<part>` for every expert of a model's mixtures."""
    mixtures = [x.feed_forward for x in spec.layers if isinstance(x.feed_forward, MoeSpec)]
    count = max((mixture.router.num_experts for mixture in mixtures), default=0)
    return {
        f"experts.{index}.{part}": naming(count, index)
        for index in range(count)
        for part, naming in parts.items()
    }


def usual_expert_names(
    spec: ModelSpec,
    module: str = "mlp.experts",
    *,
    separate: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    fused: tuple[str, str] | None = None,
) -> dict[str, str | Naming]:
    """Experts stored one by one as `<module>.<index>.<gate, up, down>`, or fused in two tensors:
    gate above up [E, 2I, H], and down [E, H, I]."""
    gate_up, down = fused or (f"{module}.gate_up_proj", f"{module}.down_proj")

    def one_of(name: str, otherwise: ExpertNaming) -> ExpertNaming:
        return lambda count, index: either(f"{module}.{index}.{name}", otherwise(count, index))

    return expert_names(
        spec,
        gate=one_of(separate[0], half_of(gate_up, 0)),
        up=one_of(separate[1], half_of(gate_up, 1)),
        down=one_of(separate[2], one_of_all(down)),
    )


def half_of(name: str, half: int) -> ExpertNaming:
    """The upper (0) or lower (1) half of an expert's rows in [E, 2I, H]."""

    def naming(count: int, index: int) -> Naming:
        def ways(prefix: str, shape: Shape) -> Ways:
            inner, width = shape
            rows = (1, half * inner, (half + 1) * inner)
            part = ((0, index, index + 1), rows)
            return ((Stored(prefix + name, (count, 2 * inner, width), part=part),),)

        return ways

    return naming


def one_of_all(name: str) -> ExpertNaming:
    """One expert of a tensor with a first dimension of experts."""

    def naming(count: int, index: int) -> Naming:
        return lambda prefix, shape: (
            (Stored(prefix + name, (count, *shape), part=((0, index, index + 1),)),),
        )

    return naming
