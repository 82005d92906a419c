# SPDX-License-Identifier: Apache-2.0
"""The Mamba-2 scan as matrix products: chunks of rows that see each other through a masked square
and everything before them through the state (the SSD form of arXiv 2405.21060).

Decays are products of many factors below 1. Their logarithms are cumulated in fp64, subtracted and
only then cast: in fp32 the difference of two large sums would lose what separates neighbours, and a
scan that is cut would differ from one that is not.
"""

import torch

from ..activations import softplus
from .parameters import ScanParameters

CHUNK = 64


def scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    state: torch.Tensor,
    parameters: ScanParameters,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, H, P], dt [T, H] as projected, b and c [T, G, N], state [H, P, N], all fp32, T >= 1 ->
    y [T, H, P] and the state after the last row, which shares no memory with the one before. Head h
    reads group h // (H / G). One row takes the step form."""
    sizes = softplus(dt + parameters.dt_bias).clamp_(parameters.dt_min, parameters.dt_max)
    steps = x * sizes[:, :, None]
    logs = sizes.double() * parameters.rates.double()  # [T, H]
    if len(x) == 1:
        y, state = _step(steps[0], logs[0], b[0], c[0], state)
        y = y[None]
    else:
        outs = []
        for start in range(0, len(x), CHUNK):
            rows = slice(start, start + CHUNK)
            out, state = _chunk(steps[rows], logs[rows], b[rows], c[rows], state)
            outs.append(out)
        y = outs[0] if len(outs) == 1 else torch.cat(outs)
    return y.addcmul_(x, parameters.skip[:, None]), state


def _step(
    steps: torch.Tensor, logs: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """steps [H, P], logs [H] fp64, b and c [G, N], state [H, P, N] -> y [H, P], state [H, P, N]."""
    heads, dim, size = state.shape
    groups = len(b)
    after = state * logs.exp().float()[:, None, None]
    grouped = after.view(groups, heads // groups * dim, size)
    grouped.addcmul_(steps.reshape(groups, -1, 1), b[:, None, :])
    return torch.bmm(grouped, c[:, :, None]).view(heads, dim), after


def _chunk(
    steps: torch.Tensor, logs: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """steps [L, H, P], logs [L, H] fp64, b and c [L, G, N], state [H, P, N] -> y [L, H, P], state
    [H, P, N]."""
    length, heads, dim = steps.shape
    groups, size = b.shape[1:]
    share = heads // groups
    sums = logs.cumsum(0).t().contiguous()  # [H, L] fp64
    keys, queries = b.transpose(0, 1), c.transpose(0, 1)  # [G, L, N]

    # Rows of this chunk: what row j wrote reaches row i >= j through the decays between them.
    between = (sums[:, :, None] - sums[:, None, :]).float()  # [H, i, j], <= 0 where j <= i
    future = torch.ones(length, length, dtype=torch.bool).triu_(1)
    weights = between.masked_fill_(future, -torch.inf).exp_()
    scores = torch.bmm(queries, keys.transpose(1, 2))  # [G, i, j]
    weights.view(groups, share, length, length).mul_(scores[:, None])
    y = torch.bmm(weights, steps.transpose(0, 1))  # [H, L, P]

    # Rows before it, through the state; then the state after it.
    past = state.view(groups, share * dim, size)
    # The state on the left: with few rows there, the bits would depend on the number of threads.
    seen = torch.bmm(past, queries.transpose(1, 2)).view(groups, share, dim, length)
    decays = sums.exp().float().view(groups, share, length, 1)
    y.view(groups, share, length, dim).addcmul_(seen.transpose(2, 3), decays)

    left = (sums[:, -1:] - sums).exp().float()  # [H, L]: from each row to the end
    writes = (steps * left.t()[:, :, None]).view(length, groups, share * dim)
    after = (state * decays.view(heads, length, 1)[:, -1:]).view(groups, share * dim, size)
    after.baddbmm_(writes.permute(1, 2, 0), keys)
    return y.transpose(0, 1), after.view(heads, dim, size)
