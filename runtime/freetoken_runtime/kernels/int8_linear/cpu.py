# SPDX-License-Identifier: Apache-2.0
"""int8 weights: torch's op for few rows, dequantise and fp32 GEMM for many.

The op reads beyond its rows (and crashes) unless K is a multiple of 16, so K is padded with zeros.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from ..integers import Int8Values
from ..working_memory import room

MULTIPLE = 16
_op = torch.ops.aten._weight_int8pack_mm.default


@dataclass(frozen=True)
class PackedInt8:
    values: torch.Tensor  # [N, K padded] int8
    scales: torch.Tensor  # [N] bf16
    inputs: int

    @property
    def size_bytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes


def pack(weight: Int8Values) -> PackedInt8:
    inputs = weight.values.shape[1]
    values = pad(weight.values, (0, -inputs % MULTIPLE)).contiguous()
    return PackedInt8(values, weight.scales.contiguous(), inputs)


def few(x: torch.Tensor, weight: PackedInt8) -> torch.Tensor:
    """x [n, K] of any float dtype, rounded to bf16 -> [n, N] bf16."""
    rounded = x.bfloat16()
    padding = weight.values.shape[1] - weight.inputs
    out: torch.Tensor = _op(
        pad(rounded, (0, padding)) if padding else rounded, weight.values, weight.scales
    )
    return out


def dequantise(weight: PackedInt8, rows: slice) -> torch.Tensor:
    """Rows [start, stop) of W as fp32 [stop - start, K]; exact. In the thread's working memory:
    until it is used again."""
    values = weight.values[rows, : weight.inputs]
    return room(*values.shape).copy_(values).mul_(weight.scales[rows].float()[:, None])


def rows_of(weight: PackedInt8, rows: torch.Tensor) -> torch.Tensor:
    """Some rows of W as fp32 [len(rows), K], in new memory; exact."""
    values = weight.values[rows, : weight.inputs].float()
    return values.mul_(weight.scales[rows].float()[:, None])
