# SPDX-License-Identifier: Apache-2.0
"""Decode steps as graphs: what they give is what plain calls give, also after slots have moved."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from freetoken_runtime.batch import Form
from freetoken_runtime.device.graphs import Part, StepGraphs
from freetoken_runtime.device.mixture import DeviceExperts
from freetoken_runtime.layers.routing import Routes

from .block import Place, Report, Shape, device_experts, generator, host_records, whole


@dataclass
class Step:
    """A step of a model that is norms, routers and experts. Tensors stay where they are."""

    experts: DeviceExperts
    shape: Shape
    rows: int
    device: torch.device
    routers: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape, made = self.shape, generator(11)
        for _ in range(shape.layers):
            drawn = torch.randn(shape.hidden, shape.experts, generator=made) / shape.hidden**0.5
            self.routers.append(drawn.to(self.device))
        size = (self.rows, shape.hidden)
        self.x, self.normed, self.mixed = torch.zeros(3, *size, device=self.device).unbind()
        chosen = torch.zeros(self.rows, shape.top_k, dtype=torch.int64, device=self.device)
        self.routes = Routes(chosen, torch.zeros(chosen.shape, device=self.device))

    @property
    def memory(self) -> list[torch.Tensor]:
        routed = [self.routes.chosen, self.routes.weights, self.experts.slots.table]
        return [self.x, self.normed, self.mixed, *routed, *self.routers]

    def parts(self, *, resident: bool) -> list[Part]:
        """Pieces around breaks, or, where every expert has its slot, one piece."""
        made = []
        for layer in range(self.shape.layers):
            serve = self._serve_resident if resident else self._serve
            made += [Part(partial(self._route, layer), True), Part(partial(serve, layer), resident)]
        made.append(Part(self._add, True))
        return [Part(partial(_run_all, made), True)] if resident else made

    def _add(self) -> None:
        self.x.add_(self.mixed)
        self.mixed.zero_()

    def _route(self, layer: int) -> None:
        self._add()
        norm = self.x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        torch.mul(self.x, norm, out=self.normed)
        best = (self.normed @ self.routers[layer]).topk(self.shape.top_k, -1)
        self.routes.chosen.copy_(best.indices)
        self.routes.weights.copy_(best.values.softmax(-1))

    def _serve(self, layer: int) -> None:
        parts = whole(self.rows, Form.FEW)
        self.mixed.copy_(self.experts.mix(layer, self.normed, self.routes, parts))

    def _serve_resident(self, layer: int) -> None:
        routes = self.routes
        self.mixed.copy_(
            self.experts.mix_resident(layer, self.normed, routes.chosen, routes.weights, Form.FEW)
        )


def _run_all(parts: Sequence[Part]) -> None:
    for part in parts:
        part.run()


def graphs(place: Place, report: Report) -> None:
    """200 steps, plain and as graphs, piece by piece around experts that are fetched, and whole
    where all are there. In the middle slots go: nothing is captured again."""
    shape = Shape(3, place.size(32, 6), 2, place.size(512, 60), place.size(256, 36))
    records = host_records(place, shape, "bfloat16")
    every = shape.layers * shape.experts
    for resident in (False, True):
        name = "resident" if resident else "offloaded"
        slots = every if resident else place.size(24, 6)
        for rows in (2,) if place.interpreted else (1, 4):
            still = device_experts(place, records, slots, per_chunk=2, streams=False)
            moving = device_experts(place, records, slots, per_chunk=2, streams=False)
            if resident:
                assert still.fetch_all() and moving.fetch_all()
            plain = Step(still, shape, rows, place.accelerator.device)
            captured = Step(moving, shape, rows, place.accelerator.device)
            found = StepGraphs(place.accelerator)
            same, moved = _run(place, (plain, captured), found, resident=resident)
            report.check(f"{name}, {rows} rows: same bits", same)
            report.check(f"{name}, {rows} rows: captured once", found.captures == 1)
            report.check(f"{name}, {rows} rows: slots moved", moved)


def _run(
    place: Place, steps: tuple[Step, Step], graphs: StepGraphs, *, resident: bool
) -> tuple[bool, bool]:
    """Whether all states are equal; whether an expert's address changed on the way."""
    plain, captured = steps
    count, same = place.size(200, 5), True
    ways = [step.parts(resident=resident) for step in steps]
    slots, moved = captured.experts.slots, False
    for number in range(count):
        token = torch.randn(plain.x.shape, generator=generator(number)).to(plain.device)
        for step in steps:
            step.x.mul_(0.5).add_(token)
        if number == count // 2:
            slots.publish()
            before = slots.table.clone()
            size = slots.size_bytes
            captured.experts.resize(size // 2)
            if resident:
                captured.experts.resize(size)
                assert captured.experts.fetch_all()
            moved = not torch.equal(before, slots.table)
        _run_all(ways[0])
        graphs.run(plain.rows, ways[1], captured.memory)
        same = same and torch.equal(plain.x, captured.x) and bool(plain.x.isfinite().all())
    return same, moved
