# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts in Triton: two launches for all rows of all experts that are there.

Checked in Triton's interpreter on a CPU, and compiled for GPUs that are not here; nothing is
claimed for them. Importing this module needs the `gpu` extra, and whether kernels are interpreted
(`TRITON_INTERPRET=1`) is decided at that moment.

    chosen [n, k]   --sort-->  positions: pairs (row, slot j), those of one expert side by side
    tiles           up to `rows_per_tile` positions of one expert each (`kernels.expert_tiles`)
    _first          inner [positions, I]   activation of gate x and up x, in the kernel
    _second         out [n · k, H] fp32    written at the pair, once
    combine         y = Σ_j weights[:, j] · out[:, j], in the order of j

Experts are found by address, 64 bits wide, in a table on the device: 0 is one that is elsewhere,
and its pairs are left alone. A row's bits depend on the size of tiles and on nothing beside it:
each sum runs over the inputs in steps of one size, and rows of a tile do not meet. Integers enter
products as they are, exact in bf16; scales and zeros are applied to fp32 sums, so weights have the
values that they have on a CPU. Kernels take more parameters than functions should: pointers and
constants are all they can be given.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from ..expert_tiles.triton import arrange
from .record import ExpertRecord, RecordMatrix

OUTPUTS_PER_TILE = 64
_COMBINED = 256  # columns that one program sums
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


def compute(
    x: torch.Tensor,
    chosen: torch.Tensor,
    addresses: torch.Tensor,
    record: ExpertRecord,
    rows_per_tile: int,
    out: torch.Tensor,
) -> None:
    """x [n, H] float, chosen [n, k] int64, addresses [E] int64 -> the pairs of `out` [n · k, H]
    fp32 whose expert has an address; others stay. Nothing waits for the device, and shapes follow
    from shapes alone, so that a graph can hold it."""
    assert out.is_contiguous() and chosen.dtype == torch.int64
    x = x.to(record.compute_dtype).contiguous()
    order, tiles = arrange(chosen, addresses, rows_per_tile)
    inner = x.new_empty(len(order), record.down.inputs)
    width, step = record.down.inputs, inputs_per_step(record)
    # Positions of experts that are elsewhere stay unwritten, and are not read.
    _first[(len(tiles), triton.cdiv(width, OUTPUTS_PER_TILE))](
        *(x, order, tiles, addresses, inner, chosen.shape[1], width),
        **first_constants(record, rows_per_tile, step),
    )
    _second[(len(tiles), triton.cdiv(record.down.outputs, OUTPUTS_PER_TILE))](
        *(inner, order, tiles, addresses, out),
        **matrix_constants(record, record.down, rows_per_tile, step),
    )


def combine(out: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """out [n · k, H] fp32, weights [n, k] fp32 -> [n, H] fp32, summed in the order of slots."""
    rows, slots = weights.shape
    mixed = out.new_empty(rows, out.shape[1])
    _combine[(rows, triton.cdiv(out.shape[1], _COMBINED))](
        *(out, weights.contiguous(), mixed), slots=slots, width=out.shape[1], block=_COMBINED
    )
    return mixed


def inputs_per_step(record: ExpertRecord) -> int:
    """Inputs that a sum takes at a time; of int4, those that share a scale."""
    if record.kind == "int4":
        return record.group
    return 32 if record.compute_dtype == torch.float32 else 64


def first_constants(record: ExpertRecord, rows_per_tile: int, step: int) -> Mapping[str, object]:
    constants = matrix_constants(record, record.up, rows_per_tile, step)
    names = {"activation": record.activation, "alpha": record.alpha, "limit": record.limit}
    return {**constants, **names}


def matrix_constants(
    record: ExpertRecord, matrix: RecordMatrix, rows_per_tile: int, step: int
) -> Mapping[str, object]:
    """What a kernel is compiled for."""
    return {
        "outputs": matrix.outputs,
        "inputs": matrix.inputs,
        "weights": matrix.weights,
        "scales": matrix.scales,
        "bias": -1 if matrix.bias is None else matrix.bias,
        "stride": matrix.stride,
        "kind": record.kind,
        "dtype": _TYPES[record.dtype],
        "bias_dtype": _TYPES[record.bias_dtype],
        "pack": record.packing.block,
        "paired": record.packing.paired,
        "rows": rows_per_tile,
        "columns": OUTPUTS_PER_TILE,
        "step": step,
        "wide": INTERPRETED,
    }


@triton.jit
def _record(address: tl.tensor) -> tl.tensor:
    """Its bytes; that they begin at a multiple of 16 lets loads be wide."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.uint8), bitcast=True), 16)


@triton.jit
def _weights(
    record: tl.tensor,
    output: tl.tensor,
    key: tl.tensor,
    inside: tl.tensor,
    inputs: tl.constexpr,
    weights: tl.constexpr,
    stride: tl.constexpr,
    kind: tl.constexpr,
    dtype: tl.constexpr,
    pack: tl.constexpr,
    paired: tl.constexpr,
    step: tl.constexpr,
) -> tl.tensor:
    """[inputs of a step, outputs of a tile] as factors of a product."""
    if kind == "dense":
        dense = (record + weights).to(tl.pointer_type(dtype), bitcast=True)
        return tl.load(dense + output[None, :] * stride + key[:, None], mask=inside, other=0.0)
    elif kind == "int8":
        values = (record + weights).to(tl.pointer_type(tl.int8), bitcast=True)
        tile = tl.load(values + output[None, :] * stride + key[:, None], mask=inside, other=0)
        return tile.to(tl.float32).to(tl.bfloat16)
    else:
        # Blocks of `pack` outputs: [K padded, pack / 2] bytes, two outputs in each.
        half: tl.constexpr = pack // 2
        lane = output % pack
        byte = lane // 2 if paired else lane % half
        shift = (lane % 2 if paired else lane // half) * 4
        padded = tl.cdiv(inputs, step) * step
        place = output // pack * (padded * half) + byte
        packed = record + weights
        tile = tl.load(packed + key[:, None] * half + place[None, :], mask=inside, other=0)
        tile = (tile.to(tl.int32) >> shift[None, :]) & 15
        return (tile - 8).to(tl.float32).to(tl.bfloat16)


@triton.jit
def _product(x: tl.tensor, tile: tl.tensor, total: tl.tensor, wide: tl.constexpr) -> tl.tensor:
    if wide:
        x, tile = x.to(tl.float32), tile.to(tl.float32)
    return tl.dot(x, tile, total, input_precision="ieee")


@triton.jit
def _add(
    total: tl.tensor,
    x: tl.tensor,
    record: tl.tensor,
    output: tl.tensor,
    known: tl.tensor,
    number: tl.tensor,
    inputs: tl.constexpr,
    weights: tl.constexpr,
    scales: tl.constexpr,
    stride: tl.constexpr,
    kind: tl.constexpr,
    dtype: tl.constexpr,
    pack: tl.constexpr,
    paired: tl.constexpr,
    step: tl.constexpr,
    wide: tl.constexpr,
) -> tl.tensor:
    """`total` [rows, outputs] fp32 and what step `number` of the inputs adds to it."""
    key = number * step + tl.arange(0, step)
    inside = (key[:, None] < inputs) & known[None, :]
    tile = _weights(
        record, output, key, inside, inputs, weights, stride, kind, dtype, pack, paired, step
    )
    if kind == "int4":
        pairs = (record + scales).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        at = (number * stride + output) * 2
        scale = tl.load(pairs + at, mask=known, other=0.0).to(tl.float32)
        zero = tl.load(pairs + at + 1, mask=known, other=0.0).to(tl.float32)
        sums = tl.sum(x.to(tl.float32), 1)
        part = _product(x, tile, tl.zeros_like(total), wide)
        return total + part * scale[None, :] + sums[:, None] * zero[None, :]
    else:
        return _product(x, tile, total, wide)


@triton.jit
def _finished(
    total: tl.tensor,
    record: tl.tensor,
    output: tl.tensor,
    known: tl.tensor,
    scales: tl.constexpr,
    bias: tl.constexpr,
    kind: tl.constexpr,
    bias_dtype: tl.constexpr,
) -> tl.tensor:
    """The product with what belongs to whole outputs."""
    if kind == "int8":
        each = (record + scales).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        total *= tl.load(each + output, mask=known, other=0.0).to(tl.float32)[None, :]
    if bias >= 0:
        added = (record + bias).to(tl.pointer_type(bias_dtype), bitcast=True)
        total += tl.load(added + output, mask=known, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def _activated(
    gate: tl.tensor,
    up: tl.tensor,
    activation: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
) -> tl.tensor:
    """See `kernels.activations`; tanh(z) is 2 · sigmoid(2 z) - 1."""
    if activation == "silu":
        return gate / (1.0 + tl.exp(-gate)) * up
    elif activation == "gelu_tanh":
        twice = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        return gate / (1.0 + tl.exp(-twice)) * up
    elif activation == "clamped_glu":
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        return gate / (1.0 + tl.exp(-alpha * gate)) * up
    else:
        gate = tl.maximum(gate, 0.0)
        return gate * gate


@triton.jit
def _first(
    x: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    addresses: tl.tensor,
    inner: tl.tensor,
    slots: tl.constexpr,
    width: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    weights: tl.constexpr,
    scales: tl.constexpr,
    bias: tl.constexpr,
    stride: tl.constexpr,
    kind: tl.constexpr,
    dtype: tl.constexpr,
    bias_dtype: tl.constexpr,
    pack: tl.constexpr,
    paired: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    step: tl.constexpr,
    wide: tl.constexpr,
    activation: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
) -> None:
    """One tile of positions, `columns` inner columns: both products and the activation."""
    tile = tl.program_id(0)
    first, stop = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    if first < stop:
        record = _record(tl.load(addresses + tl.load(tiles + tile * 3)))
        position = first + tl.arange(0, rows)
        mine = position < stop
        row = tl.load(order + position, mask=mine, other=0) // slots  # int64
        column = tl.program_id(1) * columns + tl.arange(0, columns)
        known = column < width
        gate = tl.zeros((rows, columns), dtype=tl.float32)
        up = tl.zeros((rows, columns), dtype=tl.float32)
        for number in range(0, tl.cdiv(inputs, step)):
            key = number * step + tl.arange(0, step)
            there = mine[:, None] & (key[None, :] < inputs)
            values = tl.load(x + row[:, None] * inputs + key[None, :], mask=there, other=0.0)
            gate = _add(
                *(gate, values, record, column, known, number),
                *(inputs, weights, scales, stride, kind, dtype, pack, paired, step, wide),
            )
            if outputs > width:
                up = _add(
                    *(up, values, record, column + width, known, number),
                    *(inputs, weights, scales, stride, kind, dtype, pack, paired, step, wide),
                )
        gate = _finished(gate, record, column, known, scales, bias, kind, bias_dtype)
        if outputs > width:
            up = _finished(up, record, column + width, known, scales, bias, kind, bias_dtype)
        made = _activated(gate, up, activation, alpha, limit)
        at = position.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(inner + at, made.to(inner.dtype.element_ty), mask=mine[:, None] & known[None, :])


@triton.jit
def _second(
    inner: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    addresses: tl.tensor,
    out: tl.tensor,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    weights: tl.constexpr,
    scales: tl.constexpr,
    bias: tl.constexpr,
    stride: tl.constexpr,
    kind: tl.constexpr,
    dtype: tl.constexpr,
    bias_dtype: tl.constexpr,
    pack: tl.constexpr,
    paired: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    step: tl.constexpr,
    wide: tl.constexpr,
) -> None:
    """One tile of positions, `columns` outputs of down, each row at its pair."""
    tile = tl.program_id(0)
    first, stop = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    if first < stop:
        record = _record(tl.load(addresses + tl.load(tiles + tile * 3)))
        position = first + tl.arange(0, rows)
        mine = position < stop
        column = tl.program_id(1) * columns + tl.arange(0, columns)
        known = column < outputs
        total = tl.zeros((rows, columns), dtype=tl.float32)
        for number in range(0, tl.cdiv(inputs, step)):
            key = number * step + tl.arange(0, step)
            there = mine[:, None] & (key[None, :] < inputs)
            at = position.to(tl.int64)[:, None] * inputs + key[None, :]
            total = _add(
                *(total, tl.load(inner + at, mask=there, other=0.0), record, column, known, number),
                *(inputs, weights, scales, stride, kind, dtype, pack, paired, step, wide),
            )
        total = _finished(total, record, column, known, scales, bias, kind, bias_dtype)
        pair = tl.load(order + position, mask=mine, other=0)  # int64
        at = pair[:, None] * outputs + column[None, :]
        tl.store(out + at, total, mask=mine[:, None] & known[None, :])


@triton.jit
def _combine(
    out: tl.tensor,
    weights: tl.tensor,
    mixed: tl.tensor,
    slots: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    known = column < width
    total = tl.zeros((block,), dtype=tl.float32)
    for slot in range(0, slots):
        pair = row * slots + slot
        part = tl.load(out + pair * width + column, mask=known, other=0.0)
        total += part * tl.load(weights + pair)
    tl.store(mixed + row * width + column, total, mask=known)


# Triton's interpreter knows no products of bf16: the same factors meet in fp32 there.
INTERPRETED = not isinstance(_combine, triton.JITFunction)
