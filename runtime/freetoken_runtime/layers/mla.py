# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention over rows that hold a latent and the one key that turns.

Few queries meet the latent rows as they are: what takes a latent to keys is applied to the query
instead, and what takes it to values to the result, so all heads attend to one key of
kv_rank + rope_dim numbers. Many queries are cheaper the other way round: keys and values of every
head are made of the rows, block by block, and forgotten.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from ..batch import Batch, LayerState
from ..kernels.attention.cpu import attend, merge
from ..specs.attention import MlaSpec
from .linear import Linear
from .norm import RmsNorm
from .parts import Parts, Rope
from .rope import rotate

_BLOCK_ELEMENTS = 16 << 20  # keys and values made at once


@dataclass(frozen=True)
class LatentAttention:
    """The mixer of one layer. `inputs` yields [q_down,] latent, k_rope side by side; `queries`
    the parts of all heads that meet the latent, then those that turn."""

    spec: MlaSpec
    inputs: Linear
    queries: Linear
    output: Linear
    q_norm: RmsNorm | None
    latent_norm: RmsNorm
    k_up: torch.Tensor  # [heads, nope_dim, kv_rank] fp32
    v_up: torch.Tensor  # [heads, value_dim, kv_rank] fp32

    def __call__(
        self, x: torch.Tensor, batch: Batch, layer: int, rope: Rope | None
    ) -> torch.Tensor:
        """x [T, H] fp32 -> [T, H] fp32 or bf16; writes this pass's latent rows into each sequence's
        state."""
        spec, count = self.spec, len(x)
        made = self.inputs(x, batch.groups).float()
        kept = made[:, -spec.kv_rank - spec.rope_dim :]
        latent, k_rope = torch.split(kept, [spec.kv_rank, spec.rope_dim], 1)
        if self.q_norm is not None:
            x = self.q_norm(made[:, : spec.q_rank])
        q = self.queries(x, batch.groups).float()
        sizes = [spec.num_heads * spec.nope_dim, spec.num_heads * spec.rope_dim]
        nope, turning = torch.split(q, sizes, 1)
        turning, k_rope = turning.view(count, spec.num_heads, spec.rope_dim), k_rope[:, None]
        if rope is not None:
            turning, k_rope = rotate(turning, *rope), rotate(k_rope, *rope)
        rows = torch.cat((self.latent_norm(latent)[:, None], k_rope), -1)  # [T, 1, D] fp32
        nope = nope.view(count, spec.num_heads, spec.nope_dim)
        parts = [
            self._attend(nope[a:b], turning[a:b], rows[a:b], state, layer)
            for state, a, b in ((s.state, s.start, s.stop) for s in batch.sequences)
        ]
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.output(mixed.reshape(count, -1), batch.groups)

    def _attend(
        self,
        nope: torch.Tensor,
        turning: torch.Tensor,
        rows: torch.Tensor,
        state: LayerState,
        layer: int,
    ) -> torch.Tensor:
        """One sequence: nope [n, heads, nope_dim], turning [n, heads, rope_dim], rows [n, 1, D] ->
        [n, heads, value_dim]."""
        state.write(layer, rows, rows[..., :0])
        past = [rows for rows, _ in state.pieces(layer, new=False)]
        if len(rows) < self._expanding_rows:
            return self._over_latents(nope, turning, past, rows)
        return self._over_heads(torch.cat((nope, turning), -1), past, rows)

    @property
    def _expanding_rows(self) -> int:
        """Queries from which on making keys and values of a row costs less than it saves."""
        spec = self.spec
        saved = 2 * spec.kv_rank - spec.nope_dim - spec.value_dim
        made = (spec.nope_dim + spec.value_dim) * spec.kv_rank
        return max(2, made // saved) if saved > 0 else 1 << 30

    def _over_latents(
        self,
        nope: torch.Tensor,
        turning: torch.Tensor,
        past: list[torch.Tensor],
        rows: torch.Tensor,
    ) -> torch.Tensor:
        rank, scale = self.spec.kv_rank, self.spec.scale
        asked = torch.bmm(nope.transpose(0, 1), self.k_up).transpose(0, 1)  # [n, heads, kv_rank]
        q = torch.cat((asked, turning), -1)
        parts = [attend(q, kept, kept, scale=scale) for kept in past]
        parts.append(attend(q, rows, rows, scale=scale, causal=len(rows) > 1))
        mixed = merge([(out[..., :rank], lse) for out, lse in parts])
        return torch.bmm(mixed.transpose(0, 1), self.v_up.transpose(1, 2)).transpose(0, 1)

    def _over_heads(
        self, q: torch.Tensor, past: list[torch.Tensor], rows: torch.Tensor
    ) -> torch.Tensor:
        spec = self.spec
        width = max(spec.nope_dim + spec.rope_dim, spec.value_dim)
        size = max(64, _BLOCK_ELEMENTS // (2 * spec.num_heads * width))
        q = functional.pad(q, (0, width - q.shape[-1]))
        parts = [
            attend(q, *self._expanded(block, width), scale=spec.scale)
            for kept in past
            for block in torch.split(kept, size)
        ]
        parts.append(attend(q, *self._expanded(rows, width), scale=spec.scale, causal=True))
        return merge([(out[..., : spec.value_dim], lse) for out, lse in parts])

    def _expanded(self, rows: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """rows [S, 1, D] -> keys and values [S, heads, width], zeros behind what they have: the
        kernel takes one length for both."""
        spec = self.spec
        latent, turned = torch.split(rows[:, 0], [spec.kv_rank, spec.rope_dim], 1)
        keys = rows.new_zeros(len(rows), spec.num_heads, width)
        values = torch.zeros_like(keys)
        stop = spec.nope_dim + spec.rope_dim
        keys[..., : spec.nope_dim] = functional.linear(latent, self.k_up.flatten(0, 1)).view(
            len(rows), spec.num_heads, spec.nope_dim
        )
        keys[..., spec.nope_dim : stop] = turned[:, None]
        values[..., : spec.value_dim] = functional.linear(latent, self.v_up.flatten(0, 1)).view(
            len(rows), spec.num_heads, spec.value_dim
        )
        return keys, values

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.inputs, self.queries, self.output

    @property
    def size_bytes(self) -> int:
        norms = sum(x.size_bytes for x in (self.q_norm, self.latent_norm) if x is not None)
        linears = sum(linear.size_bytes for linear in self.linears)
        return linears + norms + self.k_up.nbytes + self.v_up.nbytes


def build(spec: MlaSpec, parts: Parts) -> LatentAttention:
    down = ("q_down",) if spec.q_rank is not None else ()
    heads = spec.num_heads
    return LatentAttention(
        spec=spec,
        inputs=parts.linear(*down, "latent", "k_rope"),
        queries=parts.linear("q_nope", "q_rope"),
        output=parts.linear("o"),
        q_norm=parts.norm("q_down_norm", eps=spec.latent_eps) if down else None,
        latent_norm=parts.norm("latent_norm", eps=spec.latent_eps),
        k_up=parts.tensor("k_up").view(heads, spec.nope_dim, spec.kv_rank),
        v_up=parts.tensor("v_up").view(heads, spec.value_dim, spec.kv_rank),
    )
