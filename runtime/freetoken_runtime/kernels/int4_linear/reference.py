# SPDX-License-Identifier: Apache-2.0
"""An int4 linear layer in fp64, from its values."""

import torch

from ..integers import Int4Values


def dequantise(weight: Int4Values) -> torch.Tensor:
    """[N, K] fp64."""
    outputs = len(weight.values)
    steps = weight.values.double().view(outputs, -1, weight.size) - 8
    dense = steps * weight.scales.double()[..., None] + weight.zeros.double()[..., None]
    return dense.view(outputs, -1)[:, : weight.inputs]


def linear(x: torch.Tensor, weight: Int4Values) -> torch.Tensor:
    """x [n, K] -> [n, N] fp64."""
    return x.double() @ dequantise(weight).t()
