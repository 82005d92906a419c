# SPDX-License-Identifier: Apache-2.0
"""Which families exist: `model_type` -> how to read its configuration and name its weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UnsupportedArchitecture
from ..spec import ModelSpec
from ..weight_source import Names
from .config_reader import text_part
from .deepseek import deepseek_names, read_deepseek_v2, read_deepseek_v3
from .ernie4_5_moe import ernie4_5_moe_names, read_ernie4_5_moe
from .falcon_h1 import falcon_h1_names, read_falcon_h1
from .gemma3 import gemma3_names, read_gemma3
from .glm4_moe import glm4_moe_names, read_glm4_moe
from .gpt_oss import gpt_oss_names, read_gpt_oss
from .granite import read_granite
from .granitemoe import granitemoe_names, read_granitemoe
from .granitemoehybrid import granitemoehybrid_names, read_granitemoehybrid
from .kimi_linear import kimi_linear_names, read_kimi_linear
from .lfm2_moe import lfm2_moe_names, read_lfm2_moe
from .llama import llama_names, read_llama
from .mixtral import mixtral_names, read_minimax_m2, read_mixtral
from .nemotron_h import nemotron_h_names, read_nemotron_h
from .qwen3_5 import qwen3_5_names, read_qwen3_5
from .qwen3_next import qwen3_next_names, read_qwen3_next
from .qwen_moe import qwen_moe_names, read_olmoe, read_qwen2_moe, read_qwen3_moe
from .smollm3 import read_smollm3


@dataclass(frozen=True)
class Family:
    """`read`: config.json -> spec. `names`: how a checkpoint may store each parameter."""

    read: Callable[[Mapping[str, Any]], ModelSpec]
    names: Callable[[ModelSpec], Names]


_LLAMA = Family(read_llama, llama_names)

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "smollm3": Family(read_smollm3, llama_names),
    "granite": Family(read_granite, llama_names),
    "gemma3_text": Family(read_gemma3, gemma3_names),
    "deepseek_v2": Family(read_deepseek_v2, deepseek_names),
    "deepseek_v3": Family(read_deepseek_v3, deepseek_names),
    "mixtral": Family(read_mixtral, mixtral_names),
    "minimax_m2": Family(read_minimax_m2, mixtral_names),
    "qwen2_moe": Family(read_qwen2_moe, qwen_moe_names),
    "qwen3_moe": Family(read_qwen3_moe, qwen_moe_names),
    "olmoe": Family(read_olmoe, qwen_moe_names),
    "granitemoe": Family(read_granitemoe, granitemoe_names),
    "glm4_moe": Family(read_glm4_moe, glm4_moe_names),
    "gpt_oss": Family(read_gpt_oss, gpt_oss_names),
    "ernie4_5_moe": Family(read_ernie4_5_moe, ernie4_5_moe_names),
    "falcon_h1": Family(read_falcon_h1, falcon_h1_names),
    "granitemoehybrid": Family(read_granitemoehybrid, granitemoehybrid_names),
    "lfm2_moe": Family(read_lfm2_moe, lfm2_moe_names),
    "nemotron_h": Family(read_nemotron_h, nemotron_h_names),
    "qwen3_next": Family(read_qwen3_next, qwen3_next_names),
    "qwen3_5_text": Family(read_qwen3_5, qwen3_5_names),
    "qwen3_5_moe_text": Family(read_qwen3_5, qwen3_5_names),
    "kimi_linear": Family(read_kimi_linear, kimi_linear_names),
}


def family_of(model_type: object) -> Family:
    """UnsupportedArchitecture, naming it and what is supported, for any other type."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedArchitecture(
            f"the architecture (model_type) {model_type!r} is not supported",
            limit=", ".join(FAMILIES),
        )
    return FAMILIES[model_type]


def read_family(config: Mapping[str, Any]) -> tuple[Family, ModelSpec]:
    """config.json as a mapping -> family and spec, of the text part where the model has others.
    UnsupportedArchitecture, UnsupportedConfig, UnsupportedQuantization."""
    text = text_part(config)
    family = family_of(text.get("model_type"))
    return family, family.read(text)


def read_spec(config: Mapping[str, Any]) -> ModelSpec:
    """The spec alone; see `read_family`."""
    return read_family(config)[1]
