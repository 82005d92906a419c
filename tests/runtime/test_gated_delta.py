# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule: every form against the token-by-token reference and transformers."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

from freetoken_runtime.kernels.gated_delta import cpu, reference

LENGTHS = [1, 2, 31, 32, 33, 63, 64, 65, 257]
SHAPES = [(2, 6, 12, 20), (3, 3, 7, 5), (1, 4, 16, 8)]  # Hk, Hv, Dk, Dv
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Memory that torch hands out uninitialised is NaN."""
    torch.use_deterministic_algorithms(True)
    assert bool(torch.empty(7).isnan().all())
    yield
    torch.use_deterministic_algorithms(False)


def draw(
    rows: int,
    shape: tuple[int, int, int, int] = SHAPES[0],
    *,
    seed: int = 0,
    log_rate: tuple[float, float] = (-3.0, -2.0),
) -> Case:
    """q, k, v, log decay, beta and a state as a model makes them; `log_rate`: range of A_log."""
    key_heads, heads, key_dim, dim = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    q = functional.normalize(normal(rows, key_heads, key_dim), dim=-1) * key_dim**-0.5
    k = functional.normalize(normal(rows, key_heads, key_dim), dim=-1)
    rate = torch.empty(heads).uniform_(*log_rate, generator=generator).exp()
    decay = -rate * functional.softplus(normal(rows, heads) + 1)
    beta = normal(rows, heads).sigmoid()
    return q, k, normal(rows, heads, dim), decay, beta, normal(heads, key_dim, dim)


def exact(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference in fp64."""
    return reference.scan(*case[:5], case[5].double())


def error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference as a part of the largest expected value."""
    assert ours.shape == expected.shape and bool(ours.isfinite().all())
    return float((ours - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("rows", [1, 2, 65])
def test_the_reference_equals_transformers(rows: int) -> None:
    """Oracle: transformers' token-by-token form, fp32."""
    modeling: Any = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    q, k, v, decay, beta, state = draw(rows)
    scaled = q * k.shape[-1] ** 0.5  # it scales by itself
    args = (x[None] for x in (scaled, k, v, decay, beta))
    expected, after = modeling.torch_recurrent_gated_delta_rule(
        *args, initial_state=state[None], output_final_state=True
    )
    out, last = exact((q, k, v, decay, beta, state))
    assert error(expected[0], out) < 1e-6 and error(after[0], last) < 1e-6


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", LENGTHS)
def test_chunks_equal_the_reference(rows: int, shape: tuple[int, int, int, int]) -> None:
    """Oracle: the reference in fp64, from a state that is carried in."""
    case = draw(rows, shape)
    expected, last = exact(case)
    for out, after in (cpu.chunked(*case), cpu.scan(*case)):
        assert error(out, expected) < 1e-6 and error(after, last) < 1e-6


@pytest.mark.parametrize("rows", [64, 257])
def test_chunks_equal_transformers(rows: int) -> None:
    """Oracle: transformers' chunked form, A_log in [-3, -2] where its fp32 sums still hold."""
    modeling: Any = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    q, k, v, decay, beta, state = draw(rows)
    scaled = q * k.shape[-1] ** 0.5
    args = (x[None] for x in (scaled, k, v, decay, beta))
    expected, last = modeling.torch_chunk_gated_delta_rule(
        *args, initial_state=state[None], output_final_state=True
    )
    out, after = cpu.scan(q, k, v, decay, beta, state)
    assert error(out, expected[0]) < 2e-6 and error(after, last[0]) < 2e-6


@pytest.mark.parametrize("log_rate", [(-3.0, -2.0), (-4.6, 2.8)], ids=str)
@pytest.mark.parametrize("sizes", [[64, 193], [1, 256], [63, 1, 1, 65, 127], [200, 57]], ids=str)
def test_cut_anywhere(sizes: list[int], log_rate: tuple[float, float]) -> None:
    """Oracle: one scan; the grid of chunks restarts at each cut: 4e-7 of the range, also where
    decays are as strong as checkpoints have them."""
    q, k, v, decay, beta, state = draw(257, seed=1, log_rate=log_rate)
    whole, last = cpu.scan(q, k, v, decay, beta, state)
    outs = []
    for part in range(len(sizes)):
        rows = [torch.split(x, sizes)[part] for x in (q, k, v, decay, beta)]
        out, state = cpu.scan(rows[0], rows[1], rows[2], rows[3], rows[4], state)
        outs.append(out)
    assert error(torch.cat(outs), whole) < 4e-7 and error(state, last) < 4e-7


def test_steps_for_512_rows_equal_one_scan() -> None:
    """Oracle: one scan, and the reference in fp64: errors do not grow with the number of steps."""
    case = draw(512, seed=2)
    q, k, v, decay, beta, state = case
    outs = []
    for row in range(512):
        out, state = cpu.step(q[row], k[row], v[row], decay[row], beta[row], state)
        outs.append(out)
    whole, last = cpu.scan(*case)
    expected, exact_last = exact(case)
    assert error(torch.stack(outs), whole) < 1e-6 and error(state, last) < 1e-6
    assert error(torch.stack(outs), expected) < 1e-6 and error(state, exact_last) < 1e-6


@pytest.mark.parametrize("strength", [0.0, 1e-7, 80.0, 1e4])
def test_decays_of_any_strength(strength: float) -> None:
    """Oracle: the reference in fp64: no decay at all, and decays whose exponentials vanish."""
    q, k, v, decay, beta, state = draw(100, seed=3)
    case = (q, k, v, torch.full_like(decay, -strength), beta, state)
    expected, last = exact(case)
    for out, after in (cpu.chunked(*case), cpu.scan(*case)):
        assert error(out, expected) < 2e-6 and error(after, last) < 2e-6


def test_the_same_key_again_and_again() -> None:
    """Oracle: the reference in fp64. Every row overwrites what the row before it wrote, nothing
    decays: the worst triangular system a chunk can have."""
    q, k, v, decay, beta, state = draw(200, seed=4)
    same = k[:1].expand_as(k)
    case = (q, same, v, torch.zeros_like(decay), torch.full_like(beta, 0.999), state)
    expected, last = exact(case)
    out, after = cpu.scan(*case)
    assert error(out, expected) < 2e-6 and error(after, last) < 2e-6


@pytest.mark.parametrize("rows", [1, 40])
def test_arguments_stay_and_results_own_their_memory(rows: int) -> None:
    """Oracle: copies made before; columns of one wide projection are taken as they are."""
    q, k, v, decay, beta, state = draw(rows)
    wide = torch.cat([x.reshape(rows, -1) for x in (q, k, v)], 1)
    parts = torch.split(wide, [24, 24, 120], 1)
    shaped = (parts[0].view(rows, 2, 12), parts[1].view(rows, 2, 12), parts[2].view(rows, 6, 20))
    before = wide.clone(), state.clone()
    out, after = cpu.scan(*shaped, decay, beta, state)
    plain, last = cpu.scan(q, k, v, decay, beta, state)
    assert torch.equal(out, plain) and torch.equal(after, last)
    assert torch.equal(wide, before[0]) and torch.equal(state, before[1])
    assert after.is_contiguous() and after.untyped_storage().nbytes() == after.nbytes
    assert after.data_ptr() != state.data_ptr()


def test_a_scan_longer_than_the_chunk_matrices_kept_at_once() -> None:
    """Oracle: the reference in fp64 across groups of 128 rows, with a short chunk."""
    case = draw(2 * 128 + 39, (1, 2, 6, 4), seed=5)
    expected, last = exact(case)
    out, after = cpu.scan(*case)
    assert error(out, expected) < 1e-6 and error(after, last) < 1e-6


@pytest.mark.parametrize("rows", [1, 100])
def test_threads_change_no_bit(rows: int) -> None:
    """Oracle: one thread against two, at the layer shapes of Qwen3.6-35B-A3B."""
    case = draw(rows, (16, 32, 128, 128), seed=6)
    threads, results = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append(cpu.scan(*case))
    torch.set_num_threads(threads)
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
