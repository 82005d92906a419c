# SPDX-License-Identifier: Apache-2.0
"""Delta rules with decay: the gated delta net of Qwen3-Next and Kimi delta attention.

Both keep a convolution's last rows and one matrix per head; both are followed by a norm of each
head that a gate multiplies.
"""

from dataclasses import dataclass

from ..errors import UnsupportedConfig
from ..spec import BufferSpec, StateSpec


@dataclass(frozen=True)
class GatedDeltaSpec:
    """q, k, v = silu(conv(q x, k x, v x)); y = delta rule(unit q / √key_dim, unit k, v);
    o(norm(y) · silu(z x)).

    Log decays -exp(a_log) · softplus(a x + dt_bias) and strengths sigmoid(b x) are one number per
    value head; each key head serves num_heads / num_key_heads value heads.
    """

    num_key_heads: int
    num_heads: int
    key_dim: int
    head_dim: int
    kernel: int

    def __post_init__(self) -> None:
        if self.num_heads % self.num_key_heads:
            raise UnsupportedConfig(
                "the number of value heads must be a multiple of the number of key heads",
                value=self.num_heads,
                limit=self.num_key_heads,
            )

    @property
    def rope(self) -> None:
        return None

    @property
    def key_width(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: q, k and v side by side."""
        return 2 * self.key_width + self.width

    def parameter_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """The mixer's weights by name, matrices as [out, in]. A model's attention layers have names
        for q and k of their own."""
        return {
            "delta.q": (self.key_width, hidden_size),
            "delta.k": (self.key_width, hidden_size),
            "delta.v": (self.width, hidden_size),
            "delta.z": (self.width, hidden_size),
            "delta.b": (self.num_heads, hidden_size),
            "delta.a": (self.num_heads, hidden_size),
            "delta.conv": (self.channels, 1, self.kernel),
            "delta.dt_bias": (self.num_heads,),
            "delta.a_log": (self.num_heads,),
            "delta.gate_norm": (self.head_dim,),
            "delta.o": (hidden_size, self.width),
        }

    def state(self) -> StateSpec:
        tail = BufferSpec("conv", (self.kernel - 1, self.channels))
        heads = BufferSpec("delta", (self.num_heads, self.key_dim, self.head_dim))
        return StateSpec(fixed=(tail, heads))


@dataclass(frozen=True)
class KdaSpec:
    """q, k, v = silu(conv(q x, k x, v x)); y = delta rule(unit q / √head_dim, unit k, v);
    o(norm(y) · sigmoid(z_up z_down x)).

    Log decays -exp(a_log) · softplus(a_up a_down x + dt_bias) are one number per channel of a key,
    strengths sigmoid(b x) one per head.
    """

    num_heads: int
    head_dim: int
    kernel: int

    @property
    def rope(self) -> None:
        return None

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    def parameter_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """The mixer's weights by name, matrices as [out, in]. A model's attention layers have names
        for q and k of their own."""
        return {
            "delta.q": (self.width, hidden_size),
            "delta.k": (self.width, hidden_size),
            "delta.v": (self.width, hidden_size),
            "delta.z_down": (self.head_dim, hidden_size),
            "delta.z_up": (self.width, self.head_dim),
            "delta.a_down": (self.head_dim, hidden_size),
            "delta.a_up": (self.width, self.head_dim),
            "delta.b": (self.num_heads, hidden_size),
            "delta.conv": (3 * self.width, 1, self.kernel),
            "delta.dt_bias": (self.width,),
            "delta.a_log": (self.num_heads,),
            "delta.gate_norm": (self.head_dim,),
            "delta.o": (hidden_size, self.width),
        }

    def state(self) -> StateSpec:
        tail = BufferSpec("conv", (self.kernel - 1, 3 * self.width))
        heads = BufferSpec("delta", (self.num_heads, self.head_dim, self.head_dim))
        return StateSpec(fixed=(tail, heads))
