# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention, token by token, as the package's docstring writes it."""

import torch


def scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k and log decay [n, H, Dk], v [n, H, Dv], beta [n, H], state [H, Dk, Dv] -> out
    [n, H, Dv] and the state after the last row, in the dtype of `state`."""
    q, k, v, decay, beta = (x.to(state.dtype) for x in (q, k, v, decay, beta))
    out = torch.empty_like(v)
    for row in range(len(v)):
        state = state * decay[row].exp()[:, :, None]
        recalled = (state * k[row][:, :, None]).sum(1)  # [H, Dv]
        learnt = beta[row][:, None] * (v[row] - recalled)
        state = state + k[row][:, :, None] * learnt[:, None, :]
        out[row] = (state * q[row][:, :, None]).sum(1)
    return out, state
