# SPDX-License-Identifier: Apache-2.0
"""int8 weights: torch's op for few rows, dequantise and fp32 GEMM for many; and for many whose
activations may be rounded, products of integers, with activations of one or two int8 parts.

The op reads beyond its rows (and crashes) unless K is a multiple of 16, so K is padded with zeros.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.nn.functional import pad

from ..integers import Int8Values
from ..working_memory import empty

MULTIPLE = 16
_SUMS = 4 << 20  # int32 sums that are in memory at once
_CACHED = 128 << 10  # numbers of the rows that are quantised at once: they stay in the cache
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
    """Rows [start, stop) of W as fp32 [stop - start, K]; exact."""
    values = weight.values[rows, : weight.inputs]
    return empty(*values.shape).copy_(values).mul_(weight.scales[rows].float()[:, None])


@dataclass(frozen=True)
class IntegerRows:
    """Rows as integers of one or two int8 parts, the higher one first:
    x[i] = (values[0, i] · 128 + values[1, i]) · scales[i], nearly."""

    values: torch.Tensor  # [parts, n, K] int8
    scales: torch.Tensor  # [n, 1] fp32; NaN or infinite where a row holds such a number

    def pick(self, numbers: torch.Tensor) -> "IntegerRows":
        return IntegerRows(self.values.index_select(1, numbers), self.scales[numbers])


def quantise_rows(x: torch.Tensor, parts: int) -> IntegerRows:
    """x [n, K] fp32, rounded to the 127th part of its row's largest number, or with two parts to
    the 16,256th; each row by itself, so that none depends on another."""
    values, scales = empty(parts, *x.shape, dtype=torch.int8), torch.empty(len(x), 1)
    step = max(1, _CACHED // x.shape[1])
    for rows in (slice(start, start + step) for start in range(0, len(x), step)):
        _quantise(x[rows], values[:, rows], scales[rows])
    return IntegerRows(values, scales)


def _quantise(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
    """Rows [n, K] into values [parts, n, K] and scales [n, 1]."""
    parts = len(values)
    scales.copy_(x.abs().amax(1, keepdim=True)).div_(127.0 * 128.0 ** (parts - 1))
    steps = (x / torch.where(scales == 0, 1.0, scales)).round_()
    if parts == 2:
        high = (steps / 128.0).round_()
        values[0] = high
        steps.sub_(high, alpha=128.0)
    values[-1] = steps


def many_integers(x: IntegerRows, weight: PackedInt8) -> torch.Tensor:
    """-> [n, N] fp32. Sums of products are exact: only x is rounded."""
    parts, count, inputs = x.values.shape
    missing = weight.values.shape[1] - inputs
    values = pad(x.values, (0, missing)) if missing else x.values
    values = values.view(parts * count, -1)
    out, scales = empty(count, len(weight.values)), weight.scales.float()
    step = max(64, _SUMS // (parts * count) // 64 * 64)
    for start in range(0, len(weight.values), step):
        outputs = slice(start, start + step)
        of_outputs = weight.values[outputs]
        sums = empty(parts * count, len(of_outputs), dtype=torch.int32)
        torch._int_mm(values, of_outputs.t(), out=sums)
        part = out[:, outputs].copy_(sums[-count:])
        if parts == 2:
            high = empty(count, len(of_outputs)).copy_(sums[:count])
            part.add_(high, alpha=128.0)
        part.mul_(x.scales).mul_(scales[outputs])
    return out


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
