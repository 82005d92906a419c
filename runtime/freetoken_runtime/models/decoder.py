# SPDX-License-Identifier: Apache-2.0
"""The one decoder stack: embedding, layers of mixer and feed-forward, norm, head.

It knows rows and sequences, no tokens' meaning, no scheduling and no weights' files.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..batch import Batch, Form, RowGroup
from ..layers.attention import Attention
from ..layers.embedding import Embedding
from ..layers.linear import IntegerLinear, Linear
from ..layers.mlp import Mlp
from ..layers.norm import RmsNorm
from ..layers.rope import RopeTable
from ..spec import ModelSpec

_FEW_ROWS_INTEGER = 64
_FEW_ROWS_DENSE = 16


@dataclass(frozen=True)
class Layer:
    """x += mixer(norm x); x += feed_forward(norm x)."""

    mixer_norm: RmsNorm
    mixer: Attention
    feed_forward_norm: RmsNorm
    feed_forward: Mlp


@dataclass(frozen=True)
class DecoderParts:
    """Everything with weights, built by `weights`."""

    embedding: Embedding
    layers: tuple[Layer, ...]
    norm: RmsNorm
    head: Linear


class Decoder:
    """Rows in, rows out. Used by one thread at a time; only the rope tables grow.

    `few_rows_batch`: FEW rows of several sequences may share a RowGroup; if not, each sequence's
    FEW rows are a group of their own, else a neighbour could change a token.
    """

    def __init__(self, spec: ModelSpec, parts: DecoderParts) -> None:
        self.spec = spec
        self._parts = parts
        ropes = list(dict.fromkeys(layer.mixer.rope for layer in spec.layers))
        self._tables = [RopeTable(rope) for rope in ropes]
        self._head_batches = parts.head.few_rows_batch
        self.few_rows_batch = all(linear.few_rows_batch for linear in self._linears())
        self._table_of = [ropes.index(layer.mixer.rope) for layer in spec.layers]

    @torch.inference_mode()
    def forward(self, batch: Batch, rows: torch.Tensor) -> torch.Tensor:
        """Run a pass and return the final hidden rows, after the last norm, of the batch's `rows`
        ([n] int64, n >= 0): [n, H] fp32. Writes keys and values through each sequence's state."""
        x = self._parts.embedding(batch.ids)
        ropes = [table.rows(batch.positions) for table in self._tables]
        for index, layer in enumerate(self._parts.layers):
            rope = ropes[self._table_of[index]]
            x = x + layer.mixer(layer.mixer_norm(x), batch, index, rope)
            x = x + layer.feed_forward(layer.feed_forward_norm(x), batch.groups)
        return self._parts.norm(x[rows])

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, form: Form = Form.FEW) -> torch.Tensor:
        """Hidden rows as `forward` returns them [n, H] -> [n, vocab] fp32. In the FEW form, the
        one generation uses, a row's logits are the same bits whatever rows stand beside it."""
        head = self._parts.head
        if form is Form.MANY or self._head_batches:
            return head(hidden, [RowGroup(0, len(hidden), form)]).float()
        return torch.cat([head.few(row) for row in torch.split(hidden, 1)]).float()

    @property
    def few_rows(self) -> int:
        """A sequence with fewer new rows than this in a pass takes the FEW form
        (docs/decisions/0011-rows-per-form.md)."""
        integers = any(isinstance(linear, IntegerLinear) for linear in self._linears())
        return _FEW_ROWS_INTEGER if integers else _FEW_ROWS_DENSE

    @property
    def size_bytes(self) -> int:
        """Bytes of all weights, each counted once."""
        parts = self._parts
        norms = [parts.norm]
        for layer in parts.layers:
            norms += [layer.mixer_norm, layer.feed_forward_norm]
            norms += [norm for norm in (layer.mixer.q_norm, layer.mixer.k_norm) if norm is not None]
        linears = [*self._linears(), parts.head]
        total = sum(norm.size_bytes for norm in norms) + sum(x.size_bytes for x in linears)
        return parts.embedding.size_bytes + total

    def _linears(self) -> Sequence[Linear]:
        layers = self._parts.layers
        return [
            linear
            for layer in layers
            for linear in (
                layer.mixer.qkv,
                layer.mixer.output,
                layer.feed_forward.gate_up,
                layer.feed_forward.down,
            )
        ]
