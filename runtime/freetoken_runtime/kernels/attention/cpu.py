# SPDX-License-Identifier: Apache-2.0
"""Attention over one piece of keys by torch's flash kernel for CPUs, and the merge of pieces.

The kernel kills the process on zero keys or zero queries, and its causal mask starts at the top
left, so `causal` is for a square only: both are asserted here.

A single query goes in as one row per head of its group (docs/decisions/0016-one-query.md): the
kernel's own path for one row is slower and splits keys by threads, so that its bits change when the
engine drops to one thread. That path is left for models without groups, where it is the faster one.
"""

import math

import torch
from torch.nn.functional import pad

from ..activations import sigmoid

_BLOCK, _MAX_BLOCK = 64, 512  # queries that share a mask: no fewer, no more
_ROWS = 4  # products with fewer rows depend on the number of threads
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [n, Hq, D], k and v [S, Hkv, D] -> output [n, Hq, D], log-sum-exp [n, Hq] fp32.

    Any strides; grouped heads are taken as they are. `causal`: row i sees keys 0..i (n = S)."""
    queries, keys = q.shape[0], k.shape[0]
    assert queries and keys and (not causal or queries == keys), (queries, keys, causal)
    if queries == 1 and q.shape[1] > k.shape[1]:
        return _attend_one(q, k, v, scale)
    out, lse = _flash(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        0.0,
        causal,
        scale=scale,
    )
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def _attend_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query [1, Hq, D]: the heads of a group are rows over the same keys."""
    _, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    rows = q.reshape(1, kv_heads, group, dim)
    if group < _ROWS:
        rows = pad(rows, (0, 0, 0, _ROWS - group))
    out, lse = _flash(
        rows, k.transpose(0, 1)[None], v.transpose(0, 1)[None], 0.0, False, scale=scale
    )
    return out[:, :, :group].reshape(1, heads, dim), lse[:, :, :group].reshape(1, heads)


def attend_window(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last n of S rows as queries, q [n, Hq, D] over k and v [S, Hkv, D], each seeing itself
    and the `window` - 1 keys before it. Blocks of queries, so that the work grows with the window
    and not with the chunk."""
    past = len(k) - len(q)
    assert len(q) and past >= 0 and window > 0, (len(q), len(k), window)
    block = max(_BLOCK, min(window, _MAX_BLOCK))
    parts = []
    for start in range(0, len(q), block):
        rows = q[start : start + block]
        stop = past + start + len(rows)
        first = max(0, past + start - window + 1)
        mask = _band(len(rows), stop - first, window)
        out, lse = _flash(
            rows.transpose(0, 1)[None],
            k[first:stop].transpose(0, 1)[None],
            v[first:stop].transpose(0, 1)[None],
            0.0,
            False,
            attn_mask=mask.to(q.dtype),
            scale=scale,
        )
        parts.append((out[0].transpose(0, 1), lse[0].transpose(0, 1)))
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def _band(queries: int, keys: int, window: int) -> torch.Tensor:
    """[n, S] fp32: 0 where query i, the key i + S - n, sees a key, else minus infinity: a triangle
    at the end, and one at the start where keys leave the window."""
    mask = torch.zeros(queries, keys)
    mask[:, keys - queries :] += torch.full((queries, queries), -math.inf).triu_(1)
    left = keys - queries - window  # query i does not see keys 0 .. i + left
    if queries + left > 0:
        mask[:, : queries + left] += torch.full((queries, queries + left), -math.inf).tril_(left)
    return mask


def merge(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Outputs over disjoint sets of keys -> the output over all of them, [n, Hq, D]."""
    merged, lse = parts[0]
    for index, (out, other) in enumerate(parts[1:], 2):
        # Not softmax and sum: over a first dimension their order depends on the number of threads.
        merged = torch.lerp(merged, out, torch.sigmoid(other - lse)[..., None])
        if index < len(parts):
            lse = torch.logaddexp(lse, other)
    return merged


def add_sinks(parts: list[tuple[torch.Tensor, torch.Tensor]], sinks: torch.Tensor) -> torch.Tensor:
    """`merge` with one more logit per head, `sinks` [Hq] fp32, that has no value: it takes its
    part of the softmax and adds nothing."""
    lse = parts[0][1]
    for _, other in parts[1:]:
        lse = torch.logaddexp(lse, other)
    return merge(parts) * sigmoid(lse - sinks)[..., None]
