# SPDX-License-Identifier: Apache-2.0
"""The mixture of experts as a feed-forward: router, experts one by one, what is shared.

Router and gate of the shared expert are one fp32 matrix, whatever the quantisation. Experts are
asked of `Moe.experts` by their indices and by nothing else, wherever their weights lie.
"""

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch

from ..batch import Form, RowGroup
from ..kernels.activations import sigmoid
from ..kernels.experts.cpu import Demand, Task, mix, pad_rows
from ..kernels.experts.workers import Workers
from ..specs.moe import MoeSpec, RouterSpec
from .expert import Expert, Experts, ResidentExperts, Served, expert_activation
from .linear import DenseLinear, Linear
from .mlp import Mlp
from .mlp import build as build_mlp
from .parts import Parts
from .routing import Routes, margins, route
from .rows import Rows

_ROWS = 256  # that a router sees at once

Observer = Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class Router:
    """One fp32 matrix whose first outputs are the experts' logits; one more, if there is one, gates
    the shared expert."""

    spec: RouterSpec
    linear: DenseLinear
    correction: torch.Tensor | None  # [E] fp32

    def __call__(
        self, x: torch.Tensor, groups: Sequence[RowGroup]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, H] fp32 -> logits [T, E] and gate [T, 0 or 1], a row's bits its own."""
        if len(groups) == 1:
            outputs = self._logits(x, groups[0].form)
        else:
            outputs = torch.cat([self._logits(x[g.start : g.stop], g.form) for g in groups])
        experts = self.spec.num_experts
        return outputs[:, :experts], outputs[:, experts:]

    def _logits(self, rows: torch.Tensor, form: Form) -> torch.Tensor:
        if form is Form.FEW and self.linear.few_rows_batch:
            return self.linear.few(rows)
        parts = torch.split(rows, _ROWS)  # padded by themselves: little is copied for it
        return torch.cat([self.linear.many(pad_rows(part))[: len(part)] for part in parts])

    def likely(self, x: torch.Tensor) -> list[int]:
        """The experts that rows like x [T, H] choose, the likeliest first."""
        logits = self._logits(x, Form.FEW)[:, : self.spec.num_experts]
        best_first = route(logits, self.spec, self.correction).chosen.T.flatten().tolist()
        return [expert for expert, _ in Counter(best_first).most_common()]

    def routes(self, logits: torch.Tensor) -> Routes:
        return route(logits, self.spec, self.correction)

    def margins(self, logits: torch.Tensor) -> torch.Tensor:
        return margins(logits, self.spec, self.correction)

    @property
    def size_bytes(self) -> int:
        return self.linear.size_bytes + (0 if self.correction is None else self.correction.nbytes)


@runtime_checkable
class Foresight(Protocol):
    """What else experts that are fetched want to know."""

    def foresees(self, rows: int) -> bool:
        """Whether to tell, for passes of so many rows."""

    def likely(self, experts: Sequence[int]) -> None:
        """What will probably be chosen, the likeliest first."""


@dataclass(frozen=True)
class Latent:
    """The narrower rows that routed experts work on."""

    down: Linear
    up: Linear


class Moe:
    """Σ_j weight_j · expert_j(x) + shared(x). Immutable but for `observer`, which, if set, receives
    the margins [T] of each call's routing (`routing.margins`), rows in the order of the batch (only
    tests set it), and `workers`, which the decoder gives to all its mixtures."""

    def __init__(
        self,
        router: Router,
        experts: Experts,
        shared: Mlp | None = None,
        latent: Latent | None = None,
    ) -> None:
        self.router = router
        self.experts = experts
        self.shared = shared
        self.latent = latent
        self.observer: Observer | None = None
        self.workers = Workers()
        self._foresight = experts if isinstance(experts, Foresight) else None

    def __call__(self, x: torch.Tensor, groups: Sequence[RowGroup]) -> torch.Tensor:
        """x [T, H] fp32 -> [T, H] fp32."""
        logits, gate = self.router(x, groups)
        if self.observer is not None:
            self.observer(self.router.margins(logits))
        rows = x if self.latent is None else self.latent.down(x, groups).float()
        routes = self.router.routes(logits)
        out = self._mix(rows, routes, _by_form(groups))
        if self.latent is not None:
            out = self.latent.up(out, groups).float()
        if self.shared is None:
            return out
        shared = self.shared(x, groups).float()
        return out.add_(shared * sigmoid(gate) if gate.shape[1] else shared)

    def foresee(self, x: torch.Tensor) -> None:
        """Tell where the experts come from which ones rows like x [T, H] would choose: those of an
        earlier layer, as this one's input is not known yet. What is computed does not change."""
        if self._foresight is not None:
            self._foresight.likely(self.router.likely(x))

    def foresees(self, rows: int) -> bool:
        """Whether `foresee` is of use in passes of so many rows."""
        return self._foresight is not None and self._foresight.foresees(rows)

    def _mix(self, x: torch.Tensor, routes: Routes, parts: Sequence[RowGroup]) -> torch.Tensor:
        """Every expert once, for the rows of all parts: it may have come from far."""
        rows_of = [Rows(x[part.start : part.stop]) for part in parts]

        def compute(served: Served, numbers: torch.Tensor | None, part: int) -> torch.Tensor:
            if served.prepare is not None:
                served.prepare()
            return served.expert(rows_of[part].pick(numbers), parts[part].form)

        def serve(wanted: Sequence[Demand]) -> Generator[Task]:
            for served in self.experts.serve(wanted, len(x)):
                yield Task(served.index, partial(compute, served), served.release)

        ends = [part.stop for part in parts]
        fetched = self._foresight is not None and any(part.form is not Form.FEW for part in parts)
        with self.workers.instead_of_team() if fetched else nullcontext():
            return mix(x.shape[1], routes.chosen, routes.weights, serve, ends, self.workers)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Those whose FEW form a neighbour could change: router and experts see to it themselves,
        padding rows where their kernel needs it."""
        shared = () if self.shared is None else self.shared.linears
        latent = () if self.latent is None else (self.latent.down, self.latent.up)
        return (*shared, *latent)

    @property
    def size_bytes(self) -> int:
        linears = sum(linear.size_bytes for linear in self.linears)
        return self.router.size_bytes + self.experts.size_bytes + linears


def _by_form(groups: Sequence[RowGroup]) -> list[RowGroup]:
    """Neighbouring groups of one form as one: an expert sees the rows of all of them at once."""
    merged: list[RowGroup] = []
    for group in groups:
        if merged and merged[-1].form is group.form:
            merged[-1] = RowGroup(merged[-1].start, group.stop, group.form)
        else:
            merged.append(group)
    return merged


def build(spec: MoeSpec, parts: Parts) -> Moe:
    return Moe(
        router=_build_router(spec, parts),
        experts=parts.experts(spec) or _build_experts(spec, parts),
        shared=None if spec.shared is None else build_mlp(spec.shared, parts.within("shared")),
        latent=None
        if spec.latent is None
        else Latent(parts.linear("latent_down"), parts.linear("latent_up")),
    )


def _build_experts(spec: MoeSpec, parts: Parts) -> ResidentExperts:
    activate = expert_activation(spec.expert)
    every = (parts.within(f"experts.{index}") for index in range(spec.router.num_experts))
    return ResidentExperts(
        tuple(
            Expert(part.linear(*spec.expert.inputs), part.linear("down"), activate)
            for part in every
        )
    )


def _build_router(spec: MoeSpec, parts: Parts) -> Router:
    weight = parts.tensor("router")
    if spec.shared_gate:
        weight = torch.cat((weight, parts.tensor("shared_router")))
    return Router(
        spec=spec.router,
        linear=DenseLinear(weight, parts.tensor("router.bias") if spec.router.bias else None),
        correction=parts.tensor("router.correction") if spec.router.correction else None,
    )
