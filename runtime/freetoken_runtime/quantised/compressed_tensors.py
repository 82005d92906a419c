# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the compressed-tensors library (llm-compressor, vLLM), their plain formats.

    pack-quantized     weight_packed int32 [N, ⌈K / m⌉] with m = 32 / bits integers, the first one
                       in the lowest bits, stored as q + 2^(bits - 1); weight_shape [2];
                       weight_scale [N, groups]; with asymmetric ones weight_zero_point int32
                       [⌈N / m⌉, groups], packed along N; weight_g_idx [K] names each column's
                       group where the order of activations decided it
    float-quantized    weight float8_e4m3fn, weight_scale per matrix, row, group or block
    int-quantized      weight int8, weight_scale per matrix or row
    naive-quantized    either of the two

Weights are (q - zero) · scale. Scales are multiplied in fp32, where integers of 4 and 8 bits with
scales of 16 bits are exact.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UnsupportedConfig, UnsupportedQuantization, WeightsDamaged
from ..models.config_reader import ConfigReader
from ..weight_source import Groups, Shape
from .fp8 import ACTIVATIONS, FLOAT8, Block, read_block, scaled
from .tensors import (
    SCALE_DTYPES,
    Entries,
    Entry,
    Found,
    QuantisedTensor,
    Read,
    misshapen,
    picked,
    require,
)

FORMATS = (
    *("pack-quantized", "float-quantized", "int-quantized", "naive-quantized"),
    *("mixed-precision", "dense"),
)
_PACKED = ".weight_packed"
_INT4_GROUP = 32  # of the int4 kernel
_CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point")


@dataclass(frozen=True)
class PackedTensor(QuantisedTensor):
    """Integers of `bits` bits in int32. `size`: of groups along K."""

    module: str
    shape: Shape
    bits: int
    size: int
    asymmetric: bool
    ordered: bool  # a tensor tells the group of each column

    @property
    def format(self) -> str:
        per = "per channel" if self.size >= self.shape[1] else f"in groups of {self.size}"
        return f"int{self.bits} {per}"

    @property
    def parts(self) -> tuple[str, ...]:
        endings = ["packed", "shape", "scale"]
        endings += ["zero_point"] * self.asymmetric + ["g_idx"] * self.ordered
        return tuple(f"{self.module}.weight_{ending}" for ending in endings)

    def _dequantise(self, read: Read, rows: torch.Tensor) -> torch.Tensor:
        values, scales, zeros = self._integers(read, rows)
        columns = self._columns(read)
        steps = values.float()
        if zeros is not None:
            steps -= zeros.float()[:, columns]
        return steps.mul_(scales[:, columns])

    def groups(self, read: Read, rows: torch.Tensor) -> Groups | None:
        inputs = self.shape[1]
        split = self.size if self.size < inputs else inputs
        if self.bits != 4 or split % _INT4_GROUP or inputs % _INT4_GROUP:
            return None
        if self._order(read) is not None:
            return None
        values, scales, zeros = self._integers(read, rows)
        offset = 8 if zeros is None else 8 + zeros.float()  # of the stored integers, 0..15
        repeat = split // _INT4_GROUP
        return Groups(
            (values + 8).to(torch.uint8),
            scales.repeat_interleave(repeat, 1)[:, : inputs // _INT4_GROUP].contiguous(),
            (-offset * scales)
            .repeat_interleave(repeat, 1)[:, : inputs // _INT4_GROUP]
            .contiguous(),
            _INT4_GROUP,
        )

    def _integers(
        self, read: Read, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Of some rows: q [n, K] int8, scales [n, G] fp32, zeros [n, G] int8 or None."""
        outputs, inputs = self.shape
        packed = picked(read(f"{self.module}.weight_packed"), rows)
        values = _unpack(packed, self.bits)[:, :inputs]
        scales = picked(read(f"{self.module}.weight_scale"), rows).float()
        if not self.asymmetric:
            return values, scales, None
        stored = read(f"{self.module}.weight_zero_point").T  # [G, ⌈N / m⌉]
        zeros = _unpack(stored, self.bits)[:, :outputs].T
        return values, scales, zeros[rows]

    def _columns(self, read: Read) -> torch.Tensor:
        """The group of each column [K]."""
        order = self._order(read)
        return torch.arange(self.shape[1]) // self.size if order is None else order

    def _order(self, read: Read) -> torch.Tensor | None:
        """All of it -1 means that it is not used."""
        if not self.ordered:
            return None
        name = f"{self.module}.weight_g_idx"
        order = read(name).long()
        if bool((order == -1).all()):
            return None
        count = -(-self.shape[1] // self.size)
        if int(order.min()) < 0 or int(order.max()) >= count:
            raise WeightsDamaged(
                f"tensor {name!r} names groups that do not exist",
                value=f"{int(order.min())} to {int(order.max())}",
                limit=f"0 to {count - 1}",
            )
        return order


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [n, m] -> int8 [n, m · 32 / bits]."""
    bytes_ = packed.contiguous().view(torch.uint8)  # little-endian, as the files are
    if bits == 4:
        bytes_ = torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(1)
    offset = 1 << bits - 1
    return (bytes_.to(torch.int16) - offset).to(torch.int8)


@dataclass(frozen=True)
class _Kind:
    """A group of modules that are quantised alike."""

    bits: int
    is_float: bool
    symmetric: bool
    strategy: str
    size: int | None
    block: Block | None

    @property
    def under_one_scale(self) -> Block:
        if self.strategy == "block" and self.block is not None:
            return self.block
        return {"tensor": (0, 0), "channel": (1, 0)}.get(self.strategy, (1, self.size or 0))


@dataclass(frozen=True)
class CompressedScheme:
    """Which module is quantised how follows from its tensors, not from the patterns of names."""

    kinds: tuple[_Kind, ...]
    notes: tuple[str, ...]

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> "CompressedScheme":
        reader = ConfigReader(settings)
        reader.require("quant_method", "compressed-tensors")
        _require_format(reader.get("format", "dense"))
        _refuse_sparse(reader.get("sparsity_config"))
        _refuse("transform_config", reader.get("transform_config"))
        groups = reader.get("config_groups", {})
        if not isinstance(groups, Mapping):
            raise UnsupportedConfig("config_groups", value=groups, limit="an object")
        kinds = tuple(kind for group in groups.values() for kind in _read_group(group))
        notes = []
        if any(isinstance(x, Mapping) and x.get("input_activations") for x in groups.values()):
            notes.append("activations are not quantised, as its authors do")
        if reader.get("kv_cache_scheme") is not None:
            notes.append("keys and values are not quantised, as its authors do")
        for key in ("ignore", "quantization_status", "global_compression_ratio", "version"):
            reader.get(key)
        for key in ("run_compressed", "dequantize"):
            reader.get(key)
        reader.finish()
        return cls(kinds, tuple(notes))

    def find(self, entries: Entries, read: Read) -> Found:
        found: dict[str, QuantisedTensor] = {}
        blocks = {bits: self._blocks(bits) for bits in (FLOAT8, "I8")}
        for name, entry in entries.items():
            if name.endswith(_PACKED):
                module = name.removesuffix(_PACKED)
                found[f"{module}.weight"] = self._packed(entries, module, read)
            elif name.endswith(".weight") and entry.dtype in blocks:
                found[name] = scaled(entries, name, f"{name}_scale", blocks[entry.dtype])
        unused = {x for x in entries if ACTIVATIONS.search(x) or x.endswith(_CACHE_SCALES)}
        return Found(found, frozenset(unused))

    def _blocks(self, dtype: str) -> tuple[Block, ...]:
        kinds = [x for x in self.kinds if x.bits == 8 and x.is_float == (dtype == FLOAT8)]
        return tuple(dict.fromkeys(kind.under_one_scale for kind in kinds)) or ((0, 0),)

    def _packed(self, entries: Entries, module: str, read: Read) -> PackedTensor:
        name, scale = module + _PACKED, f"{module}.weight_scale"
        shape = _read_shape(entries, module, read)
        scales, stored = require(entries, scale, name), entries[name]
        for kind in self.kinds:
            fits = stored == Entry((shape[0], -(-shape[1] * kind.bits // 32)), "I32")
            size = kind.size or shape[1]
            groups = -(-shape[1] // size)
            if kind.is_float or not fits or scales.shape != (shape[0], groups):
                continue
            if scales.dtype not in SCALE_DTYPES:
                continue
            tensor = PackedTensor(
                module,
                shape,
                kind.bits,
                size,
                asymmetric=not kind.symmetric,
                ordered=f"{module}.weight_g_idx" in entries,
            )
            _check_parts(entries, tensor, groups)
            return tensor
        raise misshapen(
            name,
            f"{stored.shape} {stored.dtype} of {shape}, scales {scales.shape} {scales.dtype}",
            ", ".join(f"int{x.bits} {x.strategy} {x.size or ''}".strip() for x in self.kinds),
        )


def _read_shape(entries: Entries, module: str, read: Read) -> tuple[int, int]:
    """What is packed says which shape it has."""
    name = f"{module}.weight_shape"
    stored = require(entries, name, module + _PACKED)
    if stored.shape != (2,) or stored.dtype not in _INTEGERS:
        raise misshapen(name, (*stored.shape, stored.dtype), "two integers")
    rows, columns = (int(size) for size in read(name))
    return rows, columns


def _check_parts(entries: Entries, tensor: PackedTensor, groups: int) -> None:
    """What belongs to the integers, where the configuration says that it is there."""
    outputs, inputs = tensor.shape
    expected = {
        f"{tensor.module}.weight_zero_point": (-(-outputs * tensor.bits // 32), groups),
        f"{tensor.module}.weight_g_idx": (inputs,),
    }
    for part in tensor.parts:
        stored = require(entries, part, tensor.module + _PACKED)
        if part in expected and (stored.shape != expected[part] or stored.dtype not in _INTEGERS):
            limit = (*expected[part], "integers")
            raise misshapen(part, (*stored.shape, stored.dtype), limit)


_INTEGERS = ("I32", "I64")


def _read_group(group: object) -> list[_Kind]:
    """A group of the configuration; nothing if its weights are not quantised."""
    if not isinstance(group, Mapping):
        raise UnsupportedConfig("config_groups", value=group, limit="objects")
    _require_format(group.get("format") or "dense")
    weights = group.get("weights")
    if weights is None:
        return []
    if not isinstance(weights, Mapping):
        raise UnsupportedConfig("weights of config_groups", value=weights, limit="an object")
    reader = ConfigReader(weights)
    bits, kind = reader.whole("num_bits", 8), reader.get("type", "int")
    size = None if reader.get("group_size") in (None, -1) else reader.whole("group_size")
    block = read_block(reader.get("block_structure"))
    strategy = reader.get("strategy", _usual_strategy(reader.get("group_size"), block))
    _refuse("dynamic", reader.get("dynamic"))
    known = {"int": (4, 8), "float": (8,)}.get(str(kind), ())
    if bits not in known or strategy not in ("tensor", "channel", "group", "block"):
        raise UnsupportedQuantization(
            "weights quantised by compressed-tensors in a way that is not supported",
            value=f"{kind}, {bits} bits, {strategy}",
            limit="int of 4 or 8 bits, float of 8 bits; tensor, channel, group, block",
            remedy="use the model's float32, bfloat16 or float16 weights, and quant=",
        )
    for key in ("actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"):
        reader.get(key)
    read = _Kind(
        bits=bits,
        is_float=kind == "float",
        symmetric=reader.flag("symmetric", True),
        strategy=strategy,
        size=size if strategy == "group" else None,
        block=block,
    )
    reader.finish()
    return [read]


def _usual_strategy(group_size: object, block: Block | None) -> str:
    """What is meant where it is not said."""
    if block is not None:
        return "block"
    return "tensor" if group_size is None else "channel" if group_size == -1 else "group"


def _require_format(name: object) -> None:
    if name not in FORMATS:
        raise UnsupportedQuantization(
            "the format of compressed-tensors is not supported",
            value=name,
            limit=", ".join(FORMATS),
            remedy="use the model's float32, bfloat16 or float16 weights, and quant=",
        )


def _refuse_sparse(settings: object) -> None:
    form = settings.get("format") if isinstance(settings, Mapping) else settings
    if form not in (None, "dense"):
        _refuse("sparsity_config", form)


def _refuse(key: str, value: object) -> None:
    if value:
        raise UnsupportedQuantization(
            f"{key!r} of compressed-tensors is not supported",
            value=value,
            remedy="use the model's float32, bfloat16 or float16 weights, and quant=",
        )
