# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule on CPUs: chunks of matrix products for many rows, and one row.

Within a chunk of c rows, with G the cumulative log decay and S the state before it, what every row
writes follows from a triangular system (the WY form of arXiv 2406.06484):

    D[i, j] = exp(G_i - G_j) for j <= i, else 0
    A       = I + strictly lower part of beta_i · (k_i · k_j) · D[i, j]
    W       = A⁻¹ (beta ⊙ (V - exp(G) ⊙ K S))                    what the rows write
    O       = exp(G) ⊙ Q S + ((Q Kᵀ) ⊙ D) W
    S'      = exp(G_c) S + Kᵀ (exp(G_c - G) ⊙ W)

Decays are cumulated and subtracted in fp64 and then cast: in fp32 the difference of two large sums
costs up to 8e-5 of a model's logit range. Products read the keys per *key* head: the value heads
that share one are columns of the same product.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch

# Longer chunks are slower on a CPU: docs/decisions/0025-delta-rules.md.
CHUNK = 32
_ROWS = 128  # rows whose chunk matrices exist at once, in the cache


def scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k [n, Hk, Dk], v [n, Hv, Dv], log decay and beta [n, Hv], state [Hv, Dk, Dv], all
    fp32, n >= 1 -> out [n, Hv, Dv] and the state after the last row, in memory of its own.

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
    heads, repeat = len(v), len(v) // len(k)
    keys_queries = torch.stack((k, q), 1).repeat_interleave(repeat, 0)  # [Hv, 2, Dk]
    kept = decay.exp().view(heads, 1, 1)
    recalled, read = (torch.bmm(keys_queries, state) * kept).unbind(1)  # each [Hv, Dv]
    learnt = (v - recalled) * beta[:, None]
    overlap = (q * k).sum(-1).repeat_interleave(repeat)
    out = torch.addcmul(read, overlap[:, None], learnt)
    return out, (state * kept).addcmul_(keys_queries[:, 0, :, None], learnt[:, None, :])


def chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`scan` by chunks of CHUNK rows from the first row on; the last chunk may be shorter."""
    count, key_heads, key_dim = k.shape
    heads, dim = v.shape[1:]
    repeat = heads // key_heads
    columns = state.view(key_heads, repeat, key_dim, dim).transpose(1, 2)
    columns = columns.reshape(key_heads, key_dim, repeat * dim)
    full = count - count % CHUNK
    bounds = sorted({*range(0, full, _ROWS), full, count})
    outs = []
    for a, b in pairwise(bounds):
        maps = _chunk_maps(q[a:b], k[a:b], decay[a:b], beta[a:b], min(CHUNK, b - a))
        out, columns = _apply(maps, v[a:b], columns)
        outs.append(out)
    columns = columns.view(key_heads, key_dim, repeat, dim).transpose(1, 2)
    return torch.cat(outs), columns.reshape(heads, key_dim, dim)


@dataclass(frozen=True)
class _ChunkMaps:
    """What does not depend on values and state, for N chunks of c rows. r = Hv / Hk."""

    keys_queries: torch.Tensor  # [N, Hk, 2 c, Dk]
    write: torch.Tensor  # [N, Hk, r, c, c]: A⁻¹ diag(beta)
    mix: torch.Tensor  # [N, Hk, r, c, c]: (Q Kᵀ) ⊙ D
    past: torch.Tensor  # [N, Hk, r, c, 1]: exp(G)
    rest: torch.Tensor  # [N, Hk, r, c, 1]: exp(G_c - G)
    whole: torch.Tensor  # [N, Hk, 1, r, 1]: exp(G_c)


def _chunk_maps(
    q: torch.Tensor, k: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, size: int
) -> _ChunkMaps:
    """Rows as in `scan`, a multiple of `size`."""
    heads, dim = k.shape[1:]
    chunks, repeat = len(k) // size, beta.shape[1] // heads
    both = torch.cat((k, q), 1).view(chunks, size, 2, heads, dim)
    both = both.permute(0, 3, 2, 1, 4).reshape(chunks * heads, 2 * size, dim)
    cross = torch.bmm(both, both[:, :size].transpose(1, 2))
    cross = cross.view(chunks, heads, 1, 2, size, size)
    betas = beta.view(chunks, size, heads, repeat).permute(0, 2, 3, 1)  # [N, Hk, r, c]
    sums = decay.view(chunks, size, heads, repeat).permute(0, 2, 3, 1).double().cumsum(-1)
    between = (sums[..., :, None] - sums[..., None, :]).float().exp_().tril_()
    system = (cross[:, :, :, 0] * between).mul_(betas[..., None])
    inverse = torch.linalg.solve_triangular(
        system, torch.eye(size).expand_as(system), upper=False, unitriangular=True
    )
    last = sums[..., -1:]
    return _ChunkMaps(
        keys_queries=both.view(chunks, heads, 2 * size, dim),
        write=inverse.mul_(betas[..., None, :]),
        mix=between.mul_(cross[:, :, :, 1]),
        past=sums.float().exp_()[..., None],
        rest=(last - sums).float().exp_()[..., None],
        whole=last.float().exp_()[:, :, None],
    )


def _apply(
    maps: _ChunkMaps, v: torch.Tensor, columns: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """v [N c, Hv, Dv] through chunk after chunk from the state `columns` [Hk, Dk, r Dv] -> out
    [N c, Hv, Dv] and the state after it."""
    chunks, key_heads, repeat, size, _ = maps.write.shape
    heads, dim = v.shape[1:]
    values = v.view(chunks, size, key_heads, repeat, dim).permute(0, 2, 3, 1, 4)
    out = torch.empty(chunks, size, heads, dim)
    for n in range(chunks):
        keys_queries = maps.keys_queries[n]
        read = torch.bmm(keys_queries, columns).view(key_heads, 2, size, repeat, dim)
        recalled, queried = read.permute(1, 0, 3, 2, 4).unbind()  # each [Hk, r, c, Dv]
        wanted = torch.addcmul(values[n], recalled, maps.past[n], value=-1)
        written = torch.bmm(maps.write[n].view(heads, size, size), wanted.reshape(heads, size, dim))
        result = (queried * maps.past[n]).reshape(heads, size, dim)
        result.baddbmm_(maps.mix[n].view(heads, size, size), written)
        out[n] = result.transpose(0, 1)
        written = written.view(key_heads, repeat, size, dim).mul_(maps.rest[n])
        columns = columns.view(key_heads, -1, repeat, dim) * maps.whole[n]
        columns = columns.view(key_heads, -1, repeat * dim).baddbmm_(
            keys_queries[:, :size].transpose(1, 2),
            written.transpose(1, 2).reshape(key_heads, size, repeat * dim),
        )
    return out.view(chunks * size, heads, dim), columns
