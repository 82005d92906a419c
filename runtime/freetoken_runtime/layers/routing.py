# SPDX-License-Identifier: Apache-2.0
"""Which experts a row takes and with what weights; pure functions of the router's logits."""

from dataclasses import dataclass

import torch

from ..kernels.activations import sigmoid
from ..specs.moe import ExpertGroups, RouterSpec


@dataclass(frozen=True)
class Routes:
    """The experts of n rows, the best of each row first."""

    chosen: torch.Tensor  # [n, k] int64
    weights: torch.Tensor  # [n, k] fp32


def route(logits: torch.Tensor, spec: RouterSpec, correction: torch.Tensor | None) -> Routes:
    """logits [n, E] fp32, correction [E] -> routes. What a row takes depends on it alone."""
    scores = _scores(logits, spec)
    choice = _choice(logits, scores, correction, spec)
    if spec.groups is not None:
        choice = _within_best_groups(choice, spec.groups)
    chosen = choice.topk(spec.top_k, -1).indices
    weights = scores.gather(1, chosen)
    if spec.scores == "softmax_of_chosen":
        weights = weights.softmax(-1)
    if spec.normalise:
        total = weights.sum(-1, keepdim=True) + spec.sum_added
        weights = weights / total.clamp_(min=spec.sum_minimum)
    return Routes(chosen, weights * spec.scale if spec.scale != 1.0 else weights)


def margins(
    logits: torch.Tensor, spec: RouterSpec, correction: torch.Tensor | None
) -> torch.Tensor:
    """By how much each row's choice was made, [n] fp32: the value that decides (the logit, or the
    score where a sigmoid or a correction decides) of the last expert taken minus that of the best
    one left, and the same of groups where they are limited, whichever is smaller."""
    choice = _choice(logits, _scores(logits, spec), correction, spec)
    margin = torch.full((len(logits),), torch.inf)
    if spec.groups is not None:
        marks = _group_marks(choice, spec.groups)
        margin = _gap(marks, spec.groups.chosen)
        choice = _within_best_groups(choice, spec.groups)
    return torch.minimum(margin, _gap(choice, spec.top_k))


def _scores(logits: torch.Tensor, spec: RouterSpec) -> torch.Tensor:
    if spec.scores == "softmax":
        return logits.softmax(-1)
    return sigmoid(logits) if spec.scores == "sigmoid" else logits


def _choice(
    logits: torch.Tensor, scores: torch.Tensor, correction: torch.Tensor | None, spec: RouterSpec
) -> torch.Tensor:
    """The values whose order decides, [n, E]. Where nothing is added, a softmax keeps the order of
    its logits, which are finer: probabilities near 0 or 1 collapse."""
    if correction is not None:
        return scores + correction
    summed = spec.groups is not None and spec.groups.score == "sum_of_two_largest"
    return logits if spec.scores == "softmax" and not summed else scores


def _within_best_groups(choice: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
    """`choice` with -inf for the experts of groups that are not taken."""
    taken = _group_marks(choice, groups).topk(groups.chosen, -1).indices
    closed = torch.ones(len(choice), groups.count, dtype=torch.bool).scatter_(1, taken, False)
    size = choice.shape[1] // groups.count
    return choice.masked_fill(closed.repeat_interleave(size, 1), -torch.inf)


def _group_marks(choice: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
    """What ranks each group, [n, groups]."""
    by_group = choice.reshape(len(choice), groups.count, -1)
    if groups.score == "largest":
        return by_group.amax(-1)
    return by_group.topk(2, -1).values.sum(-1)


def _gap(values: torch.Tensor, taken: int) -> torch.Tensor:
    """The last value taken minus the first one left, [n]; infinite where none is left."""
    if taken == values.shape[1]:
        return torch.full((len(values),), torch.inf)
    best = values.topk(taken + 1, -1).values
    return best[:, -2] - best[:, -1]
