# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 (arXiv 2405.21060): a convolution of a few rows, then a linear recurrence per head."""

from dataclasses import dataclass
from typing import Literal

from ..errors import UnsupportedConfig
from ..spec import BufferSpec, StateSpec


@dataclass(frozen=True)
class Mamba2Spec:
    """z, xBC, dt = in x; x, B, C = silu(conv(xBC)); y = scan(x, dt, B, C); out(gate(y, z)).

    B and C are shared by the heads of a group. Step sizes softplus(dt + dt_bias) are kept within
    `dt_min` and `dt_max`. `norm`: how y meets silu(z), always over each group by itself:
    "of_gated" norm(y · silu(z)), "then_gate" norm(y) · silu(z), None y · silu(z). `multipliers`:
    of the five parts z, x, B, C and dt as they leave `in`.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    kernel: int
    norm: Literal["of_gated", "then_gate"] | None
    conv_bias: bool = True
    input_bias: bool = False
    output_bias: bool = False
    dt_min: float = 0.0
    dt_max: float = float("inf")
    multipliers: tuple[float, float, float, float, float] | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise UnsupportedConfig(
                "the number of Mamba heads must be a multiple of the number of groups",
                value=self.num_heads,
                limit=self.num_groups,
            )
        if not 0 <= self.dt_min <= self.dt_max:
            raise UnsupportedConfig(
                "the limits of Mamba's step sizes must be ascending and not negative",
                value=(self.dt_min, self.dt_max),
            )

    @property
    def rope(self) -> None:
        return None

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: x, B and C side by side."""
        return self.width + 2 * self.num_groups * self.state_size

    @property
    def part_widths(self) -> tuple[int, int, int, int, int]:
        """Outputs of `in`: z, x, B, C, dt."""
        keys = self.num_groups * self.state_size
        return self.width, self.width, keys, keys, self.num_heads

    def parameter_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """The mixer's weights by name, matrices as [out, in]."""
        inputs = sum(self.part_widths)
        shapes: dict[str, tuple[int, ...]] = {
            "in": (inputs, hidden_size),
            "conv": (self.channels, 1, self.kernel),
            "dt_bias": (self.num_heads,),
            "a_log": (self.num_heads,),
            "skip": (self.num_heads,),
            "out": (hidden_size, self.width),
        }
        if self.input_bias:
            shapes["in.bias"] = (inputs,)
        if self.conv_bias:
            shapes["conv.bias"] = (self.channels,)
        if self.output_bias:
            shapes["out.bias"] = (hidden_size,)
        if self.norm is not None:
            shapes["gate_norm"] = (self.width,)
        return shapes

    def state(self) -> StateSpec:
        tail = BufferSpec("conv", (self.kernel - 1, self.channels))
        heads = BufferSpec("ssm", (self.num_heads, self.head_dim, self.state_size))
        return StateSpec(fixed=(tail, heads))
