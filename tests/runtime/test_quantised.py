# SPDX-License-Identifier: Apache-2.0
"""Quantised tensors of safetensors checkpoints, tensor by tensor: against transformers' own
dequantisation, by rows, as integers; and what is refused."""

from typing import Any

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from freetoken_runtime.errors import UnsupportedConfig, UnsupportedQuantization, WeightsMismatch
from freetoken_runtime.quantised import tensors
from freetoken_runtime.quantised.config import read_scheme
from freetoken_runtime.quantised.tensors import Entry, QuantisedTensor, Scheme

DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
}
State = dict[str, torch.Tensor]
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4"}


def entries_of(state: State) -> dict[str, Entry]:
    return {name: Entry(tuple(x.shape), DTYPES[x.dtype]) for name, x in state.items()}


def find(settings: dict[str, Any], state: State) -> dict[str, QuantisedTensor]:
    found = scheme_of(settings).find(entries_of(state), state.__getitem__)
    return dict(found.tensors)


def scheme_of(settings: dict[str, Any]) -> Scheme:
    scheme = read_scheme({"quantization_config": settings})
    assert scheme is not None
    return scheme


def compressed(form: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
    }


def random_bytes(*shape: int, below: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randint(0, below, shape, dtype=torch.uint8, generator=generator)


def random_float8(*shape: int) -> torch.Tensor:
    """Every pattern of bits but NaN."""
    stored = random_bytes(*shape)
    return torch.where((stored & 127) == 127, 0, stored).view(torch.float8_e4m3fn)


def random_scales(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.exp(torch.empty(shape).uniform_(-20, 20, generator=generator))


def packed_state(
    rows: int, columns: int, size: int, *, asymmetric: bool = False, bits: int = 4
) -> State:
    groups = -(-columns // size)

    def words(*shape: int) -> torch.Tensor:
        return random_bytes(*shape[:-1], 4 * shape[-1]).view(torch.int32)

    state = {
        "a.weight_packed": words(rows, -(-columns * bits // 32)),
        "a.weight_shape": torch.tensor([rows, columns]),
        "a.weight_scale": random_scales(rows, groups).bfloat16(),
    }
    if asymmetric:
        state["a.weight_zero_point"] = words(groups, -(-rows * bits // 32)).T.contiguous()
    return state


@pytest.mark.parametrize("shape", [(256, 384), (128, 128), (5, 256, 128)])
def test_fp8_blocks_equal_transformers(shape: tuple[int, ...]) -> None:
    """Oracle: transformers' Fp8Dequantize in fp32, the same bits, matrices by themselves and
    stacked."""
    grid = (*shape[:-2], shape[-2] // 128, shape[-1] // 128)
    state = {"a.weight": random_float8(*shape), "a.weight_scale_inv": random_scales(*grid)}
    ours = find(FP8, state)["a.weight"].dequantise(state.__getitem__)
    convert = Fp8Dequantize(None)._dequantize_one
    expected = convert(state["a.weight"], state["a.weight_scale_inv"], torch.float32)
    assert torch.equal(ours, expected.view(-1, shape[-1]))


def test_blocks_at_the_edges_may_be_smaller() -> None:
    """Oracle: each weight by its own block's scale."""
    state = {"a.weight": random_float8(300, 200), "a.weight_scale_inv": random_scales(3, 2)}
    ours = find(FP8, state)["a.weight"].dequantise(state.__getitem__)
    weight, scale = state["a.weight"].float(), state["a.weight_scale_inv"]
    for row, column in ((0, 0), (127, 127), (128, 128), (299, 199), (256, 127), (255, 128)):
        expected = weight[row, column] * scale[row // 128, column // 128]
        assert torch.equal(ours[row, column], expected)


@pytest.mark.parametrize("shape", [(4, 10, 2, 16), (1, 3, 1, 16)])
def test_mxfp4_equals_transformers(shape: tuple[int, ...]) -> None:
    """Oracle: transformers' convert_moe_packed_tensors in fp32, over every byte and exponents that
    fp32 holds exactly (it transposes what it returns)."""
    blocks = random_bytes(*shape)
    blocks.view(-1)[: min(256, blocks.numel())] = torch.arange(min(256, blocks.numel()))
    scales = random_bytes(*shape[:-1], below=253)
    scales.view(-1)[:2] = torch.tensor([0, 252], dtype=torch.uint8)
    state = {"a_blocks": blocks, "a_scales": scales}
    found = find(MXFP4, state)["a_blocks"]
    assert found.shape == (*shape[:2], 32 * shape[2])
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    assert torch.equal(found.dequantise(state.__getitem__).view(found.shape), expected)


def every_format() -> dict[str, tuple[dict[str, Any], State]]:
    scale = random_scales(2, 3)
    return {
        "fp8": (FP8, {"a.weight": random_float8(200, 300), "a.weight_scale_inv": scale}),
        "mxfp4": (
            MXFP4,
            {"a_blocks": random_bytes(9, 20, 3, 16), "a_scales": random_bytes(9, 20, 3, below=250)},
        ),
        "int8": (
            compressed("int-quantized", num_bits=8, strategy="channel"),
            {
                "a.weight": random_bytes(70, 33).view(torch.int8),
                "a.weight_scale": random_scales(70, 1),
            },
        ),
        "int4": (compressed(strategy="group", group_size=32), packed_state(70, 96, 32)),
        "int4 asymmetric": (
            compressed(strategy="group", group_size=20, symmetric=False),
            packed_state(70, 90, 20, asymmetric=True),
        ),
    }


@pytest.mark.parametrize("name", every_format())
def test_rows_are_those_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the same rows of the whole tensor, in any order, in slices or not."""
    settings, state = every_format()[name]
    (found,) = find(settings, state).values()
    whole = found.dequantise(state.__getitem__)
    some = torch.randperm(len(whole), generator=torch.manual_seed(0))[:50]
    monkeypatch.setattr(tensors, "_SLICE_ELEMENTS", 7 * whole.shape[1])
    for rows in (some, some.sort().values, torch.arange(13, 61)):
        assert torch.equal(found.dequantise(state.__getitem__, rows), whole[rows])


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize(("columns", "size"), [(96, 32), (128, 64), (160, 160)])
def test_integers_of_four_bits_are_kept(columns: int, size: int, asymmetric: bool) -> None:
    """Oracle: the dequantised weights: q · scale + minimum is the same number for every one."""
    strategy = "channel" if size == columns else "group"
    settings = compressed(
        strategy=strategy,
        group_size=None if strategy == "channel" else size,
        symmetric=not asymmetric,
    )
    state = packed_state(70, columns, size, asymmetric=asymmetric)
    (found,) = find(settings, state).values()
    rows = torch.tensor([69, 3, 4, 5])
    groups = found.groups(state.__getitem__, rows)
    assert groups is not None and groups.size == 32 and int(groups.values.max()) == 15
    weight = groups.values * groups.scales.repeat_interleave(32, 1)
    weight += groups.minimums.repeat_interleave(32, 1)
    assert torch.equal(weight, found.dequantise(state.__getitem__, rows))


@pytest.mark.parametrize(("columns", "size", "bits"), [(100, 20, 4), (100, 100, 4), (96, 32, 8)])
def test_what_has_other_groups_is_not_kept(columns: int, size: int, bits: int) -> None:
    """Oracle: None, so that it is quantised again."""
    settings = compressed(strategy="group", group_size=size, num_bits=bits)
    state = packed_state(70, columns, size, bits=bits)
    (found,) = find(settings, state).values()
    assert found.groups(state.__getitem__, torch.arange(70)) is None


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq.*fp8, compressed-tensors, mxfp4"),
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "fbgemm_fp8"}, "fbgemm_fp8"),
        ({"quant_algo": "NVFP4"}, "NVFP4"),
        ({"quant_method": ["fp8"]}, "fp8"),
        ("fp8", "fp8"),
        (compressed("marlin-24"), "marlin-24.*pack-quantized"),
        (compressed("nvfp4-pack-quantized"), "nvfp4-pack-quantized"),
        (compressed("sparse-24-bitmask"), "sparse-24-bitmask"),
        (compressed(num_bits=3), "int, 3 bits"),
        (compressed(type="float"), "float, 4 bits"),
        (compressed(strategy="tensor_group", group_size=16), "tensor_group"),
        ({**compressed(), "sparsity_config": {"format": "sparse-24"}}, "sparsity_config"),
        ({**compressed(), "transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        (compressed(dynamic=True), "dynamic"),
    ],
)
def test_other_methods_are_refused_by_name(settings: Any, named: str) -> None:
    """Oracle: the message names method or format, and where it matters what can be read; at the
    top of a configuration and in its text part."""
    for config in (
        {"quantization_config": settings},
        {"compression_config": settings},
        {"text_config": {"quantization_config": settings}},
    ):
        with pytest.raises(UnsupportedQuantization, match=named):
            read_scheme(config)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({**FP8, "fmt": "e5m2"}, "fmt.*e5m2"),
        ({**FP8, "weight_block_size": [128]}, "blocks"),
        ({**FP8, "weight_block_size": [0, 128]}, "blocks"),
        ({**FP8, "new_key": 1}, "new_key"),
        ({**MXFP4, "new_key": 1}, "new_key"),
        ({**compressed(), "new_key": 1}, "new_key"),
        (compressed(new_key=1), "new_key"),
        (compressed(num_bits=0), "num_bits"),
        (compressed(group_size=-3), "group_size"),
        ({**compressed(), "config_groups": ["W4A16"]}, "config_groups"),
        ({**compressed(), "config_groups": {"W4A16": ["Linear"]}}, "config_groups"),
    ],
)
def test_settings_that_may_change_weights_are_refused_by_name(
    settings: dict[str, Any], named: str
) -> None:
    """Oracle: the message names the setting."""
    with pytest.raises(UnsupportedConfig, match=named):
        read_scheme({"quantization_config": settings})


def hostile() -> dict[str, tuple[dict[str, Any], State, str]]:
    """Per fault: the configuration, the tensors, and what the message names."""
    packed = packed_state(70, 96, 32)
    by_group = compressed(strategy="group", group_size=32)
    blocks = {"a_blocks": random_bytes(2, 4, 3, 16), "a_scales": random_bytes(2, 4, 3)}
    weight = random_float8(256, 128)
    return {
        "no scale": (FP8, {"a.weight": weight}, "a.weight_scale_inv.*missing"),
        "scales of fewer blocks": (
            FP8,
            {"a.weight": weight, "a.weight_scale_inv": random_scales(1, 1)},
            r"a.weight_scale_inv.*\(1, 1\).*\(2, 1\)",
        ),
        "scales turned": (
            FP8,
            {"a.weight": random_float8(256, 384), "a.weight_scale_inv": random_scales(3, 2)},
            r"a.weight_scale_inv.*\(3, 2\).*\(2, 3\)",
        ),
        "a vector": (
            FP8,
            {"a.weight": weight[0], "a.weight_scale_inv": random_scales(1)},
            "a.weight.*a matrix",
        ),
        "blocks without scales": (MXFP4, {"a_blocks": blocks["a_blocks"]}, "a_scales.*missing"),
        "blocks of 8 bytes": (
            MXFP4,
            {**blocks, "a_blocks": random_bytes(2, 4, 3, 8)},
            r"a_blocks.*\(2, 4, 3, 8\)",
        ),
        "fewer scales than blocks": (
            MXFP4,
            {**blocks, "a_scales": random_bytes(2, 4, 2)},
            r"a_scales.*\(2, 4, 2",
        ),
        "no shape": (by_group, _without(packed, "a.weight_shape"), "a.weight_shape.*missing"),
        "three sizes": (
            by_group,
            {**packed, "a.weight_shape": torch.tensor([70, 96, 1])},
            "a.weight_shape.*two integers",
        ),
        "sizes that are no integers": (
            by_group,
            {**packed, "a.weight_shape": torch.tensor([70.0, torch.nan])},
            "a.weight_shape.*two integers",
        ),
        "a shape that lies": (
            by_group,
            {**packed, "a.weight_shape": torch.tensor([70, 1 << 40])},
            "a.weight_packed",
        ),
        "a negative shape": (
            by_group,
            {**packed, "a.weight_shape": torch.tensor([-70, 96])},
            "a.weight_packed",
        ),
        "packed too narrow": (
            by_group,
            {**packed, "a.weight_packed": packed["a.weight_packed"][:, 1:]},
            "a.weight_packed",
        ),
        "another group size": (
            compressed(strategy="group", group_size=16),
            packed,
            "a.weight_packed.*int4 group 16",
        ),
        "no zero points": (
            compressed(strategy="group", group_size=32, symmetric=False),
            packed,
            "a.weight_zero_point.*missing",
        ),
        "zero points too short": (
            compressed(strategy="group", group_size=32, symmetric=False),
            {**packed, "a.weight_zero_point": torch.zeros(8, 3, dtype=torch.int32)},
            r"a.weight_zero_point.*\(8, 3",
        ),
        "an order too short": (
            by_group,
            {**packed, "a.weight_g_idx": torch.zeros(95, dtype=torch.int32)},
            r"a.weight_g_idx.*95",
        ),
    }


def _without(state: State, name: str) -> State:
    return {key: value for key, value in state.items() if key != name}


@pytest.mark.parametrize("fault", hostile())
def test_tensors_that_do_not_fit_are_named(fault: str) -> None:
    """Oracle: the message names the tensor, and what it is compared with."""
    settings, state, named = hostile()[fault]
    with pytest.raises(WeightsMismatch, match=named):
        find(settings, state)


def test_scales_of_a_dtype_that_is_no_scale_are_refused_by_name() -> None:
    """Oracle: the message names tensor and dtype."""
    state = {"a.weight": random_float8(8, 8), "a.weight_scale_inv": torch.ones(1, 1).to(torch.int8)}
    with pytest.raises(UnsupportedQuantization, match=r"a\.weight_scale_inv.*I8.*F8_E8M0"):
        find(FP8, state)
