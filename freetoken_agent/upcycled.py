# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts built from a pulled .gguf, as a Hugging Face folder with its tokenizer.

Imports no torch before it builds.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

from .tokenizers.gguf_tokenizer import from_metadata, read_metadata
from .tokenizers.hf_tokenizer import definition_bytes

RECIPE = 1  # to be raised when other bytes follow from the same file
Progress = Callable[[int, int], None]  # bytes done, bytes in total


@dataclass(frozen=True)
class Built:
    """What a mixture is."""

    parameters: int
    context_tokens: int


def build_mixture(
    source: Path, folder: Path, *, layers: int | None = None, progress: Progress | None = None
) -> Built:
    """8 experts, 2 per token, each the dense model's own MLP in another order: it answers as the
    dense model does. `layers`: only the first ones, for tests. Errors are those of loading."""
    from freetoken_runtime.upcycling import Recipe, upcycle  # torch loads here

    folder.mkdir(parents=True)
    _write_tokenizer(source, folder)
    spec = upcycle(source, folder, Recipe(layers=layers), on_progress=progress)
    return Built(sum(map(prod, spec.parameter_shapes().values())), spec.context_limit)


def _write_tokenizer(source: Path, folder: Path) -> None:
    """The files from which a Hugging Face tokenizer reads what the .gguf says."""
    files = from_metadata(read_metadata(source))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **files.special_tokens}
    (folder / "tokenizer.json").write_bytes(definition_bytes(files.definition))
    _write_json(folder / "tokenizer_config.json", config)
    if files.stop_tokens:
        _write_json(folder / "generation_config.json", {"eos_token_id": list(files.stop_tokens)})
    if files.chat_template is not None:
        (folder / "chat_template.jinja").write_text(files.chat_template, encoding="utf-8")


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
