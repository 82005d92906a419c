# SPDX-License-Identifier: Apache-2.0
"""Two real models, each with a second engine of its own for cold prefills."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from freetoken_agent import LocalModel
from freetoken_agent.catalog import ModelNotFound, resolve
from freetoken_agent.proofs import Gold
from freetoken_runtime import Engine, EngineConfig

# A team of threads beside one busy process is thirty times slower; one thread is never.
ONE_THREAD = EngineConfig(dtype="float32", threads=1)


@pytest.fixture(scope="session")
def tiny_gold(tiny_folder: Path) -> Iterator[Gold]:
    engine = Engine.load(tiny_folder, ONE_THREAD)
    yield Gold(engine)
    engine.close()


@pytest.fixture
def tiny(tiny_folder: Path) -> Iterator[LocalModel]:
    with LocalModel.load(tiny_folder, config=ONE_THREAD) as model:
        yield model


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    try:
        return resolve("smollm2")
    except ModelNotFound:
        pytest.skip("SmolLM2 is not pulled: freetoken-agent pull smollm2")


@pytest.fixture(scope="session")
def smollm2_gold(smollm2_path: Path) -> Iterator[Gold]:
    engine = Engine.load(smollm2_path, ONE_THREAD)
    yield Gold(engine)
    engine.close()


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Iterator[LocalModel]:
    """Shared by the tests of a run: states of one test may serve another, counts say so."""
    with LocalModel.load(smollm2_path, config=ONE_THREAD) as model:
        yield model
