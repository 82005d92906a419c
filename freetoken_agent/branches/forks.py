# SPDX-License-Identifier: Apache-2.0
"""New branches at existing nodes: nothing is copied."""

from freetoken_storage.errors import BranchExists, StorageError
from freetoken_storage.records import ROOT, BranchRecord, Sessions

from .branch import Branch
from .codec import BranchBody, pack_branch
from .handle import Context
from .path import Path


def fork(context: Context, path: Path, name: str | None) -> Branch:
    """A branch that stands where `path` ends. Only where a cut inside the preamble laid the rest
    of it out again are there places to store; then the new branch starts with them, without an
    undo step. BranchExists, InvalidName."""
    stored = next((i for i, p in enumerate(path.places) if p.node is None), len(path.places))
    node = path.places[stored - 1].node if stored else ROOT
    assert node is not None, "places before the first new one are stored"
    body = pack_branch(BranchBody(path.tail if stored == len(path.places) else "closed"))
    sessions = context.sessions
    if name is None:
        record = create_named(sessions, context.name, "fork", head=node, body=body)
    else:
        record = sessions.create_branch(context.name, name, head=node, body=body)
    known = path if stored == len(path.places) else Path(path.places[:stored])
    branch = Branch(sessions, context.name, record, context.bodies, known)
    if known is not path:
        try:
            branch.commit(path, "fork", logged=False)
        except StorageError:
            sessions.delete_branch(context.name, record.name)
            raise
    return branch


def create_named(
    sessions: Sessions, session: str, prefix: str, *, head: int, body: bytes
) -> BranchRecord:
    """A branch named `<prefix>-<n>` with the first free number. Other processes may take a number
    meanwhile; then the next one is tried."""
    taken = {record.name for record in sessions.branches(session)}
    number = 1
    while True:
        name = f"{prefix}-{number}"
        number += 1
        if name in taken:
            continue
        try:
            return sessions.create_branch(session, name, head=head, body=body)
        except BranchExists:
            continue
