# SPDX-License-Identifier: Apache-2.0
"""The feed-forward of every row."""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "relu_squared"]


@dataclass(frozen=True)
class MlpSpec:
    """o · down(act(g · gate x) · up x), or down(act(up x)) where it is not `gated`; g is
    `gate_multiplier` and o `output_multiplier`, which also multiplies the bias of `down`."""

    intermediate_size: int
    bias: bool = False
    activation: Activation = "silu"
    gated: bool = True
    gate_multiplier: float = 1.0
    output_multiplier: float = 1.0

    def parameter_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """The feed-forward's weights by name, matrices as [out, in]."""
        inner = self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {}
        if self.gated:
            shapes["gate"] = (inner, hidden_size)
        shapes |= {"up": (inner, hidden_size), "down": (hidden_size, inner)}
        if self.bias:
            shapes |= {f"{part}.bias": shape[:1] for part, shape in list(shapes.items())}
        return shapes
