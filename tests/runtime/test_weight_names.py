# SPDX-License-Identifier: Apache-2.0
"""Parameters stored as parts of tensors, or as several: what is taken, and what is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from freetoken_runtime.errors import WeightsMismatch
from freetoken_runtime.models.weight_names import (
    Naming,
    checkpoint_names,
    either,
    paired,
    part_of,
    reshaped,
    tensor,
)
from freetoken_runtime.spec import LayerSpec, ModelSpec
from freetoken_runtime.specs.attention import AttentionSpec
from freetoken_runtime.specs.mlp import MlpSpec
from freetoken_runtime.specs.rope import RopeSpec
from freetoken_runtime.weight_source import Names, Shape, Stored, WeightSource

HIDDEN, HEADS, DIM, INNER = 12, 2, 6, 7
SPEC = ModelSpec(
    architecture="test",
    vocab_size=5,
    hidden_size=HIDDEN,
    layers=(
        LayerSpec(AttentionSpec(HEADS, HEADS, DIM, RopeSpec(DIM, 1e4), qkv_bias=True), None),
        LayerSpec(None, MlpSpec(INNER)),
    ),
    norm_eps=1e-6,
    tied_head=True,
    context_limit=64,
)


class Dictionary(WeightSource):
    """Tensors in a dictionary."""

    def __init__(self, tensors: dict[str, torch.Tensor], names: Names) -> None:
        self._tensors = tensors
        super().__init__(Path("tensors"), SPEC, names)
        self.check()

    @property
    def files(self) -> list[Path]:
        return []

    def _stored_names(self) -> set[str]:
        return set(self._tensors)

    def _stored_shape(self, stored: str) -> Shape:
        return tuple(self._tensors[stored].shape)

    def _read(self, name: str, stored: Stored) -> torch.Tensor:
        part = stored.take(self._tensors[stored.tensor])
        return part.clone(memory_format=torch.contiguous_format)


# A table with every way to store a parameter.
TABLE: dict[str, str | Naming] = {
    "embedding": "embed",
    "norm": "norm",
    "mixer_norm": "first_norm",
    "feed_forward_norm": "second_norm",
    "q": paired("qkv.q_weight", HEADS),
    "q.bias": paired("qkv.q_bias", HEADS),
    "k": "k_proj",
    "v": reshaped("v_rows", HEADS, DIM, HIDDEN),
    "v.bias": tensor("v_shift"),
    "o": lambda prefix, shape: ((Stored(f"{prefix}o_in_out", shape[::-1], order=(1, 0)),),),
    "gate": either("gate_proj", part_of("gate_up.weight", 0, 0, INNER, 2 * INNER, HIDDEN)),
    "up": either("up_proj", part_of("gate_up.weight", 0, INNER, 2 * INNER, 2 * INNER, HIDDEN)),
    "down": either(
        "down_proj",
        lambda prefix, shape: (
            (Stored(f"{prefix}down.0", (4, INNER)), Stored(f"{prefix}down.1", (8, INNER))),
        ),
    ),
}


def stored_tensors(fused: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    width = HEADS * DIM
    tensors = {
        "embed.weight": drawn(5, HIDDEN),
        "norm.weight": drawn(HIDDEN),
        "blocks.0.first_norm.weight": drawn(HIDDEN),
        "blocks.0.qkv.q_weight": drawn(width, HIDDEN),
        "blocks.0.qkv.q_bias": drawn(width),
        "blocks.0.k_proj.weight": drawn(width, HIDDEN),
        "blocks.0.k_proj.bias": drawn(width),
        "blocks.0.v_rows": drawn(HEADS, DIM, HIDDEN),
        "blocks.0.v_shift": drawn(width),
        "blocks.0.o_in_out": drawn(width, HIDDEN),
        "blocks.1.second_norm.weight": drawn(HIDDEN),
    }
    gate_up, down = drawn(2 * INNER, HIDDEN), drawn(HIDDEN, INNER)
    if fused:
        tensors["blocks.1.gate_up.weight"] = gate_up
        tensors |= {"blocks.1.down.0": down[:4].clone(), "blocks.1.down.1": down[4:].clone()}
    else:
        tensors["blocks.1.gate_proj.weight"] = gate_up[:INNER].clone()
        tensors["blocks.1.up_proj.weight"] = gate_up[INNER:].clone()
        tensors["blocks.1.down_proj.weight"] = down
    return tensors


def names() -> Names:
    return checkpoint_names(SPEC, TABLE, layers="blocks")


@pytest.mark.parametrize("fused", [False, True])
def test_every_way_gives_the_parameter(fused: bool) -> None:
    """Oracle: plain indexing of the stored tensors, and the other way to store them."""
    tensors = stored_tensors(fused)
    source = Dictionary(tensors, names())
    read = {name: source.read(name) for name in SPEC.parameter_shapes()}
    source.finish()
    assert {name: tuple(x.shape) for name, x in read.items()} == SPEC.parameter_shapes()
    assert all(x.is_contiguous() for x in read.values())
    rows = [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]  # neighbours become halves, head by head
    assert torch.equal(read["layers.0.q"], tensors["blocks.0.qkv.q_weight"][rows])
    assert torch.equal(read["layers.0.q.bias"], tensors["blocks.0.qkv.q_bias"][rows])
    assert torch.equal(read["layers.0.k"], tensors["blocks.0.k_proj.weight"])
    assert torch.equal(read["layers.0.v"], tensors["blocks.0.v_rows"].flatten(0, 1))
    assert torch.equal(read["layers.0.v.bias"], tensors["blocks.0.v_shift"])
    assert torch.equal(read["layers.0.o"], tensors["blocks.0.o_in_out"].t())
    separate = stored_tensors(False)
    for part in ("gate", "up", "down"):
        assert torch.equal(read[f"layers.1.{part}"], separate[f"blocks.1.{part}_proj.weight"])


@pytest.mark.parametrize(
    ("fused", "gone", "missing"),
    [
        (False, "blocks.1.up_proj.weight", "blocks.1.up_proj.weight"),
        (True, "blocks.1.down.1", "blocks.1.down.1"),
        (True, "blocks.0.v_shift", "blocks.0.v_shift"),
    ],
)
def test_the_way_that_the_others_show_is_named_as_missing(
    fused: bool, gone: str, missing: str
) -> None:
    """Oracle: the message: the way that the other tensors show, not the preferred one."""
    tensors = stored_tensors(fused)
    del tensors[gone]
    with pytest.raises(WeightsMismatch, match=f"missing.*{missing}") as error:
        Dictionary(tensors, names())
    assert "down_proj" not in str(error.value)


def test_both_ways_at_once_are_refused() -> None:
    """Oracle: the message names what is left over."""
    tensors = stored_tensors(True) | stored_tensors(False)
    with pytest.raises(WeightsMismatch, match=r"not used.*blocks\.1\.down\.0"):
        Dictionary(tensors, names())


def misshapen(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = stored_tensors(True)
    tensors[name] = change(tensors[name])
    with pytest.raises(WeightsMismatch, match=f"'{name}'.*wrong shape"):
        Dictionary(tensors, names())


def test_m8_misshapen_parts_are_named() -> None:
    """Oracle: the message: a fused tensor with rows too many or transposed, a transposed tensor
    that is not, a piece too long."""
    misshapen("blocks.1.gate_up.weight", lambda x: torch.cat((x, x[:2])))
    misshapen("blocks.1.gate_up.weight", lambda x: x.t().contiguous())
    misshapen("blocks.0.v_rows", lambda x: x.flatten(0, 1))
    misshapen("blocks.1.down.1", lambda x: torch.cat((x, x[:1])))


HALF = ("gate_up.weight", 0, 0, INNER, 2 * INNER, HIDDEN)


@pytest.mark.parametrize(
    "other",
    [
        part_of("gate_up.weight", 0, INNER - 1, 2 * INNER - 1, 2 * INNER, HIDDEN),
        part_of(*HALF),
        part_of("gate_up.weight", 0, INNER, 2 * INNER - 1, 2 * INNER, HIDDEN),
        lambda prefix, shape: (
            (Stored(f"{prefix}gate_up.weight", (14, HIDDEN), (7, 2, HIDDEN), ((1, 1, 2),)),),
        ),
    ],
    ids=["overlapping", "the same", "one row left", "seen otherwise"],
)
def test_m9_parts_that_overlap_or_leave_something_are_our_own_fault(other: Naming) -> None:
    """Oracle: an assertion that names tensor or parameter, where the fused tensor is used; files
    with separate ones load."""
    table = {**TABLE, "gate": either("gate_proj", part_of(*HALF)), "up": either("up_proj", other)}
    wrong = checkpoint_names(SPEC, table, layers="blocks")
    Dictionary(stored_tensors(False), wrong)
    with pytest.raises(AssertionError, match=r"gate_up|layers\.1\.up"):
        Dictionary(stored_tensors(True), wrong)


def test_a_parameter_without_a_name_is_our_own_fault() -> None:
    """Oracle: a KeyError that names the part."""
    with pytest.raises(KeyError, match="down"):
        checkpoint_names(SPEC, {k: x for k, x in TABLE.items() if k != "down"}, layers="blocks")
