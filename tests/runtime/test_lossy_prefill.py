# SPDX-License-Identifier: Apache-2.0
"""Passes over many rows that round activations: `EngineConfig.prefill`. Oracles: fp64 over values
rounded the same way; an engine that does not round."""

from pathlib import Path

import pytest
import torch

from freetoken_runtime import Engine, EngineConfig, SamplingParams
from freetoken_runtime.errors import InvalidConfig
from freetoken_runtime.kernels.int4_linear import cpu as int4
from freetoken_runtime.kernels.int4_linear import reference as int4_reference
from freetoken_runtime.kernels.int8_linear import cpu as int8
from freetoken_runtime.kernels.int8_linear import reference as int8_reference
from freetoken_runtime.kernels.integers import quantise_int4, quantise_int8
from freetoken_runtime.layers.linear import IntegerLinear
from freetoken_runtime.testing import build_checkpoint

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
@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_bfloat16_rounds_activations_and_sums(quant: str, shape: tuple[int, int]) -> None:
    """Oracle: fp64 with the activations rounded, and for int4 the weights; what is left is the
    rounding of the sum to bf16 before scale and bias."""
    made, weight, bias = layer(quant, shape)
    x = torch.randn(20, shape[1]).bfloat16()
    if quant == "int4":
        weight = weight.float().bfloat16().double()
    sums = x.double() @ weight.t()
    allowed = sums.abs() * 2**-8 + 1e-5 * sums.abs().max()
    assert bool(((made.many_rounded(x.float()) - (sums + bias)).abs() <= allowed).all())


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_rounds_each_row_by_its_own_largest(shape: tuple[int, int]) -> None:
    """Oracle: fp64 over activations that are whole 127th parts of their row's largest, and exact
    sums. One row is a thousand times larger than the others."""
    made, weight, bias = layer("int8", shape)
    x = torch.randn(20, shape[1])
    x[3] *= 1000.0
    unit = x.double().abs().amax(1, keepdim=True) / 127
    sums = (x.double() / unit).round() * unit @ weight.t()
    ours = made.many_int8(x).double() - bias
    scale = sums.abs().amax(1, keepdim=True)
    # Halves may be rounded the other way in fp32: one step of one activation.
    assert bool(((ours - sums).abs() <= 1e-5 * scale + unit * weight.abs().max()).all())
    assert float(((ours - sums).abs() / scale).median()) < 1e-6


def test_int8_keeps_what_is_no_number_to_its_row() -> None:
    """Oracle: the same rows without the others: NaN and infinity stay in theirs and are not made
    finite; a row of zeros gives the bias."""
    made, _, bias = layer("int8", (60, 84))
    x = torch.randn(20, 84)
    clean = made.many_int8(x)
    x[2, 5], x[7, 1], x[11] = torch.nan, torch.inf, 0.0
    ours = made.many_int8(x)
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


def test_a_machine_that_saturates_is_refused(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the error. Nothing wrong is ever computed."""
    monkeypatch.setattr("freetoken_runtime.runner.has_exact_sums", lambda: False)
    with pytest.raises(InvalidConfig, match="saturation"):
        Engine.load(tiny_llama, EngineConfig(quant="int8", prefill="int8", threads=1))


@pytest.mark.parametrize(
    ("quant", "prefill"), [(None, "bfloat16"), (None, "int8"), ("int4", "int8"), ("int8", "fp8")]
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


@pytest.mark.parametrize(("prefill", "form"), [("bfloat16", "many_rounded"), ("int8", "many_int8")])
def test_a_lossy_engine_says_so_and_shares_no_state(
    mixture: Path, prefill: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the exact engine of the same weights: another digest, for a reason that is named, and
    a note. Calls are counted: only the lossy engine rounds, and only rows of the prompt."""
    rounded: list[int] = []
    kept = getattr(IntegerLinear, form)

    def counted(self: IntegerLinear, x: torch.Tensor) -> torch.Tensor:
        rounded.append(len(x))
        result: torch.Tensor = kept(self, x)
        return result

    monkeypatch.setattr(IntegerLinear, form, counted)
    engines = {
        way: Engine.load(mixture, EngineConfig(quant="int8", prefill=way, threads=1))  # type: ignore[arg-type]
        for way in ("exact", prefill)
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
