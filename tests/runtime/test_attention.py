# SPDX-License-Identifier: Apache-2.0
"""Attention over pieces against the formula in fp64."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, settings
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


@settings(max_examples=60, deadline=None)
@example(queries=65, keys=1, group=1, gemm_rows=200, at_once=64, step=16, causal=True)
@given(
    queries=st.integers(1, 90),
    keys=st.integers(1, 200),
    group=st.integers(1, 3),
    gemm_rows=st.sampled_from([16, 32, 96, 200]),
    at_once=st.sampled_from([64, 128]),
    step=st.sampled_from([16, 64]),
    causal=st.booleans(),
)
def test_many_queries_in_blocks_equal_the_reference(
    queries: int,
    keys: int,
    group: int,
    gemm_rows: int,
    at_once: int,
    step: int,
    causal: bool,
) -> None:
    """Oracle: softmax written out in fp64; queries and keys in blocks of many sizes, filled up."""
    keys = queries if causal else keys
    q, _, _ = rows(queries, 2 * group, 2, 24, 0)
    _, k, v = rows(keys, 2 * group, 2, 24, 1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("_PIECE_ROWS", 1),
            ("_SQUARE_ROWS", 1),
            ("_GEMM_ROWS", gemm_rows),
            ("_KEYS", at_once),
            ("_KEYS_STEP", step),
        ):
            patch.setattr(cpu, name, value)
        out, lse = cpu.attend(q, k, v, scale=0.3, causal=causal)
    expected, expected_lse = reference.attend(q, k, v, scale=0.3, causal=causal)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("queries", "keys"), [(600, 600), (200, 2300), (43, 4100)])
@pytest.mark.parametrize("group", [1, 3])
def test_long_pieces_equal_the_reference(queries: int, keys: int, group: int) -> None:
    """Oracle: softmax in fp64 at the sizes where GEMMs take over, and one thread against two."""
    q, _, _ = rows(queries, 2 * group, 2, 16, 0)
    _, k, v = rows(keys, 2 * group, 2, 16, 1)
    expected, _ = reference.attend(q, k, v, scale=0.3, causal=queries == keys)
    before, outs = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            outs.append(cpu.attend(q, k, v, scale=0.3, causal=queries == keys))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(outs[0][0].double(), expected, rtol=0, atol=3e-6)
    assert all(torch.equal(one, two) for one, two in zip(*outs, strict=True))


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


@settings(max_examples=60, deadline=None)
@given(
    queries=st.integers(1, 150),
    past=st.integers(0, 90),
    window=st.integers(1, 130),
    groups=st.integers(1, 3),
    dim=st.integers(1, 40),
)
def test_a_window_equals_the_reference(
    queries: int, past: int, window: int, groups: int, dim: int
) -> None:
    """Oracle: a masked softmax in fp64, log-sum-exp included; windows shorter and longer than what
    there is, chunks longer than a block of queries."""
    q, _, _ = rows(queries, 2 * groups, 2, dim, 0)
    _, k, v = rows(past + queries, 2 * groups, 2, dim, 1)
    out, lse = cpu.attend_window(q, k, v, scale=0.3, window=window)
    expected, expected_lse = reference.attend(q, k, v, scale=0.3, causal=True, window=window)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)


def test_the_window_of_the_reference_by_hand() -> None:
    """Oracle: a query sees itself and the one before it, so its output is their mean."""
    q, k = torch.zeros(3, 1, 1), torch.zeros(5, 1, 1)
    v = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])[:, None, None]
    out, lse = reference.attend(q, k, v, scale=1.0, causal=True, window=2)
    assert out.flatten().tolist() == [3.0, 6.0, 12.0]
    assert lse.flatten().tolist() == pytest.approx([math.log(2)] * 3)


@pytest.mark.parametrize("cuts", [[1], [7], [3, 30, 1]])
def test_sinks_take_a_part_and_add_nothing(cuts: list[int]) -> None:
    """Oracle: one more key whose score is the sink and whose value is zero, in fp64."""
    q, _, _ = rows(4, 6, 2, 12, 0)
    _, k, v = rows(sum(cuts), 6, 2, 12, 1)
    sinks = torch.tensor([-30.0, -1.0, 0.0, 0.7, 2.0, 30.0])
    pieces = list(zip(torch.split(k, cuts), torch.split(v, cuts), strict=True))
    ours = cpu.add_sinks([cpu.attend(q, *piece, scale=0.3) for piece in pieces], sinks)
    exact = [reference.attend(q, *piece, scale=0.3) for piece in pieces]
    expected = reference.add_sinks(exact, sinks)
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=3e-6)
    scores = torch.einsum("nhd,shd->nhs", q, k.repeat_interleave(3, 1)).double() * 0.3
    weights = torch.cat((scores, sinks.double().expand(4, 6)[..., None]), -1).softmax(-1)
    by_hand = torch.einsum("nhs,shd->nhd", weights[..., :-1], v.repeat_interleave(3, 1).double())
    torch.testing.assert_close(expected, by_hand, rtol=0, atol=1e-6)


@pytest.mark.parametrize("window", [1, 2, 23, 64, 129, 500])
@pytest.mark.parametrize("passes", [[1, 1, 40, 1], [200], [64, 65, 1, 1, 70], [23, 23, 24]])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_window_over_passes_equals_one_band(passes: list[int], window: int, sinks: bool) -> None:
    """Oracle: the reference over the whole sequence in one masked square."""
    q, k, v = rows(sum(passes), 6, 2, 10, 3)
    sink = torch.linspace(-1, 1, 6) if sinks else None
    state, outs, at = ListState(1), [], 0
    for count in passes:
        a, b = at, at + count
        scores = Scores(0.4, window, sink)
        outs.append(attend_sequence(q[a:b], k[a:b], v[a:b], state, 0, scores))
        state.commit(list(range(a, b)))
        at = b
    expected = reference.attend(q, k, v, scale=0.4, causal=True, window=window)
    whole = expected[0] if sink is None else reference.add_sinks([expected], sink)
    torch.testing.assert_close(torch.cat(outs).double(), whole, rtol=0, atol=3e-6)


def test_a_window_reads_no_more_than_it_shows() -> None:
    """Oracle: rows beyond the window are NaN, and none comes out."""
    q, k, v = rows(300, 6, 2, 10, 3)
    k[:170], v[:170] = math.nan, math.nan
    state = ListState(1)
    for a, b in ((0, 100), (100, 200)):
        state.write(0, k[a:b], v[a:b])
        state.commit(list(range(a, b)))
    for a, b in ((200, 260), (260, 261), (261, 300)):
        out = attend_sequence(q[a:b], k[a:b], v[a:b], state, 0, Scores(0.4, 31))
        state.commit(list(range(a, b)))
        assert bool(out.isfinite().all())


def test_the_reference_itself_on_a_case_by_hand() -> None:
    """Oracle: two keys with scores 0 and ln 3: weights 1/4 and 3/4."""
    q = torch.tensor([[[1.0]]])
    k = torch.tensor([[[0.0]], [[math.log(3)]]])
    v = torch.tensor([[[4.0]], [[8.0]]])
    out, lse = reference.attend(q, k, v, scale=1.0)
    assert float(out[0, 0, 0]) == pytest.approx(7.0, abs=1e-6)
    assert float(lse[0, 0]) == pytest.approx(math.log(4), abs=1e-6)
