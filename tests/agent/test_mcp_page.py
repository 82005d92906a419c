# SPDX-License-Identifier: Apache-2.0
"""docs/mcp.md: its programs run, against a server process of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "mcp.md"


def test_the_programs_of_the_page_run(tmp_path: Path) -> None:
    """The python blocks of the page, as one program; torch is not there."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    program = "\n".join(["import sys", "sys.modules['torch'] = None", *blocks])
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
