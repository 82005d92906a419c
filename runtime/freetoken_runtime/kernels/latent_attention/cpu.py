# SPDX-License-Identifier: Apache-2.0
"""Attention over rows that hold a latent, of which keys and values of all heads follow, and one key
that all heads share.

Few queries meet the rows as they are: what takes a latent to keys is applied to the query instead,
and what takes it to values to the result. Many queries are cheaper the other way round: keys and
values of every head are made of the rows, block by block, and forgotten.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from ..attention.cpu import attend, merge

_BLOCK_ELEMENTS = 16 << 20  # keys and values made at once


@dataclass(frozen=True)
class Heads:
    """What takes a latent to keys and to values of every head."""

    k_up: torch.Tensor  # [heads, Dn, rank] fp32
    v_up: torch.Tensor  # [heads, Dv, rank] fp32

    @property
    def expanding_queries(self) -> int:
        """Queries from which on it pays to make keys and values of the rows."""
        keys, values = self.k_up.shape[1], self.v_up.shape[1]
        rank = self.k_up.shape[2]
        saved = 2 * rank - keys - values  # multiplications per query, key and head
        return max(2, (keys + values) * rank // saved) if saved > 0 else 1 << 30


def attend_latent(
    q: tuple[torch.Tensor, torch.Tensor],
    past: Sequence[torch.Tensor],
    rows: torch.Tensor,
    heads: Heads,
    *,
    scale: float,
) -> torch.Tensor:
    """q: [n, heads, Dn], which meets the latent, and [n, heads, Dr], which meets the shared key;
    rows [n, 1, rank + Dr] of the same tokens, behind those of `past`, each [S_i, 1, rank + Dr] ->
    [n, heads, Dv]. Row i sees the past and rows 0..i."""
    if len(rows) < heads.expanding_queries:
        return over_latents(q, past, rows, heads, scale=scale)
    return over_heads(q, past, rows, heads, scale=scale)


def over_latents(
    q: tuple[torch.Tensor, torch.Tensor],
    past: Sequence[torch.Tensor],
    rows: torch.Tensor,
    heads: Heads,
    *,
    scale: float,
) -> torch.Tensor:
    """All heads attend to the rows, as keys and as values."""
    rank = heads.k_up.shape[2]
    asked = torch.bmm(q[0].transpose(0, 1), heads.k_up).transpose(0, 1)  # [n, heads, rank]
    asking = torch.cat((asked, q[1]), -1)
    parts = [attend(asking, kept, kept, scale=scale) for kept in past]
    parts.append(attend(asking, rows, rows, scale=scale, causal=len(rows) > 1))
    mixed = merge([(out[..., :rank], lse) for out, lse in parts])
    return torch.bmm(mixed.transpose(0, 1), heads.v_up.transpose(1, 2)).transpose(0, 1)


def over_heads(
    q: tuple[torch.Tensor, torch.Tensor],
    past: Sequence[torch.Tensor],
    rows: torch.Tensor,
    heads: Heads,
    *,
    scale: float,
) -> torch.Tensor:
    """Every head has keys and values of its own."""
    values = heads.v_up.shape[1]
    asking = torch.cat(q, -1)
    width = max(asking.shape[-1], values)
    size = max(64, _BLOCK_ELEMENTS // (2 * len(heads.k_up) * width))
    asking = functional.pad(asking, (0, width - asking.shape[-1]))
    parts = [
        attend(asking, *_expand(block, heads, width), scale=scale)
        for kept in past
        for block in torch.split(kept, size)
    ]
    parts.append(attend(asking, *_expand(rows, heads, width), scale=scale, causal=True))
    return merge([(out[..., :values], lse) for out, lse in parts])


def _expand(rows: torch.Tensor, heads: Heads, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [S, 1, rank + Dr] -> keys and values [S, heads, width], zeros behind what they have:
    the kernel takes one length for both."""
    count, nope, rank = heads.k_up.shape
    value = heads.v_up.shape[1]
    latent, shared = rows[:, 0, :rank], rows[:, :, rank:]
    keys = rows.new_zeros(len(rows), count, width)
    values = torch.zeros_like(keys)
    made = functional.linear(latent, heads.k_up.flatten(0, 1))
    keys[..., :nope] = made.view(len(rows), count, nope)
    keys[..., nope : nope + shared.shape[-1]] = shared
    made = functional.linear(latent, heads.v_up.flatten(0, 1))
    values[..., :value] = made.view(len(rows), count, value)
    return keys, values
