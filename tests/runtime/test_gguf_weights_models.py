# SPDX-License-Identifier: Apache-2.0
"""Whole models in GGUF files, in every architecture and type, against transformers holding the
weights that the gguf package dequantises."""

from pathlib import Path
from typing import Any

import pytest
import torch

from freetoken_runtime import gguf_blocks, gguf_weights
from freetoken_runtime.batch import Form
from freetoken_runtime.errors import WeightsDamaged
from freetoken_runtime.gguf_builder import build_gguf
from freetoken_runtime.gguf_header import read_header
from freetoken_runtime.testing import ListState, batch_of, build_checkpoint
from freetoken_runtime.weights import load, open_source

MATRICES = (
    *("token_embd", "output", "attn_q", "attn_k", "attn_v", "attn_output"),
    *("ffn_gate", "ffn_up", "ffn_down", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
)
# Families, and what of their small models a GGUF file cannot say, or blocks need.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, "mlp_only_layers": [], "moe_intermediate_size": 64},
    "gemma3_text": {"head_dim": 32, "query_pre_attn_scalar": 32, "num_hidden_layers": 7},
    "gpt_oss": {"head_dim": 32, "num_hidden_layers": 3},
}
SUPERBLOCKS = ("Q4_K", "Q5_K", "Q6_K")  # of 256 weights
TYPES = ("F16", "BF16", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "MXFP4", *SUPERBLOCKS)


def build(tmp_path: Path, family: str, kind: str, **settings: Any) -> tuple[Path, Any]:
    width = 256 if kind in SUPERBLOCKS else 64
    dimensions = {"hidden_size": width, "intermediate_size": width, "num_attention_heads": 8}
    changes = {"num_hidden_layers": 2, **dimensions, **FAMILIES[family], **settings}
    if family == "qwen3_moe":
        changes["moe_intermediate_size"] = width
    model = build_checkpoint(tmp_path / "hf", family, **changes)
    file = tmp_path / "model.gguf"
    state = build_gguf(file, model, dict.fromkeys(MATRICES, kind))
    model.load_state_dict(state, strict=False)
    if model.config.tie_word_embeddings:
        model.tie_weights()
    return file, model


def logits_of(path: Path, ids: list[int], **forms: Any) -> torch.Tensor:
    loaded = load(path, **forms)
    state = ListState(loaded.spec.num_layers)
    hidden = loaded.decoder.forward(batch_of([(state, ids)], [Form.MANY]), torch.arange(len(ids)))
    return loaded.decoder.logits(hidden, Form.MANY)


def difference(file: Path, model: Any) -> float:
    """Largest |Δ logit| over 50 tokens, by the range of the logits."""
    ids = [int(x) for x in torch.randint(3, 211, (50,), generator=torch.manual_seed(0))]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    delta = (logits_of(file, ids) - expected).abs().max()
    return float(delta / (expected.max() - expected.min()))


@pytest.mark.parametrize("kind", ["F32", "Q5_1", "Q6_K"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_architecture_equal_transformers(
    family: str, kind: str, tmp_path: Path
) -> None:
    """Oracle: transformers with the same weights, 1e-4 of the range: names, biases, windows, ropes
    of both kinds of layers, norms stored as 1 + w, and experts stored together."""
    assert difference(*build(tmp_path, family, kind)) < 1e-4


@pytest.mark.parametrize("kind", TYPES)
def test_logits_of_every_type_equal_transformers(kind: str, tmp_path: Path) -> None:
    """Oracle: transformers with the same weights, 1e-4 of the range, on a mixture."""
    assert difference(*build(tmp_path, "qwen3_moe", kind)) < 1e-4


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_four_bits_stay_four_bits(kind: str, tmp_path: Path) -> None:
    """Oracle: the notes: scales were rounded to bf16, at most 2^-8 of the weights is lost; of the
    experts, too. Q5_1 beside them is quantised again and loses more."""
    file, _ = build(tmp_path, "qwen3_moe", kind)
    loaded = load(file, quant="int4")
    (note,) = (x for x in loaded.notes if x.startswith(f"{kind} became int4"))
    assert 0 <= float(note.split(": ")[1].split("%")[0]) < 0.4
    assert loaded.formats["layers.*.experts.*.gate up"] == "int4 in groups of 32"
    build(tmp_path / "other", "llama", "Q5_1")
    notes = load(tmp_path / "other/model.gguf", quant="int4").notes
    (note,) = (x for x in notes if x.startswith("Q5_1 became int4"))
    assert 1 < float(note.split(": ")[1].split("%")[0]) < 15


@pytest.mark.parametrize("quant", [None, "int8", "int4"])
@pytest.mark.parametrize(
    ("kind", "scale"), [("Q8_0", 0), ("Q4_1", 2), ("Q4_K", 0), ("Q6_K", 208), ("MXFP4", 0)]
)
def test_scales_that_are_not_finite_are_refused(
    kind: str, scale: int, quant: Any, tmp_path: Path
) -> None:
    """Oracle: the message names the parameter; nothing is computed with it, in whatever form."""
    file, _ = build(tmp_path, "llama", kind)
    info = read_header(file).tensors["blk.1.ffn_up.weight"]
    data = bytearray(file.read_bytes())
    start = info.offset + scale
    data[start : start + 2] = b"\xff\x7f" if kind != "MXFP4" else b"\xff\x11"
    file.write_bytes(data)
    with pytest.raises(WeightsDamaged, match=r"layers\.1\.up.*not finite"):
        load(file, quant=quant)


def test_one_expert_is_read_without_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the rows that reach the dequantiser: those of one expert, not of all twelve."""
    file, _ = build(tmp_path, "qwen3_moe", "Q5_0")
    read: list[int] = []
    original = gguf_blocks.dequantise

    def counted(kind: Any, stored: Any) -> torch.Tensor:
        read.append(len(stored))
        return original(kind, stored)

    monkeypatch.setattr(gguf_weights, "dequantise", counted)
    open_source(file).read("layers.1.experts.5.up")
    assert read == [64]
