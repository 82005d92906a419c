# SPDX-License-Identifier: Apache-2.0
"""What the package offers, and what importing it costs."""

import json
import subprocess
import sys
from pathlib import Path

import freetoken_storage
from freetoken_storage import errors, testing

PACKAGE = Path(freetoken_storage.__file__).parent


def test_all() -> None:
    """Oracle: the list written here; a new public name is a decision."""
    assert sorted(freetoken_storage.__all__) == [
        "Database",
        "Fault",
        "MemoryDatabase",
        "VerifyReport",
        "verify_store",
    ]
    for module in (freetoken_storage, testing):
        assert all(hasattr(module, name) for name in module.__all__)
        assert len(set(module.__all__)) == len(module.__all__)


def test_importing_is_cheap() -> None:
    """Oracle: the modules and the time of a fresh interpreter: no torch, no numpy, below 0.5 s."""
    script = (
        "import time; start = time.perf_counter()\n"
        "import freetoken_storage, freetoken_storage.testing\n"
        "import json, sys\n"
        "print(json.dumps([time.perf_counter() - start, sorted(sys.modules)]))\n"
    )
    best_s = 60.0
    for _ in range(3):
        output = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout
        elapsed_s, modules = json.loads(output)
        best_s = min(best_s, elapsed_s)
        for heavy in ("torch", "numpy", "transformers", "pydantic", "hypothesis", "pytest"):
            assert heavy not in modules
    assert best_s < 0.5


def test_one_module_knows_lmdb() -> None:
    """Oracle: the source of every module of the package."""
    importers = {path.name for path in PACKAGE.rglob("*.py") if "import lmdb" in path.read_text()}
    assert importers == {"environment.py"}


def test_every_error_is_drawn_in_the_tree() -> None:
    """Oracle: the tree in the module's docstring."""
    drawn = errors.__doc__ or ""
    for error in errors.StorageError.__subclasses__():
        if error.__module__ == errors.__name__:
            assert error.__name__ in drawn, f"{error.__name__} is not in the tree"
            assert error.__doc__
