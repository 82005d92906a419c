# SPDX-License-Identifier: Apache-2.0
"""8-bit weights with scales: w = q · scale, rounded to fp32 once.

`fp8` as DeepSeek-V3 stores it: float8_e4m3fn with a scale per block, mostly 128 x 128, in
`weight_scale_inv` (which multiplies, whatever it is called), or one per matrix.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ..errors import UnsupportedConfig, UnsupportedQuantization
from ..models.config_reader import ConfigReader
from ..weight_source import Shape
from .tensors import (
    SCALE_DTYPES,
    Entries,
    Found,
    QuantisedTensor,
    Read,
    misshapen,
    picked,
    require,
)

FLOAT8 = "F8_E4M3"
_NAMES = {FLOAT8: "float8_e4m3fn", "I8": "int8"}
_SCALES = ("_scale_inv", "_scale")
ACTIVATIONS = re.compile(r"\.(input|output|activation)_(scale|zero_point|global_scale)$")
Block = tuple[int, int]  # rows and columns under one scale


@dataclass(frozen=True)
class ScaledTensor(QuantisedTensor):
    """8-bit numbers, one scale per block of each matrix; a last block may be smaller."""

    name: str
    scale: str
    shape: Shape
    block: Block
    dtype: str

    @property
    def format(self) -> str:
        rows, columns = self.block
        per = f"in blocks of {rows} x {columns}"
        if columns >= self.shape[-1]:
            per = "per channel" if rows == 1 else "per matrix" if rows >= self.shape[-2] else per
        return f"{_NAMES[self.dtype]} {per}"

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.name, self.scale)

    def _dequantise(self, read: Read, rows: torch.Tensor) -> torch.Tensor:
        outputs, inputs = self.shape[-2:]
        height, width = self.block
        weights = picked(read(self.name).view(-1, inputs), rows).float()  # [n, K]
        grid = (-(-outputs // height), -(-inputs // width))
        scales = read(self.scale).float().view(-1, *grid)[rows // outputs, rows % outputs // height]
        if inputs % width == 0:
            weights.view(len(rows), grid[1], width).mul_(scales[..., None])
            return weights
        for column in range(grid[1]):
            weights[:, column * width : (column + 1) * width] *= scales[:, column, None]
        return weights


def scaled(entries: Entries, name: str, scale: str, blocks: tuple[Block, ...]) -> ScaledTensor:
    """A tensor and its scales. `blocks`: what may be under one scale, 0 for all there is; the first
    one that the shape of the scales fits is taken."""
    entry, scales = entries[name], require(entries, scale, name)
    if len(entry.shape) < 2:
        raise misshapen(name, entry.shape, "a matrix")
    if scales.dtype not in SCALE_DTYPES:
        raise UnsupportedQuantization(
            f"scales {scale!r} are stored in a dtype that is not supported",
            value=scales.dtype,
            limit=", ".join(SCALE_DTYPES),
        )
    *others, outputs, inputs = entry.shape
    expected = []
    for rows, columns in blocks:
        block = (rows or outputs, columns or inputs)
        grid = (*others, -(-outputs // block[0]), -(-inputs // block[1]))
        expected.append(grid)
        if scales.shape == grid or _same(scales.shape, grid):
            return ScaledTensor(name, scale, entry.shape, block, entry.dtype)
    raise misshapen(scale, scales.shape, " or ".join(map(str, expected)))


def _same(shape: Shape, grid: Shape) -> bool:
    """Scales may lack the dimensions of one, or have more of them."""
    return [x for x in shape if x != 1] == [x for x in grid if x != 1] and prod(shape) == prod(grid)


@dataclass(frozen=True)
class Fp8Scheme:
    """Every stored float8 tensor is quantised, whatever modules the configuration lists."""

    block: Block | None
    notes: tuple[str, ...]

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> "Fp8Scheme":
        reader = ConfigReader(settings)
        reader.require("quant_method", "fp8")
        reader.require("fmt", "e4m3")
        reader.require("activation_scheme", "dynamic", "static")
        reader.require("scale_fmt", "ue8m0", "float")
        for key in ("modules_to_not_convert", "ignored_layers", "dequantize"):
            reader.get(key)
        block = read_block(reader.get("weight_block_size"))
        reader.finish()
        return cls(block, ("activations are not quantised to float8, as its authors do",))

    def find(self, entries: Entries, read: Read) -> Found:
        found: dict[str, QuantisedTensor] = {}
        for name, entry in entries.items():
            if entry.dtype != FLOAT8:
                continue
            scale = next(
                (name + end for end in _SCALES if name + end in entries), name + _SCALES[0]
            )
            found[name] = scaled(entries, name, scale, (self.block or (0, 0),))
        return Found(found, frozenset(name for name in entries if ACTIVATIONS.search(name)))


def read_block(value: object) -> Block | None:
    """[rows, columns], or `rowsxcolumns` in older files."""
    if value is None:
        return None
    if isinstance(value, str) and re.fullmatch(r"\d{1,9}x\d{1,9}", value):
        value = [int(size) for size in value.split("x")]
    if (
        not isinstance(value, list | tuple)
        or len(value) != 2
        or not all(type(size) is int and size > 0 for size in value)
    ):
        raise UnsupportedConfig(
            "the blocks of quantised weights", value=value, limit="[rows, columns]"
        )
    return value[0], value[1]
