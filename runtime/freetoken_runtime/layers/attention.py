# SPDX-License-Identifier: Apache-2.0
"""Causal attention over a sequence's pieces of keys and values, full or within a window."""

from dataclasses import dataclass

import torch

from ..batch import Batch, LayerState
from ..kernels.activations import sigmoid
from ..kernels.attention.cpu import add_sinks, attend, attend_window, merge
from ..kernels.working_memory import empty
from ..specs.attention import AttentionSpec
from .linear import Linear
from .norm import RmsNorm
from .parts import Parts, Rope
from .rope import rotate

_BLOCK = 64  # rows

Pieces = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Scores:
    """How queries meet keys; see `AttentionSpec`."""

    scale: float
    window: int | None = None
    sinks: torch.Tensor | None = None  # [Hq] fp32


@dataclass(frozen=True)
class Attention:
    """The mixer of one layer. `inputs` yields q, k, v and, where the output is gated, the gate
    side by side."""

    spec: AttentionSpec
    scores: Scores
    inputs: Linear
    output: Linear
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None

    def __call__(
        self, x: torch.Tensor, batch: Batch, layer: int, rope: Rope | None
    ) -> torch.Tensor:
        """x [T, H] fp32 -> [T, H] fp32 or bf16; writes this pass's keys and values into each
        sequence's state."""
        heads, kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        last = heads + 2 * kv_heads
        rows = self.inputs(x, batch.groups).float().view(len(x), -1, self.spec.head_dim)
        qk, v = rows[:, : heads + kv_heads], rows[:, heads + kv_heads : last]
        qk = self._placed(qk, rope)
        q, k = qk[:, :heads], qk[:, heads:]
        parts = [
            attend_sequence(q[a:b], k[a:b], v[a:b], state, layer, self.scores)
            for state, a, b in ((rows.state, rows.start, rows.stop) for rows in batch.sequences)
        ]
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self.spec.gated:
            mixed = mixed * sigmoid(rows[:, last:])
        return self.output(mixed.reshape(len(x), -1), batch.groups)

    def _placed(self, qk: torch.Tensor, rope: Rope | None) -> torch.Tensor:
        """Queries and keys [T, heads, D], normed and rotated where the model does so. Some rows at
        a time, so that what lies between the steps stays in the cache."""
        if len(qk) <= _BLOCK:
            normed = self._normed(qk)
            return normed if rope is None else rotate(normed, *rope)
        placed = empty(*qk.shape)
        for start in range(0, len(qk), _BLOCK):
            rows = slice(start, start + _BLOCK)
            normed, out = self._normed(qk[rows]), placed[rows]
            if rope is None:
                out.copy_(normed)
            else:
                cos, sin = rope
                rotate(normed, cos[rows], sin[rows], out=out)
        return placed

    def _normed(self, qk: torch.Tensor) -> torch.Tensor:
        if self.q_norm is None or self.k_norm is None:
            return qk
        q, k = qk[:, : self.spec.num_heads], qk[:, self.spec.num_heads :]
        return torch.cat((self._norm(self.q_norm, q), self._norm(self.k_norm, k)), 1)

    def _norm(self, norm: RmsNorm, rows: torch.Tensor) -> torch.Tensor:
        """rows [T, heads, dim] normed per head or over all heads."""
        if self.spec.qk_norm == "head":
            return norm(rows)
        return norm(rows.flatten(1)).view(rows.shape)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.inputs, self.output

    @property
    def size_bytes(self) -> int:
        norms = [norm for norm in (self.q_norm, self.k_norm) if norm is not None]
        sinks = 0 if self.scores.sinks is None else self.scores.sinks.nbytes
        linears = self.inputs.size_bytes + self.output.size_bytes
        return linears + sinks + sum(norm.size_bytes for norm in norms)


def build(spec: AttentionSpec, parts: Parts) -> Attention:
    gate = ("q_gate",) if spec.gated else ()
    sinks = parts.tensor("sinks") if spec.sinks else None
    return Attention(
        spec=spec,
        scores=Scores(spec.scale, spec.window, sinks),
        inputs=parts.linear("q", "k", "v", *gate),
        output=parts.linear("o"),
        q_norm=parts.norm("q_norm") if spec.qk_norm else None,
        k_norm=parts.norm("k_norm") if spec.qk_norm else None,
    )


def attend_sequence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: LayerState,
    layer: int,
    scores: Scores,
) -> torch.Tensor:
    """q [n, Hq, D], k and v [n, Hkv, D], the new rows of one sequence -> [n, Hq, D]."""
    state.write(layer, k, v)
    scale, window = scores.scale, scores.window
    if window is not None and state.length + len(q) <= window:
        window = None  # it does not bite yet
    if len(q) == 1:  # a single row sees everything, its own key included: no mask
        pieces = state.pieces(layer, new=True)
        if window is not None:
            pieces = last_rows(pieces, window)
        parts = [attend(q, keys, values, scale=scale) for keys, values in pieces]
    elif window is None:
        pieces = state.pieces(layer, new=False)
        parts = [attend(q, keys, values, scale=scale) for keys, values in pieces]
        parts.append(attend(q, k, v, scale=scale, causal=True))
    else:
        pieces = [*last_rows(state.pieces(layer, new=False), window - 1), (k, v)]
        keys, values = (torch.cat(part) for part in zip(*pieces, strict=True))
        parts = [attend_window(q, keys, values, scale=scale, window=window)]
    return merge(parts) if scores.sinks is None else add_sinks(parts, scores.sinks)


def last_rows(pieces: Pieces, count: int) -> Pieces:
    """The pieces' last rows, at most `count`."""
    kept: Pieces = []
    for k, v in reversed(pieces):
        if count <= 0:
            break
        kept.append((k[-count:], v[-count:]))
        count -= len(k)
    return kept[::-1]
