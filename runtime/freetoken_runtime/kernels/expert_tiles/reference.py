# SPDX-License-Identifier: Apache-2.0
"""Tiles by torch's own operations, on any device, for any number of rows: some fifteen launches."""

import torch

from . import most_tiles


def arrange(
    chosen: torch.Tensor, addresses: torch.Tensor, rows_per_tile: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """chosen [n, k] int64, addresses [E] int64, 0 for none -> order and tiles. Nothing waits for
    the device."""
    experts, flat = len(addresses), chosen.reshape(-1)
    flat = torch.where(addresses[flat] != 0, flat, experts)
    order = flat.argsort(stable=True)
    numbers = torch.arange(experts + 1, device=flat.device)
    starts = torch.searchsorted(flat[order], numbers)
    counts = starts[1:] - starts[:-1]
    ends = ((counts + rows_per_tile - 1) // rows_per_tile).cumsum(0)  # of each expert's tiles
    tile = torch.arange(most_tiles(len(flat), experts, rows_per_tile), device=flat.device)
    owner = torch.searchsorted(ends, tile, right=True)
    known = owner.clamp(max=experts - 1)
    ahead = tile - torch.where(known > 0, ends[known - 1], 0)  # tiles of its expert before it
    first = starts[known] + ahead * rows_per_tile
    stop = torch.where(owner < experts, starts[known + 1], 0)
    return order, torch.stack((known, first, stop), 1).int().contiguous()
