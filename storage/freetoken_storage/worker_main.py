# SPDX-License-Identifier: Apache-2.0
"""The child's side of `worker.py`: one command, its reports on standard output."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from .compaction import keep_all, keep_live_states, rewrite
from .database import LmdbEnvironment, create_file
from .errors import StorageError
from .locks import Gate
from .worker import Report

KEEP = {"sessions": keep_all, "states": keep_live_states}


def report(fields: Report) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()  # what was said must survive the crash that the next page may cause


def rewrite_command(source_folder: str, target_folder: str, kind: str) -> None:
    """Copy what is alive of one database into a new file. Nothing else may have it open."""
    create_file(Path(target_folder))
    source = LmdbEnvironment(Path(source_folder), Gate(), read_only=True, sync_header=True)
    target = LmdbEnvironment(Path(target_folder), Gate(), read_only=False, sync_header=True)
    rewrite(source, target, KEEP[kind])
    source.close()
    target.close()


COMMANDS: Mapping[str, Callable[..., None]] = {"rewrite": rewrite_command}


def main(arguments: list[str]) -> int:
    command, *rest = arguments
    try:
        COMMANDS[command](*rest)
    except StorageError as error:
        report({"error": error.code, "message": str(error)})
        return 1
    return 0
