# SPDX-License-Identifier: Apache-2.0
"""The gated feed-forward."""

from dataclasses import dataclass


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
