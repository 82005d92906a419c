# SPDX-License-Identifier: Apache-2.0
"""How checkpoints store parameters: under which name, and as which part of which tensor.

A family has a table from the parts of its layers to the modules of a checkpoint. An entry is the
module's name within the layer (its tensors are `<module>.weight` and `<module>.bias`), or a
`Naming` for what is stored otherwise.
"""

from collections.abc import Callable, Mapping

from ..spec import ModelSpec
from ..weight_source import Names, Shape, Stored, Ways

# (prefix of the layer's tensors, shape of the parameter) -> ways.
Naming = Callable[[str, Shape], Ways]


def tensor(name: str) -> Naming:
    """A tensor that is not a module's weight or bias, such as `A_log`."""
    return lambda prefix, shape: ((Stored(prefix + name, shape),),)


def reshaped(name: str, *stored: int) -> Naming:
    """A tensor with dimensions of one that the parameter lacks, such as a convolution's."""
    return lambda prefix, shape: ((Stored(prefix + name, stored),),)


def part_of(name: str, dimension: int, start: int, stop: int, *stored: int) -> Naming:
    """A range along one dimension of a tensor of the shape `stored`."""
    piece = ((dimension, start, stop),)
    return lambda prefix, shape: ((Stored(prefix + name, stored, part=piece),),)


def paired(name: str, heads: int) -> Naming:
    """Rows of q or k whose rope turns neighbours: put so that it turns halves."""

    def ways(prefix: str, shape: Shape) -> Ways:
        pairs = (heads, shape[0] // heads // 2, 2, *shape[1:])
        order = (0, 2, 1, *range(3, len(pairs)))
        return ((Stored(prefix + name, shape, view=pairs, order=order),),)

    return ways


def either(*namings: str | Naming) -> Naming:
    """Ways in order of preference; a text is a module's name."""
    return lambda prefix, shape: tuple(
        way for naming in namings for way in _ways(naming, "weight", prefix, shape)
    )


def checkpoint_names(
    spec: ModelSpec, table: Mapping[str, str | Naming], *, layers: str = "model.layers"
) -> Names:
    """The ways to store every parameter of a spec. `table` has an entry for each part of a layer,
    for `embedding`, `norm` and `head`; a bias has one of its own or goes with its module."""
    names: dict[str, Ways] = {}
    for name, shape in spec.parameter_shapes().items():
        prefix, part = "", name
        if name.startswith("layers."):
            _, index, part = name.split(".", 2)
            prefix = f"{layers}.{index}."
        kind = "weight"
        if part not in table and part.endswith(".bias"):
            part, kind = part.removesuffix(".bias"), "bias"
        names[name] = _ways(table[part], kind, prefix, shape)
    return names


def _ways(naming: str | Naming, kind: str, prefix: str, shape: Shape) -> Ways:
    if isinstance(naming, str):
        return ((Stored(f"{prefix}{naming}.{kind}", shape),),)
    return naming(prefix, shape)
