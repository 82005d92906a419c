# SPDX-License-Identifier: Apache-2.0
"""Attention of a few queries over one piece of keys, written out in fp64."""

import torch


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [n, Hq, D], k and v [S, Hkv, D] -> output [n, Hq, D] fp64, log-sum-exp [n, Hq] fp64.

    `causal`: the queries are the last n of S rows, and see no key behind their own. `window`: nor
    any but the last so many, their own included."""
    repeat = q.shape[1] // k.shape[1]
    keys = k.double().repeat_interleave(repeat, dim=1)
    values = v.double().repeat_interleave(repeat, dim=1)
    scores = torch.einsum("nhd,shd->nhs", q.double(), keys) * scale
    if causal:
        past = len(k) - len(q)
        hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(past + 1)
        if window is not None:
            hidden |= torch.ones(len(q), len(k), dtype=torch.bool).tril(past - window)
        scores = scores.masked_fill(hidden[:, None, :], float("-inf"))
    return torch.einsum("nhs,shd->nhd", scores.softmax(-1), values), scores.logsumexp(-1)


def merge(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Outputs over disjoint sets of keys -> the output over all of them."""
    total = torch.stack([lse for _, lse in parts]).logsumexp(0)
    return sum(
        (out * (lse - total).exp()[..., None] for out, lse in parts[1:]),
        parts[0][0] * (parts[0][1] - total).exp()[..., None],
    )


def add_sinks(parts: list[tuple[torch.Tensor, torch.Tensor]], sinks: torch.Tensor) -> torch.Tensor:
    """The merge with one more logit per head, `sinks` [Hq], that has no value."""
    nothing = (torch.zeros_like(parts[0][0]), sinks.double().expand_as(parts[0][1]))
    return merge([*parts, nothing])
