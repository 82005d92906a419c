# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in the form for the device on which its state lies."""

import torch

from . import cpu


def scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `cpu.scan`; all arguments on one device."""
    if state.device.type == "cpu":
        return cpu.scan(q, k, v, decay, beta, state)
    from . import triton  # here, because it needs an extra that a CPU does not

    return triton.scan(q, k, v, decay, beta, state)
