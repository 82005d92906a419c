# SPDX-License-Identifier: Apache-2.0
"""The one decoder stack: embedding, layers of mixer and feed-forward, norm, head.

It knows rows and sequences, no tokens' meaning, no scheduling and no weights' files.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..batch import Batch, Form, RowGroup
from ..kernels.experts.workers import Workers
from ..layers.embedding import Embedding
from ..layers.linear import IntegerLinear, Linear
from ..layers.moe import Moe, Observer
from ..layers.norm import RmsNorm
from ..layers.parts import FeedForward, Mixer, Module
from ..layers.rope import RopeTable
from ..spec import ModelSpec

_FEW_ROWS_INTEGER = 64
_FEW_ROWS_DENSE = 16


@dataclass(frozen=True)
class MixerBlock:
    """x + r · post_norm(mixer(norm x))."""

    norm: RmsNorm
    mixer: Mixer
    post_norm: RmsNorm | None


@dataclass(frozen=True)
class FeedForwardBlock:
    """x + r · post_norm(feed_forward(norm x))."""

    norm: RmsNorm
    feed_forward: FeedForward
    post_norm: RmsNorm | None


@dataclass(frozen=True)
class Layer:
    """One layer of the stack, with the blocks that its spec has."""

    mixer: MixerBlock | None
    feed_forward: FeedForwardBlock | None
    residual_multiplier: float


@dataclass(frozen=True)
class DecoderParts:
    """Everything with weights, built by `weights`."""

    embedding: Embedding
    layers: tuple[Layer, ...]
    norm: RmsNorm
    head: Linear


@dataclass(frozen=True)
class _Mixture:
    """A mixture of experts with the norm before it."""

    norm: RmsNorm
    mixture: Moe


class Decoder:
    """Rows in, rows out. Used by one thread at a time; only the rope tables grow.

    `few_rows_batch`: FEW rows of several sequences may share a RowGroup; if not, each sequence's
    FEW rows are a group of their own, else a neighbour could change a token. `workers`: threads
    that all its mixtures share; none until somebody allows some.
    """

    def __init__(self, spec: ModelSpec, parts: DecoderParts) -> None:
        self.spec = spec
        self._parts = parts
        rope_of = [None if layer.mixer is None else layer.mixer.rope for layer in spec.layers]
        ropes = list(dict.fromkeys(rope for rope in rope_of if rope is not None))
        self._tables = [RopeTable(rope) for rope in ropes]
        self._table_of = [None if rope is None else ropes.index(rope) for rope in rope_of]
        self.workers = Workers()
        for module in self._modules():
            if isinstance(module, Moe):
                module.workers = self.workers
        self._following = _following(parts.layers)
        self._head_batches = parts.head.few_rows_batch
        self.few_rows_batch = all(linear.few_rows_batch for linear in self._linears())

    @torch.inference_mode()
    def forward(self, batch: Batch, rows: torch.Tensor) -> torch.Tensor:
        """Run a pass and return the final hidden rows, after the last norm, of the batch's `rows`
        ([n] int64, n >= 0): [n, H] fp32. Writes the new state of every sequence through its
        `LayerState`."""
        x = self._parts.embedding(batch.ids)
        if self.spec.embedding_multiplier != 1.0:
            x = x * self.spec.embedding_multiplier
        tables = [table.rows(batch.positions) for table in self._tables]
        for index, layer in enumerate(self._parts.layers):
            mixing, feeding = layer.mixer, layer.feed_forward
            if mixing is not None:
                table = self._table_of[index]
                rope = None if table is None else tables[table]
                mixed = mixing.mixer(mixing.norm(x), batch, index, rope)
                x = _add(x, mixed, mixing.post_norm, layer.residual_multiplier)
            if feeding is not None:
                following = self._following[index]
                if following is not None and following.mixture.foresees(len(x)):
                    following.mixture.foresee(following.norm(x))
                fed = feeding.feed_forward(feeding.norm(x), batch.groups)
                x = _add(x, fed, feeding.post_norm, layer.residual_multiplier)
        return self._parts.norm(x[rows])

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, form: Form = Form.FEW) -> torch.Tensor:
        """Hidden rows as `forward` returns them [n, H] -> [n, vocab] fp32. In the FEW form, the
        one generation uses, a row's logits are the same bits whatever rows stand beside it."""
        head, spec = self._parts.head, self.spec
        if form is not Form.FEW or self._head_batches:
            logits = head(hidden, [RowGroup(0, len(hidden), form)]).float()
        else:
            logits = torch.cat([head.few(row) for row in torch.split(hidden, 1)]).float()
        if spec.logit_multiplier != 1.0:
            logits = logits * spec.logit_multiplier
        if spec.logit_soft_cap is not None:
            logits = torch.tanh(logits / spec.logit_soft_cap) * spec.logit_soft_cap
        return logits

    def observe_routing(self, observer: Observer | None) -> None:
        """Show `observer` how close every router's choice was, layer by layer and pass by pass:
        margins [T] fp32 between the last expert taken and the best one left. None ends it."""
        for mixture in self.mixtures:
            mixture.observer = observer

    @property
    def mixtures(self) -> tuple[Moe, ...]:
        """The layers with experts, in order. Benches and tests give them routers of their own."""
        return tuple(module for module in self._modules() if isinstance(module, Moe))

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
            for block in (layer.mixer, layer.feed_forward):
                if block is not None:
                    norms += [x for x in (block.norm, block.post_norm) if x is not None]
        total = sum(norm.size_bytes for norm in norms)
        total += sum(module.size_bytes for module in self._modules())
        return parts.embedding.size_bytes + total + parts.head.size_bytes

    def _modules(self) -> list[Module]:
        modules: list[Module] = []
        for layer in self._parts.layers:
            if layer.mixer is not None:
                modules.append(layer.mixer.mixer)
            if layer.feed_forward is not None:
                modules.append(layer.feed_forward.feed_forward)
        return modules

    def _linears(self) -> Sequence[Linear]:
        return [linear for module in self._modules() for linear in module.linears]


def _following(layers: Sequence[Layer]) -> list[_Mixture | None]:
    """For each layer with experts the next one with experts."""
    found: list[_Mixture | None] = []
    following: _Mixture | None = None
    for layer in reversed(layers):
        block = layer.feed_forward
        mixture = None
        if block is not None and isinstance(block.feed_forward, Moe):
            mixture = _Mixture(block.norm, block.feed_forward)
        found.append(following if mixture is not None else None)
        following = mixture or following
    return found[::-1]


def _add(
    x: torch.Tensor, out: torch.Tensor, post_norm: RmsNorm | None, multiplier: float
) -> torch.Tensor:
    if post_norm is not None:
        out = post_norm(out.float())
    return x + out if multiplier == 1.0 else torch.add(x, out, alpha=multiplier)
