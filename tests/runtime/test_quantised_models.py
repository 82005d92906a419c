# SPDX-License-Identifier: Apache-2.0
"""Small models quantised in each format as its library stores it, against transformers holding
the weights that the published formulas give."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from freetoken_runtime.batch import Form
from freetoken_runtime.conversion import convert
from freetoken_runtime.errors import InvalidConfig, WeightsDamaged, WeightsMismatch
from freetoken_runtime.safetensors_weights import SafetensorsFolder
from freetoken_runtime.testing import ListState, batch_of, build_checkpoint
from freetoken_runtime.weights import load, open_source

State = dict[str, torch.Tensor]
# A matrix -> what is stored for it, by the ending of its name, and the matrix it stands for.
Quantiser = Callable[[torch.Tensor], tuple[State, torch.Tensor]]
MATRIX = re.compile(r"layers\.\d+\.(self_attn|mlp)\..*_proj\.weight$")
E4M3_MAX = 448.0


def padded_blocks(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """[N, K] -> [blocks down, rows, blocks across, columns], zeros at the edges."""
    (rows, columns), (height, width) = weight.shape, block
    whole = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
    return whole.view(whole.shape[0] // height, height, whole.shape[1] // width, width)


def float8(
    block: tuple[int, int], ending: str, scale_dtype: torch.dtype = torch.float32
) -> Quantiser:
    """q = w / scale in e4m3; 0 in `block` for all rows or columns."""

    def quantise(weight: torch.Tensor) -> tuple[State, torch.Tensor]:
        size = (block[0] or weight.shape[0], block[1] or weight.shape[1])
        blocks = padded_blocks(weight, size)
        scales = blocks.abs().amax((1, 3)) / E4M3_MAX  # [down, across]
        if scale_dtype is torch.float8_e8m0fnu:
            scales = scales.log2().ceil().exp2()
        scales = scales.to(scale_dtype)
        wide = scales.float()[:, None, :, None]
        q = (blocks / wide).to(torch.float8_e4m3fn)
        rows, columns = q.shape[0] * q.shape[1], q.shape[2] * q.shape[3]

        def cut(x: torch.Tensor) -> torch.Tensor:
            return x.reshape(rows, columns)[: weight.shape[0], : weight.shape[1]].contiguous()

        return {"": cut(q.float()).to(torch.float8_e4m3fn), ending: scales}, cut(q.float() * wide)

    return quantise


def one_scale(quantise: Quantiser, shape: tuple[int, ...]) -> Quantiser:
    """The scales in another shape, and one of activations beside them."""

    def reshaped(weight: torch.Tensor) -> tuple[State, torch.Tensor]:
        state, restored = quantise(weight)
        (name,) = (name for name in state if name)
        return {**state, name: state[name].reshape(shape), "input": torch.ones(())}, restored

    return reshaped


def int8(weight: torch.Tensor) -> tuple[State, torch.Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    q = (weight / scales.float()).round().clamp(-128, 127).to(torch.int8)
    return {"": q, "_scale": scales}, q.float() * scales.float()


def packed_int32(q: torch.Tensor, bits: int) -> torch.Tensor:
    """[N, K] -> int32 [N, ⌈K · bits / 32⌉], the first integer in the lowest bits, unsigned."""
    per = 32 // bits
    unsigned = torch.nn.functional.pad((q.long() + (1 << bits - 1)), (0, -q.shape[1] % per))
    shifts = bits * torch.arange(per)
    words = (unsigned.view(len(q), -1, per) << shifts).sum(-1)
    return (words - ((words >> 31) << 32)).to(torch.int32)  # as two's complement


def packed(bits: int, size: int, *, symmetric: bool = True, ordered: bool = False) -> Quantiser:
    """Groups of `size` along K (0: one); `ordered`: which columns form a group is random."""

    def quantise(weight: torch.Tensor) -> tuple[State, torch.Tensor]:
        rows, columns = weight.shape
        group = size or columns
        index = torch.arange(columns) // group
        if ordered:
            index = index[torch.randperm(columns, generator=torch.manual_seed(columns))]
        count = -(-columns // group)
        low = torch.stack([weight[:, index == g].amin(1) for g in range(count)], 1)
        high = torch.stack([weight[:, index == g].amax(1) for g in range(count)], 1)
        top = (1 << bits - 1) - 1
        if symmetric:
            scales, zeros = (torch.maximum(high, -low) / top).bfloat16(), torch.zeros(rows, count)
        else:
            scales = ((high - low) / (2 * top + 1)).bfloat16()
            zeros = (-top - 1 - low / scales.float()).round().clamp(-top - 1, top)
        wide, zero = scales.float()[:, index], zeros[:, index]
        q = (weight / wide + zero).round().clamp(-top - 1, top)
        state = {
            "_packed": packed_int32(q, bits),
            "_shape": torch.tensor([rows, columns]),
            "_scale": scales,
        }
        if not symmetric:
            state["_zero_point"] = packed_int32(zeros.T, bits).T.contiguous()
        if ordered:
            state["_g_idx"] = index.to(torch.int32)
        return state, (q - zero) * wide

    return quantise


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """The configuration as compressed-tensors writes it."""
    whole = {
        "num_bits": 8,
        "type": "float" if form == "float-quantized" else "int",
        "symmetric": True,
        "strategy": "channel",
        "group_size": None,
        "block_structure": None,
        "actorder": None,
        "dynamic": False,
        "observer": "minmax",
        "observer_kwargs": {},
        **weights,
    }
    group = {
        "targets": ["Linear"],
        "weights": whole,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
    }


def fp8_config(block: list[int] | None, scheme: str = "dynamic") -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": scheme,
        "weight_block_size": block,
        "modules_to_not_convert": ["lm_head"],
    }


E8M0 = torch.float8_e8m0fnu
FORMATS: dict[str, tuple[Quantiser, dict[str, Any]]] = {
    "fp8 blocks": (float8((32, 48), "_scale_inv"), fp8_config([32, 48])),
    "fp8 blocks of 128": (float8((128, 128), "_scale_inv"), fp8_config([128, 128])),
    "fp8 e8m0": (float8((16, 20), "_scale_inv", E8M0), fp8_config([16, 20])),
    "fp8 per matrix": (one_scale(float8((0, 0), "_scale"), ()), fp8_config(None, "static")),
    "float channel": (
        float8((1, 0), "_scale", torch.bfloat16),
        compressed("float-quantized"),
    ),
    "float matrix": (
        one_scale(float8((0, 0), "_scale"), (1,)),
        compressed("float-quantized", strategy="tensor"),
    ),
    "float block": (
        float8((32, 48), "_scale"),
        compressed("float-quantized", strategy="block", block_structure=[32, 48]),
    ),
    "float group": (
        float8((1, 12), "_scale"),
        compressed("naive-quantized", type="float", strategy="group", group_size=12),
    ),
    "int8 channel": (int8, compressed("int-quantized")),
    "packed int8": (packed(8, 0), compressed("pack-quantized")),
    "packed int8 groups": (
        packed(8, 12, symmetric=False),
        compressed("pack-quantized", strategy="group", group_size=12, symmetric=False),
    ),
    "packed int4": (packed(4, 0), compressed("pack-quantized", num_bits=4)),
    "packed int4 groups": (
        packed(4, 12),
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=12),
    ),
    "packed int4 asymmetric": (
        packed(4, 12, symmetric=False),
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=12, symmetric=False),
    ),
    "packed int4 ordered": (
        packed(4, 12, symmetric=False, ordered=True),
        compressed(
            "pack-quantized",
            num_bits=4,
            strategy="group",
            group_size=12,
            symmetric=False,
            actorder="group",
        ),
    ),
}


def requantise(
    folder: Path,
    quantise: Quantiser,
    settings: Mapping[str, Any],
    chosen_names: re.Pattern[str] = MATRIX,
) -> Any:
    """Quantise a saved model's matrices in place. Returns transformers' model of what they stand
    for."""
    from transformers import AutoModelForCausalLM

    state = load_file(folder / "model.safetensors")
    plain, stored = dict(state), dict(state)
    chosen = [name for name in state if chosen_names.search(name)]
    assert chosen
    for name in chosen:
        parts, plain[name] = quantise(stored.pop(name))
        for ending, tensor in parts.items():
            at = name.replace("weight", "input_scale") if ending == "input" else name + ending
            stored[at] = tensor
    reference = folder.with_name("plain")
    shutil.copytree(folder, reference)
    save_file(plain, reference / "model.safetensors", {"format": "pt"})
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    model = AutoModelForCausalLM.from_pretrained(
        reference, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def logits_of(path: Path, ids: list[int], **forms: Any) -> torch.Tensor:
    loaded = load(path, **forms)
    state = ListState(loaded.spec.num_layers)
    hidden = loaded.decoder.forward(batch_of([(state, ids)], [Form.MANY]), torch.arange(len(ids)))
    return loaded.decoder.logits(hidden, Form.MANY)


def difference(folder: Path, model: Any, **forms: Any) -> float:
    """Largest |Δ logit| over 50 tokens, by the range of the logits."""
    ids = [int(x) for x in torch.randint(3, 211, (50,), generator=torch.manual_seed(0))]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    delta = (logits_of(folder, ids, **forms) - expected).abs().max()
    return float(delta / (expected.max() - expected.min()))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_logits_equal_transformers(family: str, name: str, tmp_path: Path) -> None:
    """Oracle: transformers with w = (q - zero) · scale as published, 1e-4 of the range, on
    dimensions that blocks, groups and int32 do not divide."""
    build_checkpoint(tmp_path / "hf", family, num_hidden_layers=2)
    quantise, settings = FORMATS[name]
    model = requantise(tmp_path / "hf", quantise, settings)
    assert difference(tmp_path / "hf", model) < 1e-4


def mxfp4(weight: torch.Tensor) -> tuple[State, torch.Tensor]:
    """[E, in, out] -> blocks and scales along the inputs of [E, out, in]; the largest magnitude of
    a block becomes 4 to 6, as OpenAI's converter does."""
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    count, inputs, outputs = weight.shape
    rows = weight.transpose(1, 2).reshape(count, outputs, inputs // 32, 32)
    exponents = rows.abs().amax(-1, keepdim=True).log2().floor() - 2
    steps = rows / exponents.exp2()
    codes = (steps.abs()[..., None] - levels).abs().argmin(-1) + 8 * (steps < 0)
    values = torch.cat((levels, -levels))[codes] * exponents.exp2()
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    state = {
        "_blocks": blocks.to(torch.uint8),
        "_scales": (exponents[..., 0] + 127).to(torch.uint8),
    }
    return state, values.flatten(2).transpose(1, 2).contiguous()


@pytest.mark.parametrize("dimensions", [(64, 96), (96, 32)])
def test_mxfp4_experts_equal_transformers(dimensions: tuple[int, int], tmp_path: Path) -> None:
    """Oracle: transformers' gpt_oss with the same numbers, 1e-4 of the range."""
    hidden, inner = dimensions
    settings = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 2}
    build_checkpoint(tmp_path / "hf", "gpt_oss", **settings)
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    experts = re.compile(r"mlp\.experts\.(gate_up_proj|down_proj)$")
    model = requantise(tmp_path / "hf", mxfp4, config, experts)
    assert difference(tmp_path / "hf", model) < 1e-4


def quantised_mixture(name: str, folder: Path) -> None:
    """A mixture whose matrices, experts included, are quantised; "mxfp4" or one of FORMATS."""
    if name == "mxfp4":
        build_checkpoint(
            folder, "gpt_oss", hidden_size=64, intermediate_size=96, num_hidden_layers=2
        )
        experts = re.compile(r"mlp\.experts\.(gate_up_proj|down_proj)$")
        requantise(folder, mxfp4, {"quant_method": "mxfp4"}, experts)
    else:
        build_checkpoint(folder, "qwen3_moe", num_hidden_layers=2)
        requantise(folder, *FORMATS[name])


MIXTURES = ("mxfp4", *FORMATS)


@pytest.mark.parametrize("name", MIXTURES)
def test_converting_keeps_what_the_quantised_file_stands_for(name: str, tmp_path: Path) -> None:
    """Oracle: every parameter as the source reads it, bit by bit."""
    quantised_mixture(name, tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "ftw")
    expected, found = open_source(tmp_path / "hf"), open_source(tmp_path / "ftw")
    for parameter in expected.spec.parameter_shapes():
        assert torch.equal(found.read(parameter), expected.read(parameter)), parameter


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_of_quantised_files_are_not_served_from_disk(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused with what to do, before any weight is read; what was converted is served. Oracle: the
    same logits as with all experts in memory."""
    quantised_mixture(name, tmp_path / "hf")

    def no_read(*_: object) -> torch.Tensor:
        raise AssertionError("a weight was read")

    with monkeypatch.context() as patch:
        patch.setattr(SafetensorsFolder, "_read", no_read)
        patch.setattr(SafetensorsFolder, "_read_slices", no_read)
        with pytest.raises(InvalidConfig, match=r"cannot be served.*remedy: convert the model"):
            load(tmp_path / "hf", offload="disk")
    convert(tmp_path / "hf", tmp_path / "ftw")
    ids = list(range(3, 30))
    served = logits_of(tmp_path / "ftw", ids, offload="disk")
    assert torch.equal(served, logits_of(tmp_path / "hf", ids))


def test_integers_of_four_bits_are_kept_and_others_quantised_again(tmp_path: Path) -> None:
    """Oracle: transformers with the dequantised weights; what is kept is exact but for bf16
    activations and the int8 head; the notes tell what was lost."""
    dimensions = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    build_checkpoint(tmp_path / "hf", "llama", **dimensions)
    settings = compressed("pack-quantized", num_bits=4, strategy="group", group_size=32)
    model = requantise(tmp_path / "hf", packed(4, 32), settings)
    assert difference(tmp_path / "hf", model, quant="int4") < 2e-2
    notes = load(tmp_path / "hf", quant="int4").notes
    assert any(
        x.startswith("int4 in groups of 32 became int4 in groups of 32: 0.00%") for x in notes
    )
    (note,) = (x for x in load(tmp_path / "hf", quant="int8").notes if "became int8" in x)
    lost = re.fullmatch(r"int4 in groups of 32 became int8: (\d\.\d\d)% of .*, at most .*", note)
    assert lost is not None and 0.1 < float(lost[1]) < 1.5
    assert not [x for x in load(tmp_path / "hf").notes if "became" in x]


FAULTS: dict[str, tuple[str, str, Callable[[torch.Tensor], Any]]] = {
    # format, stored tensor, what is done to it
    "scale": ("fp8 blocks", "up_proj.weight_scale_inv", lambda x: x.view(-1).fill_(torch.inf)),
    "number": (
        "fp8 blocks",
        "up_proj.weight",
        lambda x: x.view(torch.uint8)[3, 5:6].fill_(0x7F),
    ),
    "e8m0": (
        "fp8 e8m0",
        "up_proj.weight_scale_inv",
        lambda x: x.view(torch.uint8).view(-1)[:1].fill_(255),
    ),
    "packed": ("packed int4 asymmetric", "up_proj.weight_scale", lambda x: x.fill_(torch.nan)),
}


@pytest.mark.parametrize("quant", [None, "int8", "int4"])
@pytest.mark.parametrize("fault", FAULTS)
def test_numbers_that_are_not_finite_are_refused(fault: str, quant: Any, tmp_path: Path) -> None:
    """Oracle: the message names the parameter, in whatever form it was to be held."""
    name, tensor, damage = FAULTS[fault]
    build_checkpoint(tmp_path / "hf", "llama", num_hidden_layers=2)
    requantise(tmp_path / "hf", *FORMATS[name])
    state = load_file(tmp_path / "hf/model.safetensors")
    damage(state[f"model.layers.1.mlp.{tensor}"])
    save_file(state, tmp_path / "hf/model.safetensors", {"format": "pt"})
    with pytest.raises(WeightsDamaged, match=r"layers\.1\.up.*not finite"):
        load(tmp_path / "hf", quant=quant)


def test_tensors_without_a_meaning_are_refused(tmp_path: Path) -> None:
    """Oracle: the message names the tensor; truncated files are those of any checkpoint."""
    build_checkpoint(tmp_path / "hf", "llama", num_hidden_layers=1)
    requantise(tmp_path / "hf", *FORMATS["int8 channel"])
    file = tmp_path / "hf/model.safetensors"
    state = load_file(file)
    extra = {"model.layers.0.mlp.up_proj.weight_zero_point": torch.zeros(84, 1, dtype=torch.int8)}
    save_file({**state, **extra}, file, {"format": "pt"})
    with pytest.raises(WeightsMismatch, match=r"not used.*up_proj\.weight_zero_point"):
        load(tmp_path / "hf")
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(WeightsDamaged, match=r"model\.safetensors"):
        load(tmp_path / "hf")


def test_what_authors_quantise_besides_is_told(tmp_path: Path) -> None:
    """Oracle: the notes: scales of activations and of the cache are left out, by number."""
    build_checkpoint(tmp_path / "hf", "llama", num_hidden_layers=1)
    requantise(tmp_path / "hf", *FORMATS["fp8 per matrix"])
    notes = load(tmp_path / "hf").notes
    assert "activations are not quantised to float8, as its authors do" in notes
    assert "7 scales of activations were left out" in notes
