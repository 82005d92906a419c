# SPDX-License-Identifier: Apache-2.0
"""How the bytes of one expert are read by a kernel on a device: the bytes that CPUs compute with.

    dense   weight [N, K] in fp32 or bf16
    int8    values [N, K padded], scales [N] bf16
    int4    packed as torch packs it on this CPU, scales and zeros [K padded / group, N padded, 2]
    bias    [N], fp32 beside integers, else in the dtype of the weights

So one copy of an expert serves both, and nothing is repacked between them
(docs/decisions/0075-device-experts.md).
"""

from dataclasses import dataclass
from typing import Literal

import torch

from ..int4_linear.cpu import ByteLayout

Kind = Literal["dense", "int8", "int4"]
Activation = Literal["silu", "gelu_tanh", "clamped_glu", "relu_squared"]


@dataclass(frozen=True)
class RecordMatrix:
    """A matrix [outputs, inputs] within a record; `weights`, `scales`, `bias` are offsets in bytes,
    each a multiple of 16. `stride`: elements from one output to the next (dense, int8), or outputs
    with padding (int4)."""

    outputs: int
    inputs: int
    weights: int
    stride: int
    scales: int = 0
    bias: int | None = None


@dataclass(frozen=True)
class ExpertRecord:
    """An expert as a kernel sees it. `up` has gate and up stacked along its outputs where it is
    gated: all but `relu_squared`. `alpha`, `limit`: of `clamped_glu`, see `specs.moe.ClampedGlu`;
    `group`, `packing`: of int4."""

    kind: Kind
    dtype: torch.dtype  # of dense weights
    up: RecordMatrix
    down: RecordMatrix
    activation: Activation
    alpha: float = 0.0
    limit: float = 0.0
    group: int = 0
    packing: ByteLayout = ByteLayout(64, False)

    def __post_init__(self) -> None:
        for matrix in (self.up, self.down):
            for offset in (matrix.weights, matrix.scales, matrix.bias or 0):
                assert offset % 16 == 0, offset
        assert self.up.outputs == (2 if self.gated else 1) * self.down.inputs

    @property
    def gated(self) -> bool:
        return self.activation != "relu_squared"

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of the rows that meet the weights: sums are fp32 whatever it is."""
        return self.dtype if self.kind == "dense" else torch.bfloat16

    @property
    def bias_dtype(self) -> torch.dtype:
        return self.dtype if self.kind == "dense" else torch.float32
