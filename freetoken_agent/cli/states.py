# SPDX-License-Identifier: Apache-2.0
"""`sessions verify --deep`: the stored states of sessions, computed anew and compared."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from freetoken_storage import Database

from .output import progress

if TYPE_CHECKING:
    from freetoken_agent.proving.state_check import PathCheck, StateCheck
    from freetoken_runtime import Finding


def deep_check(
    store: Path, model: str, names: Sequence[str], *, earlier_versions: bool
) -> "StateCheck":
    """Check the states of these sessions, of all if none is named. Ctrl-C ends it between two
    chunks, with a report of what was found until then. The errors of loading, and
    SessionNotFound."""
    from freetoken_agent import LocalModel
    from freetoken_agent.proving.state_check import StoredPath, check_states, plan_check

    with Database(store) as database:
        names = names or [session.name for session in database.sessions.list()]
        with progress(f"loading {model}"):
            loading = LocalModel.load(model)
        with loading as loaded, progress("states") as bar, _interruption() as interrupted:
            loaded.attach(database.snapshots)
            plan = plan_check(database.sessions, loaded, names, earlier_versions=earlier_versions)

            def next_path(path: StoredPath) -> None:
                bar.label(f"{path.session} {path.branch or 'earlier version'}")

            return check_states(
                loaded, plan, on_path=next_path, on_progress=bar, cancelled=interrupted.is_set
            )


def check_lines(check: "StateCheck") -> list[str]:
    """The report as text."""
    lines = [f"{skipped.session}: not checked: {skipped.reason}" for skipped in check.skipped]
    for path in check.paths:
        result = path.result
        lines.append(
            f"{_name(path)}: {result.anchors:,} anchors, {result.blocks:,} blocks of "
            f"{result.forwarded_tokens:,} tokens compared by their {result.compared}"
        )
        lines += [f"{_name(path)}: {_finding(finding)}" for finding in result.findings]
        if result.findings:
            lines.append(f"{_name(path)}: {result.removed_records:,} states were removed")
    if not check.complete:
        lines.append("interrupted: the rest was not checked")
    return lines


def _name(path: "PathCheck") -> str:
    return f"{path.session} {path.branch or '(earlier version)'}"


def _finding(finding: "Finding") -> str:
    if finding.kind == "block":
        place = f"rows {finding.start:,} to {finding.position:,}"
    else:
        place = f"anchor at {finding.position:,}"
    if finding.cause != "differs":
        return f"{place}: {finding.cause}"
    layer = "" if finding.layer is None else f"layer {finding.layer} "
    return (
        f"{place}: {layer}{finding.buffer} off by {finding.difference:.1e}, limit {finding.limit}"
    )


@contextmanager
def _interruption() -> Iterator[Event]:
    """Set by Ctrl-C, instead of an exception; a second one is an exception again."""
    interrupted = Event()

    def note(number: int, frame: object) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
