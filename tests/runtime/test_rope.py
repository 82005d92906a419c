# SPDX-License-Identifier: Apache-2.0
"""Rope tables against transformers, and rotation against the textbook."""

from typing import Any

import pytest
import torch

from freetoken_runtime.errors import UnsupportedConfig
from freetoken_runtime.layers.rope import RopeTable, inverse_frequencies, rotate
from freetoken_runtime.models.registry import read_spec
from freetoken_runtime.specs.rope import FactorScaling, RopeSpec
from freetoken_runtime.testing import ODD_DIMENSIONS

KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 512},
    "yarn tuned": {
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.3,
        "truncate": False,
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [10, 64])
def test_tables_equal_transformers(kind: str, head_dim: int) -> None:
    """Oracle: LlamaRotaryEmbedding, at positions up to 100,000, bit for bit."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": kind.split()[0], "rope_theta": 50_000.0, **KINDS[kind]}
    config = LlamaConfig(**ODD_DIMENSIONS | {"head_dim": head_dim}, rope_parameters=rope)
    positions = torch.tensor([0, 1, 2, 511, 512, 4095, 100_000])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    mixer = read_spec(config.to_dict()).layers[0].mixer
    assert mixer is not None and mixer.rope is not None
    table = RopeTable(mixer.rope)
    our_cos, our_sin = table.rows(positions)
    half = head_dim // 2
    torch.testing.assert_close(our_cos[:, 0], cos[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(our_sin[:, 0, half:], sin[0, :, half:], rtol=0, atol=1e-6)
    torch.testing.assert_close(our_sin[:, 0, :half], -sin[0, :, :half], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        (kind, key)
        for kind, keys in (
            ("linear", ("factor",)),
            ("llama3", ("factor", "low_freq_factor", "high_freq_factor")),
            ("yarn", ("factor",)),
        )
        for key in keys
    ],
)
@pytest.mark.parametrize("given", ["absent", "null"])
def test_a_rope_without_one_of_its_parameters_is_refused_by_name(
    kind: str, missing: str, given: str
) -> None:
    """Oracle: transformers has no default for an absent one either: its own rope ends with an
    error. The error of ours names it, also where it is null and a ratio of contexts would suggest
    a value."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    whole = LlamaConfig(
        **ODD_DIMENSIONS,
        rope_parameters={"rope_type": kind, "rope_theta": 10_000.0, **KINDS[kind]},
    )
    read_spec(whole.to_dict())
    config = whole.to_dict()
    config["rope_parameters"] = {**config["rope_parameters"], missing: None}
    if given == "absent":
        del config["rope_parameters"][missing]
    with pytest.raises(UnsupportedConfig, match=f"rope parameter '{missing}' is missing") as error:
        read_spec(config)
    assert error.value.code == "unsupported_config"
    if given == "absent":
        whole.rope_parameters = config["rope_parameters"]
        with pytest.raises(KeyError):
            ROPE_INIT_FUNCTIONS[kind](whole, torch.device("cpu"))


def test_a_grown_table_keeps_its_rows() -> None:
    """Oracle: a table that was large from the start."""
    spec = RopeSpec(20, 10_000.0)
    grown, whole = RopeTable(spec), RopeTable(spec)
    whole.rows(torch.tensor([20_000]))
    for end in (1, 1023, 1024, 5000, 20_000):
        positions = torch.arange(0, end + 1, 7)
        for ours, theirs in zip(grown.rows(positions), whole.rows(positions), strict=True):
            assert torch.equal(ours, theirs)


def test_rotation_is_the_complex_product() -> None:
    """Oracle: (x_i + j x_{i + d/2}) · e^{j·angle} in complex fp64."""
    spec = RopeSpec(20, 10_000.0)
    x = torch.randn(5, 3, 20)
    positions = torch.tensor([0, 3, 17, 900, 1025])
    # The angle itself is an fp32 product, as in transformers.
    angles = (positions[:, None] * inverse_frequencies(spec)).double()
    turned = torch.complex(x[..., :10].double(), x[..., 10:].double()) * torch.exp(
        1j * angles
    ).unsqueeze(1)
    expected = torch.cat((turned.real, turned.imag), -1).float()
    torch.testing.assert_close(rotate(x, *RopeTable(spec).rows(positions)), expected)


def test_factors_divide_frequencies() -> None:
    """Oracle: the division."""
    factors = (1.0, 2.0, 4.0, 8.0, 8.0)
    scaled = inverse_frequencies(RopeSpec(10, 1e4, FactorScaling(factors)))
    plain = inverse_frequencies(RopeSpec(10, 1e4))
    torch.testing.assert_close(scaled, plain / torch.tensor(factors))
