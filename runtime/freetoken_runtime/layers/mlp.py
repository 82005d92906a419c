# SPDX-License-Identifier: Apache-2.0
"""The feed-forward of every row, gated or not."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from ..batch import RowGroup
from ..kernels import activations
from ..specs.mlp import Activation, MlpSpec
from .linear import Linear
from .parts import Parts

Activate = Callable[[torch.Tensor], torch.Tensor]

_ACTIVATIONS: Mapping[Activation, Activate] = {
    "silu": activations.silu,
    "gelu_tanh": activations.gelu_tanh,
    "relu_squared": activations.relu_squared,
}
_LANES = 32  # numbers that torch's vector loops take at once, at most


def activation(name: Activation, width: int) -> Activate:
    """The function for rows of `width` numbers, in new memory. torch's own silu is faster, and no
    end of its vector loop falls into a row of whole vectors (see `kernels.activations`)."""
    if name == "silu" and width % _LANES == 0:
        return functional.silu
    return _ACTIVATIONS[name]


@dataclass(frozen=True)
class Mlp:
    """down(act(gate x) · up x). `gate_up` yields both side by side, or up alone without a gate."""

    spec: MlpSpec
    gate_up: Linear
    down: Linear
    activate: Activate

    def __call__(self, x: torch.Tensor, groups: Sequence[RowGroup]) -> torch.Tensor:
        """x [T, H] fp32 -> [T, H] fp32 or bf16."""
        spec, rows = self.spec, self.gate_up(x, groups).float()
        if spec.gated:
            gate, up = rows.chunk(2, -1)
            if spec.gate_multiplier != 1.0:
                gate = gate * spec.gate_multiplier
            inner = self.activate(gate).mul_(up)
        else:
            inner = self.activate(rows)
        out = self.down(inner, groups)
        return out if spec.output_multiplier == 1.0 else out * spec.output_multiplier

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.gate_up, self.down

    @property
    def size_bytes(self) -> int:
        return self.gate_up.size_bytes + self.down.size_bytes


def build(spec: MlpSpec, parts: Parts) -> Mlp:
    inputs = parts.linear("gate", "up") if spec.gated else parts.linear("up")
    activate = activation(spec.activation, spec.intermediate_size)
    return Mlp(spec, inputs, parts.linear("down"), activate)
