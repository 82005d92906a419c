# SPDX-License-Identifier: Apache-2.0
"""docs/tutorial.md on the real model: its blocks are one program whose asserts are the oracle."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"


def program() -> str:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    return "\n".join(blocks)


def start(*arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.smollm2
def test_the_tutorial_runs(smollm2_path: Path, tmp_path: Path) -> None:
    """Oracle: the page's own asserts, in an empty folder; warnings are errors."""
    done = start("-W", "error", "-c", program(), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "reuse" in done.stdout and "tool_result" in done.stdout


@pytest.mark.slow
def test_the_tutorial_is_well_typed(tmp_path: Path) -> None:
    """Oracle: mypy --strict, as a user would call it."""
    file = tmp_path / "tutorial.py"
    file.write_text(program())
    done = start("-m", "mypy", "--strict", str(file), folder=PAGE.parents[1])
    assert done.returncode == 0, done.stdout
