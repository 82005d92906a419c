# SPDX-License-Identifier: Apache-2.0
"""The text part of multimodal checkpoints: where it lies, what beside it is left out, and that
nothing else is."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from freetoken_runtime.errors import WeightsMismatch
from freetoken_runtime.family_configs import MULTIMODAL_CONFIGS
from freetoken_runtime.models.registry import FAMILIES
from freetoken_runtime.oracle import MODES, Oracle, in_passes, new_state
from freetoken_runtime.testing import build_checkpoint, build_multimodal
from freetoken_runtime.weights import load, open_source

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    build_checkpoint(folder, "qwen3")
    return folder


def rewritten(
    folder: Path, target: Path, rename: Callable[[str], str], **extra: torch.Tensor
) -> Path:
    """A copy whose tensors have other names, and more of them."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    save_file({rename(n): x for n, x in tensors.items()} | extra, target / "model.safetensors")
    return target


def inside_model(name: str) -> str:
    return re.sub(r"^model\.", "model.language_model.", name)


def inside_language_model(name: str) -> str:
    return f"language_model.{name}"


def body_only(name: str) -> str:
    return name if name.startswith("lm_head") else f"language_model.{name}"


@pytest.mark.parametrize("model_type", MULTIMODAL_CONFIGS)
def test_the_text_part_equals_transformers(model_type: str, tmp_path: Path) -> None:
    """Oracle: transformers' multimodal model given text alone; the tower is told to be left out."""
    if MULTIMODAL_CONFIGS[model_type][0] not in FAMILIES:
        pytest.skip("the family of the text part is not there")
    model = build_multimodal(tmp_path, model_type)
    loaded = load(tmp_path)
    oracle = Oracle(model, 211)
    assert MODES["mixed"](loaded.decoder, oracle) < 1e-4
    assert len(loaded.notes) == 2 and re.fullmatch(
        r"\d+ tensors were left out: vision", loaded.notes[0]
    )


@pytest.mark.parametrize("rename", [inside_model, inside_language_model, body_only])
def test_every_place_of_a_text_part_is_found(
    plain: Path, tmp_path: Path, rename: Callable[[str], str]
) -> None:
    """Oracle: the plain folder, bit for bit."""
    moved = rewritten(plain, tmp_path, rename)
    ids = list(range(3, 40))
    ours, theirs = (load(folder).decoder for folder in (moved, plain))
    logits = [in_passes(x, new_state(x), ids, [len(ids)]) for x in (ours, theirs)]
    assert torch.equal(*logits)


SKIPPED = {
    "visual.patch_embed.proj.weight": "vision",
    "model.visual.blocks.0.norm1.weight": "vision",
    "vision_tower.encoder.layers.0.mlp.fc1.weight": "vision",
    "model.vision_tower.post_layernorm.weight": "vision",
    "multi_modal_projector.mm_input_projection_weight": "vision",
    "model.multi_modal_projector.linear_1.weight": "vision",
    "audio_tower.conv1.weight": "audio",
    "model.audio_tower.conv1.weight": "audio",
    "mtp.layers.0.mlp.up_proj.weight": "multi-token prediction",
    "mtp.fc.weight": "multi-token prediction",
    "model.mtp_block.0.mlp.up_proj.weight": "multi-token prediction",
    "model.layers.4.self_attn.q_proj.weight": "layers from 4 on",
    "model.layers.61.eh_proj.weight": "layers from 4 on",
    "model.language_model.layers.4.mlp.up_proj.weight": "layers from 4 on",
}


@pytest.mark.parametrize("name", SKIPPED)
def test_what_has_a_name_is_left_out_and_told(plain: Path, tmp_path: Path, name: str) -> None:
    """Oracle: the note names how many tensors of what kind."""
    rename = inside_model if "language_model" in name else str
    rewritten(plain, tmp_path, rename, **{name: torch.zeros(3)})
    assert load(tmp_path).notes[0] == f"1 tensors were left out: {SKIPPED[name]}"


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.self_attn.extra_proj.weight",
        "model.layers.03.self_attn.sinks",
        "model.visually.weight",
        "visual",
        "model.mtproj.weight",
        "layers.9.mlp.up_proj.weight",
        "model.vision_adapter_of_some_kind.weight",
        "language_model.visual.weight",
    ],
)
def test_anything_else_unused_is_an_error(plain: Path, tmp_path: Path, name: str) -> None:
    """Oracle: the message names the tensor as it is stored."""
    rewritten(plain, tmp_path, str, **{name: torch.zeros(3)})
    with pytest.raises(WeightsMismatch, match=f"not used.*{re.escape(name)}"):
        open_source(tmp_path)


def test_m9_a_missing_tensor_is_named_as_it_would_be_stored(plain: Path, tmp_path: Path) -> None:
    """Oracle: the message has the prefix of the multimodal model."""
    rewritten(plain, tmp_path, inside_model)
    tensors = load_file(tmp_path / "model.safetensors")
    gone = "model.language_model.layers.2.mlp.up_proj.weight"
    del tensors[gone]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsMismatch, match=f"missing.*{re.escape(gone)}"):
        open_source(tmp_path)


def test_m10_a_copy_of_a_tied_head_may_lie_in_the_text_part(tmp_path: Path) -> None:
    """Oracle: the message for a copy that differs; an equal one loads."""
    source, moved = tmp_path / "source", tmp_path / "moved"
    build_checkpoint(source, "qwen3", tie_word_embeddings=True)
    embedding = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    head: dict[str, Any] = {"language_model.lm_head.weight": embedding.clone()}
    assert load(rewritten(source, moved, inside_language_model, **head)).spec.tied_head
    head = {name: copy + 1 for name, copy in head.items()}
    rewritten(source, moved, inside_language_model, **head)
    with pytest.raises(WeightsMismatch, match=r"language_model\.lm_head.*differs"):
        open_source(moved)


def test_a_wrapper_configuration_and_its_own_folder_give_one_model(
    plain: Path, tmp_path: Path
) -> None:
    """Oracle: the plain folder's spec and content under a wrapper's config.json."""
    rewritten(plain, tmp_path, inside_model)
    config = json.loads((plain / "config.json").read_text())
    wrapper = {"model_type": "some_vision_model", "text_config": config, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(wrapper))
    assert load(tmp_path).spec == load(plain).spec
