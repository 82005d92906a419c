# SPDX-License-Identifier: Apache-2.0
"""Attention over one piece of keys, and the merge of pieces.

Few queries go to torch's flash kernel for CPUs. It kills the process on zero keys or zero queries,
and its causal mask starts at the top left, so `causal` is for a square only: both are asserted
here. Many go through oneDNN's GEMMs, the queries of a group of heads side by side: nearly twice as
fast (docs/decisions/0090-attention-by-gemm.md).

A single query goes in as one row per head of its group (docs/decisions/0016-one-query.md): the
kernel's own path for one row is slower and splits keys by threads, so that its bits change when the
engine drops to one thread. That path is left for models without groups, where it is the faster one.
"""

import math
from functools import lru_cache

import torch
from torch.nn.functional import pad

from ..activations import sigmoid
from ..dense_linear.cpu import has_onednn, linear
from ..working_memory import empty

_BLOCK, _MAX_BLOCK = 64, 512  # queries that share a mask: no fewer, no more
_ROWS = 4  # products with fewer rows depend on the number of threads
_GEMM_ROWS = 512  # of one GEMM: the queries of a group's heads; with
_KEYS = 1024  # these keys, 2 MiB of scores
_KEYS_STEP, _QUERIES_STEP = 64, 16  # oneDNN compiles a kernel for each number of them
_SQUARE_ROWS, _SQUARE_QUERIES = 1024, 512  # a causal square from either on: half of it is masked
_MAX_QUERIES = 256
_PIECE_ROWS = 128  # queries of a group that pay for putting a piece's heads apart
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
    rows = queries * (q.shape[1] // k.shape[1])
    many = rows >= _PIECE_ROWS
    if causal:
        many = rows >= _SQUARE_ROWS or queries >= _SQUARE_QUERIES
    if many and has_onednn():
        return _attend_many(q, k, v, scale, causal)
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


def _attend_many(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of queries against blocks of the keys that they see, a group of heads at a time. Rows
    of zeros fill both up, so that few shapes occur."""
    queries, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    out, lse = empty(queries, kv_heads, group, dim), q.new_empty(queries, kv_heads, group)
    block = _block(queries, group)
    scaled = _filled(q.view(queries, kv_heads, group, dim), _QUERIES_STEP).mul_(scale)
    for head in range(kv_heads):
        keys, values = (_filled(piece[:, head], _KEYS_STEP) for piece in (k, v))
        for start in range(0, queries, block):
            rows = scaled[start : start + block, head].transpose(0, 1)  # [group, block, dim]
            count = rows.shape[1]
            flat = rows.reshape(-1, dim)
            stop = start + count if causal else len(keys)
            parts = []
            for first in range(0, stop, _KEYS):
                seen = slice(first, min(first + _KEYS, stop))
                scores = linear(flat, keys[seen])
                if causal and seen.stop > start:
                    scores.view(group, count, -1)[:, :, start - first :].add_(_later(count))
                elif not causal and seen.stop > len(k):
                    scores[:, len(k) - first :] = -math.inf
                parts.append(_weigh(scores, values[seen]))
            mixed, sums = _joined(parts)
            rows_of = slice(start, min(start + block, queries))
            count_of = rows_of.stop - start
            out[rows_of, head] = mixed.view(group, -1, dim)[:, :count_of].transpose(0, 1)
            lse[rows_of, head] = sums.view(group, -1)[:, :count_of].t()
    return out.view(queries, heads, dim), lse.view(queries, heads)


def _block(queries: int, group: int) -> int:
    """How many queries go together: a power of two and no more than a block of keys, so that those
    are whole ones of these and the masked square of each lies in one of them."""
    block = _QUERIES_STEP
    while block < min(queries, _MAX_QUERIES, _KEYS) and 2 * block * group <= _GEMM_ROWS:
        block *= 2
    return block


def _filled(rows: torch.Tensor, multiple: int) -> torch.Tensor:
    """A contiguous copy of rows [n, ...] with zeros up to a multiple."""
    count = len(rows)
    out = empty(-(-count // multiple) * multiple, *rows.shape[1:])
    out[:count] = rows
    out[count:] = 0.0
    return out


def _weigh(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """scores [m, S], values [S, D] -> softmax(scores) · values [m, D], the scores' log-sum-exp [m].
    Each row holds a finite score: that of the largest is e^0 / Σ e^(s - largest)."""
    weights = torch.softmax(scores, 1, out=empty(*scores.shape))
    return linear(weights, values.t()), scores.amax(1).sub_(weights.amax(1).log_())


@lru_cache(maxsize=8)
def _later(count: int) -> torch.Tensor:
    """[n, n]: minus infinity where key j comes after query i, else 0."""
    with torch.inference_mode(False):
        return torch.full((count, count), -math.inf).triu_(1)


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
    *others, last = parts
    return _blended(_joined(others), last) if others else last[0]


def _joined(
    parts: list[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [..., D] and log-sum-exps [...] over disjoint sets of keys -> those over all."""
    joined = parts[0]
    for part in parts[1:]:
        joined = _blended(joined, part), _log_of_sum(joined[1], part[1])
    return joined


def _blended(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """The output of both."""
    # Not softmax and sum: over a first dimension their order depends on the number of threads.
    return torch.lerp(one[0], other[0], sigmoid(other[1] - one[1])[..., None])


def _log_of_sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """log(e^a + e^b), whose bits do not depend on where a number lies (torch.logaddexp's do)."""
    return torch.maximum(a, b).add_((a - b).abs_().neg_().exp_().log1p_())


def add_sinks(parts: list[tuple[torch.Tensor, torch.Tensor]], sinks: torch.Tensor) -> torch.Tensor:
    """`merge` with one more logit per head, `sinks` [Hq] fp32, that has no value: it takes its
    part of the softmax and adds nothing."""
    merged, lse = _joined(parts)
    return merged * sigmoid(lse - sinks)[..., None]
