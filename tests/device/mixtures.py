# SPDX-License-Identifier: Apache-2.0
"""One mixture by every way of serving it; whole layers fetched ahead; slots that come and go."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from freetoken_runtime import Engine, EngineConfig
from freetoken_runtime.batch import Form, RowGroup
from freetoken_runtime.config import read_host, resolve
from freetoken_runtime.device.mixture import DeviceExperts, Serving
from freetoken_runtime.device.model import DeviceSettings, load_on_device
from freetoken_runtime.kernels.experts.workers import Workers
from freetoken_runtime.random_weights import RandomWeights, random_model

from .block import (
    FORMS,
    Place,
    Report,
    Shape,
    apart,
    device_experts,
    host_records,
    routes,
    rows_of,
    small_spec,
    whole,
)
from .placement import FixedSplit

# On a CPU, products of bf16 and integers are rounded to bf16; on a device, sums stay fp32.
_BESIDE_A_CPU = {"float32": 1e-5, "bfloat16": 2e-2, "int8": 2e-2, "int4": 2e-2}


def mixtures(place: Place, report: Report) -> None:
    """Resident, offloaded and gathered: the same bits. Hybrid, and on the CPU: within rounding.
    Then a whole model: its logits, by way of an engine."""
    shape = Shape(2, place.size(32, 6), 2, place.size(512, 60), place.size(256, 36))
    few, workers = place.size(8, 3), Workers(1)
    for form in ("int4",) if place.interpreted else FORMS:
        records = host_records(place, shape, form)
        resident = device_experts(place, records, shape.layers * shape.experts)
        report.check(f"{form}: all are there", resident.fetch_all())
        ways = {
            "offloaded": device_experts(place, records, few, streams=False),
            "gathered": device_experts(place, records, few, gathers=True, streams=False),
            "ahead": device_experts(place, records, 3 * shape.experts // 2, per_chunk=3),
            "hybrid": device_experts(
                *(place, records, few), policy=FixedSplit(1), workers=workers, streams=False
            ),
        }
        expected = _outputs(place, resident, shape)
        for way, experts in ways.items():
            made = _outputs(place, experts, shape)
            if way == "hybrid":
                report.check(f"{form} hybrid computes", experts.counts.computed > 0)
                error = max(apart(a, b) for a, b in zip(made, expected, strict=True))
                report.check(f"{form} {way}", error <= _BESIDE_A_CPU[form], error)
            else:
                same = all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))
                report.check(f"{form} {way}: same bits", same)
        report.check(f"{form} ahead fetches ahead", ways["ahead"].counts.ahead > 0)
        cpu = device_experts(place, records, few, policy=FixedSplit(0), streams=False)
        error = max(apart(a, b) for a, b in zip(_outputs(place, cpu, shape), expected, strict=True))
        report.check(f"{form} on the CPU", error <= _BESIDE_A_CPU[form], error)
    _model(place, report)


def _outputs(place: Place, experts: DeviceExperts, shape: Shape) -> list[torch.Tensor]:
    """What passes of few, of many and of both kinds of rows give, layer by layer."""
    both = [RowGroup(0, 14, Form.MANY), RowGroup(14, 17, Form.FEW)]
    passes = [both, whole(1, Form.FEW), whole(200, Form.MANY)][: place.size(3, 1)]
    made = []
    for seed, parts in enumerate(passes):
        count = parts[-1].stop
        x = rows_of(shape, count, seed)
        for layer in range(shape.layers):
            made.append(experts.mix(layer, x, routes(shape, count, 10 * seed + layer), parts))
    return [x.cpu() for x in made]


def _model(place: Place, report: Report) -> None:
    """Logits of an engine whose experts are the device's: resident = offloaded to the bit, hybrid
    and the CPU's own within 1e-4 of the range."""
    spec, config = (
        small_spec(),
        resolve(EngineConfig(threads=1, prefill_chunk=48, ram_budget_bytes=1 << 28), read_host()),
    )
    ids = np.random.default_rng(0).integers(3, 200, 20).tolist()

    def logits(model: Any) -> torch.Tensor:
        engine = Engine(model, config)
        try:
            return engine.logits(ids)
        finally:
            engine.close()

    def on_device(budget_bytes: int, **serving: Any) -> torch.Tensor:
        source = RandomWeights(spec, 1)
        source.check()
        settings = DeviceSettings(budget_bytes, slots_per_chunk=2, serving=Serving(**serving))
        made = load_on_device(source, place.accelerator, settings)
        return logits(replace(made.model, content_hash="random-1"))

    resident = on_device(1 << 24)
    few = 4 * 28672
    offloaded = on_device(few, streams=False)
    report.check("model offloaded: same bits", torch.equal(offloaded, resident))
    span = float(resident.max() - resident.min())
    others = {
        "hybrid": on_device(few, policy=FixedSplit(1), streams=False),
        "on the CPU": logits(random_model(spec, 1)),
    }
    for name, made in others.items():
        error = float((made - resident).abs().max()) / span
        report.check(f"model {name}: error", error <= 1e-4, error)


def double_buffer(place: Place, report: Report) -> None:
    """A prefill of 2,000 rows with room for two layers: computing alone (C), reading alone (D),
    one after the other, and overlapped. The bits are the same."""
    shape = Shape(
        *(place.size(6, 2), place.size(64, 6), place.size(8, 2)),
        *(place.size(2048, 60), place.size(768, 36)),
    )
    rows = place.size(2000, 20)
    device = place.accelerator.device
    x = rows_of(shape, rows, 0).to(device)
    routed = [routes(shape, rows, layer) for layer in range(shape.layers)]

    def prefill(experts: DeviceExperts) -> list[torch.Tensor]:
        parts = whole(rows, Form.MANY)
        return [experts.mix(layer, x, routed[layer], parts) for layer in range(shape.layers)]

    for form in ("int8",) if place.interpreted else ("bfloat16", "int8", "int4"):
        records = host_records(place, shape, form)
        resident = device_experts(place, records, shape.layers * shape.experts)
        resident.fetch_all()
        room = 2 * shape.experts
        plain = device_experts(place, records, room, streams=False)
        ahead = device_experts(place, records, room)
        expected = prefill(resident)
        for name, experts in (("plain", plain), ("ahead", ahead)):
            same = all(torch.equal(a, b) for a, b in zip(prefill(experts), expected, strict=True))
            report.check(f"{form} {name}: same bits", same)
        before = ahead.counts
        prefill(ahead)
        once = ahead.counts.fetched - before.fetched <= shape.layers * shape.experts
        report.check(f"{form}: each expert is fetched at most once", once)
        compute = place.seconds(lambda: prefill(resident))  # noqa: B023
        overlapped = place.seconds(lambda: prefill(ahead))  # noqa: B023
        copies = shape.layers * shape.experts * records.form.layout.size_bytes
        reading = copies / _link_bytes_per_s(place)
        bound = max(compute, reading) + min(compute, reading) / shape.layers
        report.note(
            form,
            {
                "C": compute,
                "D": reading,
                "one after the other": place.seconds(lambda: prefill(plain)),  # noqa: B023
                "overlapped": overlapped,
                "over max + min / L": overlapped / bound,
            },
        )


def _link_bytes_per_s(place: Place) -> float:
    size = place.size(256 << 20, 1 << 20)
    source = place.accelerator.host_memory(size)
    target = torch.empty(size, dtype=torch.uint8, device=place.accelerator.device)
    return size / place.seconds(lambda: target.copy_(source, non_blocking=True))


def elastic(place: Place, report: Report) -> None:
    """Slots halved and doubled while a session decodes: what it gives is what it would have given,
    the budget holds, and whoever is in the table is where the table says."""
    shape = Shape(3, place.size(32, 6), 2, place.size(512, 60), place.size(256, 36))
    steps = place.size(120, 9)
    for form in ("bfloat16", "int4") if not place.interpreted else ("bfloat16",):
        records = host_records(place, shape, form)
        still = device_experts(place, records, shape.layers * shape.experts)
        moving = device_experts(place, records, place.size(32, 8), per_chunk=2)
        begun = time.perf_counter()
        sizes: list[int] = []
        for step in range(steps):
            if step % (steps // 3) == steps // 6:
                slots = (place.size(16, 4), place.size(64, 12), place.size(8, 2))[len(sizes)]
                budget = slots * records.record_bytes + 100
                moving.resize(budget)
                sizes.append(moving.slots.size_bytes)
                report.check(f"{form} budget {len(sizes)}", moving.slots.size_bytes <= budget)
                report.check(f"{form} table {len(sizes)}", _table_holds(moving))
            for layer in range(shape.layers):
                x, routed = rows_of(shape, 1, step), routes(shape, 1, 7 * step + layer)
                parts = whole(1, Form.FEW)
                made = moving.mix(layer, x, routed, parts)
                if not torch.equal(made, still.mix(layer, x, routed, parts)):
                    report.check(f"{form} step {step}, layer {layer}: same bits", False)
        report.check(f"{form}: resized three times", len(set(sizes)) == 3, sizes)
        report.note(f"{form}: seconds", time.perf_counter() - begun)


def _table_holds(experts: DeviceExperts) -> bool:
    """Every address of the table is that of the expert's own bytes."""
    size, slots = experts.records.form.layout.size_bytes, experts.slots
    experts.slots.publish()
    place_of = {key: slot for key in slots.keys() if (slot := slots.find(key)) is not None}
    for layer, row in enumerate(slots.table.tolist()):
        for expert, address in enumerate(row):
            slot = place_of.get((layer, expert))
            if (slot.address if slot else 0) != address:
                return False
            own = experts.records.bytes_of(layer, expert)[:size]
            if slot is not None and not torch.equal(slot.memory[:size].cpu(), own):
                return False
    return True
