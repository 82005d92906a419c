# SPDX-License-Identifier: Apache-2.0
"""A causal depthwise convolution, token by token in fp64."""

import torch


def convolve(
    x: torch.Tensor, tail: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n, C] after tail [K - 1, C], with taps [K, C] and bias [C] -> out [n, C] fp64 and the
    last K - 1 rows of both [K - 1, C]. The last tap meets the row itself."""
    rows = list(torch.cat((tail, x)).double())
    width = len(taps)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for index in range(len(x)):
        for row, tap in zip(rows[index : index + width], taps.double(), strict=True):
            out[index] += row * tap
        if bias is not None:
            out[index] += bias.double()
    return out, torch.cat((tail, x))[len(x) :].clone()
