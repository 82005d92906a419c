# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts against transformers' own blocks, each built from its configuration."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from freetoken_runtime.batch import Form, RowGroup
from freetoken_runtime.layers.linear import DenseLinear, Linear
from freetoken_runtime.layers.moe import build
from freetoken_runtime.layers.norm import RmsNorm
from freetoken_runtime.specs.mlp import MlpSpec
from freetoken_runtime.specs.moe import ClampedGlu, ExpertGroups, ExpertSpec, MoeSpec, RouterSpec

pytestmark = pytest.mark.usefixtures("one_thread")

HIDDEN = 60
SIZES = {
    "hidden_size": HIDDEN,
    "num_attention_heads": 6,
    "intermediate_size": 84,
    "num_hidden_layers": 4,
}
X = {"num_experts": 12, "num_experts_per_tok": 2}
LOCAL = {"num_local_experts": 12, "num_experts_per_tok": 2}
INNER = {"moe_intermediate_size": 36}
ROUTED = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 2,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    **INNER,
}
ERNIE = {"moe_num_experts": 12, "moe_k": 2, "moe_num_shared_experts": 2, **INNER}
LFM2 = {"norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 1.7}

NORMED, PLAIN = (RouterSpec(12, 2, "softmax", flag) for flag in (True, False))
OF_CHOSEN = RouterSpec(12, 2, "softmax_of_chosen")
V2 = RouterSpec(12, 2, "softmax", groups=ExpertGroups(3, 2, "largest"), scale=1.7)
SIGMOID = RouterSpec(12, 2, "sigmoid", True, correction=True)
V3 = replace(SIGMOID, groups=ExpertGroups(3, 2, "sum_of_two_largest"), sum_added=1e-20, scale=1.7)
CLAMPED = ExpertSpec(84, ClampedGlu(1.702, 7.0), bias=True)


@dataclass(frozen=True)
class Case:
    """A block of transformers with the spec that a family file makes of its configuration."""

    family: str
    block: str
    settings: dict[str, Any]
    spec: MoeSpec


CASES = {
    "mixtral": Case("mixtral", "MixtralSparseMoeBlock", LOCAL, MoeSpec(NORMED, ExpertSpec(84))),
    "olmoe": Case("olmoe", "OlmoeSparseMoeBlock", X, MoeSpec(PLAIN, ExpertSpec(84))),
    "m11 olmoe normed": Case(
        "olmoe",
        "OlmoeSparseMoeBlock",
        {**X, "norm_topk_prob": True},
        MoeSpec(NORMED, ExpertSpec(84)),
    ),
    "granitemoe": Case("granitemoe", "GraniteMoeMoE", LOCAL, MoeSpec(OF_CHOSEN, ExpertSpec(84))),
    "qwen2_moe": Case(
        "qwen2_moe",
        "Qwen2MoeSparseMoeBlock",
        {**X, **INNER, "shared_expert_intermediate_size": 44},
        MoeSpec(PLAIN, ExpertSpec(36), MlpSpec(44), shared_gate=True),
    ),
    "qwen3_moe": Case(
        "qwen3_moe",
        "Qwen3MoeSparseMoeBlock",
        {**X, **INNER, "norm_topk_prob": True},
        MoeSpec(NORMED, ExpertSpec(36)),
    ),
    "glm4_moe": Case("glm4_moe", "Glm4MoeMoE", ROUTED, MoeSpec(V3, ExpertSpec(36), MlpSpec(36))),
    "deepseek_v2": Case(
        "deepseek_v2",
        "DeepseekV2Moe",
        {**ROUTED, "topk_method": "group_limited_greedy", "n_shared_experts": 2},
        MoeSpec(V2, ExpertSpec(36), MlpSpec(72)),
    ),
    "deepseek_v2 greedy": Case(
        "deepseek_v2",
        "DeepseekV2Moe",
        {**ROUTED, "topk_method": "greedy", "n_shared_experts": 2},
        MoeSpec(replace(V2, groups=None), ExpertSpec(36), MlpSpec(72)),
    ),
    "deepseek_v3": Case(
        "deepseek_v3", "DeepseekV3MoE", ROUTED, MoeSpec(V3, ExpertSpec(36), MlpSpec(36))
    ),
    "gpt_oss": Case("gpt_oss", "GptOssMLP", LOCAL, MoeSpec(replace(OF_CHOSEN, bias=True), CLAMPED)),
    "minimax_m2": Case(
        "minimax_m2", "MiniMaxM2SparseMoeBlock", LOCAL, MoeSpec(SIGMOID, ExpertSpec(84))
    ),
    "ernie4_5_moe": Case(
        "ernie4_5_moe",
        "Ernie4_5_MoeSparseMoeBlock",
        ERNIE,
        MoeSpec(
            replace(PLAIN, normalise=True, correction=True, sum_minimum=1e-12),
            ExpertSpec(36),
            MlpSpec(72),
        ),
    ),
    "lfm2_moe": Case(
        "lfm2_moe",
        "Lfm2MoeSparseMoeBlock",
        {**X, **INNER, **LFM2},
        MoeSpec(replace(SIGMOID, sum_added=1e-6, scale=1.7), ExpertSpec(36)),
    ),
}


def parameters(block: Any, spec: MoeSpec) -> Iterator[tuple[str, torch.Tensor]]:
    """The block's weights, fused as transformers holds them, under our names."""
    state = dict(block.state_dict())
    gpt_oss = "experts.gate_up_proj_bias" in state
    for name, tensor in state.items():
        if name.startswith("experts."):
            yield from _of_experts(name, tensor, transposed=gpt_oss, spec=spec)
        elif name.endswith(("e_score_correction_bias", "expert_bias")):
            yield "router.correction", tensor.flatten()
        elif name.startswith("shared_expert_gate"):
            yield "shared_router", tensor
        elif name.startswith("shared_expert"):
            yield f"shared.{name.split('.')[1].removesuffix('_proj')}", tensor
        else:
            yield ("router.bias" if name.endswith("bias") else "router"), tensor


def _of_experts(
    name: str, tensor: torch.Tensor, *, transposed: bool, spec: MoeSpec
) -> Iterator[tuple[str, torch.Tensor]]:
    suffix = ".bias" if name.endswith("_bias") else ""
    for index, of_expert in enumerate(tensor):
        if transposed and not suffix:
            of_expert = of_expert.t()
        if "gate_up" not in name:
            yield f"experts.{index}.down{suffix}", of_expert
        elif transposed:
            yield f"experts.{index}.gate{suffix}", of_expert[0::2]
            yield f"experts.{index}.up{suffix}", of_expert[1::2]
        else:
            yield f"experts.{index}.gate", of_expert[: spec.expert.intermediate_size]
            yield f"experts.{index}.up", of_expert[spec.expert.intermediate_size :]


@dataclass
class Taken:
    """`layers.parts.Parts` over plain tensors in fp32, each taken once."""

    weights: dict[str, torch.Tensor]
    prefix: str = ""

    def tensor(self, name: str) -> torch.Tensor:
        return self.weights.pop(self.prefix + name)

    def linear(self, *names: str) -> Linear:
        biases = [self.tensor(f"{name}.bias") for name in names if self.has(f"{name}.bias")]
        weight = torch.cat([self.tensor(name) for name in names])
        return DenseLinear(weight, torch.cat(biases) if biases else None)

    def has(self, name: str) -> bool:
        return self.prefix + name in self.weights

    def experts(self, spec: MoeSpec) -> None:
        return None

    def within(self, part: str) -> "Taken":
        return Taken(self.weights, f"{self.prefix}{part}.")

    def norm(self, name: str, *, offset: float | None = None, eps: float | None = None) -> RmsNorm:
        raise AssertionError(f"a mixture has no norm {name}")


@pytest.mark.parametrize("name", CASES)
def test_a_mixture_equals_transformers_block(name: str) -> None:
    """Oracle: the block itself on 300 rows, 1e-5 of its range, as many rows, few and one; rows that
    a router decides by less than 3e-6 are left out, and they are rare."""
    case = CASES[name]
    torch.manual_seed(sum(name.encode()))
    config = AutoConfig.for_model(case.family, **{**SIZES, **case.settings})
    module = importlib.import_module(f"transformers.models.{case.family}.modeling_{case.family}")
    block = getattr(module, case.block)(config).eval().float()
    for tensor in block.state_dict().values():
        tensor.normal_(0.0, 0.5)
    weights = dict(parameters(block, case.spec))
    shapes = {key: tuple(tensor.shape) for key, tensor in weights.items()}
    assert shapes == case.spec.parameter_shapes(HIDDEN)
    moe = build(case.spec, Taken(weights))
    assert not weights
    x = torch.randn(300, HIDDEN)
    with torch.no_grad():
        out = block(x[None])
    expected = (out[0] if isinstance(out, tuple) else out)[0]
    margins: list[torch.Tensor] = []
    moe.observer = margins.append
    many = moe(x, [RowGroup(0, 300, Form.MANY)])
    moe.observer = None
    clear = margins[0] >= 3e-6
    assert int(clear.sum()) >= 298
    few = moe(x[:7], [RowGroup(0, 7, Form.FEW)])
    one = moe(x[:1], [RowGroup(0, 1, Form.FEW)])
    extent = expected.max() - expected.min()
    for ours in (many, few, one):
        difference = (ours - expected[: len(ours)]).abs()[clear[: len(ours)]]
        assert float(difference.max() / extent) < 1e-5
