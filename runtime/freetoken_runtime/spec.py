# SPDX-License-Identifier: Apache-2.0
"""What a model is, without its weights: shapes, state bytes, rope, context. Knows no torch.

A model is a tuple of layers, each a mixer and a feed-forward. Everything else in the runtime
branches on these records, never on a model's name.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod

from .errors import UnsupportedConfig

MAX_LAYERS = 10_000


@dataclass(frozen=True)
class BufferSpec:
    """One buffer of a layer's state: its name and the shape of one row of it."""

    name: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class StateSpec:
    """What a mixer keeps of the past.

    `rows`: buffers with one row per `granularity` tokens, from which a shorter prefix can be taken
    at any multiple of it. `fixed`: fp32 buffers that every token overwrites and every anchor
    copies. `carry`: fp32 buffers with the raw rows of the group that is still open, which an anchor
    adds too; between groups there is nothing in them. `replay_tokens`: after a restore, this many
    tokens before the position are forwarded again, because a part of the state is stored nowhere.
    """

    rows: tuple[BufferSpec, ...] = ()
    fixed: tuple[BufferSpec, ...] = ()
    carry: tuple[BufferSpec, ...] = ()
    granularity: int = 1
    replay_tokens: int = 0

    @property
    def sliceable(self) -> bool:
        """Whether any shorter prefix can be taken without an anchor."""
        return not self.fixed and self.granularity == 1

    @property
    def overwritten(self) -> tuple[BufferSpec, ...]:
        """What an anchor copies, in the order of `LayerState.fixed`."""
        return (*self.fixed, *self.carry)

    def bytes_per_token(self, element_bytes: int = 4) -> int:
        """Bytes of rows per token, rounded up where a row serves several tokens."""
        return -(-element_bytes * sum(buffer.elements for buffer in self.rows) // self.granularity)

    def bytes_per_anchor(self) -> int:
        return 4 * sum(buffer.elements for buffer in self.overwritten)


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: every frequency divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: low frequencies divided by `factor`, high ones kept, smooth in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071); `attention_factor` multiplies cos and sin."""

    factor: float
    attention_factor: float
    original_context: int
    beta_fast: float
    beta_slow: float
    truncate: bool


@dataclass(frozen=True)
class FactorScaling:
    """One divisor per frequency, as GGUF files store Llama 3 scaling (`rope_freqs`)."""

    factors: tuple[float, ...]


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FactorScaling


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions over the whole head, halves paired (dimension i with i + dim / 2)."""

    dim: int
    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class AttentionSpec:
    """Full causal attention with grouped key/value heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedConfig(
                "the number of attention heads must be a multiple of num_key_value_heads",
                value=self.num_heads,
                limit=self.num_kv_heads,
            )
        if self.head_dim % 2:
            raise UnsupportedConfig("head_dim must be even for rope", value=self.head_dim)

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def parameter_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """The mixer's weights by name, matrices as [out, in]."""
        rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {}
        for part, outputs in (("q", rows), ("k", kv_rows), ("v", kv_rows)):
            shapes[part] = (outputs, hidden_size)
            if self.qkv_bias:
                shapes[f"{part}.bias"] = (outputs,)
        shapes["o"] = (hidden_size, rows)
        if self.output_bias:
            shapes["o.bias"] = (hidden_size,)
        if self.qk_norm:
            shapes |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
        return shapes

    def state(self) -> StateSpec:
        row = (self.num_kv_heads, self.head_dim)
        return StateSpec(rows=(BufferSpec("k", row), BufferSpec("v", row)))


@dataclass(frozen=True)
class MlpSpec:
    """down(silu(gate x) · up x)."""

    intermediate_size: int
    bias: bool = False

    def parameter_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """The feed-forward's weights by name, matrices as [out, in]."""
        inner = self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {
            "gate": (inner, hidden_size),
            "up": (inner, hidden_size),
            "down": (hidden_size, inner),
        }
        if self.bias:
            shapes |= {"gate.bias": (inner,), "up.bias": (inner,), "down.bias": (hidden_size,)}
        return shapes


@dataclass(frozen=True)
class LayerSpec:
    """x += mixer(norm x); x += feed_forward(norm x)."""

    mixer: AttentionSpec
    feed_forward: MlpSpec


@dataclass(frozen=True)
class ModelSpec:
    """Architecture of one model. `context_limit`: positions it was configured for."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    tied_head: bool
    context_limit: int

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def states(self) -> tuple[StateSpec, ...]:
        """One per layer."""
        return tuple(layer.mixer.state() for layer in self.layers)

    def bytes_per_token(self, element_bytes: int = 4) -> int:
        return sum(state.bytes_per_token(element_bytes) for state in self.states())

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight by its name here, e.g. `layers.3.q`, `layers.3.q.bias`, with its shape.
        Matrices are [out, in]. A tied head has no entry: it is the embedding."""
        shapes: dict[str, tuple[int, ...]] = {"embedding": (self.vocab_size, self.hidden_size)}
        for index, layer in enumerate(self.layers):
            parts: dict[str, tuple[int, ...]] = {
                "mixer_norm": (self.hidden_size,),
                "feed_forward_norm": (self.hidden_size,),
            }
            parts |= layer.mixer.parameter_shapes(self.hidden_size)
            parts |= layer.feed_forward.parameter_shapes(self.hidden_size)
            shapes |= {f"layers.{index}.{part}": shape for part, shape in parts.items()}
        shapes["norm"] = (self.hidden_size,)
        if not self.tied_head:
            shapes["head"] = (self.vocab_size, self.hidden_size)
        return shapes

    def fingerprint_parts(self) -> Mapping[str, str]:
        """Digests of what decides a state besides weights and kernels, each under its own name so
        that a difference can be told: `architecture`, `rope`, `context`."""
        layers = [asdict(layer) for layer in self.layers]
        ropes = [layer["mixer"].pop("rope") for layer in layers]
        architecture = {
            "family": self.architecture,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "norm_eps": self.norm_eps,
            "tied_head": self.tied_head,
            "layers": layers,
        }
        kinds = [[type(x.mixer).__name__, type(x.feed_forward).__name__] for x in self.layers]
        scalings = [type(layer.mixer.rope.scaling).__name__ for layer in self.layers]
        return {
            "architecture": _digest([architecture, kinds]),
            "rope": _digest([ropes, scalings]),
            "context": str(self.context_limit),
        }


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
