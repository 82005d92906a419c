# SPDX-License-Identifier: Apache-2.0
"""Linear kernels against their references in fp64, and the promise about neighbouring rows."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken_runtime.batch import Form, RowGroup
from freetoken_runtime.errors import UnsupportedQuantization
from freetoken_runtime.kernels.dense_linear import cpu as dense
from freetoken_runtime.kernels.dense_linear import reference as dense_reference
from freetoken_runtime.kernels.int4_linear import cpu as int4
from freetoken_runtime.kernels.int4_linear import reference as int4_reference
from freetoken_runtime.kernels.int8_linear import cpu as int8
from freetoken_runtime.kernels.int8_linear import reference as int8_reference
from freetoken_runtime.kernels.integers import (
    Int4Values,
    Int8Values,
    int4_from_groups,
    quantise_int4,
    quantise_int8,
    stack_int4,
)
from freetoken_runtime.layers.linear import DenseLinear, IntegerLinear, Linear

SHAPES = [(211, 60), (60, 84), (7, 33), (1, 1), (64, 32), (192, 576), (130, 4096)]


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    assert ours.shape == reference.shape and bool(ours.isfinite().all())
    return float((ours.double() - reference).abs().max() / reference.abs().max())


def build(kind: str, shape: tuple[int, int], seed: int = 0) -> tuple[Linear, torch.Tensor]:
    """A layer with bias and its exact weights in fp64."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(*shape, generator=generator)
    bias = torch.randn(shape[0], generator=generator)
    if kind == "int8":
        eight = quantise_int8(weight)
        return IntegerLinear(int8.pack(eight), bias), int8_reference.dequantise(eight)
    if kind.startswith("int4"):
        four = quantise_int4(weight, int(kind[4:]))
        return IntegerLinear(int4.pack(four), bias), int4_reference.dequantise(four)
    kept = weight.to(torch.bfloat16 if kind == "bf16" else torch.float32)
    return DenseLinear(kept, bias), kept.double()


KINDS = ["fp32", "bf16", "int8", "int432", "int464", "int4128"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_both_forms_hold_the_same_weights(kind: str, shape: tuple[int, int]) -> None:
    """Oracle: fp64 over the dequantised values. Many rows of integers use fp32 activations
    (1e-5), packed ops and bf16 weights round activations to bf16 (5e-3)."""
    layer, weight = build(kind, shape)
    x = torch.randn(20, shape[1], generator=torch.Generator().manual_seed(1))
    expected = dense_reference.linear(x, weight, layer._bias)  # type: ignore[attr-defined]
    exact_many = kind != "bf16"
    assert error(layer.many(x), expected) < (1e-5 if exact_many else 5e-3)
    assert error(layer.few(x), expected) < (1e-5 if kind == "fp32" else 5e-3)
    assert (layer.outputs, layer.inputs) == shape


@pytest.mark.parametrize("kind", ["int8", "int432"])
def test_the_few_form_differs_by_activation_rounding_only(kind: str) -> None:
    """Oracle: fp64 with activations already rounded to bf16; what is left is the rounding of the
    output. A weight rounded differently would show at once."""
    layer, weight = build(kind, (192, 576))
    x = torch.randn(5, 576).bfloat16().float()
    expected = dense_reference.linear(x, weight)
    plain = IntegerLinear(layer._weight)  # type: ignore[attr-defined]
    allowed = expected.abs() * 2**-8 + 1e-5
    assert bool(((plain.few(x).double() - expected).abs() <= allowed).all())


@pytest.mark.parametrize("shape", [(211, 60), (192, 576), (130, 4096), (960, 576)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_neighbours(kind: str, shape: tuple[int, int]) -> None:
    """Oracle: the same row computed alone, bit for bit (where the layer promises it)."""
    layer, _ = build(kind, shape)
    if not layer.few_rows_batch:
        assert kind in ("fp32", "bf16")
        return
    x = torch.randn(48, shape[1])
    whole = layer.few(x)
    for start, rows in ((0, 1), (5, 1), (0, 2), (7, 3), (3, 8), (1, 17), (9, 33)):
        assert torch.equal(layer.few(x[start : start + rows]), whole[start : start + rows])


@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_do_not_depend_on_their_neighbours(kind: str) -> None:
    """Oracle: 16 rows or more of one sequence computed alone, bit for bit: chunks of several
    sequences share one GEMM."""
    layer, _ = build(kind, (960, 576))
    x = torch.randn(100, 576)
    whole = layer.many(x)
    for start, rows in ((0, 16), (5, 17), (30, 64), (1, 99)):
        assert torch.equal(layer.many(x[start : start + rows]), whole[start : start + rows])


def test_a_promise_about_rows_is_tried_out_not_assumed() -> None:
    """Oracle: a kernel whose sums depend on the number of rows must be found out."""
    dense.is_row_invariant.cache_clear()
    original = dense.linear

    def fickle(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = original(x, weight, bias)
        return out * (1 + 2**-20) if len(x) == 5 else out

    dense.linear = fickle
    try:
        assert not dense.is_row_invariant(64, 64, torch.float32)
    finally:
        dense.linear = original
        dense.is_row_invariant.cache_clear()


def test_groups_are_computed_each_in_its_form() -> None:
    """Oracle: the forms called one by one."""
    layer, _ = build("int432", (192, 576))
    x = torch.randn(25, 576)
    groups = [RowGroup(0, 20, Form.MANY), RowGroup(20, 21, Form.FEW), RowGroup(21, 25, Form.FEW)]
    expected = torch.cat([layer.many(x[:20]), layer.few(x[20:21]), layer.few(x[21:])])
    assert torch.equal(layer(x, groups), expected)
    assert torch.equal(layer(x, [RowGroup(0, 25, Form.FEW)]), layer.few(x))


def test_large_matrices_are_dequantised_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the same layer in one piece."""
    from freetoken_runtime.layers import linear as module

    for kind in ("int8", "int464"):
        layer, _ = build(kind, (330, 64))
        x = torch.randn(17, 64)
        whole = layer.many(x)
        monkeypatch.setattr(module, "_SLICE_ELEMENTS", 64 * 130)
        torch.testing.assert_close(layer.many(x), whole, rtol=0, atol=1e-5)
        monkeypatch.undo()


def test_m13_zero_rows_stay_finite_and_exact() -> None:
    """Oracle: zero weights and zero activations give the bias or zero."""
    weight = torch.randn(64, 64)
    weight[3] = 0.0
    weight[5] = 2.5  # a constant group has no range
    for layer, dequantised in (
        (IntegerLinear(int8.pack(quantise_int8(weight))), None),
        (
            IntegerLinear(int4.pack(quantise_int4(weight, 32))),
            int4_reference.dequantise(quantise_int4(weight, 32)),
        ),
    ):
        x = torch.randn(20, 64)
        for out in (layer.many(x), layer.few(x)):
            assert bool(out.isfinite().all()) and not out[:, 3].any()
        assert not layer.many(torch.zeros(20, 64)).any()
        if dequantised is not None:
            assert bool((dequantised[5] == 2.5).all())


@settings(max_examples=40, deadline=None)
@given(
    outputs=st.integers(1, 150),
    inputs=st.integers(1, 200),
    size=st.sampled_from([32, 64, 128]),
    seed=st.integers(0, 99),
)
def test_int4_packing_loses_nothing(outputs: int, inputs: int, size: int, seed: int) -> None:
    """Oracle: the reference's dequantisation of the values before packing, any shape."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))
    values = quantise_int4(weight, size)
    packed = int4.pack(values)
    expected = int4_reference.dequantise(values)
    for start in range(0, outputs, 64):
        ours = int4.dequantise(packed, slice(start, min(start + 64, outputs)))
        torch.testing.assert_close(
            ours.double(), expected[start : start + 64], rtol=1e-6, atol=1e-7
        )


@pytest.mark.parametrize("layout", [(64, False), (32, False), (32, True), (16, True)])
def test_every_known_byte_layout_can_be_unpacked(layout: tuple[int, bool]) -> None:
    """Oracle: the layouts of torch's packing kernels, written out per instruction set."""
    block, paired = layout
    values = torch.randint(0, 16, (128, 32), dtype=torch.int32)
    rows = values.view(-1, block, 32)
    if paired:
        low, high = rows[:, 0::2], rows[:, 1::2]
    else:
        low, high = rows[:, : block // 2], rows[:, block // 2 :]
    packed = (low | high << 4).transpose(1, 2).to(torch.uint8).reshape(128, 16)
    unpacked = int4._unpacked(packed, int4.ByteLayout(block, paired))
    assert torch.equal(unpacked, values)


def test_an_unknown_byte_layout_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the error's type; weights in an unknown order must never be used."""
    int4.byte_layout.cache_clear()
    monkeypatch.setattr(int4, "_pack", lambda values, tiles: values.flip(0)[:, ::2].byte())
    with pytest.raises(UnsupportedQuantization, match="cannot be unpacked"):
        int4.byte_layout()
    monkeypatch.undo()
    assert int4.byte_layout().block in (16, 32, 64)


def test_quantisation_is_nearest_within_half_a_step() -> None:
    """Oracle: |w - q(w)| is at most half a step, plus what rounding scale and zero to bf16 costs
    (2^-9 of the largest weight)."""
    weight = torch.randn(50, 128)
    eight = quantise_int8(weight)
    difference = (int8_reference.dequantise(eight) - weight.double()).abs()
    largest = weight.abs().amax(1, keepdim=True).double()
    assert bool((difference <= eight.scales.double()[:, None] / 2 + largest * 2**-9).all())
    four = quantise_int4(weight, 64)
    steps = four.scales.double().repeat_interleave(64, 1)
    difference = (int4_reference.dequantise(four) - weight.double()).abs()
    assert bool((difference <= steps / 2 + largest * 2**-7).all())
    assert int(eight.values.min()) >= -127


def test_integers_of_a_file_are_kept() -> None:
    """Oracle: the integers themselves; scale and zero rounded to bf16 once."""
    values = torch.randint(0, 16, (64, 64), dtype=torch.uint8)
    scales, minimums = torch.rand(64, 2) * 0.1, torch.randn(64, 2)
    kept = int4_from_groups(values, scales, minimums, 32)
    assert torch.equal(kept.values, values)
    assert torch.equal(kept.scales, scales.bfloat16())
    assert torch.equal(kept.zeros, (minimums + 8 * scales).bfloat16())


def test_stacked_matrices_equal_separate_ones() -> None:
    """Oracle: each matrix by itself."""
    first, second = quantise_int4(torch.randn(64, 96), 32), quantise_int4(torch.randn(30, 96), 32)
    both = int4_reference.dequantise(stack_int4([first, second]))
    assert torch.equal(both[:64], int4_reference.dequantise(first))
    assert torch.equal(both[64:], int4_reference.dequantise(second))


def test_rows_of_a_tied_head() -> None:
    """Oracle: the dequantised matrix's rows, exactly: embedding and head are one parameter."""
    for kind in ("fp32", "bf16", "int8"):
        layer, weight = build(kind, (211, 60))
        rows = torch.tensor([0, 210, 5, 5])
        assert torch.equal(layer.weight_rows(rows).double(), weight[rows])


def test_sizes_are_counted() -> None:
    """Oracle: arithmetic, padding included."""
    layer, _ = build("int8", (211, 60))
    assert layer.size_bytes == 211 * 64 + 211 * 2 + 211 * 4
    layer, _ = build("int432", (211, 60))
    assert layer.size_bytes == 256 * 32 + 2 * 256 * 2 * 2 + 211 * 4
    assert isinstance(quantise_int8(torch.ones(2, 2)), Int8Values)
    assert isinstance(quantise_int4(torch.ones(2, 2), 32), Int4Values)
