# SPDX-License-Identifier: Apache-2.0
"""Attention: which heads, which positions, what is kept."""

from dataclasses import dataclass
from typing import Literal

from ..errors import UnsupportedConfig
from ..spec import BufferSpec, StateSpec
from .rope import RopeSpec


@dataclass(frozen=True)
class AttentionSpec:
    """Causal attention with grouped key/value heads.

    `rope`: None where positions come from elsewhere. `qk_norm`: over each head, or over the whole
    width of all heads. `window`: a query at position t sees keys t - window + 1 .. t. `gated`: the
    output is multiplied by sigmoid(gate x) before `o`. `sinks`: one more logit per head that takes
    part in the softmax and carries no value. `scaling`: of the scores, head_dim ** -0.5 if None.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["head", "width"] | None = None
    window: int | None = None
    scaling: float | None = None
    gated: bool = False
    sinks: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedConfig(
                "the number of attention heads must be a multiple of num_key_value_heads",
                value=self.num_heads,
                limit=self.num_kv_heads,
            )
        if self.rope is not None and (self.rope.dim % 2 or self.rope.dim > self.head_dim):
            raise UnsupportedConfig(
                "rope must turn an even number of dimensions, at most head_dim",
                value=self.rope.dim,
                limit=self.head_dim,
            )

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5) if self.scaling is None else self.scaling

    def parameter_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """The mixer's weights by name, matrices as [out, in]."""
        rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {}
        gate = (("q_gate", rows),) if self.gated else ()
        for part, outputs in (("q", rows), ("k", kv_rows), ("v", kv_rows), *gate):
            shapes[part] = (outputs, hidden_size)
            if self.qkv_bias:
                shapes[f"{part}.bias"] = (outputs,)
        shapes["o"] = (hidden_size, rows)
        if self.output_bias:
            shapes["o.bias"] = (hidden_size,)
        if self.qk_norm == "head":
            shapes |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
        elif self.qk_norm == "width":
            shapes |= {"q_norm": (rows,), "k_norm": (kv_rows,)}
        if self.sinks:
            shapes["sinks"] = (self.num_heads,)
        return shapes

    def state(self) -> StateSpec:
        row = (self.num_kv_heads, self.head_dim)
        return StateSpec(rows=(BufferSpec("k", row), BufferSpec("v", row)))


@dataclass(frozen=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads
    follow from one latent row, which is all that is kept, with the one key that turns.

    `q_rank`: queries come from a latent row too, None if not. `rope`: None where nothing turns, and
    the `rope_dim` dimensions are keys that all heads share. `scaling`: of the scores,
    (nope_dim + rope_dim) ** -0.5 if None. `bias`: of what makes latent rows, and of `o`.
    `latent_eps`: of the latent rows' norms. `pairs`: the checkpoint's rope turns neighbours.
    """

    num_heads: int
    kv_rank: int
    q_rank: int | None
    nope_dim: int
    rope_dim: int
    value_dim: int
    rope: RopeSpec | None
    scaling: float | None = None
    bias: bool = False
    latent_eps: float = 1e-6
    pairs: bool = False

    @property
    def scale(self) -> float:
        width = self.nope_dim + self.rope_dim
        return float(width**-0.5) if self.scaling is None else self.scaling

    def parameter_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """The mixer's weights by name, matrices as [out, in]. Queries are split into the part
        that meets the latent row and the part that turns; `k_up` and `v_up` take a latent row to
        keys and values."""
        heads, values = self.num_heads, self.num_heads * self.value_dim
        shapes: dict[str, tuple[int, ...]] = {}
        if self.q_rank is not None:
            shapes |= {"q_down": (self.q_rank, hidden_size), "q_down_norm": (self.q_rank,)}
        q_inputs = hidden_size if self.q_rank is None else self.q_rank
        shapes |= {
            "q_nope": (heads * self.nope_dim, q_inputs),
            "q_rope": (heads * self.rope_dim, q_inputs),
            "latent": (self.kv_rank, hidden_size),
            "k_rope": (self.rope_dim, hidden_size),
            "latent_norm": (self.kv_rank,),
            "k_up": (heads * self.nope_dim, self.kv_rank),
            "v_up": (values, self.kv_rank),
            "o": (hidden_size, values),
        }
        if self.bias:
            biased = {"q_down", "latent", "k_rope", "o"} & shapes.keys()
            shapes |= {f"{part}.bias": shapes[part][:1] for part in sorted(biased)}
        return shapes

    def state(self) -> StateSpec:
        return StateSpec(rows=(BufferSpec("latent", (1, self.kv_rank + self.rope_dim)),))
