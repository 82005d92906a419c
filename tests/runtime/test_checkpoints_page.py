# SPDX-License-Identifier: Apache-2.0
"""docs/checkpoints.md names what the code reads."""

import re
from pathlib import Path

import pytest

from freetoken_runtime import gguf_blocks, gguf_config
from freetoken_runtime.quantised import compressed_tensors, config

PAGE = Path(__file__, "../../../docs/checkpoints.md").resolve()


@pytest.mark.parametrize(
    "name",
    [
        *(kind.name for kind in gguf_blocks.TYPES),
        *gguf_config._ARCHITECTURES,
        *config._SCHEMES,
        *compressed_tensors.FORMATS,
    ],
)
def test_the_page_names_every_format(name: str) -> None:
    """Oracle: the tables of the code."""
    words = re.split(r"[\s|,;:()`]+", PAGE.read_text(encoding="utf-8"))
    assert name in words
