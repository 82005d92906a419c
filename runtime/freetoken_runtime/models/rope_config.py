# SPDX-License-Identifier: Apache-2.0
"""Rope settings in both spellings: `rope_parameters` (transformers 5) and `rope_scaling` with
`rope_theta` (earlier). Defaults and derived values follow transformers 5.24."""

import math
from collections.abc import Mapping

from ..errors import UnsupportedConfig
from ..specs.rope import LinearScaling, Llama3Scaling, RopeScaling, RopeSpec, YarnScaling
from .config_reader import ConfigReader

SUPPORTED_KINDS = ("default", "linear", "llama3", "yarn")


def read_rope(config: ConfigReader, head_dim: int, context_limit: int) -> RopeSpec:
    """The rope of every layer. UnsupportedConfig names a kind or key that is not implemented."""
    theta = config.number("rope_theta", 10_000.0)
    config.require("rope_interleaved", False)
    config.require("partial_rotary_factor", 1)
    older, newer = config.get("rope_scaling"), config.get("rope_parameters")
    settings = older or newer or {}
    if not isinstance(settings, Mapping):
        raise UnsupportedConfig("rope parameters", value=settings, limit="an object")
    reader = ConfigReader(settings)
    theta = reader.number("rope_theta", theta)
    reader.require("partial_rotary_factor", 1)
    original = reader.whole("original_max_position_embeddings", context_limit)
    # A key beside the rope parameters wins over one inside, as in transformers.
    original = config.whole("original_max_position_embeddings", original)
    scaling = _read_scaling(reader, context_limit, original)
    reader.finish()
    return RopeSpec(head_dim, theta, scaling)


def _read_scaling(
    reader: ConfigReader, context_limit: int, original_context: int
) -> RopeScaling | None:
    older = reader.get("type", "default")
    kind = reader.get("rope_type", older)
    if kind == "default":
        reader.get("factor")  # without a kind it has no meaning, and transformers ignores it
        return None
    if kind == "linear":
        return LinearScaling(_required(reader, "factor"))
    if kind == "llama3":
        return Llama3Scaling(
            factor=_required(reader, "factor"),
            low_freq_factor=_required(reader, "low_freq_factor"),
            high_freq_factor=_required(reader, "high_freq_factor"),
            original_context=original_context,
        )
    if kind == "yarn":
        factor = reader.number("factor", context_limit / original_context)
        return YarnScaling(
            factor=factor,
            attention_factor=_yarn_attention_factor(reader, factor),
            original_context=original_context,
            beta_fast=reader.number("beta_fast", 32.0),
            beta_slow=reader.number("beta_slow", 1.0),
            truncate=reader.flag("truncate", True),
        )
    raise UnsupportedConfig(
        "rope_type is not supported", value=kind, limit=", ".join(SUPPORTED_KINDS)
    )


def _yarn_attention_factor(reader: ConfigReader, factor: float) -> float:
    given = reader.get("attention_factor")
    mscale, mscale_all = reader.get("mscale"), reader.get("mscale_all_dim")
    if given is not None:
        return float(given)
    if mscale and mscale_all:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all)
    return _mscale(factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _required(reader: ConfigReader, key: str) -> float:
    if reader.get(key) is None:
        raise UnsupportedConfig(f"rope parameter {key!r} is missing", remedy="complete config.json")
    return reader.number(key, 1.0)
