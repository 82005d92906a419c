# SPDX-License-Identifier: Apache-2.0
"""A tiny random model for tests of every layer, as a folder."""

import json
import shutil
from pathlib import Path

import pytest

from freetoken_agent.testing import CHATML
from freetoken_agent.tokenizers.byte_tokenizer import CHATML_CONTROLS


def _byte_symbols() -> list[str]:
    """GPT-2's printable stand-in for each byte value."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return [chr(b) if b in shown else chr(next(hidden)) for b in range(256)]


def _write_byte_tokenizer(folder: Path) -> None:
    """Ids 0-255 are bytes and the ChatML controls follow: the ids of `ByteTokenizer`."""
    added = [
        {
            "id": 256 + index,
            "content": literal,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, literal in enumerate(CHATML_CONTROLS)
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    definition = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {symbol: byte for byte, symbol in enumerate(_byte_symbols())},
            "merges": [],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    config = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama over bytes, as a Hugging Face folder with a ChatML template."""
    from freetoken_runtime.testing import build_checkpoint  # torch, for those who ask

    folder = tmp_path_factory.mktemp("tiny")
    build_checkpoint(
        folder, "llama", vocab_size=256 + len(CHATML_CONTROLS), bos_token_id=256, eos_token_id=258
    )
    _write_byte_tokenizer(folder)
    return folder


@pytest.fixture
def tiny_copy(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may spoil."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "copy"))
