# SPDX-License-Identifier: Apache-2.0
"""What configurations say about attention: heads, windows, kinds of layers."""

from ..errors import UnsupportedConfig
from .config_reader import ConfigReader

FULL, SLIDING = "full_attention", "sliding_attention"


def read_head_dim(reader: ConfigReader, heads: int) -> int:
    """`head_dim`, or what the hidden size leaves for each head."""
    hidden = reader.whole("hidden_size")
    if reader.get("head_dim") is None and hidden % heads:
        raise UnsupportedConfig("hidden_size / num_attention_heads must be whole", value=hidden)
    return reader.whole("head_dim", hidden // heads)


def read_kv_heads(reader: ConfigReader, heads: int, absent: int | None) -> int:
    """`num_key_value_heads`: null means one per head; `absent`: where the key is not there, None
    if it has to be."""
    null = reader.has("num_key_value_heads")
    return reader.whole("num_key_value_heads", heads if null else absent)


def read_kinds(
    reader: ConfigReader, default: list[str], supported: tuple[str, ...] = (FULL, SLIDING)
) -> tuple[str, ...]:
    """`layer_types`, one per layer, or the default."""
    kinds = reader.get("layer_types", default)
    if not isinstance(kinds, list | tuple) or len(kinds) != len(default):
        raise UnsupportedConfig(
            "config key 'layer_types'", value=kinds, limit=f"a list of {len(default)} names"
        )
    for kind in kinds:
        if kind not in supported:
            raise UnsupportedConfig(
                "config key 'layer_types' names a kind of layer that is not supported",
                value=kind,
                limit=", ".join(supported),
            )
    return tuple(kinds)


def read_window(reader: ConfigReader, absent: int | None = None) -> int | None:
    """`sliding_window`; null means none; `absent`: where the key is not there."""
    if reader.get("sliding_window") is None and (absent is None or reader.has("sliding_window")):
        return None
    return reader.whole("sliding_window", absent)


def used_window(window: int | None, context: int) -> int | None:
    """A window that hides nothing is none."""
    return None if window is None or window >= context else window
