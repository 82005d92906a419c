# SPDX-License-Identifier: Apache-2.0
"""Sessions on scripted models, in memory."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from freetoken_agent import Session, Store
from freetoken_agent.testing import ScriptedModel


@pytest.fixture
def memory_store() -> Iterator[Store]:
    with Store(":memory:") as store:
        yield store


@pytest.fixture
def begin(memory_store: Store) -> Callable[..., Session]:
    """`begin(*script, **model options)`: a session that waits for its first reply."""

    def begin(*script: object, **options: object) -> Session:
        model = ScriptedModel(script, **options)  # type: ignore[arg-type]
        session = memory_store.create("s", model, system="You are helpful.")
        session.append("user", "Hi")
        return session

    return begin


@pytest.fixture
def page_program() -> Callable[[str, int], str]:
    """`page_program(name, least)`: the python blocks of a page of docs/, at least so many, as one
    program."""

    def page_program(name: str, least: int) -> str:
        page = Path(__file__).resolve().parents[2] / "docs" / name
        blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
        assert len(blocks) >= least
        return "\n".join(blocks)

    return page_program


@pytest.fixture
def run_program(tmp_path: Path) -> Callable[..., str]:
    """`run_program(code, *flags)`: what it prints, in an empty folder and a process of its own that
    has no torch; it must end well."""

    def run_program(code: str, *flags: str) -> str:
        done = subprocess.run(
            [sys.executable, *flags, "-c", f"import sys\nsys.modules['torch'] = None\n{code}"],
            cwd=tmp_path,
            env=dict(os.environ),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run_program
