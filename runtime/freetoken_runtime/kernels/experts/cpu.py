# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts on the CPU: rows grouped by expert, one call of an expert for all its rows.

    chosen [n, k]  --sort-->  expert e: the (row, slot) pairs that chose it
    out    [n, k, N]          what each pair computed, wherever and whenever its expert was served
    y      Σ_j weights[:, j] · out[:, j]        in the order of the slots

Results are kept per (row, slot) and summed in the order of the slots, so that a row's bits depend
neither on the order in which experts are served nor on the rows that share them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ...specs.moe import ClampedGlu
from ..activations import sigmoid

PADDED_ROWS = 16  # a GEMM with at least so many rows gives a row the same bits whatever the others


@dataclass(frozen=True)
class ExpertRows:
    """What one expert serves, in the order of rows: pair p is slot p % k of row p // k."""

    expert: int
    pairs: torch.Tensor  # [m] int64, m >= 1


def group_by_expert(chosen: torch.Tensor) -> Iterator[ExpertRows]:
    """chosen [n, k] int64 -> every expert that has rows, ascending."""
    flat = chosen.reshape(-1)
    order = flat.argsort(stable=True)
    experts, counts = torch.unique_consecutive(flat[order], return_counts=True)
    for expert, pairs in zip(experts.tolist(), torch.split(order, counts.tolist()), strict=True):
        yield ExpertRows(expert, pairs)


def mix(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    compute: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """x [n, H] fp32, chosen [n, k] int64, weights [n, k] fp32 -> [n, H] fp32. `compute(e, rows)`
    applies expert e to rows [m, H], m >= 1; it is called once per expert that has any."""
    slots = chosen.shape[1]
    out = torch.empty(chosen.numel(), x.shape[1])  # every (row, slot) is written exactly once
    for group in group_by_expert(chosen):
        rows = x[group.pairs.div(slots, rounding_mode="floor")]
        out.index_copy_(0, group.pairs, compute(group.expert, rows).float())
    parts = out.view(len(x), slots, -1)
    mixed = parts[:, 0] * weights[:, :1]
    for slot in range(1, slots):
        mixed.addcmul_(parts[:, slot], weights[:, slot : slot + 1])
    return mixed


def pad_rows(rows: torch.Tensor) -> torch.Tensor:
    """Rows [m, H] with rows of zeros up to PADDED_ROWS."""
    missing = PADDED_ROWS - len(rows)
    return rows if missing <= 0 else torch.nn.functional.pad(rows, (0, 0, 0, missing))


def clamped_glu(rows: torch.Tensor, spec: ClampedGlu) -> torch.Tensor:
    """rows [m, 2I] fp32, gate before up, overwritten -> [m, I]; see `ClampedGlu`."""
    gate, up = rows.chunk(2, -1)
    gate.clamp_(max=spec.limit)
    up.clamp_(-spec.limit, spec.limit).add_(1.0)
    return sigmoid(gate * spec.alpha).mul_(gate).mul_(up)
