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
