# SPDX-License-Identifier: Apache-2.0
"""The gated feed-forward."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from ..batch import RowGroup
from ..specs.mlp import MlpSpec
from .linear import Linear
from .parts import Parts


@dataclass(frozen=True)
class Mlp:
    """down(silu(gate x) · up x). `gate_up` yields both side by side."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor, groups: Sequence[RowGroup]) -> torch.Tensor:
        """x [T, H] fp32 -> [T, H] fp32 or bf16."""
        gate, up = self.gate_up(x, groups).float().chunk(2, -1)
        return self.down(functional.silu(gate).mul_(up), groups)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.gate_up, self.down

    @property
    def size_bytes(self) -> int:
        return self.gate_up.size_bytes + self.down.size_bytes


def build(spec: MlpSpec, parts: Parts) -> Mlp:
    return Mlp(parts.linear("gate", "up"), parts.linear("down"))
