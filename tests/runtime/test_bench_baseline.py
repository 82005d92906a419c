# SPDX-License-Identifier: Apache-2.0
"""The baseline holds the same weights: its greedy tokens are the engine's and transformers' own."""

from pathlib import Path

import pytest
import torch

from freetoken_runtime import Engine, EngineConfig, SamplingParams
from freetoken_runtime.bench.baseline import Baseline, BaselineUnavailable
from freetoken_runtime.testing import build_checkpoint

IDS = [5, 17, 101, 33, 8, 150, 42]


def test_baseline_decodes_what_transformers_generates(tiny_llama: Path) -> None:
    """Oracle: the checkpoint loaded by transformers itself, one full forward pass per token."""
    from transformers import AutoModelForCausalLM

    own = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    ids = list(IDS)
    with torch.inference_mode():
        for _ in range(12):
            ids.append(int(own(torch.tensor([ids])).logits[0, -1].argmax()))
    tokens, seconds = Baseline(tiny_llama, torch.float32).decode(IDS, 12)
    assert tokens == ids[len(IDS) :] and seconds > 0


def test_baseline_and_engine_agree(tiny_llama: Path) -> None:
    """The two contestants of `bench decode` answer alike in fp32."""
    with Engine.load(tiny_llama, EngineConfig(dtype="float32", threads=1)) as engine:
        ours = [token.id for token in engine.generate(IDS, SamplingParams(max_tokens=12))]
    assert ours == Baseline(tiny_llama, torch.float32).decode(IDS, 12)[0]


def test_a_foreign_architecture_is_refused(tmp_path: Path) -> None:
    """The baseline says what it knows instead of measuring something else."""
    build_checkpoint(tmp_path, "qwen2")
    with pytest.raises(BaselineUnavailable, match="llama architecture"):
        Baseline(tmp_path, torch.float32)
