# SPDX-License-Identifier: Apache-2.0
"""Routing against a naive reference in Python, with every kind of score, group and norm."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken_runtime.errors import UnsupportedConfig
from freetoken_runtime.kernels.experts import reference
from freetoken_runtime.layers.routing import margins, route
from freetoken_runtime.specs.moe import ExpertGroups, RouterSpec, Scores

ROWS = 40
SCORES: tuple[Scores, ...] = get_args(Scores)


@st.composite
def routers(draw: st.DrawFn) -> RouterSpec:
    groups = None
    experts = draw(st.integers(1, 20))
    available = experts
    if draw(st.booleans()):
        count, size = draw(st.integers(1, 5)), draw(st.integers(2, 5))
        chosen = draw(st.integers(1, count))
        groups = ExpertGroups(
            count, chosen, draw(st.sampled_from(["largest", "sum_of_two_largest"]))
        )
        experts, available = count * size, chosen * size
    return RouterSpec(
        num_experts=experts,
        top_k=draw(st.integers(1, available)),
        scores=draw(st.sampled_from(SCORES)),
        normalise=draw(st.booleans()),
        correction=draw(st.booleans()),
        groups=groups,
        sum_added=draw(st.sampled_from([0.0, 1e-20, 1e-6])),
        sum_minimum=draw(st.sampled_from([0.0, 1e-12, 0.3])),
        scale=draw(st.sampled_from([1.0, 2.5])),
    )


def random_logits(spec: RouterSpec, seed: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(ROWS, spec.num_experts, generator=generator) * 2
    correction = torch.randn(spec.num_experts, generator=generator)
    return logits, correction if spec.correction else None


@settings(max_examples=150, deadline=None)
@given(spec=routers(), seed=st.integers(0, 999))
def test_routes_equal_the_reference(spec: RouterSpec, seed: int) -> None:
    """Oracle: one row at a time in Python's fp64; rows decided by less than 1e-5 may differ."""
    if spec.scores == "softmax_of_chosen":
        spec = replace(spec, normalise=False)  # they sum to 1 already
    logits, correction = random_logits(spec, seed)
    routes = route(logits, spec, correction)
    clear = margins(logits, spec, correction) > 1e-5
    assert routes.chosen.shape == routes.weights.shape == (ROWS, spec.top_k)
    for row in range(ROWS):
        expected = reference.route(
            logits[row].double().tolist(),
            spec,
            None if correction is None else correction.double().tolist(),
        )
        if clear[row]:
            ours = dict(zip(routes.chosen[row].tolist(), routes.weights[row].tolist(), strict=True))
            assert ours == pytest.approx(dict(expected), rel=1e-4, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(spec=routers(), seed=st.integers(0, 999))
def test_a_margin_is_what_it_takes_to_change_the_choice(spec: RouterSpec, seed: int) -> None:
    """Oracle: the values that decide are moved by less than half of the margin, and every row
    keeps its experts. Groups ranked by a sum of two move twice as far, so a quarter there."""
    logits, correction = random_logits(spec, seed)
    if spec.scores == "sigmoid" and correction is None:
        correction = torch.zeros(spec.num_experts)
    margin = margins(logits, spec, correction)
    assert bool((margin >= 0).all())
    noise = (torch.rand(logits.shape) - 0.5) * 0.49 * margin.clamp(max=1.0)[:, None]
    chosen = route(logits, spec, correction).chosen.sort(-1).values
    if correction is None:
        moved = route(logits + noise, spec, None).chosen
    else:
        parts = [route(logits[i : i + 1], spec, correction + noise[i]).chosen for i in range(ROWS)]
        moved = torch.cat(parts)
    assert torch.equal(moved.sort(-1).values, chosen)


def test_the_margin_is_the_gap_at_the_cut() -> None:
    """Oracle: written out: experts alone, groups closer than experts, and nothing to choose."""
    logits = torch.tensor([[4.0, 3.0, 2.5, -1.0]])
    two = RouterSpec(4, 2, "softmax")
    assert margins(logits, two, None).tolist() == [0.5]
    assert margins(logits, RouterSpec(4, 4, "softmax"), None).tolist() == [float("inf")]
    grouped = replace(two, top_k=1, groups=ExpertGroups(2, 1, "largest"))
    assert margins(logits, grouped, None).tolist() == [1.0]  # expert 0 before 1, group 4.0 to 2.5
    close = torch.tensor([[4.0, 1.0, 3.75, -1.0]])
    assert margins(close, grouped, None).tolist() == [0.25]
    corrected = margins(logits, two, torch.tensor([0.0, 0.0, 0.0, 9.0]))
    probabilities = logits.softmax(-1)[0]
    assert corrected.item() == pytest.approx(float(probabilities[0] - probabilities[1]))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("groups", [None, ExpertGroups(3, 2, "sum_of_two_largest")], ids=str)
def test_a_row_is_routed_by_itself(scores: Scores, groups: ExpertGroups | None, seed: int) -> None:
    """Oracle: each row alone, bit for bit; logits that are a slice of a wider matrix too."""
    spec = RouterSpec(12, 4, scores, True, correction=seed % 2 == 1, groups=groups)
    logits = torch.randn(57, 13)[:, :12]
    correction = torch.randn(12) if spec.correction else None
    whole = route(logits, spec, correction)
    for row in range(57):
        alone = route(logits[row : row + 1].clone(), spec, correction)
        assert torch.equal(alone.chosen[0], whole.chosen[row])
        assert torch.equal(alone.weights[0], whole.weights[row])


@pytest.mark.parametrize("normalise", [False, True])
def test_m11_norm_topk_prob_both_ways(normalise: bool) -> None:
    """Oracle: the definition: weights of the chosen sum to one, or are their probabilities."""
    logits = torch.randn(30, 12)
    routes = route(logits, RouterSpec(12, 3, "softmax", normalise), None)
    probabilities = logits.softmax(-1).gather(1, routes.chosen)
    if normalise:
        torch.testing.assert_close(routes.weights.sum(-1), torch.ones(30))
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    torch.testing.assert_close(routes.weights, probabilities)
    assert (routes.weights.sum(-1) < 0.999).all() == (not normalise)


def test_m13_equal_logits_route_somewhere_finite() -> None:
    """Oracle: a row of zeros gives every expert the same logit: distinct experts, equal weights."""
    for scores in SCORES:
        for groups in (None, ExpertGroups(3, 2, "sum_of_two_largest")):
            spec = RouterSpec(12, 4, scores, scores == "sigmoid", groups=groups)
            routes = route(torch.zeros(3, 12), spec, None)
            assert all(len(set(row)) == 4 for row in routes.chosen.tolist())
            assert bool(
                (routes.weights == routes.weights[0, 0]).all() and routes.weights.isfinite().all()
            )


@pytest.mark.parametrize(
    "arguments",
    [
        {"top_k": 13},
        {"top_k": 0},
        {"groups": ExpertGroups(5, 2, "largest")},
        {"groups": ExpertGroups(3, 4, "largest")},
        {"groups": ExpertGroups(3, 0, "largest")},
        {"groups": ExpertGroups(12, 6, "sum_of_two_largest")},
        {"groups": ExpertGroups(3, 1, "largest"), "top_k": 5},
    ],
    ids=str,
)
def test_routers_that_cannot_route_are_refused(arguments: dict[str, object]) -> None:
    """Oracle: the error's type: more experts asked for than there are, groups that do not fit."""
    with pytest.raises(UnsupportedConfig):
        RouterSpec(**{"num_experts": 12, "top_k": 2, "scores": "softmax", **arguments})  # type: ignore[arg-type]
