# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: how a router chooses, what one expert computes, what every row shares.

scores   softmax or sigmoid of the router's logits, or the logits themselves
choice   scores (+ correction): the top_k largest, within the best groups where there are groups
weights  scores of the chosen (or the softmax of the chosen logits), normalised, scaled
y        Σ_j weight_j · expert_j(x)  +  shared(x) · sigmoid(shared_router x)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..errors import UnsupportedConfig
from .mlp import MlpSpec

MAX_EXPERTS = 2_048  # each is a parameter by name: more would only be a long list

Scores = Literal["softmax", "sigmoid", "softmax_of_chosen"]
GroupScore = Literal["largest", "sum_of_two_largest"]


@dataclass(frozen=True)
class ExpertGroups:
    """Experts lie in `count` equal groups; only those in the `chosen` best groups can be taken.
    `score`: what of a group's choice values ranks it (DeepSeek-V2: largest, V3: the sum of two)."""

    count: int
    chosen: int
    score: GroupScore


@dataclass(frozen=True)
class RouterSpec:
    """`bias` is added to the logits, `correction` to the scores for the choice only. Normalised
    weights are divided by max(sum + sum_added, sum_minimum); `scale` multiplies all weights."""

    num_experts: int
    top_k: int
    scores: Scores
    normalise: bool = False
    bias: bool = False
    correction: bool = False
    groups: ExpertGroups | None = None
    sum_added: float = 0.0
    sum_minimum: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.num_experts > MAX_EXPERTS:
            raise UnsupportedConfig(
                "more experts than any model has", value=self.num_experts, limit=MAX_EXPERTS
            )
        available = self.num_experts
        if self.groups is not None:
            available = self._check_groups(self.groups)
        if not 1 <= self.top_k <= available:
            raise UnsupportedConfig(
                "the number of experts per token exceeds the experts it can choose from",
                value=self.top_k,
                limit=available,
            )

    def _check_groups(self, groups: ExpertGroups) -> int:
        """How many experts are left to choose from."""
        if groups.count < 1 or self.num_experts % groups.count:
            raise UnsupportedConfig(
                "the number of experts must be a multiple of the number of their groups",
                value=self.num_experts,
                limit=groups.count,
            )
        size = self.num_experts // groups.count
        if not 1 <= groups.chosen <= groups.count:
            raise UnsupportedConfig(
                "topk_group must lie within the number of groups",
                value=groups.chosen,
                limit=groups.count,
            )
        if groups.score == "sum_of_two_largest" and size < 2:
            raise UnsupportedConfig("a group of experts needs at least two", value=size)
        return groups.chosen * size


@dataclass(frozen=True)
class ClampedGlu:
    """(min(max(up, -limit), limit) + 1) · g · sigmoid(alpha · g) with g = min(gate, limit), as in
    gpt-oss."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class ExpertSpec:
    """One routed expert: down(silu(gate x) · up x), the clamped form of it, or, for `relu_squared`,
    down(relu(up x)²) without a gate."""

    intermediate_size: int
    activation: Literal["silu", "relu_squared"] | ClampedGlu = "silu"
    bias: bool = False

    @property
    def gated(self) -> bool:
        return self.activation != "relu_squared"

    @property
    def inputs(self) -> tuple[str, ...]:
        """Its matrices that see the row, in the order in which they are stacked."""
        return ("gate", "up") if self.gated else ("up",)

    def parameter_shapes(self, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of its weights, for rows of `width`; matrices as [out, in]."""
        inner = self.intermediate_size
        shapes = dict.fromkeys(self.inputs, (inner, width)) | {"down": (width, inner)}
        for name, shape in shapes.items():
            yield name, shape
            if self.bias:
                yield f"{name}.bias", shape[:1]


@dataclass(frozen=True)
class LatentSpec:
    """Routed experts work on a projection of the row to `size`, and their sum is projected back."""

    size: int
    bias: bool = False


@dataclass(frozen=True)
class MoeSpec:
    """A feed-forward of routed experts. `shared` sees every row; with `shared_gate` its output is
    multiplied by the sigmoid of one more router output."""

    router: RouterSpec
    expert: ExpertSpec
    shared: MlpSpec | None = None
    shared_gate: bool = False
    latent: LatentSpec | None = None

    def __post_init__(self) -> None:
        if self.shared_gate and (self.shared is None or self.router.bias):
            raise UnsupportedConfig(
                "a gate of shared experts needs shared experts and a router without bias"
            )

    def parameter_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """The feed-forward's weights by name, matrices as [out, in]; every expert's by itself
        (`experts.3.gate`), whatever way a file stores them."""
        router, width = self.router, hidden_size
        shapes: dict[str, tuple[int, ...]] = {"router": (router.num_experts, hidden_size)}
        if router.bias:
            shapes["router.bias"] = (router.num_experts,)
        if router.correction:
            shapes["router.correction"] = (router.num_experts,)
        if self.latent is not None:
            width = self.latent.size
            shapes |= {"latent_down": (width, hidden_size), "latent_up": (hidden_size, width)}
            if self.latent.bias:
                shapes |= {"latent_down.bias": (width,), "latent_up.bias": (hidden_size,)}
        for index in range(router.num_experts):
            for name, shape in self.expert.parameter_shapes(width):
                shapes[f"experts.{index}.{name}"] = shape
        if self.shared is not None:
            for name, shape in self.shared.parameter_shapes(hidden_size).items():
                shapes[f"shared.{name}"] = shape
            if self.shared_gate:
                shapes["shared_router"] = (1, hidden_size)
        return shapes
