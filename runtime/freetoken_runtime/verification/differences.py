# SPDX-License-Identifier: Apache-2.0
"""How far two states are apart, tensor by tensor, or in the logits that follow from them."""

import math
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from ..spec import StateSpec
from ..state.anchors import Anchor
from ..state.buffers import StateLayout

# Of a tensor's range. A path that was cut in other places differs by rounding only, some thirty
# times less: docs/decisions/0061-deep-verification.md has the figures.
STATE_LIMIT = 1e-4

# Where the two kernel forms round activations differently (DESIGN, invariant 1): of the logits'
# range, mean and largest; and the mean divergence in nats.
MEAN_LIMIT, LARGEST_LIMIT, DIVERGENCE_LIMIT = 1e-2, 6e-2, 3e-3


@dataclass(frozen=True)
class Difference:
    """`buffer`: what differs, of `layer` if it is one layer's; by `size` of its own range, or in
    the unit of its limit."""

    buffer: str
    layer: int | None
    size: float
    limit: float

    @property
    def excess(self) -> float:
        """Over 1: wrong."""
        return self.size / self.limit


SAME = Difference("rows", None, 0.0, STATE_LIMIT)


def of_rows(
    stored: Mapping[str, torch.Tensor],
    cold: Mapping[str, torch.Tensor],
    layout: StateLayout,
    states: SequenceOf[StateSpec],
) -> Iterator[Difference]:
    """Of blocks, named tensors [L, rows, H, D]: one for each layer and kind of row."""
    assert stored.keys() == cold.keys(), (sorted(stored), sorted(cold))
    for name, rows in cold.items():
        layers = layout.groups[int(name[1:])].layers
        sizes = _relative(stored[name], rows).tolist()
        for layer, size in zip(layers, sizes, strict=True):
            buffer = states[layer].rows[0 if name[0] == "k" else 1].name
            yield Difference(buffer, layer, size, STATE_LIMIT)


def of_anchors(
    stored: Anchor, cold: Anchor, layout: StateLayout, states: SequenceOf[StateSpec]
) -> Iterator[Difference]:
    """Of the hidden row, and of each buffer that every token overwrites and a store keeps."""
    size = _relative(stored.row.unsqueeze(0), cold.row.unsqueeze(0)).item()
    yield Difference("hidden row", None, size, STATE_LIMIT)
    pairs = zip(layout.stored(stored.fixed), layout.stored(cold.fixed), states, strict=True)
    for layer, (ours, theirs, state) in enumerate(pairs):
        named = zip(ours, theirs, state.overwritten, strict=False)
        for mine, other, buffer in named:
            size = _relative(mine.unsqueeze(0), other.unsqueeze(0)).item()
            yield Difference(buffer.name, layer, size, STATE_LIMIT)


def of_logits(stored: torch.Tensor, cold: torch.Tensor, *, routed: bool) -> Iterator[Difference]:
    """Of logits [1 + n, V] fp32: of a hidden row, and of n ids behind it. `routed`: the model
    chooses experts, and where two are nearly equal, rounding chooses for one id what it does not
    for the next: then the medians over the n ids count, which a wrong state moves and a few other
    choices do not."""
    gaps = (stored - cold).abs() / (cold.max() - cold.min())
    divergences = torch.nn.functional.kl_div(
        stored.log_softmax(-1), cold.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    by_id = torch.stack([gaps.amax(-1), gaps.mean(-1), divergences])  # [3, 1 + n]
    if not routed:
        sizes = torch.stack([by_id[0].amax(), by_id[1].mean(), by_id[2].mean()])
    elif by_id.shape[1] == 1:
        sizes = by_id[:, 0]
    else:
        sizes = torch.maximum(by_id[:, 0], by_id[:, 1:].median(1).values)
    limits = (LARGEST_LIMIT, MEAN_LIMIT, DIVERGENCE_LIMIT)
    names = ("logits, largest", "logits, mean", "logits, divergence")
    sizes = sizes.nan_to_num(nan=math.inf)
    for name, size, limit in zip(names, sizes.tolist(), limits, strict=True):
        yield Difference(name, None, size, limit)


def _relative(stored: torch.Tensor, cold: torch.Tensor) -> torch.Tensor:
    """[n, …] twice -> [n]: the largest difference, relative to the range of `cold` or, where that
    lies away from zero, to its largest value: what rounding is relative to."""
    stored, cold = stored.flatten(1), cold.flatten(1)
    gap = (stored - cold).abs().amax(1)
    extent = torch.maximum(cold.amax(1) - cold.amin(1), cold.abs().amax(1))
    size = torch.where(gap == 0, gap, gap / extent)
    return size.nan_to_num(nan=math.inf, posinf=math.inf)
