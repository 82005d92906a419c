# SPDX-License-Identifier: Apache-2.0
"""Passes over many rows that round activations: `EngineConfig.prefill`. Oracles: fp64 over values
rounded the same way; an engine that does not round."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from freetoken_runtime import Engine, EngineConfig, SamplingParams
from freetoken_runtime.config import Prefill, Quant
from freetoken_runtime.errors import InvalidConfig
from freetoken_runtime.kernels.int4_linear import cpu as int4
from freetoken_runtime.kernels.int4_linear import reference as int4_reference
from freetoken_runtime.kernels.int8_linear import cpu as int8
from freetoken_runtime.kernels.int8_linear import reference as int8_reference
from freetoken_runtime.kernels.integers import quantise_int4, quantise_int8
from freetoken_runtime.layers.linear import IntegerLinear
from freetoken_runtime.layers.rows import PickedRows, Rows
from freetoken_runtime.testing import build_checkpoint

EXACT_AND: Mapping[Prefill, tuple[Prefill, Prefill]] = {
    "bfloat16": ("exact", "bfloat16"),
    "int16": ("exact", "int16"),
    "int8": ("exact", "int8"),
}
INNER = 84  # the width of an expert in the mixture
pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = [(211, 60), (7, 33), (64, 32), (192, 576), (4200, 1030)]  # the last in two slices


def layer(quant: str, shape: tuple[int, int]) -> tuple[IntegerLinear, torch.Tensor, torch.Tensor]:
    """A layer, its weights in fp64, its bias."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(*shape, generator=generator)
    bias = torch.randn(shape[0], generator=generator)
    if quant == "int8":
        eight = quantise_int8(weight)
        return IntegerLinear(int8.pack(eight), bias), int8_reference.dequantise(eight), bias
    four = quantise_int4(weight, 32)
    return IntegerLinear(int4.pack(four), bias), int4_reference.dequantise(four), bias


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_rounds_activations_weights_and_sums(shape: tuple[int, int]) -> None:
    """Oracle: fp64 with activations and weights rounded; what is left is the rounding of the sum
    to bf16 before the bias."""
    made, weight, bias = layer("int4", shape)
    x = torch.randn(20, shape[1]).bfloat16()
    sums = x.double() @ weight.float().bfloat16().double().t()
    allowed = sums.abs() * 2**-8 + 1e-5 * sums.abs().max()
    assert bool(((made.many_rounded(x.float()) - (sums + bias)).abs() <= allowed).all())


def integers(made: IntegerLinear, x: torch.Tensor, parts: int) -> torch.Tensor:
    return made.many_integers(Rows(x).pick(None), parts)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("parts", "steps"), [(1, 127), (2, 127 * 128)])
def test_integers_round_each_row_by_its_own_largest(
    shape: tuple[int, int], parts: int, steps: int
) -> None:
    """Oracle: fp64 over activations that are whole 127th (16,256th) parts of their row's largest,
    and exact sums. One row is a thousand times larger than the others."""
    made, weight, bias = layer("int8", shape)
    x = torch.randn(20, shape[1])
    x[3] *= 1000.0
    unit = x.double().abs().amax(1, keepdim=True) / steps
    sums = (x.double() / unit).round() * unit @ weight.t()
    ours = integers(made, x, parts).double() - bias
    scale = sums.abs().amax(1, keepdim=True)
    # Halves may be rounded the other way in fp32: one step of one activation.
    assert bool(((ours - sums).abs() <= 1e-5 * scale + unit * weight.abs().max()).all())
    assert float(((ours - sums).abs() / scale).median()) < 1e-6


@pytest.mark.parametrize("parts", [1, 2])
def test_integers_keep_what_is_no_number_to_its_row(parts: int) -> None:
    """Oracle: the same rows without the others: NaN and infinity stay in theirs and are not made
    finite; a row of zeros gives the bias."""
    made, _, bias = layer("int8", (60, 84))
    x = torch.randn(20, 84)
    clean = integers(made, x, parts)
    x[2, 5], x[7, 1], x[11] = torch.nan, torch.inf, 0.0
    ours = integers(made, x, parts)
    others = [row for row in range(20) if row not in (2, 7, 11)]
    assert torch.equal(ours[others], clean[others])
    assert not ours[2].isfinite().any() and not ours[7].isfinite().any()
    assert torch.equal(ours[11], bias)


@pytest.mark.parametrize("rows", [1, 5, 16, 33])
def test_sums_of_products_are_exact(rows: int) -> None:
    """Oracle: whole numbers in int64, with the largest products that can meet."""
    assert int8.has_exact_sums()
    x = torch.randint(-127, 128, (rows, 4096), dtype=torch.int8)
    weight = torch.randint(-127, 128, (70, 4096), dtype=torch.int8)
    x[0], weight[0], weight[1] = 127, 127, -127
    expected = x.long() @ weight.long().t()
    assert torch.equal(torch._int_mm(x, weight.t()).long(), expected)


@pytest.mark.parametrize("parts", [1, 2])
def test_rows_that_are_picked_are_rounded_once(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: each picked row by itself, bit for bit; roundings are counted."""
    made, _, _ = layer("int8", (192, 576))
    counted: list[int] = []

    def counting(x: torch.Tensor, parts: int) -> int8.IntegerRows:
        counted.append(len(x))
        return int8.quantise_rows(x, parts)

    monkeypatch.setattr("freetoken_runtime.layers.rows.quantise_rows", counting)
    rows = Rows(torch.randn(40, 576))
    for numbers in ([3], [5, 39, 5], list(range(17, 33))):
        ours = made.many_integers(rows.pick(torch.tensor(numbers)), parts)
        alone = [integers(made, rows.x[number : number + 1], parts) for number in numbers]
        assert torch.equal(ours, torch.cat(alone))
    assert counted.count(40) == 1


def test_many_outputs_are_computed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: all at once, bit for bit."""
    made, _, _ = layer("int8", (4200, 64))
    x = torch.randn(20, 64)
    whole = integers(made, x, 2)
    monkeypatch.setattr(int8, "_SUMS", 3000)
    assert torch.equal(integers(made, x, 2), whole)


@pytest.mark.parametrize("prefill", ["int8", "int16"])
def test_a_machine_that_saturates_is_refused(
    tiny_llama: Path, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the error. Nothing wrong is ever computed."""
    monkeypatch.setattr("freetoken_runtime.runner.has_exact_sums", lambda: False)
    with pytest.raises(InvalidConfig, match="saturation"):
        Engine.load(tiny_llama, EngineConfig(quant="int8", prefill=prefill, threads=1))


@pytest.mark.parametrize(
    ("quant", "prefill"),
    [
        (None, "bfloat16"),
        (None, "int8"),
        ("int4", "int8"),
        ("int4", "int16"),
        ("int8", "bfloat16"),
        ("int8", "fp8"),
    ],
)
def test_what_cannot_be_is_refused(quant: str | None, prefill: str) -> None:
    """Oracle: the error names the field."""
    with pytest.raises(InvalidConfig, match="prefill"):
        EngineConfig(quant=quant, prefill=prefill)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtral")
    build_checkpoint(folder, "mixtral")
    return folder


@pytest.mark.parametrize(
    ("quant", "prefill", "form"),
    [
        ("int4", "bfloat16", "many_rounded"),
        ("int8", "int16", "many_integers"),
        ("int8", "int8", "many_integers"),
    ],
)
def test_a_lossy_engine_says_so_and_shares_no_state(
    mixture: Path, quant: Quant, prefill: Prefill, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the exact engine of the same weights: another digest, for a reason that is named, and
    a note. Calls are counted: only the lossy engine rounds, and only rows of the prompt."""
    rounded: list[int] = []
    kept = getattr(IntegerLinear, form)

    def counted(self: IntegerLinear, rows: torch.Tensor | PickedRows, *parts: int) -> torch.Tensor:
        some = isinstance(rows, PickedRows) and rows.numbers is not None
        if not some and self.inputs != INNER:  # else of an expert, which may have a single row
            rounded.append(len(rows))
        result: torch.Tensor = kept(self, rows, *parts)
        return result

    monkeypatch.setattr(IntegerLinear, form, counted)
    engines = {
        way: Engine.load(mixture, EngineConfig(quant=quant, prefill=way, threads=1))
        for way in EXACT_AND[prefill]
    }
    exact, lossy = engines.values()
    try:
        assert exact.fingerprint.digest != lossy.fingerprint.digest
        assert exact.fingerprint.difference(lossy.fingerprint) == "prefill"
        assert any(prefill in note for note in lossy.notes)
        assert not any("lossy" in note for note in exact.notes)
        for engine in engines.values():
            rounded.clear()
            made = list(engine.generate(list(range(3, 90)), SamplingParams(max_tokens=3)))
            assert len(made) == 3
            assert bool(rounded) is (engine is lossy) and 1 not in rounded
    finally:
        for engine in engines.values():
            engine.close()
