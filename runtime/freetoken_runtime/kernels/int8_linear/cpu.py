# SPDX-License-Identifier: Apache-2.0
"""int8 weights: torch's op for few rows, dequantise and fp32 GEMM for many; and two forms for many
that round activations: to bf16 (the integers are exact in it), and to int8.

The op reads beyond its rows (and crashes) unless K is a multiple of 16, so K is padded with zeros.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.nn.functional import pad

from ..dense_linear.cpu import linear
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


def many_rounded(x: torch.Tensor, weight: PackedInt8, rows: slice) -> torch.Tensor:
    """x [n, K] bf16 -> [n, stop - start] fp32. Sums are rounded to bf16, as `few` does it."""
    values = weight.values[rows, : weight.inputs]
    integers = room(*values.shape, dtype=torch.bfloat16).copy_(values)
    return linear(x, integers).float().mul_(weight.scales[rows].float())


@dataclass(frozen=True)
class QuantisedRows:
    """x[i] = values[i] · scales[i], nearly: rounded to the 127th part of its row's largest."""

    values: torch.Tensor  # [n, K] int8
    scales: torch.Tensor  # [n, 1] fp32; NaN or infinite where a row holds such a number


def quantise_rows(x: torch.Tensor) -> QuantisedRows:
    """x [n, K] fp32; each row by itself, so that none depends on another."""
    scales = x.abs().amax(1, keepdim=True).div_(127.0)
    steps = x / torch.where(scales == 0, 1.0, scales)
    return QuantisedRows(steps.round_().to(torch.int8), scales)


def many_int8(x: QuantisedRows, weight: PackedInt8, rows: slice) -> torch.Tensor:
    """-> [n, stop - start] fp32. Sums of integers are exact: only x is rounded."""
    sums = torch._int_mm(x.values, weight.values[rows, : weight.inputs].t())
    return sums.float().mul_(x.scales).mul_(weight.scales[rows].float())


@lru_cache(maxsize=1)
def has_exact_sums() -> bool:
    """Whether this machine adds products of int8 without saturating, tried with the largest."""
    x = torch.full((32, 256), 127, dtype=torch.int8)
    x[:, 1::3] = -127
    weight = x.flip(1)[:16].contiguous()
    expected = x.long() @ weight.long().t()
    return torch.equal(torch._int_mm(x, weight.t()).long(), expected)


def rows_of(weight: PackedInt8, rows: torch.Tensor) -> torch.Tensor:
    """Some rows of W as fp32 [len(rows), K], in new memory; exact."""
    values = weight.values[rows, : weight.inputs].float()
    return values.mul_(weight.scales[rows].float()[:, None])
