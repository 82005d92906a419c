# SPDX-License-Identifier: Apache-2.0
"""Loading as a whole: forms, reports, sizes, fingerprints."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from freetoken_agent.catalog import ModelNotFound, resolve
from freetoken_runtime.errors import UnsupportedQuantization
from freetoken_runtime.testing import build_checkpoint
from freetoken_runtime.weights import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    build_checkpoint(folder, "llama", tie_word_embeddings=True)
    return folder


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("untied")
    build_checkpoint(folder, "qwen2", num_hidden_layers=2).bfloat16().save_pretrained(folder)
    return folder


LAYERS = ("q k v", "o", "gate up", "down")


@pytest.mark.parametrize(
    ("dtype", "quant", "layers", "head"),
    [
        ("float32", None, "float32", "float32"),
        ("bfloat16", None, "bfloat16", "bfloat16"),
        ("float32", "int8", "int8", "int8"),
        ("bfloat16", "int4", "int4 in groups of 32", "int8"),
    ],
)
def test_the_report_says_how_every_matrix_is_held(
    folder: Path, dtype: Any, quant: Any, layers: str, head: str
) -> None:
    """Oracle: the table of what was asked."""
    loaded = load(folder, dtype=dtype, quant=quant)
    assert loaded.formats == {
        "head and embedding": head,
        **{f"layers.*.{part}": layers for part in LAYERS},
    }
    assert any("head is int8" in note for note in loaded.notes) == (quant == "int4")


def test_an_untied_embedding_keeps_the_dtype_of_its_file(untied: Path) -> None:
    """Oracle: the file is bf16; a lookup gains nothing from a wider table."""
    loaded = load(untied, quant="int8")
    assert (loaded.formats["embedding"], loaded.formats["head"]) == ("bfloat16", "int8")
    table = load_file(untied / "model.safetensors")["model.embed_tokens.weight"]
    rows = loaded.decoder._parts.embedding(torch.tensor([3, 200]))
    assert torch.equal(rows, table[[3, 200]].float())


def test_sizes_add_up(folder: Path, untied: Path) -> None:
    """Oracle: four bytes per parameter in fp32, two per matrix element in bf16, norms and biases
    as they are."""
    spec = load(folder).spec
    parameters = sum(torch.Size(shape).numel() for shape in spec.parameter_shapes().values())
    assert load(folder).decoder.size_bytes == 4 * parameters
    shapes = load(untied).spec.parameter_shapes()
    matrices = sum(torch.Size(shape).numel() for shape in shapes.values() if len(shape) == 2)
    vectors = {name: shape[0] for name, shape in shapes.items() if len(shape) == 1}
    biases = sum(size for name, size in vectors.items() if name.endswith("bias"))
    norms = sum(vectors.values()) - biases
    assert load(untied, dtype="bfloat16").decoder.size_bytes == 2 * (matrices + biases) + 4 * norms


@pytest.mark.parametrize(("name", "value"), [("dtype", "float16"), ("quant", "int2")])
def test_other_forms_are_refused_by_name(folder: Path, name: str, value: str) -> None:
    """Oracle: the message names the option, the value and what is supported."""
    with pytest.raises(UnsupportedQuantization, match=f"{name}.*{value}.*(bfloat16|int4)") as error:
        load(folder, **{name: value})  # type: ignore[arg-type]
    assert error.value.code == "unsupported_quantization"


def test_c39_c40_fingerprints_differ_where_they_must(folder: Path, tmp_path: Path) -> None:
    """Oracle: the part that was changed, and no other."""
    base = load(folder).fingerprint_parts()
    assert load(folder).fingerprint_parts() == base

    def differing(path: Path, **forms: Any) -> set[str]:
        parts = load(path, **forms).fingerprint_parts()
        assert parts.keys() == base.keys()
        return {name for name in base if parts[name] != base[name]}

    assert differing(folder, quant="int8") == {"quantisation"}
    assert differing(folder, dtype="bfloat16") == {"quantisation"}
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.self_attn.v_proj.weight"][0, 0] += 1e-3
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert differing(tmp_path) == {"weights"}
    config["rope_parameters"]["rope_theta"] = 20_000.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert differing(tmp_path) == {"weights", "rope"}


@pytest.mark.smollm2
@pytest.mark.parametrize("quant", [None, "int8", "int4"])
def test_c54_loading_leaves_nothing_behind_but_the_weights(quant: str | None) -> None:
    """Oracle: RssAnon of a fresh process, freed pages returned, against the bytes the decoder
    reports, 10 % and 16 MiB for the allocator and the code that was imported on the way."""
    try:
        path = resolve("smollm2")
    except ModelNotFound:
        pytest.skip("SmolLM2 is not pulled: freetoken-agent pull smollm2")
    code = f"""
import torch
from freetoken_runtime.memory import return_freed_memory
from freetoken_runtime.weights import load

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("RssAnon"))

torch.set_num_threads(1)
before = anonymous()
loaded = load({str(path)!r}, quant={quant!r})
return_freed_memory()
print(anonymous() - before, loaded.decoder.size_bytes)
"""
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    grown, size = map(int, output.split())
    assert grown <= 1.1 * size + (16 << 20), (grown, size)
