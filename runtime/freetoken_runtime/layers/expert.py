# SPDX-License-Identifier: Apache-2.0
"""One routed expert, and who hands experts out."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..batch import Form
from ..kernels.experts.cpu import Demand, clamped_glu, pad_rows
from ..specs.moe import ClampedGlu, ExpertSpec
from .linear import PARTS, Linear
from .mlp import Activate, activation
from .rows import PickedRows, Rows


@dataclass(frozen=True)
class Expert:
    """One routed expert. `up` yields gate and up side by side where the spec has a gate, `activate`
    makes the inner row of what it yields."""

    up: Linear
    down: Linear
    activate: Activate

    def __call__(self, rows: PickedRows, form: Form) -> torch.Tensor:
        """rows [m, H], m >= 1 -> [m, H] fp32 or bf16; a row's bits do not depend on m."""
        if form is Form.FEW and self.up.few_rows_batch and self.down.few_rows_batch:
            outer = self.up.few(rows.rounded(self.up.few_dtype))
            return self.down.few(self.activate(outer.float()))
        if form in PARTS and self.up.has_integer_forms and self.down.has_integer_forms:
            inner = self.activate(self.up.many_integers(rows, PARTS[form]))
            return self.down.many_integers(Rows(inner).pick(None), PARTS[form])
        inner = self.activate(self.up.apply(form, pad_rows(rows.plain())).float())
        return self.down.apply(form, pad_rows(inner))[: len(rows)]

    @property
    def size_bytes(self) -> int:
        return self.up.size_bytes + self.down.size_bytes


@dataclass(frozen=True)
class Served:
    """An expert that may be used until it is released, once, by any thread. `prepare`: to be called
    before each use, by who uses it; it writes the weights that `expert` computes with."""

    index: int
    expert: Expert
    release: Callable[[], None]
    prepare: Callable[[], None] | None = None


class Experts(Protocol):
    """The routed experts of one layer."""

    def serve(self, wanted: Sequence[Demand], rows: int) -> Iterable[Served]:
        """Each of the experts `wanted` once, in an order that suits: those at hand first. The next
        one may have to wait until others are released. `rows`: of the whole pass, by which it is
        judged what later layers will want."""

    @property
    def size_bytes(self) -> int:
        """Bytes in memory that are this layer's alone."""


@dataclass(frozen=True)
class ResidentExperts:
    """All of them, in memory."""

    every: tuple[Expert, ...]

    def serve(self, wanted: Sequence[Demand], rows: int) -> Iterator[Served]:
        for demand in wanted:
            yield Served(demand.expert, self.every[demand.expert], _stays)

    @property
    def size_bytes(self) -> int:
        return sum(expert.size_bytes for expert in self.every)


def _stays() -> None:
    """Nothing waits for what is never given away."""


def expert_activation(spec: ExpertSpec) -> Activate:
    """What `up` yields [m, 2I or I] fp32, which may be overwritten -> [m, I]."""
    kind = spec.activation
    if isinstance(kind, ClampedGlu):
        return lambda rows: clamped_glu(rows, kind)
    act = activation(kind, spec.intermediate_size)
    if not spec.gated:
        return act

    def gated(rows: torch.Tensor) -> torch.Tensor:
        gate, up = rows.chunk(2, -1)
        return act(gate).mul_(up)

    return gated
