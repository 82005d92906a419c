# SPDX-License-Identifier: Apache-2.0
"""Activations whose bits do not depend on where a number lies in memory.

torch computes silu, sigmoid, gelu and softplus in vectors, and what is left at the end of a loop
one by one with other roundings (4 to 9 % of those numbers differ in the last bit). Where the end of
a loop falls depends on the rows beside a row and on the number of threads. exp and tanh do not
differ, arithmetic is exact to the bit, so these are put together from them.
"""

import math

import torch


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + e^-x), in new memory."""
    return x.neg().exp_().add_(1.0).reciprocal_()


def silu(x: torch.Tensor) -> torch.Tensor:
    """x · sigmoid(x), in new memory."""
    return torch.div(x, x.neg().exp_().add_(1.0))


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)², in new memory."""
    return x.clamp(min=0.0).square_()


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))), in new memory."""
    inner = (x * x).mul_(0.044715).add_(1.0).mul_(x).mul_(math.sqrt(2 / math.pi))
    return inner.tanh_().add_(1.0).mul_(x).mul_(0.5)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + e^x), in new memory."""
    return x.clamp(min=0.0).add_(x.abs().neg_().exp_().log1p_())
