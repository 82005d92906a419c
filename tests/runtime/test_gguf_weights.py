# SPDX-License-Identifier: Apache-2.0
"""GGUF files, written by the gguf package, against its own dequantisation and transformers."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize

from freetoken_agent.catalog import ModelNotFound, resolve
from freetoken_runtime.batch import Form
from freetoken_runtime.errors import (
    UnsupportedArchitecture,
    UnsupportedConfig,
    UnsupportedQuantization,
    WeightsDamaged,
    WeightsMismatch,
)
from freetoken_runtime.gguf_builder import build_gguf
from freetoken_runtime.gguf_header import read_header
from freetoken_runtime.specs.rope import FactorScaling, LinearScaling, RopeScaling
from freetoken_runtime.testing import ListState, batch_of, build_checkpoint
from freetoken_runtime.weights import load, open_source

DIMENSIONS: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 128, "head_dim": 16}
MATRICES = ("token_embd", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up")


def logits_of(path: Path, ids: list[int], **forms: Any) -> torch.Tensor:
    loaded = load(path, **forms)
    state = ListState(loaded.spec.num_layers)
    hidden = loaded.decoder.forward(batch_of([(state, ids)], [Form.MANY]), torch.arange(len(ids)))
    return loaded.decoder.logits(hidden, Form.MANY)


def scaling_of(file: Path) -> RopeScaling | None:
    mixer = open_source(file).spec.layers[0].mixer
    assert mixer is not None and mixer.rope is not None
    return mixer.rope.scaling


def build(tmp_path: Path, kind: str, **settings: Any) -> tuple[Path, Any]:
    model = build_checkpoint(tmp_path / "hf", "llama", **{**DIMENSIONS, **settings})
    kinds = dict.fromkeys((*MATRICES, "ffn_down", "output"), kind)
    file = tmp_path / "model.gguf"
    model.load_state_dict(build_gguf(file, model, kinds), strict=False)
    if settings.get("tie_word_embeddings"):
        model.tie_weights()
    return file, model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_logits_equal_transformers_with_the_same_values(
    kind: str, tied: bool, tmp_path: Path
) -> None:
    """Oracle: transformers with the weights the gguf package dequantises, 1e-4 of the range. Head
    counts differ between q and k, so a permutation undone wrongly shows."""
    file, model = build(tmp_path, kind, tie_word_embeddings=tied)
    ids = [int(x) for x in torch.randint(3, 211, (50,), generator=torch.manual_seed(0))]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    difference = (logits_of(file, ids) - expected).abs().max()
    assert float(difference / (expected.max() - expected.min())) < 1e-4
    assert open_source(file).spec.tied_head == tied


def test_four_bit_matrices_keep_their_integers(tmp_path: Path) -> None:
    """Oracle: Q4_1's integers, scales rounded to bf16, dequantised by hand and run as fp32."""
    file, model = build(tmp_path, "Q4_1")
    source = open_source(file)
    for index in range(4):
        for part, module in (("o", "self_attn.o_proj"), ("q", "self_attn.q_proj")):
            groups = source.read_groups(f"layers.{index}.{part}")
            assert groups is not None
            scale = groups.scales.repeat_interleave(32, 1)
            weight = groups.values * scale + groups.minimums.repeat_interleave(32, 1)
            expected = model.state_dict()[f"model.layers.{index}.{module}.weight"]
            assert torch.equal(weight, expected)
    loaded = load(file, quant="int4")
    assert loaded.formats["layers.*.down"] == "int4 in groups of 32"
    assert loaded.formats["head"] == "int8"
    ids = list(range(20, 60))
    exact, four = logits_of(file, ids), logits_of(file, ids, quant="int4")
    # Only bf16 rounding of scales and zeros (2^-9) and the int8 head lie between the two.
    assert float((four - exact).abs().max() / (exact.max() - exact.min())) < 2e-2


def test_the_header_equals_the_gguf_package(tmp_path: Path) -> None:
    """Oracle: GGUFReader's own metadata, offsets, sizes and shapes."""
    file, _ = build(tmp_path, "Q4_0")
    header, reader = read_header(file), GGUFReader(file)
    for tensor in reader.tensors:
        info = header.tensors[tensor.name]
        assert (info.offset, info.size_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert info.shape == tuple(int(size) for size in reversed(tensor.shape))
    assert len(header.tensors) == len(reader.tensors)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key in header.metadata:
            assert header.metadata[key] == field.contents()


def test_llama3_factors_are_read(tmp_path: Path) -> None:
    """Oracle: the tensor as written."""
    model = build_checkpoint(tmp_path / "hf", "llama", num_hidden_layers=1)
    file = tmp_path / "model.gguf"
    original = GGUFWriter.add_rope_freq_base

    def with_factors(self: GGUFWriter, value: float) -> None:
        original(self, value)
        self.add_tensor("rope_freqs.weight", np.array([1, 1, 2, 4, 8], dtype=np.float32))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GGUFWriter, "add_rope_freq_base", with_factors)
        build_gguf(file, model, {})
    assert scaling_of(file) == FactorScaling((1.0, 1.0, 2.0, 4.0, 8.0))


def test_rope_factors_of_another_length_are_refused(tmp_path: Path) -> None:
    """Oracle: the message names the tensor."""
    model = build_checkpoint(tmp_path / "hf", "llama", num_hidden_layers=1)
    file = tmp_path / "model.gguf"
    original = GGUFWriter.add_rope_freq_base

    def with_factors(self: GGUFWriter, value: float) -> None:
        original(self, value)
        self.add_tensor("rope_freqs.weight", np.array([1, 2], dtype=np.float32))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GGUFWriter, "add_rope_freq_base", with_factors)
        build_gguf(file, model, {})
    with pytest.raises(WeightsMismatch, match="rope_freqs"):
        open_source(file)


def test_linear_scaling_is_read_and_arrays_of_the_architecture_are_refused(tmp_path: Path) -> None:
    """Oracle: the factor as written; per-layer head counts are another architecture."""
    model = build_checkpoint(tmp_path / "hf", "llama", num_hidden_layers=1)
    original = GGUFWriter.add_rope_freq_base

    def linear(self: GGUFWriter, value: float) -> None:
        original(self, value)
        self.add_string("llama.rope.scaling.type", "linear")
        self.add_float32("llama.rope.scaling.factor", 4.0)

    def arrays(self: GGUFWriter, value: float) -> None:
        original(self, value)
        self.add_array("llama.head_counts", [6])

    file = tmp_path / "model.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GGUFWriter, "add_rope_freq_base", linear)
        build_gguf(file, model, {})
    assert scaling_of(file) == LinearScaling(4.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GGUFWriter, "add_rope_freq_base", arrays)
        build_gguf(file, model, {})
    with pytest.raises(UnsupportedConfig, match="head_counts"):
        open_source(file)


@pytest.mark.parametrize("part", [0.0, 0.0005, 0.01, 0.3, 0.9999])
def test_m6_a_truncated_file_is_named(part: float, tmp_path: Path) -> None:
    """Oracle: the message names the file, wherever it ends: magic, metadata, tensor list, data."""
    file, _ = build(tmp_path, "F16")
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(WeightsDamaged, match=r"model\.gguf"):
        open_source(file)


@pytest.mark.parametrize("byte", range(0, 400, 7))
def test_a_flipped_header_byte_never_escapes_as_a_foreign_error(byte: int, tmp_path: Path) -> None:
    """Oracle: it either still opens or is an error of ours; no hang, no stray exception."""
    file = tmp_path / "model.gguf"
    file.write_bytes(_flipped(byte))
    try:
        open_source(file)
    except (WeightsDamaged, WeightsMismatch, UnsupportedConfig, UnsupportedArchitecture) as error:
        assert error.code
    except UnsupportedQuantization as error:
        assert "limit" in str(error)


_CACHE: dict[str, bytes] = {}


def _flipped(byte: int) -> bytes:
    if not _CACHE:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            _CACHE["data"] = build(Path(folder), "F32", num_hidden_layers=1)[0].read_bytes()
    data = bytearray(_CACHE["data"])
    data[byte] ^= 0xFF
    return bytes(data)


@pytest.mark.parametrize(
    "content",
    [
        b"GGML" + bytes(100),
        b"\x80" * 1000,
        b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60),
        b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62),
    ],
)
def test_foreign_and_hostile_headers_are_named(content: bytes, tmp_path: Path) -> None:
    """Oracle: the message names the file; lengths beyond the file are never allocated."""
    file = tmp_path / "x.gguf"
    file.write_bytes(content)
    with pytest.raises(WeightsDamaged, match=r"x\.gguf"):
        open_source(file)


def _minimal(file: Path, architecture: str = "llama", **metadata: Any) -> None:
    writer = GGUFWriter(file, architecture)
    values = {
        "context_length": 64,
        "embedding_length": 32,
        "block_count": 1,
        "feed_forward_length": 32,
        "attention.head_count": 2,
        **metadata,
    }
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_string(f"llama.{key}", value)
        elif value is not None:
            writer.add_uint32(f"llama.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("metadata", "error", "named"),
    [
        ({"expert_count": 8}, UnsupportedConfig, "expert_count"),
        ({"attention.sliding_window": 23}, UnsupportedConfig, "sliding_window"),
        ({"logit_scale": 2}, UnsupportedConfig, "logit_scale"),
        ({"rope.scaling.type": "longrope"}, UnsupportedConfig, "rope.scaling.type.*longrope.*yarn"),
        ({"rope.scaling.type": "yarn"}, WeightsDamaged, "llama.rope.scaling.factor"),
        ({"rope.dimension_count": 8}, UnsupportedConfig, "rope.dimension_count; got 8; limit: 16"),
        ({"attention.value_length": 8}, UnsupportedConfig, "attention.value_length; got 8"),
        ({"block_count": None}, WeightsDamaged, "llama.block_count"),
        ({"block_count": 0}, UnsupportedConfig, "llama.block_count"),
        ({}, WeightsMismatch, "blk.0.attn_k.weight"),
    ],
)
def test_metadata_that_does_not_fit_is_named(
    metadata: dict[str, Any], error: Any, named: str, tmp_path: Path
) -> None:
    """Oracle: the message names the key or the tensor."""
    file = tmp_path / "model.gguf"
    _minimal(file, **metadata)
    with pytest.raises(error, match=named):
        open_source(file)


def test_one_of_several_files_is_refused_by_number(tmp_path: Path) -> None:
    """Oracle: the message names the number of files and how to make one of them."""
    file = tmp_path / "model-00001-of-00003.gguf"
    original = GGUFWriter.add_tensor

    def with_count(self: GGUFWriter, *arguments: Any) -> None:
        self.add_uint16("split.count", 3)
        original(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GGUFWriter, "add_tensor", with_count)
        _minimal(file)
    with pytest.raises(UnsupportedConfig, match="00001-of-00003.*got 3.*merge"):
        open_source(file)


def test_another_architecture_is_named(tmp_path: Path) -> None:
    """Oracle: the message names it and what is supported."""
    file = tmp_path / "model.gguf"
    _minimal(file, "mamba")
    with pytest.raises(UnsupportedArchitecture, match="mamba.*llama"):
        open_source(file)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q8_K", "IQ4_XS", "TQ1_0", "F64", "I8"])
def test_a_type_that_cannot_be_loaded_is_named_before_loading(kind: str, tmp_path: Path) -> None:
    """Oracle: the message names tensor, type and what can be loaded."""
    file = tmp_path / "model.gguf"
    writer = GGUFWriter(file, "llama")
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    data = np.zeros((8, 256 // block * size), dtype=np.uint8)
    writer.add_tensor("blk.0.odd", data, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedQuantization, match=rf"blk\.0\.odd.*{kind}.*Q6_K"):
        open_source(file)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    try:
        return resolve("smollm2")
    except ModelNotFound:
        pytest.skip("SmolLM2 is not pulled: freetoken-agent pull smollm2")


@pytest.mark.smollm2
def test_smollm2_equals_the_dequantised_reference(smollm2: Path) -> None:
    """Oracle: transformers' Llama with the weights the gguf package dequantises."""
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = GGUFReader(smollm2)
    spec = open_source(smollm2).spec
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.load_state_dict(_reference_state(reader), strict=False)
    model.tie_weights()
    model.eval()
    ids = [int(x) for x in torch.randint(20, 49_000, (130,), generator=torch.manual_seed(0))]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    difference = (logits_of(smollm2, ids) - expected).abs().max()
    assert float(difference / (expected.max() - expected.min())) < 1e-4


def _reference_state(reader: GGUFReader) -> dict[str, torch.Tensor]:
    modules = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    state = {}
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        rows = dequantize(tensor.data, tensor.tensor_type).reshape(shape).astype(np.float32)
        parts = tensor.name.split(".")
        if parts[0] != "blk":
            name = {"token_embd": "embed_tokens", "output_norm": "norm"}[parts[0]]
        else:
            name = f"layers.{parts[1]}.{modules[parts[2]]}"
        if parts[0] == "blk" and parts[2] in ("attn_q", "attn_k"):
            heads = 9 if parts[2] == "attn_q" else 3
            rows = rows.reshape(heads, shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(shape)
        state[f"model.{name}.weight"] = torch.from_numpy(np.ascontiguousarray(rows))
    return state
