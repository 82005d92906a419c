# SPDX-License-Identifier: Apache-2.0
"""The house: what imports what and how fast, what the wheel holds, how the code is cut."""

import ast
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import freetoken_agent
import freetoken_runtime
import freetoken_storage

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    ROOT / "freetoken_agent",
    ROOT / "runtime" / "freetoken_runtime",
    ROOT / "storage" / "freetoken_storage",
)
SOURCES = [path for package in PACKAGES for path in sorted(package.rglob("*.py"))]
OTHERS = [path for folder in ("tests", "examples") for path in (ROOT / folder).rglob("*.py")]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def run_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_sdk_and_the_storage_import_without_torch() -> None:
    """With torch made unimportable, the SDK, its testing module, its command line and every module
    of the storage import."""
    run_python(
        "import sys, pkgutil, importlib\n"
        "sys.modules['torch'] = None\n"
        "import freetoken_agent, freetoken_agent.testing, freetoken_agent.cli.main\n"
        "import freetoken_storage, freetoken_runtime\n"
        "for name in freetoken_agent.__all__:\n"
        "    getattr(freetoken_agent, name)\n"
        "for module in pkgutil.iter_modules(freetoken_storage.__path__, 'freetoken_storage.'):\n"
        "    importlib.import_module(module.name)\n"
    )


def test_importing_the_sdk_is_quick() -> None:
    """Below 0.5 s, the best of five fresh processes (the others were disturbed)."""
    code = (
        "import time; t = time.perf_counter(); import freetoken_agent; "
        "print(time.perf_counter() - t)"
    )
    assert min(float(run_python(code)) for _ in range(5)) < 0.5


@pytest.mark.parametrize("package", [freetoken_agent, freetoken_runtime, freetoken_storage])
def test_public_names_exist_and_are_explained(package: object) -> None:
    """`__all__` is sorted, without repeats, and each class or function has a docstring."""
    names = package.__all__  # type: ignore[attr-defined]
    assert sorted(set(names)) == sorted(names)
    for name in names:
        value = getattr(package, name)
        if callable(value):
            assert value.__doc__, name


def test_every_file_names_its_licence() -> None:
    """SPDX on the first line of each Python file."""
    for path in [*SOURCES, *OTHERS]:
        first = path.read_text().split("\n", 1)[0]
        assert first == "# SPDX-License-Identifier: Apache-2.0", relative(path)


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_files_and_functions_stay_short(path: Path) -> None:
    """A file has at most 400 lines, a function at most 60; no drawer is called utils."""
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    assert path.stem not in ("utils", "helpers", "common", "misc")
    for function in functions(text):
        length = (function.end_lineno or 0) - function.lineno + 1
        assert length <= 60, f"{function.name} has {length} lines"


def functions(text: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_the_wheel_holds_the_three_packages_and_nothing_else(tmp_path: Path) -> None:
    """Oracle: the files of the working tree."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    command += ["--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (n for n in names if n.endswith("entry_points.txt"))
        assert b"freetoken-agent = freetoken_agent.cli.main:main" in archive.read(entry_points)
    expected = {
        str(path.relative_to(package.parent))
        for package in PACKAGES
        for path in package.rglob("*.py")
    }
    expected |= {f"{package.name}/py.typed" for package in PACKAGES}
    held = {name for name in names if ".dist-info/" not in name}
    assert held == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)
