# SPDX-License-Identifier: Apache-2.0
"""Parameters read some rows at a time: the numbers of the whole, in little memory."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from freetoken_runtime import gguf_weights, safetensors_weights, weight_reader, weight_source
from freetoken_runtime.conversion import convert
from freetoken_runtime.gguf_builder import build_gguf
from freetoken_runtime.kernels.int4_linear import cpu as int4
from freetoken_runtime.kernels.int8_linear import cpu as int8
from freetoken_runtime.kernels.integers import quantise_int4, quantise_int8, stack_int4, stack_int8
from freetoken_runtime.losses import Losses
from freetoken_runtime.random_checkpoint import write_random_checkpoint
from freetoken_runtime.testing import build_checkpoint
from freetoken_runtime.weight_reader import WeightReader
from freetoken_runtime.weight_source import WeightSource
from freetoken_runtime.weights import open_source

SOURCES = ("llama", "mixtral", "gpt_oss", "qwen3_next", "falcon_h1", "gguf", "ftw")
SLICE = 7 * 60  # elements: no whole number of most rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A source of each kind, made when it is first asked for."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            made[name] = path
            if name == "gguf":
                settings = {"hidden_size": 96, "intermediate_size": 128, "head_dim": 16}
                model = build_checkpoint(path / "hf", "llama", **settings)
                kinds = {"attn_q": "Q4_1", "ffn_up": "Q8_0", "ffn_down": "Q5_0", "attn_k": "F16"}
                made[name] = path / "model.gguf"
                build_gguf(made[name], model, kinds)
            elif name == "ftw":
                build_checkpoint(path / "hf", "qwen3_moe")
                made[name] = path / "ftw"
                convert(path / "hf", made[name])
            else:
                build_checkpoint(path, name)
        return made[name]

    return make


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (weight_source, weight_reader, safetensors_weights, gguf_weights):
        monkeypatch.setattr(module, "SLICE_ELEMENTS", SLICE)


def matrices(source: WeightSource) -> Iterator[str]:
    shapes = source.spec.parameter_shapes()
    yield from (name for name, shape in shapes.items() if len(shape) == 2)


@pytest.mark.parametrize("kind", SOURCES)
def test_slices_are_the_rows_of_the_whole(
    kind: str, folder: Callable[[str], Path], small_slices: None
) -> None:
    """Oracle: `read`. Fused, permuted and quantised tensors too; each parameter counts as read."""
    whole, sliced = open_source(folder(kind)), open_source(folder(kind))
    cut = 0
    for name in matrices(whole):
        parts = list(sliced.read_slices(name))
        assert max(part.numel() for part in parts) <= max(SLICE, whole.shape(name)[1])
        assert torch.equal(torch.cat(parts), whole.read(name)), name
        cut += len(parts) > 1
        with pytest.raises(AssertionError):
            list(sliced.read_slices(name))
    assert cut > 10


@pytest.mark.parametrize("kind", ["llama", "gguf"])
def test_quantised_in_slices_is_quantised_as_a_whole(
    kind: str, folder: Callable[[str], Path], small_slices: None
) -> None:
    """Oracle: all rows quantised at once and packed at once, q, k and v stacked."""
    names = [f"layers.1.{part}" for part in "qkv"]

    def reader() -> WeightReader:
        source = open_source(folder(kind))
        return WeightReader(source, Losses(source.stored_format), 32)

    exact = [reader().read(name) for name in names]
    eight = int8.pack(stack_int8([quantise_int8(x) for x in exact]))
    found = reader().int8(names)
    assert torch.equal(found.values, eight.values) and torch.equal(found.scales, eight.scales)
    if kind == "llama":  # in the other one, q keeps the integers of its file
        four = int4.pack(stack_int4([quantise_int4(x, 32) for x in exact]))
        made = reader().int4(names)
        assert torch.equal(made.packed, four.packed)
        assert torch.equal(made.scales_zeros, four.scales_zeros)
        assert (made.outputs, made.inputs) == (four.outputs, four.inputs)
    assert torch.equal(reader().dense(names, torch.float32), torch.cat(exact).float())


WIDE = {
    "model_type": "qwen3",
    "vocab_size": 60_000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}

MEASURED = """
import json, sys, threading, time
from pathlib import Path
def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
import torch
torch.set_num_threads(1)
torch.ones(300, 300) @ torch.ones(300, 300)
from freetoken_runtime.weights import load
before, peak, done = anonymous(), 0, False
def sample():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.001)
thread = threading.Thread(target=sample)
thread.start()
model = load(Path(sys.argv[1]), dtype="bfloat16", quant=json.loads(sys.argv[2]))
done = True
thread.join()
print(json.dumps([model.decoder.size_bytes, peak - before]))
"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """362 MB in bfloat16, a third of them in the tied head."""
    path = tmp_path_factory.mktemp("wide")
    write_random_checkpoint(path, WIDE)
    return path


@pytest.mark.parametrize("quant", [None, "int8", "int4"])
def test_loading_takes_the_weights_and_a_slice(quant: str | None, wide: Path) -> None:
    """RssAnon over imports, sampled each millisecond in a process of its own: at most 1.1 times the
    weights and 32 MiB, whatever the largest matrix takes (117 MiB in the file, 234 in fp32)."""
    command = [sys.executable, "-c", MEASURED, str(wide), json.dumps(quant)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    weights, taken = json.loads(done.stdout)
    shown = f"{taken / 2**20:.0f} MiB for {weights / 2**20:.0f} MiB of weights"
    assert weights < taken < 1.1 * weights + (32 << 20), shown
