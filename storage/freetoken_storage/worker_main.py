# SPDX-License-Identifier: Apache-2.0
"""The child's side of `worker.py`: one command, its reports on standard output."""

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

from .audit import EVERYTHING, PageAudit
from .compaction import keep_all, keep_live_states, rewrite
from .disk_errors import translated
from .environment import DATA_FILE, LmdbEnvironment, create_file
from .errors import StorageError, StoreReadOnly
from .inspection import Inspection
from .locks import Gate, StoreLock
from .migrations import SESSIONS, STATES, stored_version
from .pages import read_header_of
from .worker import Report

FORMATS = {"sessions": SESSIONS, "states": STATES}
LOCK_TIMEOUT_S = 60.0
KEEP = {"sessions": keep_all, "states": keep_live_states}


def report(fields: Report) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()  # what was said must survive the crash that the next page may cause


def rewrite_command(source_folder: str, target_folder: str, kind: str) -> None:
    """Copy what is alive of one database into a new file. Nothing else may have it open."""
    create_file(Path(target_folder))
    source = LmdbEnvironment(Path(source_folder), Gate(), read_only=True)
    target = LmdbEnvironment(Path(target_folder), Gate(), read_only=False)
    rewrite(source, target, KEEP[kind])
    source.close()
    target.close()


def verify_command(store_folder: str, kind: str) -> None:
    """Read all of one database, pages first. The store may be open elsewhere."""
    folder = Path(store_folder)
    if not folder.is_dir():
        raise StoreReadOnly("there is no store to verify", value=store_folder)
    with closing(StoreLock(folder, read_only=True)) as lock:
        lock.begin(LOCK_TIMEOUT_S)
        lock.share()
        path = folder / kind / DATA_FILE
        environment = LmdbEnvironment(folder / kind, Gate(), read_only=True)
        with closing(environment):
            stored_version(environment, FORMATS[kind])
            while not _inspect(environment, path, kind):
                pass  # two commits of another process came between: take a newer view


def _inspect(environment: LmdbEnvironment, path: Path, kind: str) -> bool:
    """Inspect one view of the database; its pages stay as they are while the view is open. False
    if the header of the view had been replaced already."""
    with environment.read() as txn:
        header = read_header_of(path, txn.commit_number())
        if header is None:
            return False
        PageAudit(path, header, EVERYTHING).run()
        inspection = Inspection(txn, tell)
        if kind == "sessions":
            inspection.sessions()
        else:
            inspection.states()
        report({"counts": dict(inspection.counts)})
    return True


def tell(fault: str, session: str | None) -> None:
    report({"fault": fault, "session": session})


COMMANDS: Mapping[str, Callable[..., None]] = {
    "rewrite": rewrite_command,
    "verify": verify_command,
}


def main(arguments: list[str]) -> int:
    command, *rest = arguments
    try:
        with translated(Path(rest[0])):
            COMMANDS[command](*rest)
    except StorageError as error:
        report({"error": error.code, "message": str(error)})
        return 1
    return 0
