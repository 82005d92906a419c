# SPDX-License-Identifier: Apache-2.0
"""docs/agents.md and the examples of agents: they run without a model, and are well typed."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = [
    "approval_across_restart.py",
    "long_research.py",
    "read_files.py",
    "structured_answer.py",
]


def test_the_programs_of_the_page_run(
    page_program: Callable[[str, int], str], run_program: Callable[..., str]
) -> None:
    """The python blocks of the page, as one program; warnings are errors, torch is not there."""
    run_program(page_program("agents.md", 8), "-W", "error")


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_run_without_a_model(name: str, run_program: Callable[..., str]) -> None:
    """Each example, in an empty folder; its own asserts are the oracle."""
    assert run_program((ROOT / "examples" / name).read_text(), "-W", "error")


@pytest.mark.slow
def test_the_page_is_well_typed(page_program: Callable[[str, int], str], tmp_path: Path) -> None:
    """Oracle: mypy --strict, as a user would call it. The examples are checked with the code."""
    file = tmp_path / "page.py"
    file.write_text(page_program("agents.md", 8))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
