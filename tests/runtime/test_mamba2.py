# SPDX-License-Identifier: Apache-2.0
"""The Mamba-2 scan against the recurrence written out, and against transformers' own."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken_runtime.kernels.mamba2 import cpu, reference
from freetoken_runtime.kernels.mamba2.parameters import ScanParameters

LENGTHS = [1, 2, 3, 63, 64, 65, 127, 128, 129, 257]
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
SLOW_DECAY, FAST_DECAY = (-3.0, -2.0), (0.0, 2.7)  # ranges of A_log


@pytest.fixture(autouse=True)
def poisoned_memory_and_one_thread() -> Iterator[None]:
    """Deterministic algorithms fill what `torch.empty` returns with NaN (torch's default), so that
    a place nobody wrote shows."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    assert bool(torch.empty(1).isnan())
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def random_rows(
    count: int, heads: int = 6, dim: int = 20, groups: int = 2, size: int = 12, seed: int = 0
) -> Rows:
    """x, dt, b, c."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return (
        draw(count, heads, dim),
        draw(count, heads),
        draw(count, groups, size),
        draw(count, groups, size),
    )


def random_parameters(
    heads: int = 6,
    decay: tuple[float, float] = SLOW_DECAY,
    limits: tuple[float, float] = (0.0, float("inf")),
) -> ScanParameters:
    generator = torch.Generator().manual_seed(9)
    logs = torch.empty(heads).uniform_(*decay, generator=generator)
    skip, bias = torch.randn(2, heads, generator=generator)
    return ScanParameters(-logs.exp(), skip, bias - 3, *limits)


def random_state(heads: int = 6, dim: int = 20, size: int = 12) -> torch.Tensor:
    return torch.randn(heads, dim, size, generator=torch.Generator().manual_seed(5))


def distance(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference as a part of the range of what is expected."""
    assert ours.shape == expected.shape and bool(ours.isfinite().all())
    return float((ours.double() - expected).abs().max() / (expected.max() - expected.min()))


def exact(
    rows: Rows, state: torch.Tensor, parameters: ScanParameters
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence in fp64."""
    x, dt, b, c = (value.double() for value in rows)
    return reference.scan(x, dt, b, c, state.double(), parameters)


def cut(rows: Rows, start: int, stop: int) -> Rows:
    x, dt, b, c = (value[start:stop] for value in rows)
    return x, dt, b, c


@pytest.mark.parametrize("decay", [SLOW_DECAY, FAST_DECAY], ids=["slow", "fast"])
@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_and_steps_equal_the_recurrence(length: int, decay: tuple[float, float]) -> None:
    """Oracle: the recurrence in fp64, 5e-7 of the range (seen: 2e-7), from a state that is not
    zero; rows and the state after them."""
    rows, state, parameters = random_rows(length), random_state(), random_parameters(decay=decay)
    y, after = cpu.scan(*rows, state, parameters)
    expected_y, expected = exact(rows, state, parameters)
    assert y.dtype == after.dtype == torch.float32
    assert distance(y, expected_y) < 5e-7
    assert distance(after, expected) < 5e-7


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 140),
    groups=st.integers(1, 3),
    share=st.integers(1, 3),
    dim=st.integers(1, 9),
    size=st.integers(1, 9),
    seed=st.integers(0, 10_000),
)
def test_any_shape_equals_the_recurrence(
    length: int, groups: int, share: int, dim: int, size: int, seed: int
) -> None:
    """Oracle: the recurrence in fp64, written row by row."""
    heads = groups * share
    rows = random_rows(length, heads, dim, groups, size, seed)
    state, parameters = random_state(heads, dim, size), random_parameters(heads)
    for ours, expected in zip(
        cpu.scan(*rows, state, parameters), exact(rows, state, parameters), strict=True
    ):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("decay", [SLOW_DECAY, FAST_DECAY], ids=["slow", "fast"])
@pytest.mark.parametrize("cuts", [[1], [63], [64], [65], [1, 2, 3], [100, 101, 250]], ids=str)
def test_a_cut_scan_equals_a_whole_one(cuts: list[int], decay: tuple[float, float]) -> None:
    """Oracle: the scan without cuts, 3e-7 of the range; the grid restarts at each cut."""
    rows, state, parameters = random_rows(257), random_state(), random_parameters(decay=decay)
    whole, last = cpu.scan(*rows, state, parameters)
    outs = []
    for start, stop in zip([0, *cuts], [*cuts, 257], strict=True):
        out, state = cpu.scan(*cut(rows, start, stop), state, parameters)
        outs.append(out)
    assert distance(torch.cat(outs), whole.double()) < 3e-7
    assert distance(state, last.double()) < 3e-7


def test_m23_512_steps_stay_with_a_prefill() -> None:
    """Oracle: one prefill, and the recurrence in fp64: steps do not drift (5e-7 of the range)."""
    rows, state, parameters = random_rows(512), random_state(), random_parameters()
    whole, last = cpu.scan(*rows, state, parameters)
    exact_y, exact_state = exact(rows, state, parameters)
    outs = []
    for row in range(512):
        out, state = cpu.scan(*cut(rows, row, row + 1), state, parameters)
        outs.append(out)
    assert distance(torch.cat(outs), whole.double()) < 5e-7
    assert distance(torch.cat(outs), exact_y) < 5e-7
    assert distance(state, last.double()) < 5e-7
    assert distance(state, exact_state) < 5e-7


@pytest.mark.parametrize("length", [1, 90])
def test_a_scan_leaves_its_inputs_alone(length: int) -> None:
    """Oracle: copies made before; the state after shares no memory with the one before, and is no
    view of something larger."""
    rows, state, parameters = random_rows(length), random_state(), random_parameters()
    copies = [value.clone() for value in (*rows, state)]
    y, after = cpu.scan(*rows, state, parameters)
    assert all(torch.equal(a, b) for a, b in zip((*rows, state), copies, strict=True))
    after.fill_(7.0)
    y.fill_(7.0)
    assert all(torch.equal(a, b) for a, b in zip((*rows, state), copies, strict=True))
    assert after.untyped_storage().nbytes() == after.nbytes


@pytest.mark.parametrize("length", [1, 40])
def test_step_sizes_are_limited(length: int) -> None:
    """Oracle: the recurrence with sizes clamped by hand: limits hold in chunks and steps alike."""
    x, dt, b, c = random_rows(length)
    dt = dt * 4
    state, parameters = random_state(), random_parameters(limits=(0.02, 0.3))
    sizes = torch.nn.functional.softplus(dt.double() + parameters.dt_bias.double())
    assert bool((sizes < 0.02).any()) and bool((sizes > 0.3).any())
    y, _ = cpu.scan(x, dt, b, c, state, parameters)
    limited = sizes.clamp(0.02, 0.3)
    h, outs = state.double(), []
    for row in range(length):
        keys, queries = (v[row].double().repeat_interleave(3, 0) for v in (b, c))
        decay = (limited[row] * parameters.rates.double()).exp()
        written = (limited[row][:, None] * x[row].double())[:, :, None] * keys[:, None]
        h = decay[:, None, None] * h + written
        skip = parameters.skip.double()[:, None] * x[row].double()
        outs.append(torch.einsum("hpn,hn->hp", h, queries) + skip)
    assert distance(y, torch.stack(outs)) < 5e-7


def test_large_decays_do_not_overflow() -> None:
    """Oracle: the recurrence in fp64; within a chunk the logarithms reach -9,000, and the part of
    the square that is masked would be infinite."""
    rows, state = random_rows(100), random_state()
    parameters = ScanParameters(
        torch.full((6,), -90.0), torch.ones(6), torch.full((6,), 1.0), 0.0, float("inf")
    )
    y, after = cpu.scan(*rows, state, parameters)
    expected_y, expected = exact(rows, state, parameters)
    assert distance(y, expected_y) < 5e-7 and distance(after, expected) < 5e-7


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("length", [1, 2, 5, 11, 40, 130])
def test_the_bits_do_not_depend_on_the_number_of_threads(length: int, groups: int) -> None:
    """Oracle: one thread against two: the engine drops to one thread beside a busy process."""
    rows = random_rows(length, heads=6, dim=64, groups=groups, size=128)
    state, parameters = random_state(6, 64, 128), random_parameters()
    outs = []
    for count in (1, 2):
        torch.set_num_threads(count)
        outs.append(cpu.scan(*rows, state, parameters))
    assert all(torch.equal(one, two) for one, two in zip(*outs, strict=True))


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 257])
def test_chunks_equal_those_of_transformers(length: int) -> None:
    """Oracle: transformers' scan in torch, from the same state, its own chunk size 16; it subtracts
    fp32 cumulative decays, hence 1e-6."""
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

    rows, state = random_rows(length), random_state()
    parameters = random_parameters(limits=(0.01, float("inf")))
    x, dt, b, c = (value[None] for value in rows)
    expected_y, expected = mamba2_chunk_scan(
        x,
        dt,
        parameters.rates,
        b,
        c,
        chunk_size=16,
        D=parameters.skip,
        dt_bias=parameters.dt_bias,
        initial_states=state[None],
        dt_softplus=True,
        dt_limit=(parameters.dt_min, parameters.dt_max),
        return_final_states=True,
    )
    y, after = cpu.scan(*rows, state, parameters)
    assert distance(y, expected_y[0].double()) < 1e-6
    assert distance(after, expected[0].double()) < 1e-6


def test_the_recurrence_itself_on_a_case_by_hand() -> None:
    """Oracle: one head of one number: h = 2 exp(-ln 2) + ln 2 · 3 · 5, y = 7 h + 11 · 3, with
    softplus(0) = ln 2."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    parameters = ScanParameters(
        torch.tensor([-1.0]), torch.tensor([11.0]), torch.tensor([0.0]), 0.0, float("inf")
    )
    y, after = reference.scan(3 * one, 0 * one[0], 5 * one, 7 * one, 2 * one, parameters)
    log2 = float(torch.tensor(2.0, dtype=torch.float64).log())
    assert float(after) == pytest.approx(1 + 15 * log2, abs=1e-12)
    assert float(y) == pytest.approx(7 * (1 + 15 * log2) + 33, abs=1e-12)
