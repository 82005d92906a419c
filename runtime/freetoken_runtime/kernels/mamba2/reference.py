# SPDX-License-Identifier: Apache-2.0
"""The Mamba-2 recurrence (arXiv 2405.21060), one token after another, in the dtype of the rows.

h = exp(dt · rate) · h + dt · x ⊗ B          y = h · C + skip · x
"""

import torch

from .parameters import ScanParameters


def scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    state: torch.Tensor,
    parameters: ScanParameters,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, H, P], dt [T, H] as projected, b and c [T, G, N], state [H, P, N] -> y [T, H, P] and
    the state after the last row. Head h reads group h // (H / G)."""
    heads, groups = x.shape[1], b.shape[1]
    rates, skip, bias = (
        value.to(x.dtype) for value in (parameters.rates, parameters.skip, parameters.dt_bias)
    )
    outs = []
    for row in range(len(x)):
        shifted = dt[row] + bias
        size = torch.logaddexp(shifted, torch.zeros_like(shifted))
        size = size.clamp(parameters.dt_min, parameters.dt_max)  # [H]
        keys = b[row].repeat_interleave(heads // groups, 0)  # [H, N]
        queries = c[row].repeat_interleave(heads // groups, 0)
        written = (size[:, None] * x[row])[:, :, None] * keys[:, None, :]
        state = torch.exp(size * rates)[:, None, None] * state + written
        outs.append((state * queries[:, None, :]).sum(-1) + skip[:, None] * x[row])
    return torch.stack(outs), state
