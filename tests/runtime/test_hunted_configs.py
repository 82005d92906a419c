# SPDX-License-Identifier: Apache-2.0
"""Hostile configurations. Oracle: our own error, or a spec that can be named and counted, whatever
stands under whichever key."""

from collections.abc import Iterator
from typing import Any

import pytest

from freetoken_runtime.errors import UnsupportedConfig
from freetoken_runtime.models.registry import FAMILIES, read_family
from freetoken_runtime.testing import family_config
from freetoken_storage.errors import FreetokenError

JUNK: list[Any] = [
    "x",
    -1,
    0,
    1.5,
    True,
    10**30,
    float("nan"),
    float("inf"),
    [],
    ["x"],
    [None] * 4,
    {},
    {"a": 1},
]
ROPES: list[Any] = [
    {"rope_type": "yarn", "factor": "x"},
    {"rope_type": "yarn", "factor": 4.0, "mscale": "x", "mscale_all_dim": "y"},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": "x"},
    {"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": -1},
    {"type": 7},
    {"rope_type": ["a"]},
    {"rope_type": "linear", "factor": True},
    {"full_attention": 7},
    {"full_attention": {"rope_type": "linear"}},
    {"rope_theta": [1]},
    {"partial_rotary_factor": "x"},
]
ADDED = ("rope_theta", "partial_rotary_factor", "head_dim", "sliding_window", "layer_types")


def changes(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in (*config, *ADDED, "text_config"):
        yield from ((key, value) for value in JUNK)
    for key in ("rope_parameters", "rope_scaling"):
        yield from ((key, value) for value in (*JUNK, *ROPES))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_value_is_met_by_anything_but_our_own_error(family: str) -> None:
    """Keys one at a time, and values that no configuration has."""
    base = family_config(family).to_dict()
    read = 0
    for key, value in changes(base):
        try:
            kind, spec = read_family({**base, key: value})
        except FreetokenError:
            continue
        except Exception as error:
            raise AssertionError(f"{key} = {value!r}: {error!r}") from error
        read += 1
        spec.fingerprint_parts()
        if spec.num_layers < 100:
            assert kind.names(spec).keys() == spec.parameter_shapes().keys()
    assert read > 20, "no value was harmless"


COUNTS = {
    "mixtral": "num_local_experts",
    "qwen3_moe": "num_experts",
    "deepseek_v3": "n_routed_experts",
    "ernie4_5_moe": "moe_num_experts",
    "llama": "num_hidden_layers",
}


@pytest.mark.parametrize("family", COUNTS)
def test_numbers_of_layers_and_experts_have_a_limit(family: str) -> None:
    """Oracle: an error before two thousand million names are made."""
    config = {**family_config(family).to_dict(), "layer_types": None, COUNTS[family]: 2**31 - 1}
    with pytest.raises(UnsupportedConfig, match=str(2**31 - 1)):
        read_family(config)
