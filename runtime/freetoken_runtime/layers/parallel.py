# SPDX-License-Identifier: Apache-2.0
"""Attention and Mamba-2 on the same rows, added."""

from dataclasses import dataclass

import torch

from ..batch import Batch
from ..specs.parallel import ParallelSpec
from . import attention, mamba
from .attention import Attention
from .linear import Linear
from .mamba import Mamba2
from .parts import Parts, Rope


@dataclass(frozen=True)
class Parallel:
    """The mixer of one layer; each part uses its own kind of the layer's state."""

    spec: ParallelSpec
    attention: Attention
    mamba: Mamba2

    def __call__(
        self, x: torch.Tensor, batch: Batch, layer: int, rope: Rope | None
    ) -> torch.Tensor:
        """x [T, H] fp32 -> [T, H] fp32."""
        spec = self.spec
        attended = self.attention(_scaled(x, spec.attention_in), batch, layer, rope)
        scanned = self.mamba(_scaled(x, spec.mamba_in), batch, layer, None)
        return _scaled(attended.float(), spec.attention_out) + _scaled(
            scanned.float(), spec.mamba_out
        )

    @property
    def linears(self) -> tuple[Linear, ...]:
        return *self.attention.linears, *self.mamba.linears

    @property
    def size_bytes(self) -> int:
        return self.attention.size_bytes + self.mamba.size_bytes


def build(spec: ParallelSpec, parts: Parts) -> Parallel:
    return Parallel(
        spec=spec,
        attention=attention.build(spec.attention, parts),
        mamba=mamba.build(spec.mamba, parts.within("mamba")),
    )


def _scaled(x: torch.Tensor, multiplier: float) -> torch.Tensor:
    return x if multiplier == 1.0 else x * multiplier
