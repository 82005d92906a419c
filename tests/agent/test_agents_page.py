# SPDX-License-Identifier: Apache-2.0
"""docs/agents.md and the examples of agents: they run without a model, and are well typed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "agents.md"
EXAMPLES = [
    "approval_across_restart.py",
    "long_research.py",
    "read_files.py",
    "structured_answer.py",
]


def program() -> str:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 8
    return "\n".join(blocks)


def run(code: str, folder: Path) -> str:
    """What it prints; warnings are errors, torch is not there."""
    code = f"import sys\nsys.modules['torch'] = None\n{code}"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=folder,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_programs_of_the_page_run(tmp_path: Path) -> None:
    """The python blocks of the page, as one program."""
    run(program(), tmp_path)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_run_without_a_model(name: str, tmp_path: Path) -> None:
    """Each example, in an empty folder; its own asserts are the oracle."""
    assert run((ROOT / "examples" / name).read_text(), tmp_path)


@pytest.mark.slow
def test_the_page_is_well_typed(tmp_path: Path) -> None:
    """Oracle: mypy --strict, as a user would call it. The examples are checked with the code."""
    file = tmp_path / "page.py"
    file.write_text(program())
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
