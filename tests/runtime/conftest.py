# SPDX-License-Identifier: Apache-2.0
"""Engines over a tiny random model for the tests of the runtime."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from freetoken_runtime.config import EngineConfig, read_host, resolve
from freetoken_runtime.engine import Engine
from freetoken_runtime.testing import build_checkpoint
from freetoken_runtime.weights import load
from freetoken_storage.records import Snapshots

EngineMaker = Callable[..., Engine]


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random llama of odd dimensions: 211 ids, 4 layers, 4,096 positions."""
    folder = tmp_path_factory.mktemp("llama")
    build_checkpoint(folder, "llama")
    return folder


@pytest.fixture
def make_engine(tiny_llama: Path) -> Iterator[EngineMaker]:
    """`make_engine(snapshots=None, folder=None, **EngineConfig fields)`: an engine whose fresh KV
    rows are NaN; closed at the end of the test."""
    engines: list[Engine] = []

    def make(
        snapshots: Snapshots | None = None, folder: Path | None = None, **fields: Any
    ) -> Engine:
        settings = {"threads": 1, "prefill_chunk": 64, "ram_budget_bytes": 1 << 30, **fields}
        config = resolve(EngineConfig(**settings), read_host())
        model = load(folder or tiny_llama, dtype=config.dtype, quant=config.quant)
        engine = Engine(model, config, poison=True)
        engines.append(engine)
        if snapshots is not None:
            engine.attach(snapshots)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One compute thread for torch in this test's own thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
