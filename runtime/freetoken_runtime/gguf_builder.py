# SPDX-License-Identifier: Apache-2.0
"""Builds GGUF files for tests: models of transformers, written the way llama.cpp's converter does.

Q4_K, Q5_K and Q6_K have no quantiser in Python: such tensors are random blocks.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH, GGUFWriter, RopeScalingType, get_tensor_name_map
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize

Array = np.ndarray
_ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "gemma3_text": MODEL_ARCH.GEMMA3,
    "gpt_oss": MODEL_ARCH.GPT_OSS,
}
_NAMES = {
    MODEL_ARCH.LLAMA: "llama",
    MODEL_ARCH.QWEN2: "qwen2",
    MODEL_ARCH.QWEN3: "qwen3",
    MODEL_ARCH.QWEN3MOE: "qwen3moe",
    MODEL_ARCH.GEMMA3: "gemma3",
    MODEL_ARCH.GPT_OSS: "gpt-oss",
}


def build_gguf(file: Path, model: Any, kinds: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Write a transformers model. `kinds`: last part of a tensor's name (`attn_q`, `output`, …) ->
    type such as `Q4_1`; F32 where absent. Returns the dequantised state, under the names of
    transformers: load it into `model` to get the reference."""
    config = model.config
    architecture = _ARCHITECTURES[config.model_type]
    writer = GGUFWriter(file, _NAMES[architecture])
    _write_metadata(writer, config)
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    generator = np.random.default_rng(0)
    dequantised = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        restored = []
        for module, ending, part in _split(config, name, parameter.detach().numpy()):
            found = names.get_name(module)
            assert found is not None, module
            kind = Type[kinds.get(found.rpartition(".")[2], "F32") if part.ndim > 1 else "F32"]
            data = _encoded(np.ascontiguousarray(part), kind, generator)
            writer.add_tensor(found + ending, data, raw_dtype=kind)
            restored.append(dequantize(data, kind).reshape(part.shape).astype(np.float32))
        joined = _joined(config, name, restored)
        dequantised[name] = torch.from_numpy(np.ascontiguousarray(joined))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dequantised


def _write_metadata(writer: GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    rope = config.rope_parameters
    if config.model_type == "gemma3_text":
        rope = rope["full_attention"]
        writer.add_sliding_window(config.sliding_window)
        if config.final_logit_softcapping is not None:
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config.model_type == "qwen3_moe":
        _write_experts(writer, config.num_experts, config, config.moe_intermediate_size)
    if config.model_type == "gpt_oss":
        _write_experts(writer, config.num_local_experts, config, config.intermediate_size)
        writer.add_sliding_window(config.sliding_window)


def _write_experts(writer: GGUFWriter, count: int, config: Any, inner: int) -> None:
    writer.add_expert_count(count)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(inner)


def _split(config: Any, name: str, rows: Array) -> list[tuple[str, str, Array]]:
    """(module, ending, what is stored) of each tensor that one of transformers becomes."""
    prefix, _, part = name.rpartition(".mlp.experts.")
    if prefix:
        return [
            (f"{prefix}.mlp.experts.{module}", ".bias" if part.endswith("bias") else ".weight", x)
            for module, x in zip(_modules(part), _experts(config, part, rows), strict=True)
        ]
    if name.endswith("sinks"):
        return [(name, ".weight", rows)]
    module, _, ending = name.rpartition(".")
    heads = _interleaved_heads(config, name)
    if heads:
        rows = rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2)
        rows = rows.reshape(-1, *([rows.shape[-1]] if ending == "weight" else []))
    if config.model_type == "gemma3_text" and name.endswith("norm.weight"):
        rows = rows + 1
    return [(module, f".{ending}", rows)]


def _joined(config: Any, name: str, parts: list[Array]) -> Array:
    """What `_split` made, put together again."""
    part = name.rpartition(".mlp.experts.")[2]
    if part != name:
        return _fused(config, part, parts)
    (rows,) = parts
    heads = _interleaved_heads(config, name)
    if heads:
        shape = rows.shape
        rows = rows.reshape(heads, len(rows) // heads // 2, 2, -1).swapaxes(1, 2).reshape(shape)
    if config.model_type == "gemma3_text" and name.endswith("norm.weight"):
        rows = rows - 1
    return rows


def _interleaved_heads(config: Any, name: str) -> int:
    """llama.cpp's rope pairs neighbours in this architecture only."""
    if config.model_type != "llama":
        return 0
    if ".q_proj." in name:
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if ".k_proj." in name else 0


def _modules(part: str) -> list[str]:
    return ["down_proj"] if part.startswith("down") else ["gate_proj", "up_proj"]


def _experts(config: Any, part: str, rows: Array) -> list[Array]:
    if config.model_type == "gpt_oss":
        rows = rows if part.endswith("bias") else rows.swapaxes(1, 2)
        return [rows] if part.startswith("down") else [rows[:, 0::2], rows[:, 1::2]]
    return [rows] if part.startswith("down") else np.split(rows, 2, 1)


def _fused(config: Any, part: str, parts: list[Array]) -> Array:
    if config.model_type != "gpt_oss":
        return np.concatenate(parts, 1)
    rows = parts[0] if len(parts) == 1 else np.stack(parts, 2)
    if len(parts) == 2:
        rows = rows.reshape(rows.shape[0], -1, *rows.shape[3:])
    return rows if part.endswith("bias") else rows.swapaxes(1, 2)


def _encoded(rows: Array, kind: Type, generator: np.random.Generator) -> Array:
    if kind not in (Type.Q4_K, Type.Q5_K, Type.Q6_K):
        data: Array = quantize(rows, kind)
        return data
    return random_blocks(kind, rows.shape, generator)


def random_blocks(
    kind: Type, shape: tuple[int, ...], generator: np.random.Generator, spread: float = 0.15
) -> Array:
    """Stored bytes of weights of about this standard deviation."""
    block, size = GGML_QUANT_SIZES[kind]
    data = generator.integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
    deviation = {Type.Q4_K: 310.0, Type.Q5_K: 640.0, Type.Q6_K: 1360.0}[kind]
    scale = np.float16(spread / deviation)
    if kind == Type.Q6_K:
        data[..., -2:] = np.array([scale]).view(np.uint8)
    else:
        middle = 7.5 if kind == Type.Q4_K else 15.5
        data[..., :4] = np.array([scale, np.float16(scale * middle)]).view(np.uint8)
    return data.reshape(*shape[:-1], -1)
