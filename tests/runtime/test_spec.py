# SPDX-License-Identifier: Apache-2.0
"""Specs: sizes against transformers, and fingerprints that tell what differs."""

import os
import subprocess
import sys
from dataclasses import replace
from math import prod
from typing import Any

import pytest

from freetoken_runtime.models.registry import FAMILIES, read_spec
from freetoken_runtime.spec import BufferSpec, StateSpec
from freetoken_runtime.specs.attention import AttentionSpec
from freetoken_runtime.specs.rope import LinearScaling
from freetoken_runtime.testing import ODD_DIMENSIONS, family_config

LLAMA: dict[str, Any] = {**ODD_DIMENSIONS, "model_type": "llama"}


DENSE = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "gemma3_text")


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("tied", [False, True])
def test_parameter_shapes_are_those_of_transformers(family: str, tied: bool) -> None:
    """Oracle: transformers' state dict, by name and shape."""
    from transformers import AutoModelForCausalLM

    config = family_config(family, tie_word_embeddings=tied)
    spec = read_spec(config.to_dict())
    theirs = {
        name: tuple(parameter.shape)
        for name, parameter in AutoModelForCausalLM.from_config(config).named_parameters()
    }
    names = FAMILIES[family].names(spec)
    assert names.keys() == spec.parameter_shapes().keys()
    assert {piece.tensor: piece.shape for (way,) in names.values() for piece in way} == theirs


def test_state_bytes() -> None:
    """Oracle: 2 buffers x 2 heads x 10 values x 4 bytes x 4 layers."""
    spec = read_spec(LLAMA)
    assert spec.bytes_per_token() == 2 * 2 * 10 * 4 * 4
    assert spec.bytes_per_token(2) == spec.bytes_per_token() // 2
    assert all(state.sliceable for state in spec.states())
    recurrent = StateSpec(fixed=(BufferSpec("state", (6, 12, 20)),))
    assert not recurrent.sliceable
    assert (recurrent.bytes_per_token(), recurrent.bytes_per_anchor()) == (0, prod((6, 12, 20)) * 4)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"rope_theta": 5e5}, "rope"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope"),
        ({"max_position_embeddings": 2048}, "context"),
        ({"rms_norm_eps": 1e-5}, "architecture"),
        ({"attention_bias": True}, "architecture"),
        ({"num_hidden_layers": 5}, "architecture"),
        ({"model_type": "qwen2"}, "architecture"),
    ],
)
def test_c39_a_changed_setting_is_told_by_its_part(change: dict[str, Any], part: str) -> None:
    """Oracle: exactly the named part differs (a depth also lengthens the list of ropes)."""
    before = read_spec(LLAMA).fingerprint_parts()
    after = read_spec({**LLAMA, **change}).fingerprint_parts()
    different = {name for name in before if before[name] != after[name]}
    assert part in different
    assert different <= {part, "rope"} if "num_hidden_layers" in change else different == {part}


class OtherScaling(LinearScaling):
    """The same fields, another meaning."""


def test_scalings_of_equal_numbers_but_other_kind_differ() -> None:
    """Oracle: two classes with the same fields must not share a digest."""
    spec = read_spec({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}})
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, AttentionSpec) and mixer.rope is not None
    changed = replace(mixer, rope=replace(mixer.rope, scaling=OtherScaling(2.0)))
    other = replace(spec, layers=(replace(spec.layers[0], mixer=changed),) * 4)
    assert other.fingerprint_parts()["rope"] != spec.fingerprint_parts()["rope"]


def test_c42_fingerprints_do_not_depend_on_the_hash_seed() -> None:
    """Oracle: two processes with different PYTHONHASHSEED."""
    code = (
        "from freetoken_runtime.models.registry import read_spec\n"
        f"print(sorted(read_spec({LLAMA!r}).fingerprint_parts().items()))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1 and "architecture" in outputs.pop()
