# SPDX-License-Identifier: Apache-2.0
"""An int8 linear layer in fp64, from its values."""

import torch

from ..integers import Int8Values


def dequantise(weight: Int8Values) -> torch.Tensor:
    """[N, K] fp64."""
    return weight.values.double() * weight.scales.double()[:, None]


def linear(x: torch.Tensor, weight: Int8Values) -> torch.Tensor:
    """x [n, K] -> [n, N] fp64."""
    return x.double() @ dequantise(weight).t()
