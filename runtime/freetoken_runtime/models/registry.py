# SPDX-License-Identifier: Apache-2.0
"""Which families exist: `model_type` -> how to read its configuration and name its weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UnsupportedArchitecture
from ..spec import ModelSpec
from ..weight_source import Names
from .config_reader import text_part
from .llama import llama_names, read_llama


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
