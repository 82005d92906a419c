# SPDX-License-Identifier: Apache-2.0
"""Attention of a few queries over one piece of keys, written out in fp64."""

import torch


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [n, Hq, D], k and v [S, Hkv, D] -> output [n, Hq, D] fp64, log-sum-exp [n, Hq] fp64.

    `causal`: row i sees keys 0..i (n = S)."""
    repeat = q.shape[1] // k.shape[1]
    keys = k.double().repeat_interleave(repeat, dim=1)
    values = v.double().repeat_interleave(repeat, dim=1)
    scores = torch.einsum("nhd,shd->nhs", q.double(), keys) * scale
    if causal:
        hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden[:, None, :], float("-inf"))
    return torch.einsum("nhs,shd->nhd", scores.softmax(-1), values), scores.logsumexp(-1)


def merge(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Outputs over disjoint sets of keys -> the output over all of them."""
    total = torch.stack([lse for _, lse in parts]).logsumexp(0)
    return sum(
        (out * (lse - total).exp()[..., None] for out, lse in parts[1:]),
        parts[0][0] * (parts[0][1] - total).exp()[..., None],
    )
