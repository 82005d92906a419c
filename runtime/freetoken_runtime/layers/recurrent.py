# SPDX-License-Identifier: Apache-2.0
"""What every recurrent mixer does around its recurrence: each sequence by itself, cut where the
state has to be handed over."""

from collections.abc import Callable

import torch

from ..batch import Batch

Buffers = tuple[torch.Tensor, ...]
# Rows of a piece [n, ·] and the state before them -> what they give [n, ·] and the state after.
Scan = Callable[[torch.Tensor, Buffers], tuple[torch.Tensor, Buffers]]


def scan_sequences(rows: torch.Tensor, batch: Batch, layer: int, scan: Scan) -> torch.Tensor:
    """Every row of the pass [T, ·] -> [T, ·]. A row sees rows of its own sequence only, and the
    layer's state is kept at each cut and at the end."""
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
