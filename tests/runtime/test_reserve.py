# SPDX-License-Identifier: Apache-2.0
"""The reserve: who gets it, that it is counted once, and that it goes first. Oracle: arithmetic of
the layout's bytes, and a pool without a reserve."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from freetoken_runtime import Engine, EngineConfig
from freetoken_runtime.plan import reserve_rows
from freetoken_runtime.state.buffers import Pool, RowShape, StateLayout
from freetoken_runtime.state.reserve import Reserve
from freetoken_runtime.testing import build_checkpoint
from freetoken_runtime.weights import open_source

LAYOUT = StateLayout([RowShape(heads=2, key_dim=10, value_dim=6, dtype=torch.float32)] * 3)
ROWS = 1024


@pytest.fixture
def pool() -> Pool:
    pool = Pool(LAYOUT)
    pool.adopt(Reserve(ROWS, LAYOUT.token_bytes))
    return pool


@pytest.mark.parametrize(
    ("asked", "capacity", "used"),
    [
        (64, 64, ROWS + 64),  # a small buffer leaves it alone
        (512, 512, ROWS + 512),  # exactly half: still too small, or half would be idle
        (513, ROWS, ROWS),
        (1024, ROWS, ROWS),
        (1025, 1088, ROWS + 1088),  # too large for it
    ],
)
def test_a_buffer_that_needs_more_than_half_takes_it(
    pool: Pool, asked: int, capacity: int, used: int
) -> None:
    buffer = pool.allocate(asked)
    assert buffer.capacity == capacity
    assert pool.meter.used_bytes == used * LAYOUT.token_bytes
    for tensor in buffer.tensors:
        assert not tensor.any()


def test_it_is_given_once_and_counted_until_the_last_view_goes(pool: Pool) -> None:
    first = pool.allocate(ROWS)
    second = pool.allocate(ROWS)
    first.tensors[0].fill_(1)
    assert not second.tensors[0].any(), "two buffers over one memory"
    del first, second
    gc.collect()
    assert pool.meter.used_bytes == 0


def test_dropping_it_gives_the_bytes_back(pool: Pool) -> None:
    assert pool.drop_reserve()
    assert pool.meter.used_bytes == 0
    assert not pool.drop_reserve()


def test_its_size_follows_the_budget_and_the_context(tmp_path: Path) -> None:
    """1/32 of the budget, at most 256 MiB, whole blocks, never more than one path can fill."""
    build_checkpoint(tmp_path, "llama")
    spec = open_source(tmp_path).spec
    token_bytes = spec.bytes_per_token()
    assert reserve_rows(spec, 64 << 30) == spec.context_limit // 64 * 64
    long = replace(spec, context_limit=1 << 30)
    assert reserve_rows(long, 64 << 30) == (256 << 20) // token_bytes // 64 * 64
    assert reserve_rows(long, 32 << 20) == (1 << 20) // token_bytes // 64 * 64
    assert reserve_rows(long, 64) == 0


def test_an_engine_under_pressure_lets_it_go_before_any_path(tmp_path: Path) -> None:
    """The budget then holds two paths, but not the reserve and a path: both paths stay."""
    build_checkpoint(tmp_path, "llama")
    spec = open_source(tmp_path).spec
    first, second = ([5 + (i * step) % 199 for i in range(900)] for step in (1, 7))
    with Engine.load(tmp_path, EngineConfig(threads=1)) as engine:
        empty = engine.stats()
        assert empty.state_bytes == reserve_rows(spec, 8 << 30) * spec.bytes_per_token()
        engine.warm(first)
        path_bytes = engine.stats().state_bytes - empty.state_bytes
        assert 0 < 2 * path_bytes < empty.state_bytes, "less than half of the reserve: left alone"
        held = empty.weights_bytes + empty.working_bytes
        engine.set_budget(ram_bytes=held + 2 * path_bytes)
        engine.warm(second)
        assert engine.stats().evicted_paths == 0
        assert engine.stats().state_bytes == 2 * path_bytes
        assert engine.plan(first).prefill_tokens == engine.plan(second).prefill_tokens == 0
