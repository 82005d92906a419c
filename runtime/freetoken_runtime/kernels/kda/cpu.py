# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention on CPUs: chunks of matrix products for many rows, and one row.

As in the gated delta rule, a chunk is a triangular system; but the decay between rows i and j is a
vector, so that the coupling of two rows is no plain product:

    P[x, i, j] = sum_d x_i[d] · k_j[d] · exp(G_i[d] - G_j[d])     x: k or q; G: cumulative decay

Writing it as (x ⊙ exp(G)) (k ⊙ exp(-G))ᵀ overflows: exp(-G) has no bound. Instead the lower
triangle is cut into squares: rows of the later half of a block against those of its earlier half,
both decayed to the border between them, so that no exponent is above zero. Halves are halved again
down to LEAF rows, whose pairs are written out. Decays are cumulated and subtracted in fp64, then
cast.
"""

from dataclasses import dataclass

import torch

CHUNK = 32  # both: docs/decisions/0025-delta-rules.md
LEAF = 4
_ROWS = 128  # rows whose chunk matrices exist at once, in the cache


def scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k and log decay [n, H, Dk], v [n, H, Dv], beta [n, H], state [H, Dk, Dv], all fp32,
    n >= 1 -> out [n, H, Dv] and the state after the last row, in memory of its own.

    `state` is not changed. One row takes the step form, more take the chunked form."""
    if len(v) == 1:
        out, after = step(q[0], k[0], v[0], decay[0], beta[0], state)
        return out[None], after
    return chunked(q, k, v, decay, beta, state)


def step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`scan` of one row, every argument but the state without its first dimension."""
    decayed = state * decay.exp()[:, :, None]
    recalled, read = torch.bmm(torch.stack((k, q), 1), decayed).unbind(1)  # each [H, Dv]
    learnt = (v - recalled) * beta[:, None]
    out = torch.addcmul(read, (q * k).sum(-1, keepdim=True), learnt)
    return out, decayed.addcmul_(k[:, :, None], learnt[:, None, :])


def chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`scan` by chunks of CHUNK rows from the first row on; the last chunk may be shorter."""
    count = len(v)
    full = count - count % CHUNK
    outs = []
    for start in range(0, full, _ROWS):
        rows = slice(start, min(start + _ROWS, full))
        maps = _chunk_maps(q[rows], k[rows], v[rows], decay[rows], beta[rows], CHUNK)
        out, state = _apply(maps, state)
        outs.append(out)
    if full < count:
        rest = [_padded(x[full:]) for x in (q, k, v, decay, beta)]
        maps = _chunk_maps(rest[0], rest[1], rest[2], rest[3], rest[4], len(rest[0]))
        out, state = _apply(maps, state)
        outs.append(out[: count - full])
    return torch.cat(outs), state


def _padded(rows: torch.Tensor) -> torch.Tensor:
    """Zero rows up to the next power of two, at least LEAF: they write and decay nothing."""
    size = LEAF
    while size < len(rows):
        size *= 2
    return torch.cat((rows, rows.new_zeros(size - len(rows), *rows.shape[1:])))


@dataclass(frozen=True)
class _ChunkMaps:
    """N chunks of c rows, heads first; everything but the state's part."""

    values: torch.Tensor  # [N, H, c, Dv]
    write: torch.Tensor  # [N, H, c, c]: A⁻¹ diag(beta)
    mix: torch.Tensor  # [N, H, c, c]: P[q], lower
    past: torch.Tensor  # [N, H, 2 c, Dk]: k ⊙ exp(G), then q ⊙ exp(G)
    rest: torch.Tensor  # [N, H, c, Dk]: k ⊙ exp(G_c - G)
    whole: torch.Tensor  # [N, H, Dk, 1]: exp(G_c)


def _chunk_maps(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    size: int,
) -> _ChunkMaps:
    """Rows as in `scan`, a multiple of `size`."""
    heads = k.shape[1]
    q, k, v, decay = (
        x.view(-1, size, heads, x.shape[-1]).transpose(1, 2).contiguous()
        for x in (q, k, v, decay.double())
    )
    betas = beta.view(-1, size, heads).transpose(1, 2)  # [N, H, c]
    sums = decay.cumsum(2)
    both = torch.stack((k, q), 2)  # [N, H, 2, c, Dk]
    couplings = _couplings(both, k, sums)
    system = couplings[:, :, 0] * betas[..., None]
    inverse = torch.linalg.solve_triangular(
        system, torch.eye(size).expand_as(system), upper=False, unitriangular=True
    )
    last = sums[:, :, -1:]
    return _ChunkMaps(
        values=v,
        write=inverse.mul_(betas[..., None, :]),
        mix=couplings[:, :, 1],
        past=both.mul_(sums.float().exp_()[:, :, None]).flatten(2, 3),
        rest=(last - sums).float().exp_().mul_(k),
        whole=last.float().exp_().transpose(2, 3),
    )


def _couplings(both: torch.Tensor, k: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """P for k and for q, [N, H, 2, c, c], zero above the diagonal. both [N, H, 2, c, Dk],
    k and sums (fp64) [N, H, c, Dk]; c is LEAF times a power of two."""
    chunks, heads, size, _ = k.shape
    result = torch.zeros(chunks, heads, 2, size, size)
    _fill_leaves(result, both, k, sums)
    half = LEAF
    while half < size:
        _fill_squares(result, both, k, sums, half)
        half *= 2
    return result


def _fill_squares(
    result: torch.Tensor, both: torch.Tensor, k: torch.Tensor, sums: torch.Tensor, half: int
) -> None:
    """Every block of 2 `half` rows: its later half against its earlier half."""
    chunks, heads, size, dim = k.shape
    blocks = size // (2 * half)
    split = (chunks, heads, blocks, 2, half, dim)
    earlier, later = sums.view(split).unbind(3)  # [N, H, blocks, half, Dk]
    border = earlier[..., -1:, :]
    columns = k.view(split)[:, :, :, 0] * (border - earlier).float().exp_()
    rows = both.view(chunks, heads, 2, blocks, 2, half, dim)[:, :, :, :, 1]
    rows = rows * (later - border).float().exp_()[:, :, None]
    rows = rows.transpose(2, 3).reshape(chunks, heads, blocks, 2 * half, dim)
    squares = torch.matmul(rows, columns.transpose(-1, -2))
    squares = squares.view(chunks, heads, blocks, 2, half, half).permute(0, 1, 3, 4, 5, 2)
    at = result.view(chunks, heads, 2, blocks, 2, half, blocks, 2, half)[:, :, :, :, 1, :, :, 0]
    at.diagonal(dim1=3, dim2=5).copy_(squares)  # [N, H, 2, half, half, blocks]


def _fill_leaves(
    result: torch.Tensor, both: torch.Tensor, k: torch.Tensor, sums: torch.Tensor
) -> None:
    """Every pair of rows within a leaf, written out."""
    chunks, heads, size, dim = k.shape
    leaves = size // LEAF
    split = (chunks, heads, leaves, LEAF, dim)
    columns, sides = k.view(split), sums.view(split)
    rows = both.view(chunks, heads, 2, leaves, LEAF, dim)
    at = result.view(chunks, heads, 2, leaves, LEAF, leaves, LEAF).diagonal(dim1=3, dim2=5)
    for i in range(LEAF):
        for j in range(i + 1):
            column = (sides[..., i, :] - sides[..., j, :]).float().exp_().mul_(columns[..., j, :])
            at[:, :, :, i, j] = (rows[..., i, :] * column[:, :, None]).sum(-1)


def _apply(maps: _ChunkMaps, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows through chunk after chunk -> out [N c, H, Dv] and the state after them."""
    chunks, heads, size, dim = maps.values.shape
    out = torch.empty(chunks, size, heads, dim)
    for n in range(chunks):
        recalled, result = torch.split(torch.bmm(maps.past[n], state), size, 1)
        written = torch.bmm(maps.write[n], maps.values[n] - recalled)
        out[n] = torch.baddbmm(result, maps.mix[n], written).transpose(0, 1)
        state = (state * maps.whole[n]).baddbmm_(maps.rest[n].transpose(1, 2), written)
    return out.view(chunks * size, heads, dim), state
