# SPDX-License-Identifier: Apache-2.0
"""Specs: sizes against transformers, and fingerprints that tell what differs."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from math import prod
from typing import Any

import pytest

from freetoken_runtime.errors import UnsupportedConfig
from freetoken_runtime.models.registry import FAMILIES, read_spec
from freetoken_runtime.spec import BufferSpec, LayerSpec, StateSpec
from freetoken_runtime.specs.attention import AttentionSpec
from freetoken_runtime.specs.mlp import MlpSpec
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


def variants_of(value: Any) -> Iterator[Any]:
    """Other values of a field's kind; of a record or tuple, with one field or item changed."""
    if is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            for other in variants_of(getattr(value, field.name)):
                with suppress(UnsupportedConfig, AssertionError):  # impossible together
                    yield replace(value, **{field.name: other})
    elif isinstance(value, tuple):
        yield (*value, *value[-1:])
        for index, item in enumerate(value):
            yield from ((*value[:index], x, *value[index + 1 :]) for x in variants_of(item))
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield value + (2 if isinstance(value, int) else 0.5)
    elif isinstance(value, str):
        yield f"{value}_other"


@pytest.mark.parametrize("family", FAMILIES)
def test_c39_no_field_of_any_family_is_left_out_of_the_fingerprint(family: str) -> None:
    """Oracle: one field at a time, through all records of a layer of each kind: every change is
    another digest, and no two changes share one."""
    spec = read_spec(family_config(family).to_dict())
    kinds = tuple(dict.fromkeys(spec.layers))
    spec = replace(spec, layers=kinds)
    seen = {tuple(sorted(spec.fingerprint_parts().items()))}
    count = 1
    for other in variants_of(spec):
        if other == spec:
            continue
        seen.add(tuple(sorted(other.fingerprint_parts().items())))
        count += 1
    assert len(seen) == count > 20, family


def test_kinds_with_the_same_numbers_differ() -> None:
    """Oracle: a feed-forward of another class with equal fields, a mixer gone, a rope gone."""

    class OtherMlp(MlpSpec):
        """The same fields, another meaning."""

    spec = read_spec(LLAMA)
    layer = spec.layers[0]
    assert isinstance(layer.mixer, AttentionSpec)
    others = [
        replace(layer, feed_forward=OtherMlp(84)),
        replace(layer, mixer=None),
        replace(layer, feed_forward=None),
        replace(layer, mixer=replace(layer.mixer, rope=None)),
    ]
    specs = [spec, *(replace(spec, layers=(other,) * 4) for other in others)]
    assert len({tuple(sorted(x.fingerprint_parts().items())) for x in specs}) == len(specs)


def test_a_layer_may_have_one_block_only() -> None:
    """Oracle: by hand: no mixer, no state; a block that is not there has no weights and no norm."""
    layers = (
        LayerSpec(AttentionSpec(2, 1, 6, None), None, post_norms=True),
        LayerSpec(None, MlpSpec(7)),
    )
    spec = replace(read_spec(LLAMA), layers=layers)
    assert spec.states() == (AttentionSpec(2, 1, 6, None).state(), StateSpec())
    assert spec.bytes_per_token() == 2 * 6 * 4
    shapes = spec.parameter_shapes()
    of_layers = {name for name in shapes if name.startswith("layers.")}
    assert of_layers == {
        *(f"layers.0.{part}" for part in ("mixer_norm", "mixer_post_norm", "q", "k", "v", "o")),
        *(f"layers.1.{part}" for part in ("feed_forward_norm", "gate", "up", "down")),
    }


def test_two_weights_of_one_name_are_our_own_fault() -> None:
    """Oracle: an assertion that names it."""

    @dataclass(frozen=True)
    class Colliding(MlpSpec):
        def parameter_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
            return {"q": (1, hidden_size)}

    layer = replace(read_spec(LLAMA).layers[0], feed_forward=Colliding(7))
    with pytest.raises(AssertionError, match="'q'"):
        layer.parameter_shapes(60)
