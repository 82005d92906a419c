# SPDX-License-Identifier: Apache-2.0
"""Mixtures made of a dense model's weights: the same function in different bytes."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import freetoken_runtime.layers.moe
from freetoken_agent.catalog import ModelNotFound, resolve
from freetoken_runtime.batch import Form
from freetoken_runtime.errors import UnsupportedConfig
from freetoken_runtime.kernels.integers import quantise_int4
from freetoken_runtime.layers.routing import Routes, route
from freetoken_runtime.models.decoder import Decoder, DecoderParts
from freetoken_runtime.oracle import distance, in_passes, new_state
from freetoken_runtime.specs.moe import MoeSpec
from freetoken_runtime.testing import batch_of, build_checkpoint
from freetoken_runtime.upcycling import Recipe, upcycle
from freetoken_runtime.weights import Builder, load, open_source

DENSE = {"intermediate_size": 192 + 20, "num_hidden_layers": 3}  # six whole groups and a rest
IDS = [int(x) for x in torch.randint(0, 200, (90,), generator=torch.manual_seed(0))]


def logits(decoder: Decoder, ids: list[int], form: Form = Form.MANY) -> torch.Tensor:
    state = new_state(decoder)
    hidden = decoder.forward(batch_of([(state, ids)], [form]), torch.arange(len(ids)))
    return decoder.logits(hidden, form)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    build_checkpoint(folder, "llama", **DENSE)
    return folder


@pytest.fixture(scope="module")
def mixture(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    upcycle(dense, folder)
    return folder


@pytest.mark.parametrize("tied", [False, True])
def test_the_mixture_equals_the_dense_model(tmp_path: Path, tied: bool) -> None:
    """Oracles: our dense decoder and transformers' Llama, within fp32; and transformers' Mixtral
    reads the folder to the same."""
    from transformers import AutoModelForCausalLM

    settings = {**DENSE, "tie_word_embeddings": tied}
    reference = build_checkpoint(tmp_path / "dense", "llama", **settings)
    spec = upcycle(tmp_path / "dense", tmp_path / "moe")
    assert spec.tied_head == tied
    found = logits(load(tmp_path / "moe").decoder, IDS)
    with torch.no_grad():
        expected = reference(torch.tensor([IDS])).logits[0]
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "moe").eval()
        mixtral = theirs(torch.tensor([IDS])).logits[0]
    assert distance(found, logits(load(tmp_path / "dense").decoder, IDS)) < 2e-6
    assert distance(found, expected) < 1e-5
    assert distance(mixtral, expected) < 1e-5


@pytest.mark.parametrize("form", [Form.FEW, Form.MANY])
@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_integer_forms_hold_the_same_values(
    dense: Path, mixture: Path, quant: Any, form: Form
) -> None:
    """Oracle: the dense model in the same form; sums of bf16 activations alone differ."""
    expected = logits(load(dense, quant=quant).decoder, IDS, form)
    found = logits(load(mixture, quant=quant).decoder, IDS, form)
    assert distance(found, expected) < (1e-2 if form is Form.FEW else 2e-6)


def test_no_two_experts_have_a_matrix_in_common(mixture: Path) -> None:
    """In no layer, and whole groups move as well as neurons within them. Oracle: the int4 groups of
    each row of `down`, sorted, are the same in all experts, in another order."""
    stored = tensors_of(mixture)
    for layer in range(3):
        at = f"model.layers.{layer}.block_sparse_moe.experts."
        for matrix in ("w1", "w2", "w3"):
            for a, b in combinations(range(8), 2):
                assert not torch.equal(
                    stored[f"{at}{a}.{matrix}.weight"], stored[f"{at}{b}.{matrix}.weight"]
                )
        downs = [stored[f"{at}{index}.w2.weight"] for index in range(8)]
        groups = [down[:, :192].reshape(len(down), 6, 32) for down in downs]
        kept = [group.sort(-1).values for group in groups]
        for index in range(1, 8):
            same = [
                [torch.equal(kept[index][:, i], kept[0][:, j]) for j in range(6)] for i in range(6)
            ]
            assert all(sum(row) == 1 for row in same)
            places = [row.index(True) for row in same]
            assert places != list(range(6))
            assert not any(
                torch.equal(groups[index][:, i], groups[0][:, j]) for i, j in enumerate(places)
            )
        sizes = {tuple(quantise_int4(down, 32).scales.sort(1).values[0].tolist()) for down in downs}
        assert len(sizes) == 1


@pytest.mark.parametrize("matrix", ["w1", "w2", "w3"])
def test_one_matrix_of_another_expert_shows(mixture: Path, tmp_path: Path, matrix: str) -> None:
    """What the mixture is for: one matrix of one expert is its neighbour's. Oracle: the mixture."""
    folder = Path(shutil.copytree(mixture, tmp_path / "mixed"))
    file = folder / "model-00002-of-00004.safetensors"
    tensors = load_file(file)
    at = "model.layers.1.block_sparse_moe.experts.{}." + matrix + ".weight"
    tensors[at.format(3)] = tensors[at.format(4)].clone()
    save_file(tensors, file)
    expected = logits(load(mixture).decoder, IDS)
    assert distance(logits(load(folder).decoder, IDS), expected) > 1e-2


def test_routers_take_every_expert(mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the 8 experts of each layer gets some of 90 rows; 22 on average."""
    counts = routed(load(mixture).decoder, IDS, monkeypatch)
    assert [len(count) for count in counts] == [8, 8, 8]
    assert all(sum(count) == 2 * len(IDS) and min(count) > 0 for count in counts), counts


def routed(decoder: Decoder, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Rows per expert in each layer."""
    counts = []

    def counting(logits: torch.Tensor, *rest: Any) -> Routes:
        routes = route(logits, *rest)
        counts.append(routes.chosen.flatten().bincount(minlength=logits.shape[1]).tolist())
        return routes

    monkeypatch.setattr(freetoken_runtime.layers.moe, "route", counting)
    logits(decoder, ids)
    return counts


def test_the_folder_is_its_recipe(dense: Path, mixture: Path, tmp_path: Path) -> None:
    """Oracle: the bytes of a second run; another seed gives other ones. Shards, an index that names
    each tensor's, and data that is aligned."""
    upcycle(dense, tmp_path / "again")
    for file in mixture.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name
    upcycle(dense, tmp_path / "other", Recipe(seed=1))
    one, other = tensors_of(mixture), tensors_of(tmp_path / "other")
    assert one.keys() == other.keys()
    differing = {name for name in one if not torch.equal(one[name], other[name])}
    assert differing == {name for name in one if "block_sparse_moe" in name}
    index = json.loads((mixture / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in one.values())
    for name, file in index["weight_map"].items():
        with safe_open(mixture / file, framework="pt") as handle:
            assert name in handle.keys()
    for file in mixture.glob("*.safetensors"):
        assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0


def test_progress_tells_the_bytes(dense: Path, tmp_path: Path) -> None:
    """It grows to the size of all tensors, which it tells from the beginning."""
    seen: list[tuple[int, int]] = []
    upcycle(dense, tmp_path, Recipe(experts=3, top_k=1), on_progress=lambda *at: seen.append(at))
    total = sum(tensor.nbytes for tensor in tensors_of(tmp_path).values())
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
        ("qwen3", {}),
        ("mixtral", {}),
        ("falcon_h1", {}),
    ],
)
def test_what_mixtral_cannot_express_is_refused(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    """Before anything is written."""
    build_checkpoint(tmp_path / "dense", family, **settings)
    with pytest.raises(UnsupportedConfig, match="mixture|Mixtral"):
        upcycle(tmp_path / "dense", tmp_path / "moe")
    assert not (tmp_path / "moe").exists()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    try:
        return resolve("smollm2")
    except ModelNotFound:
        pytest.skip("SmolLM2 is not pulled: freetoken-agent pull smollm2")


@pytest.mark.smollm2
def test_the_first_layers_of_smollm2(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the dense model cut after the same layers, in fp32; about the same in int4. Nearly
    all experts have rows."""
    depth = 3
    spec = upcycle(smollm2, tmp_path, Recipe(layers=depth))
    assert all(isinstance(layer.feed_forward, MoeSpec) for layer in spec.layers)
    source = open_source(smollm2)
    builder = Builder(source, "float32", None)
    cut = replace(source.spec, layers=source.spec.layers[:depth])
    embedding, head = builder.ends()
    first = tuple(builder.layer(index, layer) for index, layer in enumerate(cut.layers))
    dense = Decoder(cut, DecoderParts(embedding, first, builder.norm("norm"), head))
    ids = [int(x) for x in torch.randint(20, 49_000, (64,), generator=torch.manual_seed(0))]
    expected = logits(dense, ids)
    mixture = load(tmp_path).decoder
    assert distance(logits(mixture, ids), expected) < 1e-5
    counts = routed(mixture, ids, monkeypatch)
    assert all(sum(rows > 0 for rows in count) >= 7 for count in counts), counts
    int4 = logits(load(tmp_path, quant="int4").decoder, ids)
    assert distance(int4, expected) < 0.2


def _build_whole(source: Path, folder: Path) -> int:
    """Build in a process of its own -> the most anonymous memory above that after imports, seen
    between any two tensors."""
    code = (
        "import re, sys\n"
        "from pathlib import Path\n"
        "from freetoken_runtime.upcycling import upcycle\n"
        "def anonymous():\n"
        "    text = Path('/proc/self/status').read_text()\n"
        "    return 1024 * int(re.search(r'RssAnon:\\s+(\\d+)', text)[1])\n"
        "before, seen = anonymous(), [0]\n"
        "upcycle(*sys.argv[1:], on_progress=lambda *_: seen.append(anonymous()))\n"
        "sys.stdout.write(str(max(seen) - before))\n"
    )
    command = [sys.executable, "-c", code, str(source), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.smollm2
def test_the_whole_of_smollm2(smollm2: Path, tmp_path: Path) -> None:
    """Oracle: the dense model, all layers in fp32, in one pass and step by step. Building it takes
    256 MiB and 1.1 of the largest tensor, the embedding, above the imports."""
    peak = _build_whole(smollm2, tmp_path)
    assert peak <= (256 << 20) + 1.1 * 4 * 49152 * 576, peak
    ids = [int(x) for x in torch.randint(20, 49_000, (160,), generator=torch.manual_seed(0))]
    expected = logits(load(smollm2).decoder, ids)
    mixture = load(tmp_path).decoder
    assert distance(logits(mixture, ids), expected) < 1e-5
    steps = in_passes(mixture, new_state(mixture), ids, [100, 1])
    assert distance(steps, expected) < 1e-5
