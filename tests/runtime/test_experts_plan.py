# SPDX-License-Identifier: Apache-2.0
"""Memory for experts. Oracles: arithmetic on shapes and sizes; what tensors really take."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken_runtime.bench.hybrid import shapes
from freetoken_runtime.config import EngineConfig, Host, ResolvedConfig, resolve
from freetoken_runtime.errors import BudgetTooSmall, InvalidConfig
from freetoken_runtime.plan import (
    SlotDemand,
    divide_slots,
    plan_memory,
    slots_within,
    weights_estimate,
    working_bytes,
)
from freetoken_runtime.testing import build_checkpoint
from freetoken_runtime.weights import load, open_source

HOST = Host(cores=2, memory_bytes=8 << 30, threads=None)


def config(**fields: object) -> ResolvedConfig:
    return resolve(EngineConfig(**fields), HOST)  # type: ignore[arg-type]


def demands_of(sizes: list[tuple[int, int, int]]) -> tuple[SlotDemand, ...]:
    return tuple(SlotDemand(size, least + more, least) for size, least, more in sizes)


SIZES = st.lists(
    st.tuples(st.integers(1, 10**7), st.integers(1, 16), st.integers(0, 6000)),
    min_size=1,
    max_size=3,
).map(demands_of)


def test_a_row_meets_only_the_experts_that_it_chooses() -> None:
    """Oracle: arithmetic on Qwen3.6-35B-A3B's layers: a row meets 8 of 64 or of 256 experts, so
    that more of them ask for no more working memory than their router's outputs."""
    few, many = shapes(), shapes(num_experts=256)
    bytes_ = [working_bytes(spec, config(prefill_chunk=256)) for spec in (few, many)]
    rows, logits = 256 + 8, 3 * 8 * few.vocab_size * 4
    assert bytes_[1] - bytes_[0] == rows * 2 * (256 - 64) * 4
    mixer = max(
        sum(s[0] for n, s in layer.mixer.parameter_shapes(2048).items() if len(s) == 2)
        for layer in few.layers
        if layer.mixer is not None
    )
    feed = 64 + 1 + (8 + 1) * (512 + 512 + 2048)  # routers; eight experts and the shared one
    activations = rows * (4 * 2048 + 2 * (mixer + feed)) * 4
    states = sum(state.bytes_per_anchor() for state in few.states())
    rest = bytes_[0] - activations - logits - 2 * 8 * states - 4 * 64 * few.bytes_per_token(4)
    assert rest == 40 << 20, "what a process holds beyond what is counted"


@given(SIZES, st.integers(0, 1 << 40))
def test_slots_by_bytes(demands: tuple[SlotDemand, ...], size_bytes: int) -> None:
    """Oracle: bounds. Never more than asked for unless a row's experts need it, never more than
    there are experts, and less than one slot of each form is left over."""
    slots = slots_within(demands, size_bytes)
    used = sum(x.size_bytes * n for x, n in zip(demands, slots, strict=True))
    least = sum(x.size_bytes * x.least for x in demands)
    assert all(x.least <= n <= x.experts for x, n in zip(demands, slots, strict=True))
    assert used <= max(size_bytes, least)
    if any(n < x.experts for x, n in zip(demands, slots, strict=True)) and size_bytes >= least:
        assert size_bytes - used < sum(x.size_bytes for x in demands)


@given(SIZES, st.integers(1, 20_000))
def test_slots_by_number(demands: tuple[SlotDemand, ...], total: int) -> None:
    """Oracle: bounds; a number that does not hold a row's experts is refused."""
    if total < sum(x.least for x in demands):
        with pytest.raises(InvalidConfig, match="expert_slots"):
            divide_slots(demands, total)
        return
    slots = divide_slots(demands, total)
    assert all(x.least <= n <= x.experts for x, n in zip(demands, slots, strict=True))
    assert sum(slots) <= total
    if total >= sum(x.experts for x in demands):
        assert list(slots) == [x.experts for x in demands]
    else:
        assert sum(slots) > total - len(demands)


@settings(deadline=None, max_examples=50)
@given(
    SIZES,
    st.integers(0, 1 << 34),
    st.integers(1 << 27, 1 << 36),
    st.none() | st.integers(50, 500),
)
def test_m28_expert_and_kv_budgets_add_up(
    demands: tuple[SlotDemand, ...], weights: int, budget: int, slots: int | None
) -> None:
    """Oracle: addition. Every part is there once, none is negative, and states get a quarter of
    what weights leave unless slots were named; or the plan is refused with what is needed."""
    spec, asked = shapes(num_layers=4), config(expert_slots=slots, prefill_chunk=16)
    try:
        plan = plan_memory(spec, asked, weights, budget, demands)
    except BudgetTooSmall as error:
        assert int(str(error.limit).split()[2]) > budget
        return
    parts = (plan.weights_bytes, plan.working_bytes, plan.slots_bytes, plan.states_bytes)
    assert sum(parts) == budget and min(parts) >= 0
    sizes = [x.size_bytes * n for x, n in zip(demands, plan.slots, strict=True)]
    assert plan.slots_bytes == sum(sizes)
    assert plan.states_bytes >= 64 * plan.token_bytes
    least = sum(x.size_bytes * x.least for x in demands)
    if slots is None and plan.slots_bytes > least:
        assert plan.states_bytes >= (budget - weights - plan.working_bytes) // 4


def test_without_experts_nothing_changes() -> None:
    """Oracle: the sum of weights, working memory and states, as ever."""
    spec = shapes(num_layers=4)
    plan = plan_memory(spec, config(), 1000, 1 << 32)
    assert (plan.slots, plan.slots_bytes) == ((), 0)
    assert plan.states_bytes == (1 << 32) - 1000 - working_bytes(spec, config())


@pytest.mark.parametrize("quant", [None, "int8", "int4"])
@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_the_estimate_of_weights_bounds_them(tmp_path: Path, family: str, quant: str) -> None:
    """Oracle: the loaded tensors. What is decided before loading must not be taken back after."""
    build_checkpoint(tmp_path, family)
    asked = config(quant=quant)
    estimate = weights_estimate(open_source(tmp_path).spec, asked)
    held = load(tmp_path, quant=asked.quant).decoder.size_bytes
    assert held <= estimate <= 1.2 * held, "padding of small matrices"
    halved = replace(asked, dtype="bfloat16")
    held = load(tmp_path, quant=asked.quant, dtype="bfloat16").decoder.size_bytes
    assert held <= weights_estimate(open_source(tmp_path).spec, halved)
