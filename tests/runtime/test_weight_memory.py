# SPDX-License-Identifier: Apache-2.0
"""Memory of weights: its layout, and what loading takes beside it."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from freetoken_runtime.random_checkpoint import write_random_checkpoint
from freetoken_runtime.weight_memory import MAPPING_BYTES, WeightMemory

MIXTURE = {
    "model_type": "qwen3_moe",
    "vocab_size": 1024,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_experts": 40,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}

# What is mapped by malloc, beside what is used of it, when all is loaded.
HELD_FREE = """
import ctypes, json, sys
from pathlib import Path
import torch
from freetoken_runtime.weights import load
class Counts(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]
mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Counts
torch.set_num_threads(1)
before = mallinfo()
model = load(Path(sys.argv[1]), quant=sys.argv[2])
after = mallinfo()
used = after.uordblks + after.hblkhd - before.uordblks - before.hblkhd
print(json.dumps([model.decoder.size_bytes, used]))
"""


def test_tensors_lie_apart_and_begin_as_zeros() -> None:
    """Oracle: each tensor filled with its own number, all read again."""
    memory, generator = WeightMemory(), torch.Generator().manual_seed(0)
    rows = torch.randint(1, 3000, (60,), generator=generator).tolist()
    kinds = (torch.int8, torch.bfloat16, torch.float32)
    tensors = []
    for number, count in enumerate([*rows, MAPPING_BYTES // 4000 + 1]):
        tensor = memory.zeros(count, 1000, dtype=kinds[number % 3])
        assert not tensor.any() and tensor.data_ptr() % 64 == 0
        tensors.append(tensor.fill_(number))
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))


def test_memory_returns_with_its_last_tensor() -> None:
    """Oracle: the kernel's list of mappings. Two tensors of one mapping: it stays for one."""
    memory = WeightMemory()
    first, second = (memory.zeros(1 << 20, dtype=torch.int8) for _ in range(2))
    start = first.data_ptr()
    del memory, first
    gc.collect()
    assert _mapped(start)
    del second
    gc.collect()
    assert not _mapped(start)


def _mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = (line.split()[0].split("-") for line in lines)
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """260 MB in bfloat16, in 80 matrices that are quantised one after another."""
    path = tmp_path_factory.mktemp("mixture")
    write_random_checkpoint(path, MIXTURE)
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="mallinfo2 is glibc's")
@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_no_matrix_lies_among_what_malloc_serves(quant: str, mixture: Path) -> None:
    """Oracle: glibc's own count of what is in use, in a process of its own: hardly any of the
    weights (but the norms and the notes about them), so that no hole can be left between them."""
    command = [sys.executable, "-c", HELD_FREE, str(mixture), quant]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    weights, used = json.loads(done.stdout)
    assert weights > 60 << 20
    assert used < 8 << 20, f"{used / 2**20:.0f} of {weights / 2**20:.0f} MiB"
