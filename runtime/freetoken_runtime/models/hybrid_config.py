# SPDX-License-Identifier: Apache-2.0
"""What configurations and checkpoints of Mamba-2 and convolution hybrids share."""

from collections.abc import Mapping
from typing import Any, Literal

from ..errors import UnsupportedConfig
from ..spec import MAX_LAYERS
from ..specs.mamba import Mamba2Spec
from .config_reader import ConfigReader
from .weight_names import Naming, tensor

# Both spellings of transformers, before and since 5.
KIND_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}


def read_hybrid_kinds(
    reader: ConfigReader,
    supported: tuple[str, ...],
    keys: tuple[str, ...],
    default: list[str] | None = None,
) -> tuple[str, ...]:
    """The kind of every layer, from the first of `keys` that is there, in the newer spelling; as
    many as `num_hidden_layers`, if that is there."""
    lists = [reader.get(key) for key in keys]
    kinds = next((kinds for kinds in lists if kinds is not None), default)
    if not isinstance(kinds, list) or not 1 <= len(kinds) <= MAX_LAYERS:
        raise UnsupportedConfig(
            f"config key {keys[0]!r}", value=kinds, limit=f"a list of 1 to {MAX_LAYERS} names"
        )
    renamed = tuple(KIND_NAMES.get(kind, kind) for kind in kinds)
    for kind in renamed:
        if kind not in supported:
            raise UnsupportedConfig(
                f"config key {keys[0]!r} names a kind of layer that is not supported",
                value=kind,
                limit=", ".join(supported),
            )
    layers = reader.whole("num_hidden_layers", len(renamed))
    if layers != len(renamed):
        raise UnsupportedConfig(
            f"config key 'num_hidden_layers' differs from the length of {keys[0]!r}",
            value=layers,
            limit=len(renamed),
        )
    return renamed


def read_mamba2(
    reader: ConfigReader, width: int, norm: Literal["of_gated", "then_gate"] | None
) -> Mamba2Spec:
    """The `mamba_*` keys that granitemoehybrid and falcon_h1 share; `width` of all heads."""
    heads = reader.whole("mamba_n_heads", 128)
    if reader.get("mamba_d_head", "auto") == "auto":
        head_dim = width // heads
    else:
        head_dim = reader.whole("mamba_d_head")
    if head_dim * heads != width:
        raise UnsupportedConfig(
            "mamba_n_heads · mamba_d_head must be the width of the Mamba layers",
            value=f"{heads} · {head_dim}",
            limit=width,
        )
    reader.get("mamba_chunk_size")  # how transformers cuts a scan, not what it computes
    bias = reader.flag("mamba_proj_bias")
    low, high = read_step_limits(reader)
    return Mamba2Spec(
        num_heads=heads,
        head_dim=head_dim,
        num_groups=reader.whole("mamba_n_groups", 1),
        state_size=reader.whole("mamba_d_state", 256),
        kernel=reader.whole("mamba_d_conv", 4),
        norm=norm,
        conv_bias=reader.flag("mamba_conv_bias", True),
        input_bias=bias,
        output_bias=bias,
        dt_min=low,
        dt_max=high,
    )


def read_step_limits(reader: ConfigReader) -> tuple[float, float]:
    """`time_step_limit`, whose infinity transformers writes as an object."""
    limits = reader.get("time_step_limit", (0.0, float("inf")))
    if not isinstance(limits, list | tuple) or len(limits) != 2:
        raise UnsupportedConfig("config key 'time_step_limit'", value=limits, limit="two numbers")
    low, high = (_number(limit) for limit in limits)
    return low, high


def refuse_step_limits(reader: ConfigReader) -> None:
    """UnsupportedConfig unless `time_step_limit` limits nothing."""
    limits = read_step_limits(reader)
    if limits != (0.0, float("inf")):
        raise UnsupportedConfig(
            "config key 'time_step_limit' is not supported", value=limits, limit="0 to infinity"
        )


def _number(value: Any) -> float:
    if isinstance(value, Mapping):
        value = float("inf") if value.get("__float__") == "Infinity" else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnsupportedConfig("config key 'time_step_limit'", value=value, limit="two numbers")
    return float(value)


def read_numbers(reader: ConfigReader, key: str, count: int) -> tuple[float, ...]:
    """A list of `count` finite numbers, all 1 by default."""
    values = reader.get(key, [1.0] * count)
    numbers = isinstance(values, list) and all(type(value) in (int, float) for value in values)
    if not numbers or len(values) != count or not all(abs(v) < float("inf") for v in values):
        raise UnsupportedConfig(f"config key {key!r}", value=values, limit=f"{count} numbers")
    return tuple(float(value) for value in values)


def mamba2_names(module: str, at: str = "") -> dict[str, str | Naming]:
    """Where a checkpoint has the parameters of a Mamba-2 mixer, here named from `at` on."""
    return {
        f"{at}in": f"{module}.in_proj",
        f"{at}conv": f"{module}.conv1d",
        f"{at}dt_bias": tensor(f"{module}.dt_bias"),
        f"{at}a_log": tensor(f"{module}.A_log"),
        f"{at}skip": tensor(f"{module}.D"),
        f"{at}gate_norm": f"{module}.norm",
        f"{at}out": f"{module}.out_proj",
    }
