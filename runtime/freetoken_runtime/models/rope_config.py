# SPDX-License-Identifier: Apache-2.0
"""Rope settings in both spellings: `rope_parameters` (transformers 5) and `rope_scaling` with
`rope_theta` (earlier). Defaults and derived values follow transformers 5.24."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import UnsupportedConfig
from ..specs.rope import LinearScaling, Llama3Scaling, RopeScaling, RopeSpec, YarnScaling
from .config_reader import ConfigReader

SUPPORTED_KINDS = ("default", "linear", "llama3", "yarn")


def read_rope(
    config: ConfigReader,
    head_dim: int,
    context_limit: int,
    *,
    theta: float = 10_000.0,
    partial: float | None = None,
) -> RopeSpec:
    """The one rope of a model. `theta` and `partial`, the part of a head that turns, are the
    family's defaults; without the latter a head turns as a whole. UnsupportedConfig names a kind or
    key that is not implemented."""
    theta = config.number("rope_theta", theta)
    config.require("rope_interleaved", False)
    if partial is None:
        config.require("partial_rotary_factor", 1)
    else:
        partial = config.number("partial_rotary_factor", partial)
    older, newer = config.get("rope_scaling"), config.get("rope_parameters")
    # A key beside the rope parameters wins over one inside, as in transformers.
    original = config.get("original_max_position_embeddings")
    if original is not None:
        original = config.whole("original_max_position_embeddings")
    return rope_of(
        older or newer or {}, Rotation(head_dim, theta, partial), context_limit, original
    )


@dataclass(frozen=True)
class Rotation:
    """What is known of a rope before its parameters are read; see `read_rope`."""

    head_dim: int
    theta: float
    partial: float | None = None


def rope_of(
    settings: object, known: Rotation, context_limit: int, original: int | None = None
) -> RopeSpec:
    """A rope from its parameters. `original`: the context it was trained for, where that is told
    beside them."""
    if not isinstance(settings, Mapping):
        raise UnsupportedConfig("rope parameters", value=settings, limit="an object")
    reader = ConfigReader(settings)
    theta = reader.number("rope_theta", known.theta)
    dim = known.head_dim
    if known.partial is None:
        reader.require("partial_rotary_factor", 1)
    else:
        dim = int(dim * reader.number("partial_rotary_factor", known.partial))
    inside = reader.whole("original_max_position_embeddings", context_limit)
    scaling = _read_scaling(reader, inside if original is None else original)
    for key in ("mrope_section", "mrope_interleaved"):
        reader.get(key)  # of time, height and width of images: in text all three are one position
    reader.finish()
    return RopeSpec(dim, theta, scaling)


def _read_scaling(reader: ConfigReader, original_context: int) -> RopeScaling | None:
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
        factor = _required(reader, "factor")
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
    """As transformers: two factors that are both there, and not 0, divide."""
    given = None
    if reader.get("attention_factor") is not None:
        given = reader.number("attention_factor", 1.0)
    mscale, mscale_all = (_number_or_0(reader, key) for key in ("mscale", "mscale_all_dim"))
    if given is not None:
        return given
    if mscale and mscale_all:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all)
    return _mscale(factor, 1.0)


def score_scale(reader: ConfigReader) -> float:
    """What a scaled rope multiplies the scores with where it has `mscale_all_dim`: the squared
    factor of its paper's temperature; 1 for any other rope."""
    settings = reader.get("rope_scaling") or reader.get("rope_parameters") or {}
    if not isinstance(settings, Mapping):
        raise UnsupportedConfig("rope parameters", value=settings, limit="an object")
    inside = ConfigReader(settings)
    if inside.get("rope_type", inside.get("type", "default")) == "default":
        return 1.0
    return _mscale(inside.number("factor", 1.0), _number_or_0(inside, "mscale_all_dim")) ** 2


def _number_or_0(reader: ConfigReader, key: str) -> float:
    return 0.0 if reader.get(key, 0) == 0 else reader.number(key, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _required(reader: ConfigReader, key: str) -> float:
    if reader.get(key) is None:
        raise UnsupportedConfig(f"rope parameter {key!r} is missing", remedy="complete config.json")
    return reader.number(key, 1.0)
