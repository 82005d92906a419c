# SPDX-License-Identifier: Apache-2.0
"""Disks that read short, stall, fail or hold other bytes than before. Oracles: the same model with
all weights in memory; the error's type, and the clock."""

import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch

from freetoken_runtime import Engine, SamplingParams
from freetoken_runtime.config import EngineConfig, read_host, resolve
from freetoken_runtime.conversion import convert
from freetoken_runtime.errors import WeightsDamaged, WeightsError, WeightsNotFound, WeightsTimeout
from freetoken_runtime.experts.fetch import SWITCH_S, unfinished
from freetoken_runtime.kernels.experts.cpu import Demand
from freetoken_runtime.testing import build_checkpoint
from freetoken_runtime.weights import LoadedModel, load
from freetoken_storage.errors import FreetokenError
from freetoken_storage.weights import FtwAltered
from freetoken_storage.weights_direct import DirectReader, Preadv

CONFIG = EngineConfig(threads=1, prefill_chunk=48, ram_budget_bytes=1 << 30, expert_slots=6)
IDS = list(range(3, 60))
FOUR = SamplingParams(max_tokens=4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four layers of twelve experts."""
    path = tmp_path / "mixtral"
    build_checkpoint(path, "mixtral")
    return path


@pytest.fixture
def engines() -> Iterator[Callable[[LoadedModel], Engine]]:
    """Engines that are closed at the end of the test."""
    made: list[Engine] = []

    def make(model: LoadedModel) -> Engine:
        made.append(Engine(model, resolve(CONFIG, read_host()), poison=True))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def reads_by(model: LoadedModel, preadv: Preadv) -> None:
    """From now on every read of the model's experts is made so."""
    model.experts.close()
    model.experts.disk._make = lambda: DirectReader(preadv=preadv)


def answer(engine: Engine) -> list[int]:
    return [token.id for token in engine.generate(IDS, FOUR)]


def forget_slots(model: LoadedModel) -> None:
    """Every expert has to be fetched again."""
    for pool in model.experts._pools.values():
        wait(unfinished(slot.filling for slot in pool.slots()))
        for slot in list(pool.slots()):
            pool.drop(slot)


def test_m7_short_reads_are_completed(
    folder: Path, engines: Callable[[LoadedModel], Engine]
) -> None:
    """A disk that hands out a block at a time, or parts of blocks: the same logits."""
    expected = engines(load(folder)).logits(IDS)
    for most in (4096, 5000):
        model = load(folder, offload="disk")

        def short(fd: int, buffers: Sequence[memoryview], offset: int, most: int = most) -> int:
            return min(most, os.preadv(fd, buffers, offset))

        reads_by(model, short)
        assert torch.equal(engines(model).logits(IDS), expected)


def test_m7_a_file_that_became_shorter_is_refused(
    folder: Path, engines: Callable[[LoadedModel], Engine]
) -> None:
    """The error names what was opened; whole again, the file serves again."""
    engine = engines(model := load(folder, offload="disk"))
    expected = answer(engine)
    forget_slots(model)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    os.truncate(file, len(whole) // 2)
    with pytest.raises(WeightsDamaged, match=r"no longer what was opened.*model\.safetensors"):
        engine.logits([*IDS[::-1], 7])
    file.write_bytes(whole)
    assert answer(engine) == expected


def test_bytes_that_are_not_finite_are_refused(
    folder: Path, engines: Callable[[LoadedModel], Engine]
) -> None:
    """What was overwritten with NaN after it was opened is not computed."""
    engine = engines(model := load(folder, offload="disk"))
    forget_slots(model)
    file = folder / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.seek(size // 2)
        stream.write(b"\xff" * (size // 2))
    with pytest.raises(WeightsDamaged, match="is not finite"):
        engine.logits(IDS)


def test_altered_records_are_refused(
    folder: Path, tmp_path: Path, engines: Callable[[LoadedModel], Engine]
) -> None:
    """A flipped bit in any expert of a converted folder fails its checksum; the engine goes on."""
    convert(folder, tmp_path / "converted", quant="int8")
    model = load(tmp_path / "converted", offload="disk", quant="int8")
    engine = engines(model)
    expected = answer(engine)
    forget_slots(model)
    (shard,) = (tmp_path / "converted").glob("records-*.ftw")
    whole = bytearray(shard.read_bytes())
    for byte in range(0, len(whole), 4096):
        whole[byte + 100] ^= 4
    original = shard.read_bytes()
    with shard.open("r+b") as stream:
        stream.write(whole)
    with pytest.raises(FtwAltered, match=r"experts\.\d+.*fails its checksum"):
        engine.logits([*IDS[::-1], 7])
    with shard.open("r+b") as stream:
        stream.write(original)
    assert answer(engine) == expected


def test_m21_a_stalled_disk_is_an_error_in_time(
    folder: Path, engines: Callable[[LoadedModel], Engine]
) -> None:
    """No request hangs, the next ones neither; when the disk answers again, so does the engine."""
    engine = engines(model := load(folder, offload="disk"))
    expected = answer(engine)
    answers = threading.Event()

    def stalled(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        answers.wait()
        return os.preadv(fd, buffers, offset)

    reads_by(model, stalled)
    forget_slots(model)
    model.experts.timeout_s = 0.3
    for path in ([*IDS[::-1], 7], [9, *IDS]):
        started = time.monotonic()
        with pytest.raises(WeightsTimeout, match=r"0\.3 s.*remedy"):
            list(engine.generate(path, FOUR))
        assert time.monotonic() - started < 10
    assert engine.stats().running == 0
    answers.set()
    model.experts.timeout_s = 30.0
    assert answer(engine) == expected
    cold = engines(load(folder)).logits([9, *IDS])
    assert torch.equal(engine.logits([9, *IDS], reuse=False), cold)


def test_m21_a_reader_that_dies_is_an_error(
    folder: Path, engines: Callable[[LoadedModel], Engine]
) -> None:
    """Reads fail at random: each request ends well or with the disk's error, and never with other
    tokens than before."""
    engine = engines(model := load(folder, offload="disk"))
    expected = answer(engine)
    count = 0

    def failing(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal count
        count += 1
        if count % 7 == 0:
            raise OSError(errno.EIO, "Input/output error")
        return os.preadv(fd, buffers, offset)

    reads_by(model, failing)
    outcomes: list[object] = []
    for turn in range(8):
        forget_slots(model)
        engine.forget(IDS, 0)
        try:
            outcomes.append(answer(engine))
        except FreetokenError as error:
            assert isinstance(error, WeightsDamaged) and "Input/output" in str(error), turn
            outcomes.append(type(error))
    assert any(isinstance(outcome, type) for outcome in outcomes)
    assert all(o == expected for o in outcomes if not isinstance(o, type))
    reads_by(model, os.preadv)
    assert answer(engine) == expected


def test_m5_m6_shards_without_an_index_serve_and_missing_ones_are_named(
    folder: Path, tmp_path: Path, engines: Callable[[LoadedModel], Engine]
) -> None:
    """Experts in several files, with and without an index: the same logits; a missing or empty
    shard is an error at load that names it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "parts", max_shard_size="200KB")
    files = sorted((tmp_path / "parts").glob("*.safetensors"))
    assert len(files) > 2
    expected = engines(load(folder)).logits(IDS)
    assert torch.equal(engines(load(tmp_path / "parts", offload="disk")).logits(IDS), expected)
    (tmp_path / "parts" / "model.safetensors.index.json").unlink()
    assert torch.equal(engines(load(tmp_path / "parts", offload="disk")).logits(IDS), expected)
    content = files[1].read_bytes()
    files[1].write_bytes(b"")
    with pytest.raises(WeightsError, match=files[1].name):
        load(tmp_path / "parts", offload="disk")
    files[1].write_bytes(content[:-50])
    with pytest.raises(WeightsError, match=files[1].name):
        load(tmp_path / "parts", offload="disk")
    files[1].unlink()
    with pytest.raises(WeightsNotFound, match=files[1].name):
        load(tmp_path / "parts", offload="disk")


def test_the_switch_interval_is_given_back(folder: Path) -> None:
    """Oracle: the interpreter's own setting, before, while files are open, and after."""
    usual = sys.getswitchinterval()
    first, second = (load(folder, offload="disk", expert_slots=4) for _ in range(2))
    for model in (first, second):
        for expert in range(4):
            next(iter(model.experts.serve(0, [Demand(expert, 1)], 1)))
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S, rel=0.05)
    for model in (second, first):
        model.experts.close()
    assert sys.getswitchinterval() == pytest.approx(usual, rel=0.05)
