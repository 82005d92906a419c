# SPDX-License-Identifier: Apache-2.0
"""Models of any spec with random weights: shapes that nobody published, for benches and tests."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from .spec import ModelSpec
from .weight_source import Quant, Stored, WeightSource
from .weights import Dtype, LoadedModel, load


class RandomWeights(WeightSource):
    """Parameters drawn from a seed, each from its own, whatever the order of reading. Scaled so
    that activations neither grow nor vanish: norms around 1, matrices by their inputs, decays
    slow."""

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        shapes = spec.parameter_shapes()
        super().__init__(
            Path(f"random-{seed}"),
            spec,
            {name: ((Stored(name, shape),),) for name, shape in shapes.items()},
        )
        self._seed = seed
        self._places = {name: place for place, name in enumerate(shapes)}

    @property
    def files(self) -> Sequence[Path]:
        return ()

    def _stored_names(self) -> set[str]:
        return set(self._shapes)

    def _stored_shape(self, stored: str) -> tuple[int, ...]:
        return self._shapes[stored]

    def _read(self, name: str, stored: Stored) -> torch.Tensor:
        # Of a seed, the generator of the CPU uses 32 bits.
        mixed = (self._seed * 0x9E3779B1 + self._places[name]) % (1 << 32)
        generator = torch.Generator().manual_seed(mixed)
        tensor = torch.empty(stored.shape)
        part = name.rsplit(".", 1)[-1]
        if part == "a_log":
            return tensor.uniform_(-3.0, -2.0, generator=generator)
        if "norm" in part:
            return tensor.uniform_(0.5, 1.5, generator=generator)
        if len(stored.shape) == 1:
            return tensor.normal_(0.0, 0.3, generator=generator)
        inputs = math.prod(stored.shape[1:])
        return tensor.normal_(0.0, 1.0 / math.sqrt(inputs), generator=generator)


def random_model(
    spec: ModelSpec, seed: int = 0, *, dtype: Dtype = "float32", quant: Quant | None = None
) -> LoadedModel:
    """A model with random weights, ready for `Engine(model, config)`."""
    source = RandomWeights(spec, seed)
    source.check()
    model = load(source, dtype=dtype, quant=quant)
    return replace(model, content_hash=f"random-{seed}")
