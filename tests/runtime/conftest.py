# SPDX-License-Identifier: Apache-2.0
"""Engines over tiny random models for the tests of the runtime."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from freetoken_runtime.config import EngineConfig, read_host, resolve
from freetoken_runtime.engine import Engine
from freetoken_runtime.engine_cases import KINDS, CheckedEngine, hybrid_model
from freetoken_runtime.testing import build_checkpoint
from freetoken_runtime.weights import LoadedModel, load
from freetoken_storage.records import Snapshots

EngineMaker = Callable[..., Engine]
CheckedMaker = Callable[..., CheckedEngine]


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random llama of odd dimensions: 211 ids, 4 layers, 4,096 positions."""
    folder = tmp_path_factory.mktemp("llama")
    build_checkpoint(folder, "llama")
    return folder


@pytest.fixture(scope="session")
def kind_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with a small model of each of KINDS, built when first asked for: 8,192 positions."""
    folders: dict[str, Path] = {}

    def build(kind: str) -> Path:
        if kind not in folders:
            folder = tmp_path_factory.mktemp(kind)
            KINDS[kind].build(folder, max_position_embeddings=8192)
            folders[kind] = folder
        return folders[kind]

    return build


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    """Every kind of state in turn."""
    name: str = request.param
    return name


@pytest.fixture
def model(kind: str, kind_folder: Callable[[str], Path]) -> LoadedModel:
    """A small model of every kind of state in turn; where a test names the kinds, "hybrid" is one
    of them all."""
    return hybrid_model() if kind == "hybrid" else load(kind_folder(kind))


@pytest.fixture
def checked(model: LoadedModel) -> Iterator[CheckedMaker]:
    """`checked(snapshots=None, **EngineConfig fields)`: a checked engine over the model, closed at
    the end of the test."""
    made: list[CheckedEngine] = []

    def make(snapshots: Snapshots | None = None, **fields: Any) -> CheckedEngine:
        made.append(CheckedEngine(model, snapshots, **fields))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


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
