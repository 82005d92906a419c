# SPDX-License-Identifier: Apache-2.0
"""Block formats of GGUF files against the dequantisers of the gguf package."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

from freetoken_runtime import gguf_blocks
from freetoken_runtime.gguf_blocks import TYPES, dequantise, groups

# Where the fp16 numbers of a block lie.
SCALES = {
    Type.Q8_0: (0,),
    Type.Q6_K: (208,),
    Type.Q5_K: (0, 2),
    Type.Q5_1: (0, 2),
    Type.Q5_0: (0,),
    Type.Q4_K: (0, 2),
    Type.Q4_1: (0, 2),
    Type.Q4_0: (0,),
}
ROWS, BLOCKS = 13, 7


def random_rows(kind: Type, scales: str, seed: int = 0) -> np.ndarray:
    """Random bytes; fp16 scales of any finite value, zeros, subnormal or the largest ones."""
    generator = np.random.default_rng(seed)
    size = GGML_QUANT_SIZES[kind][1]
    blocks = generator.integers(0, 256, (ROWS * BLOCKS, size), dtype=np.uint8)
    for start in SCALES.get(kind, ()):
        bits = generator.integers(0, 1 << 16, len(blocks)).astype(np.uint16)
        if scales == "subnormal":
            bits = bits & np.uint16(0x83FF)
        elif scales == "largest":
            bits = (bits & np.uint16(0x80FF)) | np.uint16(0x7B00)
        bits[(bits & 0x7C00) == 0x7C00] = 0  # neither infinite nor NaN
        blocks[:, start : start + 2] = bits.view(np.uint8).reshape(-1, 2)
    if kind == Type.MXFP4:
        blocks[:, 0] %= 253  # 6 · 2^126 is too large for fp32
    return blocks.reshape(ROWS, -1)


@pytest.mark.parametrize("scales", ["any", "subnormal", "largest"])
@pytest.mark.parametrize("kind", [*SCALES, Type.MXFP4], ids=lambda kind: kind.name)
def test_dequantised_blocks_equal_the_gguf_package(kind: Type, scales: str) -> None:
    """Oracle: gguf.quants.dequantize, the same fp32 numbers, over random bytes."""
    stored = random_rows(kind, scales)
    expected = dequantize(stored, kind)
    assert np.isfinite(expected).all()
    assert np.array_equal(dequantise(kind, stored).numpy(), expected)


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16], ids=lambda kind: kind.name)
def test_floats_keep_their_bits(kind: Type) -> None:
    """Oracle: the stored bytes."""
    stored = np.random.default_rng(0).integers(0, 256, (5, 64), dtype=np.uint8)
    assert dequantise(kind, stored).view(torch.uint8).numpy().tobytes() == stored.tobytes()


@pytest.mark.parametrize("kind", [*SCALES, Type.MXFP4], ids=lambda kind: kind.name)
def test_slices_of_rows_join(kind: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the same rows at once."""
    stored = random_rows(kind, "any")
    whole = dequantise(kind, stored)
    monkeypatch.setattr(gguf_blocks, "_SLICE_ELEMENTS", 3 * whole.shape[1])
    assert torch.equal(dequantise(kind, stored), whole)


@pytest.mark.parametrize("scales", ["any", "subnormal", "largest"])
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_groups_are_the_integers_of_four_bit_formats(kind: Type, scales: str) -> None:
    """Oracle: gguf.quants.dequantize of the same bytes: q · scale + minimum in fp32 is the same
    number. Other formats have none."""
    stored = random_rows(kind, scales)
    found = groups(kind, stored)
    if kind not in (Type.Q4_0, Type.Q4_1, Type.Q4_K):
        assert found is None
        return
    assert found is not None and found.size == 32
    assert found.values.dtype is torch.uint8 and int(found.values.max()) == 15
    steps = found.values.float() * found.scales.repeat_interleave(32, 1)
    weights = steps + found.minimums.repeat_interleave(32, 1)
    assert np.array_equal(weights.numpy(), dequantize(stored, kind))


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00])
@pytest.mark.parametrize("kind", SCALES, ids=lambda kind: kind.name)
def test_scales_that_are_not_finite_show_in_the_weights(kind: Type, bits: int) -> None:
    """Oracle: no weight of the block is finite, so that the loader's check refuses it."""
    for start in SCALES[kind]:
        stored = random_rows(kind, "any").reshape(ROWS * BLOCKS, -1)
        stored[5, start : start + 2] = np.array([bits], np.uint16).view(np.uint8)
        if kind in (Type.Q4_K, Type.Q5_K):
            stored[5, 4:16] = 0xFF  # a scale of 0 would hide nothing: 0 · inf is NaN, too
        weights = dequantise(kind, stored.reshape(ROWS, -1)).view(ROWS * BLOCKS, -1)
        assert not torch.isfinite(weights[5]).any()


def test_an_exponent_of_255_is_not_a_number() -> None:
    """Oracle: the standard of microscaling formats; ggml itself would take it as 2^127."""
    stored = random_rows(Type.MXFP4, "any").reshape(ROWS * BLOCKS, -1)
    stored[5, 0] = 255
    weights = dequantise(Type.MXFP4, stored.reshape(ROWS, -1)).view(ROWS * BLOCKS, -1)
    assert weights[5].isnan().all() and torch.isfinite(weights[4]).all()
