# SPDX-License-Identifier: Apache-2.0
"""What a layer is built from and what it has to offer.

Each kind of mixer and feed-forward has a file beside this one with `build(spec, parts)`; `weights`
chooses it by the type of the spec.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from ..batch import Batch, RowGroup
from ..specs.moe import MoeSpec
from .linear import Linear
from .norm import RmsNorm

if TYPE_CHECKING:
    from .expert import Experts

Rope = tuple[torch.Tensor, torch.Tensor]  # cos and sin of a pass, from `RopeTable.rows`


class Parts(Protocol):
    """The weights of one layer, by the names of its spec's `parameter_shapes`. Each is taken
    exactly once."""

    def linear(self, *names: str) -> Linear:
        """One linear layer from matrices [out, in] stacked along their outputs, with their biases
        (`<name>.bias`, all or none), quantised as the caller of `load` asked."""

    def norm(self, name: str, *, offset: float | None = None, eps: float | None = None) -> RmsNorm:
        """A norm with `offset` added to its weights; the model's own offset and epsilon if None."""

    def tensor(self, name: str) -> torch.Tensor:
        """A parameter in fp32, never quantised: what is small or decides much (A_log, dt_bias,
        convolutions, sinks, routers)."""

    def has(self, name: str) -> bool:
        """Whether the spec has this parameter."""

    def within(self, part: str) -> "Parts":
        """The parameters `<part>.<name>`, under their names: for layers made of layers, such as
        `shared` or `experts.17`."""

    def experts(self, spec: MoeSpec) -> "Experts | None":
        """The parameters `experts.<e>.<name>` of a mixture, where they are served from other places
        than memory of the layer's own; None if they are to be built here, like any other."""


class Module(Protocol):
    """What the decoder asks of every part of a layer."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All linear layers that see rows of a pass."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all weights, the linear layers' included."""


class Mixer(Module, Protocol):
    """x [T, H] fp32 -> [T, H] fp32 or bf16. Works per sequence: reads and writes the state of
    `layer` in each of the batch's. `rope` belongs to the spec's `rope`."""

    def __call__(
        self, x: torch.Tensor, batch: Batch, layer: int, rope: Rope | None
    ) -> torch.Tensor: ...


class FeedForward(Module, Protocol):
    """x [T, H] fp32 -> [T, H] fp32 or bf16; a row's result does not depend on other sequences."""

    def __call__(self, x: torch.Tensor, groups: Sequence[RowGroup]) -> torch.Tensor: ...
