# SPDX-License-Identifier: Apache-2.0
"""A linear layer in fp64."""

import torch


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [n, K], weight [N, K], bias [N] -> [n, N] fp64."""
    out = x.double() @ weight.double().t()
    return out if bias is None else out + bias.double()
