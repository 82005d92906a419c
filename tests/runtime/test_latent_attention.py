# SPDX-License-Identifier: Apache-2.0
"""Latent attention in both forms against its paper's formula in fp64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken_runtime.kernels.latent_attention import cpu, reference

HEADS, RANK, NOPE, TURNING, VALUE = 6, 28, 12, 8, 20
pytestmark = pytest.mark.usefixtures("one_thread")
Query = tuple[torch.Tensor, torch.Tensor]


def heads_of(seed: int, value: int = VALUE) -> cpu.Heads:
    generator = torch.Generator().manual_seed(seed)
    return cpu.Heads(
        torch.randn(HEADS, NOPE, RANK, generator=generator) * 0.3,
        torch.randn(HEADS, value, RANK, generator=generator) * 0.3,
    )


def drawn(past: list[int], queries: int, seed: int) -> tuple[Query, list[torch.Tensor]]:
    """Queries, and rows of every piece, the new ones last."""
    generator = torch.Generator().manual_seed(seed)
    q = tuple(torch.randn(queries, HEADS, dim, generator=generator) for dim in (NOPE, TURNING))
    pieces = [torch.randn(n, 1, RANK + TURNING, generator=generator) for n in (*past, queries)]
    return (q[0], q[1]), pieces


@settings(max_examples=40, deadline=None)
@given(
    past=st.lists(st.integers(1, 50), max_size=4),
    queries=st.integers(1, 70),
    value=st.sampled_from([VALUE, 9, 33]),
)
@pytest.mark.parametrize("form", [cpu.over_latents, cpu.over_heads])
def test_both_forms_equal_the_reference(
    form: type, past: list[int], queries: int, value: int
) -> None:
    """Oracle: keys and values of every head and softmax in fp64; values shorter and longer than
    keys."""
    q, pieces = drawn(past, queries, queries)
    heads = heads_of(1, value)
    ours = form(q, pieces[:-1], pieces[-1], heads, scale=0.25)
    expected = reference.attend_latent(
        q, pieces[:-1], pieces[-1], (heads.k_up, heads.v_up), scale=0.25
    )
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=5e-6)


def test_blocks_of_expanded_rows_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the reference, with room for 64 expanded rows at a time."""
    monkeypatch.setattr(cpu, "_BLOCK_ELEMENTS", 1)
    q, pieces = drawn([130, 3], 40, 4)
    heads = heads_of(2)
    ours = cpu.over_heads(q, pieces[:-1], pieces[-1], heads, scale=0.2)
    expected = reference.attend_latent(
        q, pieces[:-1], pieces[-1], (heads.k_up, heads.v_up), scale=0.2
    )
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=5e-6)


def test_the_form_follows_from_the_number_of_queries() -> None:
    """Oracle: multiplications by hand. DeepSeek-V2: 256 · 512 / (1024 - 256) = 170 queries; where
    a latent is no longer than what is made of it, never."""
    heads = cpu.Heads(torch.empty(16, 128, 512), torch.empty(16, 128, 512))
    assert heads.expanding_queries == 170
    assert cpu.Heads(torch.empty(2, 40, 32), torch.empty(2, 40, 32)).expanding_queries > 1 << 20
    short = heads_of(3)
    assert short.expanding_queries == 32 * 28 // (56 - 32)
    for queries, form in ((36, cpu.over_latents), (37, cpu.over_heads)):
        q, pieces = drawn([11], queries, 5)
        chosen = cpu.attend_latent(q, pieces[:1], pieces[1], short, scale=0.3)
        assert torch.equal(chosen, form(q, pieces[:1], pieces[1], short, scale=0.3))
