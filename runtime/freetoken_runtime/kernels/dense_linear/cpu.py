# SPDX-License-Identifier: Apache-2.0
"""GEMM in fp32 or bf16 through oneDNN.

`F.linear` sends fp32 to MKL, which ran at half of oneDNN's speed on an AVX512 machine of AMD and
whose results change with the number of rows (docs/decisions/0010-fp32-gemm.md).
"""

from functools import lru_cache

import torch
from torch.nn import functional


@lru_cache(maxsize=1)
def has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [n, K], weight [N, K] of one dtype, bias [N] -> [n, N] of that dtype. The weight or its
    transpose must be contiguous: oneDNN takes any strides, a slice's a thousand times slower."""
    assert weight.is_contiguous() or weight.t().is_contiguous()
    if not has_onednn():
        return functional.linear(x, weight, bias)
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
        x.contiguous(), weight, bias, "none", [], ""
    )
    return out


def linear_from_two(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`linear`, with a single row computed as one of two: one row alone takes another kernel with
    another order of summation."""
    if len(x) > 1:
        return linear(x, weight, bias)
    return linear(x.expand(2, -1), weight, bias)[:1]


@lru_cache(maxsize=256)
def is_row_invariant(outputs: int, inputs: int, dtype: torch.dtype) -> bool:
    """Whether `linear_from_two` gives a row the same bits whatever rows stand beside it, tried out
    on this machine with random matrices of this shape (of at most 4,096 outputs)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, inputs, generator=generator).to(dtype)
    weight = torch.randn(min(outputs, 4096), inputs, generator=generator).to(dtype)
    whole = linear_from_two(x, weight)
    windows = [(start, start + rows) for rows in (1, 2, 3, 5, 9, 16, 33) for start in (0, 7)]
    return all(torch.equal(linear_from_two(x[a:b], weight), whole[a:b]) for a, b in windows)
