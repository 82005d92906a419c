# SPDX-License-Identifier: Apache-2.0
"""Tiles of few rows in one launch: each pair counts those that come before it.

Importing this module needs the `gpu` extra.
"""

import torch
import triton
import triton.language as tl

from . import most_tiles, reference

MOST_PAIRS = 128  # every pair meets every other one


def arrange(
    chosen: torch.Tensor, addresses: torch.Tensor, rows_per_tile: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference, which serves more pairs than this can."""
    pairs, experts = chosen.numel(), len(addresses)
    if pairs > MOST_PAIRS:
        return reference.arrange(chosen, addresses, rows_per_tile)
    count = most_tiles(pairs, experts, rows_per_tile)
    order = torch.empty(pairs, dtype=torch.int64, device=chosen.device)
    tiles = torch.empty(count, 3, dtype=torch.int32, device=chosen.device)
    _arrange[(1,)](
        *(chosen.contiguous(), addresses, order, tiles, pairs, count),
        experts=experts,
        rows=rows_per_tile,
        block=max(16, triton.next_power_of_2(pairs)),
        room=max(16, triton.next_power_of_2(count)),
    )
    return order, tiles


@triton.jit
def _arrange(
    chosen: tl.tensor,
    addresses: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    pairs: tl.tensor,
    count: tl.tensor,
    experts: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    room: tl.constexpr,
) -> None:
    pair = tl.arange(0, block)
    known = pair < pairs
    expert = tl.load(chosen + pair, mask=known, other=0)
    there = known & (tl.load(addresses + expert, mask=known, other=0) != 0)
    key = tl.where(there, expert.to(tl.int32), tl.where(known, experts, experts + 1))
    less = key[None, :] < key[:, None]
    same = key[None, :] == key[:, None]
    start = tl.sum(less.to(tl.int32), 1)
    before = tl.sum((same & (pair[None, :] < pair[:, None])).to(tl.int32), 1)
    position = start + before
    tl.store(order + position, pair.to(tl.int64), mask=known)
    leads = there & (before % rows == 0)
    earlier = position[None, :] < position[:, None]
    tile = tl.sum((earlier & (leads[None, :] != 0)).to(tl.int32), 1)
    tl.store(tiles + tile * 3, key, mask=leads)
    tl.store(tiles + tile * 3 + 1, position, mask=leads)
    tl.store(tiles + tile * 3 + 2, start + tl.sum(same.to(tl.int32), 1), mask=leads)
    spare = tl.arange(0, room)
    empty = (spare >= tl.sum(leads.to(tl.int32), 0)) & (spare < count)
    for part in range(0, 3):
        tl.store(tiles + spare * 3 + part, tl.zeros((room,), dtype=tl.int32), mask=empty)
