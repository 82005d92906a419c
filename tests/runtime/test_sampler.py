# SPDX-License-Identifier: Apache-2.0
"""The sampler against transformers' processors, plain numpy, and its own promises."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from freetoken_runtime.errors import ConstraintDeadEnd, EngineFault, InvalidSampling
from freetoken_runtime.sampler import Sampler, SamplingParams, candidates, uniform

VOCAB = 211


def row(seed: int, size: int = VOCAB, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread


def run(params: SamplingParams, rows: list[torch.Tensor], path: list[int]) -> list[int]:
    sampler = Sampler(params, VOCAB, path)
    return [sampler.sample(logits).id for logits in rows]


def transformers_probabilities(
    logits: torch.Tensor, params: SamplingParams, path: list[int]
) -> torch.Tensor:
    """Oracle: the processors that `generate` would build, in its order."""
    from transformers.generation import logits_process as lp

    ids, scores = torch.tensor([path]), logits[None].clone()
    steps: list[Any] = []
    if params.repetition_penalty != 1.0:
        steps.append(lp.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    steps.append(lp.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(lp.TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        steps.append(lp.TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        steps.append(lp.MinPLogitsWarper(params.min_p))
    for step in steps:
        scores = step(ids, scores)
    return scores[0].softmax(0)


def our_probabilities(
    logits: torch.Tensor, params: SamplingParams, path: list[int]
) -> torch.Tensor:
    sampler = Sampler(params, len(logits), path)
    ids, weights = candidates(sampler._penalised(logits), params)
    result = torch.zeros(len(logits))
    result[ids] = weights / weights.sum()
    return result


@settings(max_examples=150, deadline=None)
@example(seed=0, temperature=1.0, top_k=3, top_p=1 - 2**-53, min_p=0.0, repetition=1.0)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.1, 4.0),
    top_k=st.integers(0, VOCAB + 5),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.5),
    repetition=st.sampled_from([1.0, 1.3, 0.7]),
)
def test_distribution_equals_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, repetition: float
) -> None:
    """Oracle: transformers' LogitsProcessors, composed as `generate` composes them."""
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
    )
    path = [int(x) for x in torch.randint(0, VOCAB, (30,), generator=torch.manual_seed(seed))]
    logits = row(seed)
    ours = our_probabilities(logits, params, path)
    theirs = transformers_probabilities(logits, params, path)
    # transformers sums in fp32: where the sum lands on top_p itself it may keep one token more or
    # less, and near 1 it drops a tail whose mass it cannot see.
    different = (ours > 0) != (theirs > 0)
    if params.top_p < 1.0 and int(different.sum()) == 1:
        return
    assert float((ours + theirs)[different].sum()) < 1e-6
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-4)


def test_nucleus_beyond_the_first_candidates_equals_a_full_sort() -> None:
    """Oracle: numpy over the whole vocabulary, on a distribution too flat for a short list."""
    logits = row(1, 6000, 0.01)
    ids, _ = candidates(logits, SamplingParams(temperature=1.0, top_p=0.9))
    scaled = (logits - logits.max()).numpy()  # fp32, as the sampler sees it: ties are made here
    probabilities = np.exp(scaled.astype(np.float64))
    probabilities /= probabilities.sum()
    order = np.argsort(-scaled, kind="stable")
    count = int(np.searchsorted(np.cumsum(probabilities[order]), 0.9)) + 1
    assert ids.tolist() == order[:count].tolist()
    assert len(ids) > 1024


def test_draws_follow_the_distribution() -> None:
    """Oracle: softmax probabilities; chi-square over 4,000 draws at distinct positions."""
    logits = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03]))
    sampler = Sampler(SamplingParams(temperature=1.0, seed=7), 5, [])
    counts = np.bincount([sampler.sample(logits).id for _ in range(4000)], minlength=5)
    expected = np.array([0.5, 0.25, 0.15, 0.07, 0.03]) * 4000
    assert float((((counts - expected) ** 2) / expected).sum()) < 18.5  # 99.9 % for 4 degrees


def test_presence_and_frequency_penalties_count_this_requests_ids_only() -> None:
    """Oracle: the subtraction written out."""
    params = SamplingParams(presence_penalty=0.75, frequency_penalty=0.5, force=(4, 4, 9))
    sampler = Sampler(params, VOCAB, [3, 3, 3])
    logits = row(2)
    for _ in range(3):
        sampler.sample(logits)
    expected = logits.clone()
    expected[4] -= 0.75 + 2 * 0.5
    expected[9] -= 0.75 + 0.5
    torch.testing.assert_close(sampler._penalised(logits), expected)


def test_repetition_counts_what_was_sampled_once() -> None:
    """Oracle: transformers' processor over path and sampled ids, an id sampled twice included."""
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    params = SamplingParams(repetition_penalty=1.7, force=(4, 4, 9))
    sampler = Sampler(params, VOCAB, [])
    logits = row(6)
    for _ in range(3):
        sampler.sample(logits)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[4, 4, 9]]), logits[None])[0]
    torch.testing.assert_close(sampler._penalised(logits), expected)


def test_greedy_takes_the_best_and_leaves_the_row_alone() -> None:
    """Oracle: argmax; the row compared with a copy after every option that edits scores."""
    logits = row(3)
    before = logits.clone()
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=1.0)
    sampler = Sampler(params, VOCAB, list(range(50)))
    for _ in range(3):
        sampler.sample(logits)
    assert torch.equal(logits, before)
    assert run(SamplingParams(), [logits], []) == [int(logits.argmax())]


def test_the_same_seed_gives_the_same_ids_alone_interleaved_and_continued() -> None:
    """Oracle: the request's own ids when it ran alone."""
    rows = [row(seed) for seed in range(40)]
    params = SamplingParams(temperature=1.2, top_p=0.95, seed=5)
    alone = run(params, rows, [1, 2, 3])
    other = Sampler(SamplingParams(temperature=1.0, seed=5), VOCAB, [1])
    sampler = Sampler(params, VOCAB, [1, 2, 3])
    beside = []
    for logits in rows:
        other.sample(logits)
        beside.append(sampler.sample(logits).id)
    first = run(params, rows[:17], [1, 2, 3])
    assert beside == alone
    assert first + run(params, rows[17:], [1, 2, 3, *first]) == alone
    assert run(SamplingParams(temperature=1.2, top_p=0.95, seed=6), rows, [1, 2, 3]) != alone


def test_without_a_seed_two_requests_differ() -> None:
    """Oracle: chance of equality below 1e-20 over 40 flat draws."""
    rows = [torch.zeros(VOCAB)] * 40
    params = SamplingParams(temperature=1.0)
    assert run(params, rows, []) != run(params, rows, [])


def test_uniform_is_the_same_on_every_machine() -> None:
    """Oracle: values fixed by the definition (blake2b of seed and position)."""
    assert uniform(0, 0) != uniform(0, 1) != uniform(1, 0)
    assert [round(uniform(1234, position), 6) for position in range(3)] == UNIFORM_1234
    draws = [uniform(-3, position) for position in range(2000)]
    assert 0.47 < sum(draws) / 2000 < 0.53 and 0 <= min(draws) and max(draws) < 1


UNIFORM_1234 = [0.165122, 0.835271, 0.825424]  # computed once from hashlib


def test_forced_ids_come_first_and_count_as_sampled() -> None:
    """Oracle: the list given, then greedy; logprobs of forced ids from log_softmax."""
    rows = [row(seed) for seed in range(4)]
    sampler = Sampler(SamplingParams(force=[7, 8]), VOCAB, [])
    tokens = [sampler.sample(logits) for logits in rows]
    assert [token.id for token in tokens] == [7, 8, int(rows[2].argmax()), int(rows[3].argmax())]
    for token, logits in zip(tokens, rows, strict=True):
        assert token.logprob == pytest.approx(float(logits.log_softmax(0)[token.id]), abs=1e-5)


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    """Oracle: log_softmax of the raw row, whatever temperature and penalties do."""
    logits = row(4)
    params = SamplingParams(temperature=2.0, top_k=3, repetition_penalty=1.9, logprobs=5, seed=0)
    token = Sampler(params, VOCAB, [1, 2]).sample(logits)
    log_probabilities = logits.log_softmax(0)
    values, ids = log_probabilities.topk(5)
    assert token.logprob == pytest.approx(float(log_probabilities[token.id]), abs=1e-5)
    assert [pair[0] for pair in token.top] == ids.tolist()
    assert [pair[1] for pair in token.top] == pytest.approx(values.tolist(), abs=1e-5)


class OnlyEven:
    """Even ids, at most two of them, then nothing; 42 is forced first."""

    def __init__(self, taken: tuple[int, ...] = ()) -> None:
        self.taken = taken

    @property
    def accepting(self) -> bool:
        return len(self.taken) > 0

    def mask(self, row: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        row[1::2] = -math.inf
        if len(self.taken) >= 3:
            row[:] = -math.inf

    def accept(self, token_id: int) -> None:
        self.taken = (*self.taken, token_id)

    def forced(self) -> tuple[int, ...]:
        return () if self.taken else (42,)

    def copy(self) -> "OnlyEven":
        return OnlyEven(self.taken)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_constraint_rules_and_its_dead_end_is_an_error(temperature: float) -> None:
    """Oracle: parity of every sampled id; the constraint passed in is not advanced."""
    constraint = OnlyEven()
    params = SamplingParams(temperature=temperature, constraint=constraint, seed=1)
    sampler = Sampler(params, VOCAB, [])
    ids = [sampler.sample(row(seed)).id for seed in range(3)]
    assert ids[0] == 42 and all(token_id % 2 == 0 for token_id in ids)
    assert constraint.taken == ()
    with pytest.raises(ConstraintDeadEnd) as error:
        sampler.sample(row(9))
    assert error.value.code == "constraint_dead_end"


def test_masked_ids_are_never_drawn_even_at_the_ends() -> None:
    """Oracle: the only finite logits; a draw of 0 or of almost 1 must not leave them."""
    logits = torch.full((9,), -math.inf)
    logits[3:6] = 0.0
    sampler = Sampler(SamplingParams(temperature=1.0, seed=2), 9, [])
    assert {sampler.sample(logits).id for _ in range(200)} == {3, 4, 5}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_a_fault(bad: float) -> None:
    """Oracle: the error's type; a NaN must never become a token."""
    logits = row(5)
    logits[17] = bad
    with pytest.raises(EngineFault):
        Sampler(SamplingParams(), VOCAB, []).sample(logits)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", math.inf),
        ("seed", 2**64),
        ("seed", 1.5),
        ("logprobs", -1),
        ("logprobs", 100_000),
    ],
)
def test_invalid_values_name_field_value_and_limit(field: str, value: Any) -> None:
    """Oracle: the message itself."""
    with pytest.raises(InvalidSampling) as error:
        SamplingParams(**{field: value})
    assert error.value.code == "invalid_sampling"
    assert field in str(error.value) and repr(value) in str(error.value)
    assert "limit" in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("stop_ids", frozenset({VOCAB})), ("force", [0, -1]), ("logprobs", VOCAB + 1)],
)
def test_ids_outside_the_vocabulary_are_refused(field: str, value: Any) -> None:
    """Oracle: the message names the field."""
    with pytest.raises(InvalidSampling, match=field):
        Sampler(SamplingParams(**{field: value}), VOCAB, [])


def test_stop_ids() -> None:
    """Oracle: set membership."""
    sampler = Sampler(SamplingParams(stop_ids=frozenset({5})), VOCAB, [])
    assert sampler.is_stop(5) and not sampler.is_stop(6)
