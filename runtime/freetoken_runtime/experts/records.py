# SPDX-License-Identifier: Apache-2.0
"""How an expert lies in memory, as its kernels use it.

    fields      gate up.packed | gate up.scales_zeros | gate up.bias | down.packed | …
    bytes       each field begins on a multiple of 64

Experts of one form can take each other's place.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from freetoken_storage.weights import Field, Layout, aligned

from ..ftw_weights import DTYPES, fields_of, tensor_of
from ..kernels.int4_linear import cpu as int4
from ..kernels.int8_linear import cpu as int8
from ..kernels.integers import quantise_int4, quantise_int8, stack_int4, stack_int8
from ..layers.expert import Expert, expert_activation
from ..layers.linear import DenseLinear, IntegerLinear, Linear
from ..specs.moe import ExpertSpec
from ..weight_source import Quant

_ALIGNMENT = 64  # of fields: a cache line
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# A parameter of an expert by its name (`gate`, `down.bias`), in a floating dtype.
Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class ExpertForm:
    """An expert's shapes and how its weights are held. `dtype`: of what is not quantised; `group`:
    of int4 weights along their inputs."""

    spec: ExpertSpec
    width: int
    quant: Quant | None
    dtype: torch.dtype
    group: int
    layout: Layout

    @classmethod
    def of(
        cls, spec: ExpertSpec, width: int, quant: Quant | None, dtype: torch.dtype, group: int
    ) -> "ExpertForm":
        """With fields one behind another."""
        shapes = dict(spec.parameter_shapes(width))
        fields: list[Field] = []
        offset = 0
        for names in units(spec):
            wanted = fields_of(names, shapes, quant, group)
            if spec.bias:
                rows = sum(shapes[name][0] for name in names)
                wanted["bias"] = (_NAMES[torch.float32 if quant else dtype], (rows,))
            for kind, (name, shape) in wanted.items():
                field = Field(f"{' '.join(names)}.{kind}", name or _NAMES[dtype], shape, offset)
                fields.append(field)
                offset = aligned(field.stop, _ALIGNMENT)
        return cls(spec, width, quant, dtype, group, Layout(tuple(fields)))

    def tensors(self, memory: memoryview) -> dict[str, torch.Tensor]:
        """The fields, as views of the memory."""
        return {field.name: tensor_of(memory, field) for field in self.layout.fields}

    def expert(self, memory: memoryview) -> Expert:
        """What computes with the weights that are in this memory whenever it is called."""
        tensors = self.tensors(memory)
        up, down = (self._linear(names, tensors) for names in units(self.spec))
        return Expert(up, down, expert_activation(self.spec))

    def formats(self) -> dict[str, str]:
        """Matrix -> how it is held, as a layer in memory would report it."""
        scratch = memoryview(bytearray(self.layout.size_bytes))
        tensors = self.tensors(scratch)
        every = units(self.spec)
        return {" ".join(names): self._linear(names, tensors).format for names in every}

    def fill(self, memory: memoryview, read: Read) -> None:
        """Write an expert; its bits are those of one that was loaded to stay."""
        tensors = self.tensors(memory)
        for names in units(self.spec):
            at = " ".join(names)
            for kind, made in self._made(names, read).items():
                tensors[f"{at}.{kind}"].copy_(made)
            if self.spec.bias:
                bias = torch.cat([read(f"{name}.bias").float() for name in names])
                tensors[f"{at}.bias"].copy_(bias)

    def copy(self, memory: memoryview, fields: Mapping[str, torch.Tensor]) -> None:
        """Write an expert whose fields are there already, if in other dtypes."""
        for name, tensor in self.tensors(memory).items():
            tensor.copy_(fields[name])

    def _made(self, names: Sequence[str], read: Read) -> dict[str, torch.Tensor]:
        if self.quant == "int8":
            eight = int8.pack(stack_int8([quantise_int8(read(name)) for name in names]))
            return {"values": eight.values, "scales": eight.scales}
        if self.quant == "int4":
            values = stack_int4([quantise_int4(read(name), self.group) for name in names])
            four = int4.pack(values)
            return {"packed": four.packed, "scales_zeros": four.scales_zeros}
        return {"weight": torch.cat([read(name).to(self.dtype) for name in names])}

    def _linear(self, names: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> Linear:
        at = " ".join(names)
        bias = tensors.get(f"{at}.bias")
        if self.quant is None:
            return DenseLinear(tensors[f"{at}.weight"], bias)
        shapes = dict(self.spec.parameter_shapes(self.width))
        outputs, inputs = sum(shapes[name][0] for name in names), shapes[names[0]][1]
        if self.quant == "int8":
            values, scales = tensors[f"{at}.values"], tensors[f"{at}.scales"]
            return IntegerLinear(int8.PackedInt8(values, scales, inputs), bias)
        packed, pairs = tensors[f"{at}.packed"], tensors[f"{at}.scales_zeros"]
        return IntegerLinear(int4.PackedInt4(packed, pairs, self.group, outputs, inputs), bias)

    @property
    def largest_bytes(self) -> int:
        """An upper bound of what `fill` allocates beside the slot: parameters in fp32, and what is
        made of the largest ones."""
        elements = [prod(shape) for _, shape in self.spec.parameter_shapes(self.width)]
        return 4 * sum(elements) + 12 * max(elements)


def units(spec: ExpertSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """An expert's matrices as they are stacked along their outputs."""
    return spec.inputs, ("down",)
