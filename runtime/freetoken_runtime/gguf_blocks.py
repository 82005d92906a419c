# SPDX-License-Identifier: Apache-2.0
"""The block formats of GGUF files, as ggml lays them out (`ggml-common.h`, `ggml-quants.c`).

Every one is w = q · scale + minimum over groups of 16 or 32 weights. A product has at most 25
significant bits, so only the sum (or, in Q6_K, the product) is rounded, as in ggml itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from .weight_source import Groups

FLOATS: Mapping[Type, torch.dtype] = {
    Type.F32: torch.float32,
    Type.F16: torch.float16,
    Type.BF16: torch.bfloat16,
}
_SLICE_ELEMENTS = 4 << 20
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # e2m1, doubled
_FP4_VALUES = torch.tensor(_FP4, dtype=torch.int8)


@dataclass(frozen=True)
class _Blocks:
    """Of n blocks: values [n, G, size] of any integer type, scales and minimums [n, G] fp32."""

    values: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor | None = None


def row_bytes(kind: Type, elements: int) -> int:
    """Bytes of a row of weights; whole blocks, as the header's reader saw to."""
    block, size = GGML_QUANT_SIZES[kind]
    assert elements % block == 0, (kind, elements)
    return int(elements // block * size)


def dequantise(kind: Type, stored: np.ndarray) -> torch.Tensor:
    """Rows of stored bytes [R, bytes] -> [R, K] in memory of its own, in the stored float dtype or
    fp32. In slices, so that what lies between is small."""
    if kind in FLOATS:
        return torch.from_numpy(np.array(stored)).view(FLOATS[kind])
    block, size = GGML_QUANT_SIZES[kind]
    rows, width = len(stored), stored.shape[1] // size * block
    out = torch.empty(rows, width)
    step = max(1, _SLICE_ELEMENTS // width)
    for start in range(0, rows, step):
        blocks = _blocks(kind, stored[start : start + step])
        part = out[start : start + step].view(blocks.values.shape)
        torch.mul(blocks.values, blocks.scales[..., None], out=part)
        if blocks.minimums is not None:
            part.add_(blocks.minimums[..., None])
    return out


def groups(kind: Type, stored: np.ndarray) -> Groups | None:
    """The integers of formats that have 4 bits and groups of 32, None for the others. stored
    [R, bytes]."""
    if kind not in (Type.Q4_0, Type.Q4_1, Type.Q4_K):
        return None
    rows = len(stored)
    blocks = _blocks(kind, stored)
    values, scales = blocks.values, blocks.scales
    if blocks.minimums is None:  # (q - 8) d is q d - 8 d to the bit: d has 11 of them
        return Groups(
            (values + 8).to(torch.uint8).view(rows, -1),
            scales.reshape(rows, -1),
            (-8 * scales).view(rows, -1),
            values.shape[-1],
        )
    minimums = blocks.minimums.reshape(rows, -1)
    return Groups(values.reshape(rows, -1), scales.reshape(rows, -1), minimums, values.shape[-1])


def _blocks(kind: Type, stored: np.ndarray) -> _Blocks:
    size = GGML_QUANT_SIZES[kind][1]
    return _FORMATS[kind](torch.from_numpy(np.array(stored)).view(-1, size))


def _halves(blocks: torch.Tensor, start: int, count: int = 1) -> torch.Tensor:
    """fp16 numbers at a byte of every block -> [n, count] fp32."""
    return blocks[:, start : start + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(stored: torch.Tensor) -> torch.Tensor:
    """Bytes [..., m] -> [..., 2m]: all low halves, then all high ones."""
    return torch.cat((stored & 15, stored >> 4), -1)


def _fifth_bits(stored: torch.Tensor) -> torch.Tensor:
    """4 bytes -> 32 times 0 or 16, the lowest bit first."""
    bits = (stored[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten(1) << 4


def _q8_0(blocks: torch.Tensor) -> _Blocks:
    """fp16 scale, 32 int8."""
    return _Blocks(blocks[:, None, 2:].view(torch.int8), _halves(blocks, 0))


def _q4_0(blocks: torch.Tensor) -> _Blocks:
    """fp16 scale, 16 bytes of nibbles: q - 8."""
    values = _nibbles(blocks[:, None, 2:]).view(torch.int8) - 8
    return _Blocks(values, _halves(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> _Blocks:
    """fp16 scale and minimum, 16 bytes of nibbles."""
    return _Blocks(_nibbles(blocks[:, None, 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> _Blocks:
    """fp16 scale, 4 bytes of fifth bits, 16 bytes of nibbles: q - 16."""
    values = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _Blocks((values.view(torch.int8) - 16)[:, None], _halves(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> _Blocks:
    """fp16 scale and minimum, 4 bytes of fifth bits, 16 bytes of nibbles."""
    values = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _Blocks(values[:, None], _halves(blocks, 0), _halves(blocks, 2))


def _mxfp4(blocks: torch.Tensor) -> _Blocks:
    """An exponent, 16 bytes of nibbles: e2m1 numbers, doubled here, and half of their scale.
    Exponent 255 is NaN in the standard (OCP microscaling formats 1.0)."""
    values = _FP4_VALUES[_nibbles(blocks[:, None, 1:]).long()]
    scales = blocks[:, :1].contiguous().view(torch.float8_e8m0fnu).float() / 2
    return _Blocks(values, scales)


def _k_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """12 bytes -> 8 scales and 8 minimums of 6 bits: four of each in the low bits of eight bytes,
    the others split over the high bits of those and the nibbles of the last four."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (rest & 15) | (first >> 2 & 48)), -1)
    minimums = torch.cat((second & 63, (rest >> 4) | (second >> 2 & 48)), -1)
    return scales, minimums


def _k_minimums(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp16 scales of the scales and of the minimums, then 12 bytes of those."""
    both = _halves(blocks, 0, 2)
    scales, minimums = _k_scales(blocks[:, 4:16])
    return both[:, :1] * scales, -(both[:, 1:] * minimums)


def _k_nibbles(stored: torch.Tensor) -> torch.Tensor:
    """128 bytes -> [n, 8, 32]: of every 32 bytes the low halves, then the high ones."""
    return _nibbles(stored.view(len(stored), 4, 32)).view(len(stored), 8, 32)


def _q4_k(blocks: torch.Tensor) -> _Blocks:
    scales, minimums = _k_minimums(blocks)
    return _Blocks(_k_nibbles(blocks[:, 16:].contiguous()), scales, minimums)


def _q5_k(blocks: torch.Tensor) -> _Blocks:
    """As Q4_K, with 32 bytes of fifth bits: bit g of byte i belongs to weight i of group g."""
    scales, minimums = _k_minimums(blocks)
    groups_of = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = (blocks[:, None, 16:48] >> groups_of & 1) << 4
    return _Blocks(_k_nibbles(blocks[:, 48:].contiguous()) | fifth, scales, minimums)


def _q6_k(blocks: torch.Tensor) -> _Blocks:
    """128 bytes of nibbles, 64 bytes of pairs of bits, 16 int8 scales, fp16 scale of those."""
    n = len(blocks)
    low = _nibbles(blocks[:, :128].reshape(n, 2, 64))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(n, 2, 1, 32) >> shifts & 3) << 4
    values = (low.view(n, 2, 4, 32) | high).view(torch.int8) - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8) * _halves(blocks, 208)
    return _Blocks(values.view(n, 16, 16), scales)


_FORMATS: Mapping[Type, Callable[[torch.Tensor], _Blocks]] = {
    Type.Q8_0: _q8_0,
    Type.Q6_K: _q6_k,
    Type.Q5_K: _q5_k,
    Type.Q5_1: _q5_1,
    Type.Q5_0: _q5_0,
    Type.Q4_K: _q4_k,
    Type.Q4_1: _q4_1,
    Type.Q4_0: _q4_0,
    Type.MXFP4: _mxfp4,
}
TYPES = (*FLOATS, *_FORMATS)
