# SPDX-License-Identifier: Apache-2.0
"""MXFP4 (OCP microscaling formats 1.0) as gpt-oss stores its experts.

`<name>_blocks` [E, N, K / 32, 16] has two e2m1 numbers in a byte, the low half first;
`<name>_scales` [E, N, K / 32] the exponents of powers of two, biased by 127; 255 is NaN. Every
product is exact in fp32.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..models.config_reader import ConfigReader
from ..weight_source import Shape
from .tensors import Entries, Found, QuantisedTensor, Read, misshapen, picked, require

_BLOCK = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = torch.tensor([*_MAGNITUDES, *(-x for x in _MAGNITUDES)])
_PAIRS = torch.stack((_E2M1.repeat(16), _E2M1.repeat_interleave(16)), -1)  # [256, 2], per byte
_BLOCKS, _SCALES = "_blocks", "_scales"


@dataclass(frozen=True)
class Mxfp4Tensor(QuantisedTensor):
    """`name` without the endings of the stored tensors."""

    name: str
    shape: Shape

    @property
    def format(self) -> str:
        return "MXFP4"

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.name + _BLOCKS, self.name + _SCALES)

    def _dequantise(self, read: Read, rows: torch.Tensor) -> torch.Tensor:
        groups = self.shape[-1] // _BLOCK
        stored = picked(read(self.name + _BLOCKS).view(-1, groups, _BLOCK // 2), rows)
        exponents = picked(read(self.name + _SCALES).view(-1, groups), rows)
        values = _PAIRS[stored.int()].flatten(2)  # [n, K / 32, 32]
        scales = exponents.contiguous().view(torch.float8_e8m0fnu).float()
        return values.mul_(scales[..., None]).flatten(1)


@dataclass(frozen=True)
class Mxfp4Scheme:
    """Tensors are found under the name of their blocks."""

    notes: tuple[str, ...] = ()

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> "Mxfp4Scheme":
        reader = ConfigReader(settings)
        reader.require("quant_method", "mxfp4")
        for key in ("modules_to_not_convert", "dequantize"):
            reader.get(key)
        reader.finish()
        return cls()

    def find(self, entries: Entries, read: Read) -> Found:
        found: dict[str, QuantisedTensor] = {}
        for name, entry in entries.items():
            if not name.endswith(_BLOCKS) or entry.dtype != "U8":
                continue
            stem = name.removesuffix(_BLOCKS)
            scales = require(entries, stem + _SCALES, name)
            if len(entry.shape) < 3 or entry.shape[-1] != _BLOCK // 2:
                raise misshapen(name, entry.shape, f"[..., rows, groups, {_BLOCK // 2}]")
            if scales.shape != entry.shape[:-1] or scales.dtype != "U8":
                limit = (*entry.shape[:-1], "U8")
                raise misshapen(stem + _SCALES, (*scales.shape, scales.dtype), limit)
            shape = (*entry.shape[:-2], entry.shape[-2] * _BLOCK)
            found[name] = Mxfp4Tensor(stem, shape)
        return Found(found)
