# SPDX-License-Identifier: Apache-2.0
"""What one forward pass sees: flattened rows of several sequences.

    ids / positions   [T]      the rows of every sequence, one sequence after another
    sequences                  which rows belong to which state (mixers work per sequence)
    groups                     which kernel form serves which rows (linear layers see groups)

A row's kernel form follows from *its own* sequence's rows in this pass, never from the batch's, so
that a neighbour changes no token. Rows with a form for many come first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch


class Form(Enum):
    """Kernel form of a group of rows: the packed form for few, or a GEMM over many. Weights that
    are not integers know one form for many."""

    MANY = "many"  # activations as they are
    FEW = "few"
    MANY_ROUNDED = "many, activations in bfloat16"
    MANY_INT16 = "many, activations in two parts of int8"
    MANY_INT8 = "many, activations in int8"


class LayerState(Protocol):
    """What a mixer may do with a sequence's state during a forward pass.

    The runner calls `begin(n)` before the pass and `commit(ids)` after it; in between `length` is
    the number of rows before the pass. Rows given to `write` become visible to `pieces(...,
    new=True)` at once and permanent with the commit.
    """

    @property
    def length(self) -> int: ...

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store this pass's rows of a layer. k: [n, Hkv, Dk], v: [n, Hkv, Dv]; a layer that keeps
        one buffer only passes v with Dv = 0."""

    def pieces(self, layer: int, *, new: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views of the layer's (k, v) rows, each [S_i, Hkv, D] with S_i >= 1, in order: the rows
        before this pass, and with `new` also this pass's rows (in the last piece). Valid until
        the next `begin`. Empty at the start of a sequence."""

    def fixed(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The layer's overwritten buffers before this pass, in the order and shapes of
        `StateSpec.overwritten`, fp32; zeros at the start of a sequence. Read only: an anchor or
        another sequence may hold the same memory."""

    def keep(self, layer: int, rows: int, buffers: tuple[torch.Tensor, ...]) -> None:
        """The layer's overwritten buffers after the first `rows` rows of this pass: called once
        for every cut and once for all rows, in that order. The tensors belong to the state from
        now on and must not be changed any more."""


@dataclass(frozen=True)
class SequenceRows:
    """Rows [start, stop) of the batch belong to this sequence. `cuts`: numbers of its rows,
    ascending, each within 1 .. stop - start - 1, after which a scan has to stop and hand over its
    state (`LayerState.keep`): its grid restarts there."""

    state: LayerState
    start: int
    stop: int
    cuts: tuple[int, ...] = ()


@dataclass(frozen=True)
class RowGroup:
    """Rows [start, stop) that linear layers may compute together, in one kernel form."""

    start: int
    stop: int
    form: Form


@dataclass(frozen=True)
class Batch:
    """Input of one forward pass; see the module's table."""

    ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    sequences: Sequence[SequenceRows]
    groups: Sequence[RowGroup]
