# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts row by row in fp64, routing included."""

import math
from collections.abc import Callable, Sequence

import torch

from ...specs.moe import ClampedGlu, RouterSpec

Row = list[float]


def route(logits: Row, spec: RouterSpec, correction: Row | None) -> list[tuple[int, float]]:
    """One row's (expert, weight), the best first; ties go to the lower index."""
    scores = _scores(logits, spec)
    choice = (
        scores if correction is None else [s + c for s, c in zip(scores, correction, strict=True)]
    )
    allowed = _allowed(choice, spec)
    chosen = sorted(allowed, key=lambda expert: -choice[expert])[: spec.top_k]
    weights = [scores[expert] for expert in chosen]
    if spec.scores == "softmax_of_chosen":
        weights = _softmax(weights)
    if spec.normalise:
        total = max(sum(weights) + spec.sum_added, spec.sum_minimum)
        weights = [weight / total for weight in weights]
    return [(expert, weight * spec.scale) for expert, weight in zip(chosen, weights, strict=True)]


def _scores(logits: Row, spec: RouterSpec) -> Row:
    if spec.scores == "softmax":
        return _softmax(logits)
    if spec.scores == "sigmoid":
        return [1 / (1 + math.exp(-logit)) for logit in logits]
    return logits


def _softmax(logits: Row) -> Row:
    powers = [math.exp(logit - max(logits)) for logit in logits]
    return [power / sum(powers) for power in powers]


def _allowed(choice: Row, spec: RouterSpec) -> list[int]:
    experts = list(range(spec.num_experts))
    if spec.groups is None:
        return experts
    size, count = spec.num_experts // spec.groups.count, spec.groups.count
    best = 1 if spec.groups.score == "largest" else 2
    marks = [sum(sorted(choice[g * size : (g + 1) * size])[-best:]) for g in range(count)]
    groups = sorted(range(count), key=lambda group: -marks[group])[: spec.groups.chosen]
    return [expert for expert in experts if expert // size in groups]


def mix(
    x: torch.Tensor,
    routes: Sequence[Sequence[tuple[int, float]]],
    compute: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """x [n, H], each row's (expert, weight) -> [n, H] fp64. `compute(e, row)` applies an expert to
    one row [H] in fp64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row, route_of_row in enumerate(routes):
        for expert, weight in route_of_row:
            out[row] += weight * compute(expert, x[row].double())
    return out


def clamped_glu(gate: torch.Tensor, up: torch.Tensor, spec: ClampedGlu) -> torch.Tensor:
    """Written out for numbers, as in gpt-oss; gate, up [I] -> [I] fp64."""
    values = []
    for g, u in zip(gate.tolist(), up.tolist(), strict=True):
        g, u = min(g, spec.limit), max(-spec.limit, min(u, spec.limit))
        values.append((u + 1) * g / (1 + math.exp(-spec.alpha * g)))
    return torch.tensor(values, dtype=torch.float64)
