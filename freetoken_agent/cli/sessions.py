# SPDX-License-Identifier: Apache-2.0
"""`sessions …`: look at stored conversations and edit them without loading weights.

A command's options are its parameters, so signatures here are longer than elsewhere.
"""

import asyncio
import datetime
import json as jsonlib
import sys
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from freetoken_agent.errors import InvalidEdit
from freetoken_storage import Database, verify_store

from .editor import edit_text
from .opening import Branch, ModelName, StorePath, opened_session, opened_store, pick, store_path
from .output import (
    EXIT_FAULT_FOUND,
    EXIT_INTERRUPTED,
    Json,
    command,
    emit,
    plain,
    progress,
)
from .states import check_lines, deep_check
from .views import edit_lines, path_table, tree_view

app = typer.Typer(no_args_is_help=True, help="List, show, edit, check and clean stored sessions.")

Name = Annotated[str, typer.Argument(help="The session.")]
Reference = Annotated[str, typer.Argument(metavar="SEGMENT", help="Its number in `show`, or id.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Price it, change nothing.")]


@app.command("list")
@command
def list_sessions(
    prefix: Annotated[str, typer.Argument(help="Only names that begin with this.")] = "",
    store: StorePath = None,
    json: Json = False,
) -> None:
    """The sessions of a store."""
    with opened_store(store) as opened:
        found = opened.list(prefix)
    table = Table("session", "branches", "model", "updated", box=None, pad_edge=False)
    for info in found:
        updated = datetime.datetime.fromtimestamp(info.updated_s).isoformat(" ", "minutes")
        texts = (info.name, ", ".join(info.branches), info.model, updated)
        table.add_row(*(Text(text) for text in texts))
    emit({"sessions": found}, table if found else "no sessions")


@app.command("show")
@command
def show_session(
    name: Name,
    branch: Branch = "main",
    tree: Annotated[bool, typer.Option("--tree", help="Every branch and earlier version.")] = False,
    frames: Annotated[bool, typer.Option("--frames", help="The template's ids too.")] = False,
    store: StorePath = None,
    json: Json = False,
) -> None:
    """The segments of a branch, or the whole tree."""
    with opened_session(name, store, branch, model=None) as session:
        if tree:
            whole = session.tree()
            emit(whole, tree_view(whole, name))
            return
        path = session.path(frames=frames)
        emit({"session": name, "branch": branch, "segments": path}, path_table(path))


@app.command("edit")
@command
def edit_session(
    name: Name,
    segment: Reference,
    text: Annotated[str | None, typer.Option("--text", help="`-` reads standard input.")] = None,
    arguments: Annotated[
        str | None, typer.Option("--arguments", help="Of a call, as JSON.")
    ] = None,
    dry_run: DryRun = False,
    branch: Branch = "main",
    model: ModelName = "smollm2",
    store: StorePath = None,
    json: Json = False,
) -> None:
    """Replace a segment's text, or a call's arguments. Without either, opens $EDITOR."""
    new_arguments = None if arguments is None else _json_object(arguments)
    content = sys.stdin.read() if text == "-" else text
    with opened_session(name, store, branch, model, weights=dry_run) as session:
        target = pick(session, segment)
        if content is None and new_arguments is None:
            content = edit_text(target.content)
            if content is None:
                emit({"changed": False}, "nothing to change")
                return
        edit = session.replace(target, content, arguments=new_arguments, dry_run=dry_run)
        emit(edit, edit_lines(edit, dry_run=dry_run))


@app.command("fork")
@command
def fork_session(
    name: Name,
    at: Annotated[str | None, typer.Option("--at", help="The last segment of the fork.")] = None,
    before: Annotated[str | None, typer.Option("--before", help="The first one left out.")] = None,
    new_branch: Annotated[str | None, typer.Option("--as", help="Its name.")] = None,
    branch: Branch = "main",
    model: ModelName = "smollm2",
    store: StorePath = None,
    json: Json = False,
) -> None:
    """A new branch at a segment; nothing is copied."""
    with opened_session(name, store, branch, model) as session:
        places = {key: pick(session, ref) for key, ref in _given(at=at, before=before).items()}
        fork = session.fork(**places, name=new_branch)
        emit({"session": name, "branch": fork.branch}, f"branch {fork.branch}")


@app.command("rewind")
@command
def rewind_session(
    name: Name,
    turns: Annotated[int | None, typer.Option("--turns", help="How many turns to drop.")] = None,
    to: Annotated[
        str | None, typer.Option("--to", help="The segment that becomes the last.")
    ] = None,
    before: Annotated[str | None, typer.Option("--before", help="The first one dropped.")] = None,
    dry_run: DryRun = False,
    branch: Branch = "main",
    model: ModelName = "smollm2",
    store: StorePath = None,
    json: Json = False,
) -> None:
    """Move a branch's head back. `undo` brings it forward again."""
    with opened_session(name, store, branch, model, weights=dry_run) as session:
        places: dict[str, Any] = {
            key: pick(session, ref) for key, ref in _given(to=to, before=before).items()
        }
        if turns is not None:
            places["turns"] = turns
        edit = session.rewind(**places, dry_run=dry_run)
        emit(edit, edit_lines(edit, dry_run=dry_run))


@app.command("undo")
@command
def undo_session(
    name: Name,
    steps: Annotated[int, typer.Option("-n", help="How many steps.")] = 1,
    redo: Annotated[bool, typer.Option("--redo", help="Forward instead of back.")] = False,
    dry_run: DryRun = False,
    branch: Branch = "main",
    model: ModelName = "smollm2",
    store: StorePath = None,
    json: Json = False,
) -> None:
    """Take back the last steps of a branch, or with --redo, bring them back."""
    with opened_session(name, store, branch, model, weights=dry_run) as session:
        move = session.redo if redo else session.undo
        edit = move(steps, dry_run=dry_run)
        emit(edit, edit_lines(edit, dry_run=dry_run))


@app.command("purge")
@command
def purge_session(
    name: Name,
    segment: Annotated[str, typer.Argument(metavar="ID", help="An id, as `show --tree` lists it.")],
    branch: Branch = "main",
    model: ModelName = "smollm2",
    store: StorePath = None,
    json: Json = False,
) -> None:
    """Remove a segment for good: its bytes leave the files. It must be on no branch."""
    with opened_session(name, store, branch, model, weights=True) as session:
        with progress("purging"):
            report = asyncio.run(session.purge(segment))
    lines = [f"removed {report.num_nodes} places, {report.num_states} states"]
    lines.append(f"{report.num_log_entries} undo steps are gone")
    if report.cleared_segments:
        cleared = ", ".join(report.cleared_segments)
        lines.append(f"later versions lost the meta data they had inherited: {cleared}")
    others = [*report.other_segments, *report.other_places, *report.other_sessions]
    if others:
        lines.append(f"the same text is still held by: {', '.join(others)}")
    if not report.scrubbed:
        lines.append("another process holds the store: the next exclusive opening scrubs the file")
    emit(report, "\n".join(lines))


@app.command("verify")
@command
def verify_sessions(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[SESSION]...", help="For --deep; default: all.")
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Compute the states of every head anew and compare.")
    ] = False,
    earlier: Annotated[
        bool, typer.Option("--all", help="With --deep: earlier versions, too.")
    ] = False,
    model: ModelName = "smollm2",
    store: StorePath = None,
    json: Json = False,
) -> None:
    """Read every page and value of a store, in a child process; exit with 3 if one is wrong."""
    if not deep and (names or earlier):
        raise typer.BadParameter("sessions and --all go with --deep")
    path = store_path(store)
    with progress("reading the store"):
        report = verify_store(path)
    lines = [f"{x.database}: {x.session or ''} {x.what}" for x in report.faults]
    lines.append(", ".join(f"{count:,} {name}" for name, count in report.counts.items()))
    whole, states = plain(report), None
    if deep and not any(fault.database == "sessions" for fault in report.faults):
        states = deep_check(path, model, names or [], earlier_versions=earlier)
        whole["states"] = plain(states)
        lines += check_lines(states)
    found = not report.ok or (states is not None and not states.ok)
    emit(whole, "\n".join([*lines, "faults found" if found else "no fault"]))
    if found:
        raise typer.Exit(EXIT_FAULT_FOUND)
    if states is not None and not states.complete:
        raise typer.Exit(EXIT_INTERRUPTED)


@app.command("gc")
@command
def collect_garbage(
    keep_states_mib: Annotated[
        int | None,
        typer.Option("--keep-states", min=0, help="MiB of states to keep, most recent first."),
    ] = None,
    store: StorePath = None,
    json: Json = False,
) -> None:
    """Give back what was deleted: rewrite the files. Dropped states cost time, never a word."""
    with Database(store_path(store)) as database, progress("rewriting the store"):
        before = database.sizes()
        dropped = 0
        if keep_states_mib is not None:
            dropped = database.snapshots.shrink(keep_states_mib << 20)
        compacted = database.compact()
        after = database.sizes()
    report = {"before": before, "after": after, "states_dropped": dropped, "compacted": compacted}
    lines = [f"{kind}: {before[kind] >> 10:,} KiB → {after[kind] >> 10:,} KiB" for kind in before]
    if not compacted:
        lines.append("another process holds the store: the next exclusive opening rewrites it")
    emit(report, "\n".join(lines))


def _given(**values: str | None) -> dict[str, str]:
    return {key: value for key, value in values.items() if value is not None}


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = jsonlib.loads(text)
    except ValueError as error:
        raise InvalidEdit(
            f"--arguments is not JSON: {error}", value=text, remedy='e.g. \'{"city": "Oslo"}\''
        ) from error
    if not isinstance(value, dict):
        raise InvalidEdit(
            "--arguments must be a JSON object", value=text, remedy='e.g. \'{"city": "Oslo"}\''
        )
    return value
