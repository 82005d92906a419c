# SPDX-License-Identifier: Apache-2.0
"""int4 weights: torch's packed op for few rows; for many, the packed bytes are taken apart again,
dequantised and given to an fp32 GEMM, so that weights are held once.

Where torch puts a nibble depends on the instruction set; `byte_layout` finds out by packing a
known matrix. N is padded to whole blocks, K to whole groups.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.nn.functional import pad

from ...errors import UnsupportedQuantization
from ..dense_linear.cpu import linear
from ..integers import Int4Values
from ..working_memory import empty

BLOCK = 64  # a multiple of every known block of outputs
_pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default
_op = torch._weight_int4pack_mm_for_cpu


@dataclass(frozen=True)
class ByteLayout:
    """Outputs come in blocks; the two nibbles of a byte are outputs half a block apart, or (if
    `paired`) neighbours."""

    block: int
    paired: bool

    @property
    def name(self) -> str:
        """For files: bytes of one layout are not those of another."""
        return f"{self.block} {'pairs' if self.paired else 'halves'}"


@dataclass(frozen=True)
class PackedInt4:
    packed: torch.Tensor  # [N padded, K padded / 2] uint8, laid out by torch
    scales_zeros: torch.Tensor  # [K padded / size, N padded, 2] bf16
    size: int
    outputs: int
    inputs: int

    @property
    def size_bytes(self) -> int:
        return self.packed.nbytes + self.scales_zeros.nbytes


def pack(weight: Int4Values) -> PackedInt4:
    """UnsupportedQuantization if this machine's byte layout is not known."""
    byte_layout()
    outputs = len(weight.values)
    extra = -outputs % BLOCK
    padded = pad(weight.values, (0, 0, 0, extra))
    # The op wants int32: in slices of whole blocks, as blocks of outputs lie one after another.
    packed = torch.cat([_pack(rows.int(), 1) for rows in torch.split(padded, 16 * BLOCK)])
    pairs = torch.stack((weight.scales, weight.zeros), -1)  # [N, K / size, 2]
    scales_zeros = pad(pairs, (0, 0, 0, 0, 0, extra)).transpose(0, 1).contiguous()
    return PackedInt4(packed, scales_zeros, weight.size, outputs, weight.inputs)


def few(x: torch.Tensor, weight: PackedInt4) -> torch.Tensor:
    """x [n, K] of any float dtype, rounded to bf16 -> [n, N] bf16."""
    rounded = x.bfloat16()
    padding = 2 * weight.packed.shape[1] - weight.inputs
    if padding:
        rounded = pad(rounded, (0, padding))
    out: torch.Tensor = _op(rounded, weight.packed, weight.size, weight.scales_zeros)
    return out if weight.outputs == out.shape[1] else out[:, : weight.outputs]


def dequantise(weight: PackedInt4, rows: slice) -> torch.Tensor:
    """Rows [start, stop) of W as fp32 [stop - start, K], start a multiple of 64; exact but for one
    fp32 rounding of each weight. An input's outputs lie side by side, as they do in the packed
    bytes (turning them takes longer)."""
    stop = min(rows.stop, weight.outputs)
    padded = slice(rows.start, stop + -stop % BLOCK)
    packed = weight.packed[padded]
    turned = empty(2 * packed.shape[1], len(packed))  # [K padded, N padded]
    _unpack(packed, byte_layout(), turned)
    # [K padded / size, 1, N padded] each
    scales, zeros = weight.scales_zeros[:, padded].permute(2, 0, 1).float().contiguous()[:, :, None]
    groups = turned.view(-1, weight.size, len(packed))
    torch.addcmul(zeros, groups, scales, out=groups)
    dense = turned[: weight.inputs, : stop - rows.start]
    return (dense if dense.is_contiguous() else dense.contiguous()).t()


def many_rounded(x: torch.Tensor, weight: PackedInt4, rows: slice) -> torch.Tensor:
    """x [n, K] bf16 -> [n, stop - start] fp32. Here the weights are rounded to bf16 as well: a
    group's scale does not come out of a sum over all of K."""
    turned = dequantise(weight, rows).t()
    return linear(x, empty(*turned.shape, dtype=torch.bfloat16).copy_(turned).t()).float()


@lru_cache(maxsize=1)
def byte_layout() -> ByteLayout:
    """This machine's layout. UnsupportedQuantization if none of the known ones fits."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 16, (2 * BLOCK, 32), generator=generator, dtype=torch.int32)
    packed = _pack(values, 1)
    for layout in LAYOUTS:
        if torch.equal(_unpacked(packed, layout), values):
            return layout
    raise UnsupportedQuantization(
        "int4 weights cannot be unpacked on this machine",
        value=torch.backends.cpu.get_cpu_capability(),
        remedy="use quant='int8'",
    )


LAYOUTS = (
    ByteLayout(64, False),
    ByteLayout(32, False),
    ByteLayout(32, True),
    ByteLayout(16, True),
)


def repack(packed: torch.Tensor, layout: ByteLayout) -> torch.Tensor:
    """Packed bytes [N padded, K / 2] of a machine with that layout, laid out for this one."""
    if layout == byte_layout():
        return packed
    parts = torch.split(packed, 16 * BLOCK)
    return torch.cat([_pack(_unpacked(rows, layout), 1) for rows in parts])


def _unpack(packed: torch.Tensor, layout: ByteLayout, out: torch.Tensor) -> None:
    """packed [N, K / 2] -> integers - 8 in `out` [K, N], of any dtype."""
    inputs, half = len(out), layout.block // 2
    bytes_ = packed.view(-1, inputs, half)
    if layout.paired:
        low, high = out.view(inputs, -1, half, 2).unbind(3)
    else:
        low, high = out.view(inputs, -1, 2, half).unbind(2)  # [K, blocks, half a block]
    steps = empty(*bytes_.shape, dtype=torch.uint8)
    signed = steps.view(torch.int8).transpose(0, 1)
    torch.bitwise_and(bytes_, 15, out=steps).sub_(8)
    low.copy_(signed)
    torch.bitwise_right_shift(bytes_, 4, out=steps).sub_(8)
    high.copy_(signed)


def _unpacked(packed: torch.Tensor, layout: ByteLayout) -> torch.Tensor:
    """packed [N, K / 2] -> integers 0..15 as int32 [N, K]."""
    out = torch.empty(2 * packed.shape[1], len(packed), dtype=torch.int32)
    _unpack(packed, layout, out)
    return out.add_(8).t().contiguous()
