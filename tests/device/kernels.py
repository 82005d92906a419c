# SPDX-License-Identifier: Apache-2.0
"""The kernels against fp64 products of the same values, and beyond 2^31."""

from dataclasses import replace
from functools import partial

import torch

from freetoken_runtime.batch import Form
from freetoken_runtime.device.host_records import HostRecords, record_of
from freetoken_runtime.device.mixture import ROWS_PER_TILE
from freetoken_runtime.kernels.expert_tiles import reference
from freetoken_runtime.kernels.experts.record import ExpertRecord, RecordMatrix
from freetoken_runtime.kernels.int4_linear import cpu as int4
from freetoken_runtime.specs.moe import ClampedGlu, ExpertSpec

from .block import FORMS, Place, Report, Shape, apart, generator, host_records, routes, rows_of

_CLAMPED = ClampedGlu(1.702, 2.0)
_EXACT = 1e-5
# Rounding an inner value to bf16 falls to the other side where sums in fp32 and fp64 differ: now
# and then where sums are long, and not at all with the few inputs of an interpreted run.
_ROUNDED = 1e-3


def kernels(place: Place, report: Report) -> None:
    """Every form of weights and every activation, few rows and many; a row's bits are the same
    whatever rows stand beside it and wherever among them it stands."""
    _arranged(place, report)
    sizes = (place.size(2048, 60), place.size(768, 84))
    shape = Shape(1, place.size(8, 5), 2, *sizes)
    specs = {
        "silu": ExpertSpec(shape.inner),
        "clamped_glu": ExpertSpec(shape.inner, _CLAMPED, bias=True),
        "relu_squared": ExpertSpec(shape.inner, "relu_squared"),
    }
    for form in FORMS:
        for activation, spec in specs.items():
            records = host_records(place, shape, form, spec)
            record = record_of(records.form)
            _one(place, report, shape, f"{form} {activation}", records, record)
        gelu = replace(record_of(host_records(place, shape, form).form), activation="gelu_tanh")
        _one(place, report, shape, f"{form} gelu_tanh", host_records(place, shape, form), gelu)


def _arranged(place: Place, report: Report) -> None:
    """Tiles of few rows: those of the reference, and the others empty."""
    from freetoken_runtime.kernels.expert_tiles import triton as kernel

    device, same = place.accelerator.device, True
    for rows, slots, experts, per_tile in (
        (1, 1, 1, 16),
        (3, 2, 5, 16),
        (16, 8, 12, 16),
        (20, 4, 7, 2),
    ):
        drawn = torch.rand(rows, experts, generator=generator(rows)).topk(slots, -1).indices
        there = torch.randint(0, 3, (experts,), generator=generator(experts)) * 4096
        args = (drawn.to(device), there.to(device), per_tile)
        (order, tiles), (expected, cut) = kernel.arrange(*args), reference.arrange(*args)
        filled = cut[:, 1] < cut[:, 2]
        same = same and torch.equal(order, expected) and torch.equal(tiles[filled], cut[filled])
        same = same and tiles.shape == cut.shape and not bool(tiles[~filled].any())
    report.check("arranged as the reference", same)


def _one(
    place: Place,
    report: Report,
    shape: Shape,
    name: str,
    records: HostRecords,
    record: ExpertRecord,
) -> None:
    memory = [records.bytes_of(0, e).to(place.accelerator.device) for e in range(shape.experts)]
    elsewhere = shape.experts - 1  # its pairs stay as they are
    addresses = torch.tensor([m.data_ptr() for m in memory[:-1]] + [0]).to(memory[0].device)
    for form, count in ((Form.FEW, 3), (Form.MANY, place.size(300, 20))):
        if place.interpreted and form is Form.MANY and not name.endswith("silu"):
            continue
        x, routed = rows_of(shape, count, 3), routes(shape, count, 4)
        run = partial(_run, record, addresses, ROWS_PER_TILE[form])
        made, at = run(x, routed.chosen), f"{name} {form.value}"
        served = routed.chosen != elsewhere
        report.check(f"{at}: others are left", bool(made[~served].isnan().all()))
        expected = _products(place, records, record, x, routed.chosen)
        error = apart(made[served], expected[served])
        exact = place.interpreted or record.kind == "dense" and record.dtype is torch.float32
        report.check(f"{at}: error", error <= (_EXACT if exact else _ROUNDED), error)
        others = torch.where(torch.arange(count)[:, None] == 1, x, 3 * x.roll(1, 0))
        same = torch.equal(run(others, routed.chosen)[1].nan_to_num(), made[1].nan_to_num())
        report.check(f"{at}: bits beside other rows", same)
        if not place.interpreted:  # rows of numpy's products know their place
            some = torch.randperm(count, generator=generator(5))[: max(1, count // 3)]
            alone = run(x[some], routed.chosen[some])
            same = torch.equal(alone.nan_to_num(), made[some].nan_to_num())
            report.check(f"{at}: bits at other places", same)
        _check_sum(report, at, made.nan_to_num().to(addresses.device), routed.weights)


def _run(
    record: ExpertRecord,
    addresses: torch.Tensor,
    rows_per_tile: int,
    x: torch.Tensor,
    chosen: torch.Tensor,
) -> torch.Tensor:
    """[n, k, H] on the host, NaN where nothing was written."""
    from freetoken_runtime.kernels.experts import triton as kernel

    device = addresses.device
    out = torch.full((chosen.numel(), x.shape[1]), torch.nan, device=device)
    kernel.compute(x.to(device), chosen.to(device), addresses, record, rows_per_tile, out)
    return out.view(*chosen.shape, -1).cpu()


def _check_sum(report: Report, at: str, made: torch.Tensor, weights: torch.Tensor) -> None:
    from freetoken_runtime.kernels.experts import triton as kernel

    weights = weights.to(made.device)
    mixed = kernel.combine(made.view(-1, made.shape[-1]), weights)
    error = apart(mixed, (made.double() * weights[..., None].double()).sum(1))
    report.check(f"{at}: error of the sum", error <= 1e-6, error)


def _products(
    place: Place,
    records: HostRecords,
    record: ExpertRecord,
    x: torch.Tensor,
    chosen: torch.Tensor,
) -> torch.Tensor:
    """[n, k, H] in fp64, from the values in the records; rows rounded where the kernel does it."""
    expected = torch.zeros(*chosen.shape, x.shape[1], dtype=torch.float64)
    for expert in sorted(set(chosen.reshape(-1).tolist())):
        rows, slots = (chosen == expert).nonzero(as_tuple=True)
        tensors = records.form.tensors(records.bytes_of(0, expert).numpy().data)
        values = x[rows].to(record.compute_dtype).double()
        at = "gate up" if record.gated else "up"
        inner = _activated(record, _linear(record, record.up, at, tensors, values)).float()
        if place.interpreted and record.compute_dtype is torch.bfloat16:
            inner = (inner.view(torch.int32) & -65536).view(torch.float32)  # it is cut off there
        inner = inner.to(record.compute_dtype).double()
        expected[rows, slots] = _linear(record, record.down, "down", tensors, inner)
    return expected


def _linear(
    record: ExpertRecord,
    matrix: RecordMatrix,
    at: str,
    tensors: dict[str, torch.Tensor],
    values: torch.Tensor,
) -> torch.Tensor:
    if record.kind == "dense":
        weight = tensors[f"{at}.weight"].double()
    elif record.kind == "int8":
        steps = tensors[f"{at}.values"][:, : matrix.inputs].double()
        weight = steps * tensors[f"{at}.scales"].double()[:, None]
    else:
        fields = (tensors[f"{at}.packed"], tensors[f"{at}.scales_zeros"])
        packed = int4.PackedInt4(*fields, record.group, matrix.outputs, matrix.inputs)
        weight = int4.dequantise(packed, slice(0, matrix.outputs)).double()
    made = values @ weight.t()
    return made + tensors[f"{at}.bias"].double() if f"{at}.bias" in tensors else made


def _activated(record: ExpertRecord, made: torch.Tensor) -> torch.Tensor:
    if record.activation == "relu_squared":
        return made.clamp(min=0) ** 2
    gate, up = made.chunk(2, -1)
    if record.activation == "clamped_glu":
        gate, up = gate.clamp(max=record.limit), up.clamp(-record.limit, record.limit) + 1
        return gate * torch.sigmoid(record.alpha * gate) * up
    if record.activation == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    return torch.nn.functional.silu(gate) * up


def large(place: Place, report: Report) -> None:
    """Rows of x and of the result beyond 2^31 elements, a record beyond 2^31 bytes of its chunk:
    the last rows have the bits that they have by themselves."""
    from freetoken_runtime.kernels.experts import triton as kernel

    device = place.accelerator.device
    shape = Shape(1, 2, 1, place.size(4096, 24), 64)
    records = host_records(place, shape, "bfloat16")
    far = torch.empty(place.size(3 << 30, 1 << 16), dtype=torch.uint8, device=device)
    size = records.record_bytes
    places = [far[:size], far[-size:]]
    for expert, memory in enumerate(places):
        memory.copy_(records.bytes_of(0, expert))
    addresses = torch.tensor([memory.data_ptr() for memory in places]).to(device)
    count = place.size((1 << 31) // 4096 + 40, 70)
    tail = place.size(100, 7)
    x = torch.zeros(count, shape.hidden, device=device)
    x[-tail:] = rows_of(shape, tail, 1).to(device)
    chosen = (torch.arange(count, device=device) % 2)[:, None]
    report.note("elements", x.numel())
    if not place.interpreted:
        report.check("beyond 2^31", x.numel() > 1 << 31)

    def run(rows: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        out = torch.full((len(rows), shape.hidden), torch.nan, device=device)
        record = record_of(records.form)
        kernel.compute(rows, of, addresses, record, ROWS_PER_TILE[Form.MANY], out)
        weights = torch.ones(len(rows), 1, device=device)
        return kernel.combine(out, weights)[-tail:].cpu()

    alone = run(x[-tail:].clone(), chosen[-tail:].clone())
    report.check(
        "finite and not zero", bool(alone.isfinite().all()) and float(alone.abs().max()) > 0
    )
    error = apart(run(x, chosen), alone)
    report.check("same bits", error <= (1e-6 if place.interpreted else 0.0), error)
