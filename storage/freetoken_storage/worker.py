# SPDX-License-Identifier: Apache-2.0
"""A child process for work that a damaged file could kill: reading every page of it.

`run_worker` hands back what the child reports, one JSON object a line. The caller decides which
locks are held meanwhile; `worker_main.py` is the child's side.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from .errors import StorageError, StoreDamaged

PACKAGE_PARENT = Path(__file__).resolve().parent.parent
# The child finds the package where this process found it, whatever its own search path is.
BOOT = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from freetoken_storage.worker_main import main; sys.exit(main(sys.argv[1:]))"
)
STDERR_CHARACTERS = 2000

Report = dict[str, Any]


class WorkerKilled(StoreDamaged):
    """A signal killed the child. `reports`: what it had said until then."""

    def __init__(self, command: str, signal_name: str, reports: list[Report]) -> None:
        super().__init__(
            f"reading the file killed the process that did it ({command})",
            value=signal_name,
            remedy="restore the store from a backup",
        )
        self.reports = reports


def run_worker(command: str, *arguments: str) -> list[Report]:
    """Run one command and return its reports. The child's own StorageError is raised here under
    its class; WorkerKilled if the file killed it."""
    child = subprocess.run(
        [sys.executable, "-c", BOOT, str(PACKAGE_PARENT), command, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    reports = [json.loads(line) for line in child.stdout.splitlines() if line.endswith("}")]
    if child.returncode == 0:
        return reports
    if child.returncode < 0:
        raise WorkerKilled(command, signal.Signals(-child.returncode).name, reports)
    if reports and "error" in reports[-1]:
        by_code = {error.code: error for error in StorageError.__subclasses__()}
        raise by_code.get(reports[-1]["error"], StorageError)(reports[-1]["message"])
    raise StorageError(
        f"the storage worker failed at {command!r}", value=child.stderr[-STDERR_CHARACTERS:]
    )
