# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule, token by token, as the package's docstring writes it."""

import torch


def scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k [n, Hk, Dk], v [n, Hv, Dv], log decay and beta [n, Hv], state [Hv, Dk, Dv] -> out
    [n, Hv, Dv] and the state after the last row, in the dtype of `state`."""
    dtype, repeat = state.dtype, v.shape[1] // k.shape[1]
    q, k = (x.to(dtype).repeat_interleave(repeat, 1) for x in (q, k))
    v, decay, beta = (x.to(dtype) for x in (v, decay, beta))
    out = torch.empty_like(v)
    for row in range(len(v)):
        state = state * decay[row].exp()[:, None, None]
        recalled = (state * k[row][:, :, None]).sum(1)  # [Hv, Dv]
        learnt = beta[row][:, None] * (v[row] - recalled)
        state = state + k[row][:, :, None] * learnt[:, None, :]
        out[row] = (state * q[row][:, :, None]).sum(1)
    return out, state
