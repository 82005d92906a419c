# SPDX-License-Identifier: Apache-2.0
"""What every recurrent mixer does around its recurrence: each sequence by itself, cut where the
state has to be handed over."""

from collections.abc import Callable
from typing import Protocol, Self, TypeVar

import torch

from ..batch import Batch

Buffers = tuple[torch.Tensor, ...]


class Rows(Protocol):
    """A tensor [T, ·], or several of as many rows, that are sliced together."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Self: ...


RowsT = TypeVar("RowsT", bound=Rows)


def scan_sequences(
    rows: RowsT,
    batch: Batch,
    layer: int,
    scan: Callable[[RowsT, Buffers], tuple[torch.Tensor, Buffers]],
) -> torch.Tensor:
    """Every row of the pass -> [T, ·]. `scan`: rows of a piece and the state before them -> what
    they give [n, ·] and the state after. A row sees rows of its own sequence only, and the layer's
    state is kept at each cut and at the end."""
    outs = []
    for sequence in batch.sequences:
        own = rows[sequence.start : sequence.stop]
        buffers = sequence.state.fixed(layer)
        start = 0
        for stop in (*sequence.cuts, len(own)):
            out, buffers = scan(own[start:stop], buffers)
            sequence.state.keep(layer, stop, buffers)
            outs.append(out)
            start = stop
    return outs[0] if len(outs) == 1 else torch.cat(outs)
