# SPDX-License-Identifier: Apache-2.0
"""docs/families.md is what docs/families_table.py would write now."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from freetoken_runtime.models.registry import FAMILIES
from freetoken_runtime.oracle import MODES

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def table() -> Iterator[ModuleType]:
    """docs/families_table.py as a module."""
    spec = importlib.util.spec_from_file_location("families_table", ROOT / "docs/families_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["families_table"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["families_table"]


def test_the_table_is_current(table: ModuleType) -> None:
    """Oracle: the specs of every family now, and tolerances; what was measured may differ in its
    last digit from machine to machine."""
    lines = (ROOT / "docs/families.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    header, _, *rows = cells
    assert header[5:] == list(MODES)
    assert [row[0] for row in rows] == list(FAMILIES), "run `make docs` again"
    for row in rows:
        assert row[:5] == table.described(table.read(row[0])), "run `make docs` again"
        assert all(0 <= float(distance) < 1e-4 for distance in row[5:]), row


def test_a_measured_row_is_written_whole(table: ModuleType) -> None:
    """Oracle: the page written from one family: every mode has a number below the tolerance."""
    row = table.measure("lfm2_moe")
    assert list(row.distances) == list(MODES)
    assert all(0 < distance < 1e-4 for distance in row.distances.values())
    page = table.markdown([row])
    (line,) = (line for line in page.splitlines() if line.startswith("| lfm2_moe"))
    assert line.count("|") == 5 + len(MODES) + 1
    assert "3 × short convolution, 1 × attention" in line
