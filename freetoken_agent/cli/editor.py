# SPDX-License-Identifier: Apache-2.0
"""The user's own editor on a text."""

import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from freetoken_agent.errors import InvalidEdit


def edit_text(text: str) -> str | None:
    """`text` after $VISUAL or $EDITOR had it; None if it came back unchanged. A final newline that
    the editor added is not part of the text."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "segment.txt"
        path.write_text(text, encoding="utf-8")
        try:
            done = subprocess.run([*shlex.split(editor), str(path)], check=False)
        except OSError as error:
            raise InvalidEdit(
                f"cannot start the editor: {error.strerror or error}",
                value=editor,
                remedy="set EDITOR, or give the new text on the command line",
            ) from error
        if done.returncode != 0:
            raise InvalidEdit(
                "the editor failed; nothing was changed", value=f"exit status {done.returncode}"
            )
        edited = path.read_text(encoding="utf-8")
    if edited.endswith("\n") and not text.endswith("\n"):
        edited = edited[:-1]
    return None if edited == text else edited
