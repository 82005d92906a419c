# SPDX-License-Identifier: Apache-2.0
"""Every program that the documents show and every example: it runs, and is typed as users type.

The python blocks of a page are one program, in their order. Programs that load a model run on
SmolLM2; all others in a process that has no torch.
"""

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from freetoken_agent.catalog import ModelNotFound, resolve

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WITHOUT_TORCH = """\
import runpy, sys
sys.modules["torch"] = None
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def program_of(page: Path) -> str:
    return "\n".join(FENCE.findall(page.read_text(encoding="utf-8")))


SHOWN = {page: program_of(page) for page in PAGES if FENCE.search(page.read_text(encoding="utf-8"))}
PAGES_TO_RUN = {page: shown for page, shown in SHOWN.items() if page != ROOT / "README.md"}
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def loads_a_model(program: str) -> bool:
    return bool(re.search(r"^[^#\n]*\b(LocalModel|Engine)\.load\(", program, re.MULTILINE))


def run(file: Path, folder: Path) -> None:
    """In an empty folder; warnings are errors."""
    if loads_a_model(file.read_text(encoding="utf-8")):
        try:
            resolve("smollm2")
        except ModelNotFound:
            pytest.skip("SmolLM2 is not pulled: freetoken-agent pull smollm2")
        command = [str(file)]
    else:
        command = ["-c", WITHOUT_TORCH, str(file)]
    done = subprocess.run(
        [sys.executable, "-W", "error", *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def marked(programs: Mapping[Path, str]) -> list[object]:
    """Those that load a model can be left out by their mark."""
    return [
        pytest.param(
            path, id=name(path), marks=[pytest.mark.smollm2] if loads_a_model(program) else []
        )
        for path, program in programs.items()
    ]


@pytest.mark.parametrize("page", marked(PAGES_TO_RUN))
def test_programs_in_documents_run(page: Path, tmp_path: Path) -> None:
    """Oracle: the program's own asserts. (The README shows an example, as another test says.)"""
    file = tmp_path / "shown" / "program.py"
    file.parent.mkdir()
    file.write_text(SHOWN[page], encoding="utf-8")
    folder = tmp_path / "folder"
    folder.mkdir()
    run(file, folder)


@pytest.mark.parametrize("example", marked({path: path.read_text() for path in EXAMPLES}))
def test_examples_run(example: Path, tmp_path: Path) -> None:
    """Oracle: the example's own asserts."""
    run(example, tmp_path)


def test_programs_are_well_typed(tmp_path: Path) -> None:
    """Oracle: mypy --strict on all of them, as a user would call it: no settings of ours."""
    for page, program in SHOWN.items():
        file = tmp_path / f"shown_{re.sub(r'[^a-z]', '_', name(page).lower())}.py"
        file.write_text(program, encoding="utf-8")
    for example in EXAMPLES:
        (tmp_path / example.name).write_text(example.read_text(encoding="utf-8"), encoding="utf-8")
    assert len(list(tmp_path.glob("*.py"))) == len(SHOWN) + len(EXAMPLES)
    cache = ROOT / ".mypy_cache" / "programs"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(cache), "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_every_block_of_python_is_a_program() -> None:
    """A block that is none says so by its language: `py` is a signature, `text` a picture."""
    fences = {
        (language, name(page))
        for page in PAGES
        for language in re.findall(r"^ *(?:```|~~~) *(\S+)", page.read_text(), re.M)
    }
    known = {"python", "text", "bash"}
    assert {one for one in fences if one[0] not in known} == {
        ("py", name(page)) for page in (ROOT / "docs" / "reference").glob("*.md")
    } - {("py", "docs/reference/README.md")}
