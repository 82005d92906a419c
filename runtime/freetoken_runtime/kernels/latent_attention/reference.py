# SPDX-License-Identifier: Apache-2.0
"""Latent attention as its paper writes it (arXiv 2405.04434), in fp64: keys and values of every
head, then softmax."""

from collections.abc import Sequence

import torch


def attend_latent(
    q: tuple[torch.Tensor, torch.Tensor],
    past: Sequence[torch.Tensor],
    rows: torch.Tensor,
    ups: tuple[torch.Tensor, torch.Tensor],
    *,
    scale: float,
) -> torch.Tensor:
    """Shapes as in `cpu.attend_latent`; `ups`: k_up and v_up -> [n, heads, Dv] fp64."""
    kept = torch.cat((*past, rows))[:, 0].double()
    k_up, v_up = (up.double() for up in ups)
    latent, shared = kept[:, : k_up.shape[2]], kept[:, k_up.shape[2] :]
    nope, turning = (part.double() for part in q)
    scores = torch.einsum("nhd,hdr,sr->nhs", nope, k_up, latent)
    scores = (scores + torch.einsum("nhd,sd->nhs", turning, shared)) * scale
    hidden = torch.ones(len(rows), len(kept), dtype=torch.bool).triu(len(kept) - len(rows) + 1)
    weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1)
    return torch.einsum("nhs,sr,hdr->nhd", weights, latent, v_up)
