# SPDX-License-Identifier: Apache-2.0
"""Attention over pieces against the formula in fp64."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken_runtime.kernels.attention import cpu, reference
from freetoken_runtime.layers.attention import Scores, attend_sequence
from freetoken_runtime.state.buffers import Pool, RowShape, StateLayout
from freetoken_runtime.state.sequence import Sequence
from freetoken_runtime.state.spaces import Spaces
from freetoken_runtime.testing import ListState


@pytest.fixture(scope="module", autouse=True)
def one_thread_for_small_matrices() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rows(
    count: int, heads: int, kv_heads: int, dim: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(count, heads, dim, generator=generator),
        torch.randn(count, kv_heads, dim, generator=generator),
        torch.randn(count, kv_heads, dim, generator=generator),
    )


@settings(max_examples=60, deadline=None)
@given(
    queries=st.integers(1, 40),
    keys=st.integers(1, 90),
    groups=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    dim=st.integers(1, 70),
    causal=st.booleans(),
)
def test_one_piece_equals_the_reference(
    queries: int, keys: int, groups: int, kv_heads: int, dim: int, causal: bool
) -> None:
    """Oracle: softmax written out in fp64; outputs and log-sum-exp, any shape."""
    keys = queries if causal else keys
    q, _, _ = rows(queries, groups * kv_heads, kv_heads, dim, 0)
    _, k, v = rows(keys, groups * kv_heads, kv_heads, dim, 1)
    scale = dim**-0.5
    out, lse = cpu.attend(q, k, v, scale=scale, causal=causal)
    expected, expected_lse = reference.attend(q, k, v, scale=scale, causal=causal)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(1, 30), min_size=1, max_size=6), queries=st.integers(1, 5))
def test_merged_pieces_equal_one(cuts: list[int], queries: int) -> None:
    """Oracle: the reference over all keys at once, and the reference's own merge."""
    q, _, _ = rows(queries, 6, 2, 20, 0)
    _, k, v = rows(sum(cuts), 6, 2, 20, 1)
    pieces = list(zip(torch.split(k, cuts), torch.split(v, cuts), strict=True))
    merged = cpu.merge([cpu.attend(q, keys, values, scale=0.3) for keys, values in pieces])
    expected, _ = reference.attend(q, k, v, scale=0.3)
    torch.testing.assert_close(merged.double(), expected, rtol=0, atol=3e-6)
    exact = reference.merge([reference.attend(q, *piece, scale=0.3) for piece in pieces])
    torch.testing.assert_close(exact, expected, rtol=0, atol=1e-12)


def test_a_piece_of_small_scores_does_not_drown_in_a_merge() -> None:
    """Oracle: the reference; one piece's log-sum-exp is 80 below the other's."""
    q, k, v = rows(3, 2, 2, 8, 0)
    k2, v2 = k * 40, v + 1
    merged = cpu.merge([cpu.attend(q, k, v, scale=1.0), cpu.attend(q, k2, v2, scale=1.0)])
    expected, _ = reference.attend(q, torch.cat((k, k2)), torch.cat((v, v2)), scale=1.0)
    torch.testing.assert_close(merged.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("group", [2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("queries", [1, 5, 70])
def test_the_bits_do_not_depend_on_the_number_of_threads(queries: int, group: int) -> None:
    """Oracle: one thread against two, of each piece and of the merge: the engine drops to one
    thread beside a busy process."""
    q, _, _ = rows(queries, 2 * group, 2, 64, 0)
    pieces = [rows(keys, 2 * group, 2, 64, keys)[1:] for keys in (700, 33, 120)]
    before, outs = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            parts = [cpu.attend(q, k, v, scale=0.3) for k, v in pieces]
            outs.append([*(out for out, _ in parts), *(lse for _, lse in parts), cpu.merge(parts)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(*outs, strict=True))


def test_what_kills_the_kernel_is_stopped_before_it() -> None:
    """Oracle: an assertion instead of SIGFPE or a wrong mask."""
    q, k, v = rows(3, 2, 2, 8, 0)
    with pytest.raises(AssertionError):
        cpu.attend(q, k[:0], v[:0], scale=1.0)
    with pytest.raises(AssertionError):
        cpu.attend(q[:0], k, v, scale=1.0)
    with pytest.raises(AssertionError):
        cpu.attend(q[:2], k, v, scale=1.0, causal=True)


@pytest.mark.parametrize("passes", [[1], [5], [1, 1, 1], [17, 1, 1], [3, 40, 1, 7], [64, 65, 1]])
@pytest.mark.parametrize("kind", ["list", "spans"])
def test_a_sequence_in_passes_equals_one_causal_square(passes: list[int], kind: str) -> None:
    """Oracle: the reference over the whole sequence; the state is the plain list or the engine's
    own, with NaN wherever nothing was written."""
    q, k, v = rows(sum(passes), 6, 2, 10, 3)
    shape = RowShape(heads=2, key_dim=10, value_dim=10, dtype=torch.float32)
    state = (
        ListState(1)
        if kind == "list"
        else Sequence(Spaces(Pool(StateLayout([shape]), poison=True)))
    )
    outs, at = [], 0
    for count in passes:
        if isinstance(state, Sequence):
            state.begin(count)
        a, b = at, at + count
        outs.append(attend_sequence(q[a:b], k[a:b], v[a:b], state, 0, Scores(0.4)))
        state.commit(list(range(a, b)))
        at = b
    expected, _ = reference.attend(q, k, v, scale=0.4, causal=True)
    torch.testing.assert_close(torch.cat(outs).double(), expected, rtol=0, atol=3e-6)


def test_the_reference_itself_on_a_case_by_hand() -> None:
    """Oracle: two keys with scores 0 and ln 3: weights 1/4 and 3/4."""
    q = torch.tensor([[[1.0]]])
    k = torch.tensor([[[0.0]], [[math.log(3)]]])
    v = torch.tensor([[[4.0]], [[8.0]]])
    out, lse = reference.attend(q, k, v, scale=1.0)
    assert float(out[0, 0, 0]) == pytest.approx(7.0, abs=1e-6)
    assert float(lse[0, 0]) == pytest.approx(math.log(4), abs=1e-6)
