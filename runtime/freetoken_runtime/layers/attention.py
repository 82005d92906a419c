# SPDX-License-Identifier: Apache-2.0
"""Full causal attention over a sequence's pieces of keys and values."""

from dataclasses import dataclass

import torch

from ..batch import Batch, LayerState
from ..kernels.attention.cpu import attend, merge
from ..specs.attention import AttentionSpec
from .linear import Linear
from .norm import RmsNorm
from .parts import Parts, Rope
from .rope import rotate


@dataclass(frozen=True)
class Attention:
    """The mixer of one layer. `qkv` yields q, k and v side by side."""

    spec: AttentionSpec
    qkv: Linear
    output: Linear
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None

    def __call__(
        self, x: torch.Tensor, batch: Batch, layer: int, rope: Rope | None
    ) -> torch.Tensor:
        """x [T, H] fp32 -> [T, H] fp32 or bf16; writes this pass's keys and values into each
        sequence's state."""
        heads, kv_heads, dim = self.spec.num_heads, self.spec.num_kv_heads, self.spec.head_dim
        rows = self.qkv(x, batch.groups).float().view(len(x), heads + 2 * kv_heads, dim)
        qk, v = rows[:, : heads + kv_heads], rows[:, heads + kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, :heads]), self.k_norm(qk[:, heads:])), 1)
        if rope is not None:
            qk = rotate(qk, *rope)
        q, k = qk[:, :heads], qk[:, heads:]
        parts = [
            attend_sequence(q[a:b], k[a:b], v[a:b], state, layer, self.spec.scale)
            for state, a, b in ((rows.state, rows.start, rows.stop) for rows in batch.sequences)
        ]
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.output(mixed.reshape(len(x), heads * dim), batch.groups)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.output

    @property
    def size_bytes(self) -> int:
        norms = [norm for norm in (self.q_norm, self.k_norm) if norm is not None]
        linears = self.qkv.size_bytes + self.output.size_bytes
        return linears + sum(norm.size_bytes for norm in norms)


def build(spec: AttentionSpec, parts: Parts) -> Attention:
    return Attention(
        spec=spec,
        qkv=parts.linear("q", "k", "v"),
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
    scale: float,
) -> torch.Tensor:
    """q [n, Hq, D], k and v [n, Hkv, D], the new rows of one sequence -> [n, Hq, D]."""
    state.write(layer, k, v)
    if len(q) == 1:  # a single row sees everything, its own key included: no mask
        pieces = state.pieces(layer, new=True)
        return merge([attend(q, keys, values, scale=scale) for keys, values in pieces])
    pieces = state.pieces(layer, new=False)
    past = [attend(q, keys, values, scale=scale) for keys, values in pieces]
    return merge([*past, attend(q, k, v, scale=scale, causal=True)])
