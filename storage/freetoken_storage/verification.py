# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a store, as a report; the reading happens in a child process."""

import os
from dataclasses import dataclass, field

from .disk_errors import store_path
from .errors import StorageError
from .worker import Report, WorkerKilled, run_worker

KINDS = ("sessions", "states")
COUNTS = ("sessions", "branches", "nodes", "segments", "logs", "snapshots", "bytes")


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong. `database`: sessions or states; `session`: whose it is, if that
    could be told."""

    database: str
    what: str  # a sentence
    session: str | None = None


@dataclass(frozen=True)
class VerifyReport:
    """`ok` if nothing is wrong. The counts are of what could be read."""

    faults: tuple[Fault, ...] = ()  # what is wrong
    counts: dict[str, int] = field(default_factory=dict)  # by kind of record; `bytes` of them all

    @property
    def ok(self) -> bool:
        """No fault was found."""
        return not self.faults


def verify_store(path: str | os.PathLike[str]) -> VerifyReport:
    """Read every page and every value of the store at `path`. It may be open, here or elsewhere,
    and it may be one that cannot be opened any more. Changes nothing."""
    faults: list[Fault] = []
    counts = dict.fromkeys(COUNTS, 0)
    for kind in KINDS:
        try:
            reports = run_worker("verify", str(store_path(path)), kind)
        except WorkerKilled as killed:
            reports = [*killed.reports, {"fault": str(killed)}]
        except StorageError as error:
            reports = [{"fault": str(error)}]
        _collect(kind, reports, faults, counts)
    return VerifyReport(tuple(faults), counts)


def _collect(kind: str, reports: list[Report], faults: list[Fault], counts: dict[str, int]) -> None:
    for report in reports:
        if "fault" in report:
            faults.append(Fault(kind, report["fault"], report.get("session")))
        for name, count in report.get("counts", {}).items():
            counts[name] += count
