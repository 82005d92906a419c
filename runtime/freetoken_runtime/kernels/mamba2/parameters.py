# SPDX-License-Identifier: Apache-2.0
"""What a Mamba-2 scan knows besides its rows: one head's decay, skip and step sizes."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ScanParameters:
    """Per head: `rates` (-exp(A_log)), `skip` (D), `dt_bias`, each [H] fp32; limits of the step
    sizes after softplus."""

    rates: torch.Tensor
    skip: torch.Tensor
    dt_bias: torch.Tensor
    dt_min: float
    dt_max: float
