# SPDX-License-Identifier: Apache-2.0
"""What loading tells and decides, whatever the weights are stored as."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from freetoken_runtime.config import EngineConfig, Host, resolve
from freetoken_runtime.conversion import convert
from freetoken_runtime.engine import Engine
from freetoken_runtime.errors import InvalidConfig
from freetoken_runtime.experts.choice import own_form
from freetoken_runtime.experts.fetch import Disk
from freetoken_runtime.experts.records import ExpertForm
from freetoken_runtime.experts.tiers import RecordExperts
from freetoken_runtime.ftw_weights import FtwFolder
from freetoken_runtime.gguf_builder import build_gguf
from freetoken_runtime.random_weights import random_model
from freetoken_runtime.specs.moe import MoeSpec
from freetoken_runtime.testing import build_checkpoint
from freetoken_runtime.weight_source import Quant
from freetoken_runtime.weights import LoadedModel, load, open_source
from freetoken_storage.weights_direct import AlignedBuffer

HOST = Host(cores=2, memory_bytes=4 << 30, threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`hf`, and what it is converted to."""
    path = tmp_path_factory.mktemp("models")
    build_checkpoint(path / "hf", "qwen3_moe", num_hidden_layers=2)
    quants: tuple[Quant | None, ...] = (None, "int8", "int4")
    for quant in quants:
        convert(path / "hf", path / str(quant), quant=quant)
    return path


def says(model: LoadedModel | Engine, text: str) -> bool:
    return any(text in note for note in model.notes)


def test_files_without_checksums_are_told(folder: Path, tmp_path: Path) -> None:
    """Safetensors and GGUF; not converted weights, nor a model that came from no file."""
    settings = {"hidden_size": 96, "intermediate_size": 128, "head_dim": 16}
    build_gguf(tmp_path / "model.gguf", build_checkpoint(tmp_path / "hf", "llama", **settings), {})
    told = "without checksums: convert"
    for level in ("none", "disk"):
        assert says(load(folder / "hf", offload=level), told)
        assert not says(load(folder / "int8", offload=level), told)
    assert says(load(tmp_path / "model.gguf"), told)
    assert not says(random_model(open_source(folder / "hf").spec), told)
    config = EngineConfig(threads=1, ram_budget_bytes=256 << 20)
    with Engine.load(folder / "hf", config) as engine:
        assert says(engine, told)


def test_experts_that_are_quantised_at_every_fetch_are_told(folder: Path) -> None:
    """From safetensors and from unquantised conversions; not where the file holds what computes."""
    told = "are quantised to int4 each time they are fetched"
    assert says(load(folder / "hf", offload="disk", quant="int4"), told)
    assert says(load(folder / "None", offload="disk", quant="int4"), told)
    assert not says(load(folder / "int4", offload="disk"), told)
    assert not says(load(folder / "hf", offload="none", quant="int4"), told)
    assert not says(load(folder / "hf", offload="disk"), told)


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_what_the_files_hold_decides_what_passes_need(quant: Quant, folder: Path) -> None:
    """Converted weights are quantised without anybody asking: memory for a dequantised matrix is
    set aside all the same. Oracle: the plan of the source, loaded with that quantisation."""
    asked = resolve(EngineConfig(quant=quant, ram_budget_bytes=1 << 30), HOST)
    open_question = resolve(EngineConfig(ram_budget_bytes=1 << 30), HOST)
    plan = load(folder / str(quant)).plan(open_question)
    assert plan == load(folder / "hf", quant=quant).plan(asked)
    assert plan.working_bytes > load(folder / "hf").plan(open_question).working_bytes


@pytest.mark.parametrize("chunk", [0, -1, 1 << 40, True, 2.5])
def test_m20_chunks_out_of_range_are_refused(chunk: object) -> None:
    """Oracle: the error names the field and its limits; nothing is loaded."""
    with pytest.raises(InvalidConfig, match=r"prefill_chunk is out of range.*1 to 8192"):
        EngineConfig(prefill_chunk=chunk)  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk", [1, 7, 8192])
def test_m20_chunks_in_range_compute_the_same(chunk: int, folder: Path) -> None:
    """One row at a time, an odd number, and more than the prompt. Oracle: the usual chunk, within
    what fp32 sums differ by in another order."""
    ids = [5 * index % 211 for index in range(40)]
    found = []
    for size in (256, chunk):
        config = EngineConfig(threads=1, prefill_chunk=size, ram_budget_bytes=1 << 30)
        with Engine.load(folder / "hf", config) as engine:
            found.append(engine.logits(ids, reuse=False))
    wanted, got = found
    assert (got - wanted).abs().max() <= 1e-4 * (wanted.max() - wanted.min())


WITHOUT_CUDA = """
import sys
from pathlib import Path
import torch
from freetoken_runtime import Engine, EngineConfig, SamplingParams
for folder in sys.argv[1:]:
    for level in ("none", "ram", "disk"):
        config = EngineConfig(threads=1, ram_budget_bytes=256 << 20, offload=level)
        with Engine.load(Path(folder), config) as engine:
            tokens = [x.id for x in engine.generate(range(3, 40), SamplingParams(max_tokens=3))]
            print(*tokens)
assert not torch.cuda.is_initialized()
"""


def test_m30_everything_computes_without_cuda(folder: Path) -> None:
    """Every place of the experts, quantised or not, in a process that sees no device. Oracle: the
    same tokens from every place."""
    command = [sys.executable, "-c", WITHOUT_CUDA, str(folder / "hf"), str(folder / "int4")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 6 and all(len(line.split()) == 3 for line in lines)
    assert len(set(lines[:3])) == len(set(lines[3:])) == 1


def test_m27_experts_from_the_disk_take_no_page_faults(folder: Path) -> None:
    """Records read into one slot, 400 times: the slot's pages and the reader's are touched in the
    first round. Oracle: the kernel's count."""
    source = FtwFolder(folder / "int4")
    source.check()
    mixture = source.spec.layers[1].feed_forward
    assert isinstance(mixture, MoeSpec)
    plain = ExpertForm.of(mixture.expert, source.spec.hidden_size, "int4", torch.float32, 32)
    disk, at = Disk(), "layers.1.experts."
    tier = RecordExperts(own_form(plain, source, at), source, at, disk)
    memory = AlignedBuffer(source.file.extent(f"{at}0").room).view
    experts = range(mixture.router.num_experts)
    for expert in experts:
        tier.load(expert, memory)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for number in range(400):
        tier.load(experts[number % len(experts)], memory)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 200
    disk.close()
