# SPDX-License-Identifier: Apache-2.0
"""Real models, with second engines for cold prefills; tiny ones of any family."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from freetoken_agent import LocalModel
from freetoken_agent.catalog import ModelNotFound, resolve
from freetoken_agent.proving.miss_oracle import MissOracle
from freetoken_agent.proving.proofs import Gold
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


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Callable[[str], Path]:
    """`folder_of(family)`: a tiny random model of it, with the tokenizer and template of `tiny`."""
    made = {"llama": tiny_folder}

    def folder_of(family: str) -> Path:
        if family not in made:
            from freetoken_runtime.testing import build_checkpoint  # torch, for those who ask

            folder = tmp_path_factory.mktemp(family)
            config = json.loads((tiny_folder / "config.json").read_text())
            same = ("vocab_size", "bos_token_id", "eos_token_id")
            build_checkpoint(folder, family, **{key: config[key] for key in same})
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(tiny_folder / name, folder)
            made[family] = folder
        return made[family]

    return folder_of


@pytest.fixture(params=["llama", "qwen3_next"])
def world(
    request: pytest.FixtureRequest, folder_of: Callable[[str], Path], tmp_path: Path
) -> Iterator[MissOracle]:
    """The oracle on full attention and on a hybrid."""
    cuttable = request.param == "llama"
    made = MissOracle(folder_of(request.param), tmp_path, ONE_THREAD, cuttable=cuttable)
    yield made
    made.close()
