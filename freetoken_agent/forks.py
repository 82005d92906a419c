# SPDX-License-Identifier: Apache-2.0
"""New branches at existing nodes: nothing is copied."""

from freetoken_storage.errors import BranchExists
from freetoken_storage.records import BranchRecord, Sessions


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
