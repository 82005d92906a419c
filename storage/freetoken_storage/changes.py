# SPDX-License-Identifier: Apache-2.0
"""What the relative numbers of a `records.Changes` mean; both stores ask here."""

from .errors import InvalidRecord, SessionConflict
from .records import ROOT, BranchRecord, SegmentRecord


def check_version(name: str, branch: BranchRecord, expected_version: int) -> None:
    """SessionConflict if the branch has moved."""
    if branch.version != expected_version:
        raise SessionConflict(
            f"branch {branch.name!r} of session {name!r} has moved",
            value=branch.version,
            limit=f"expected version {expected_version}",
            remedy="reload() and repeat the edit",
        )


def check_same_body(name: str, segment: SegmentRecord, stored: SegmentRecord | None) -> bool:
    """True if `stored` is that segment already. InvalidRecord if it is another one."""
    if stored is not None and stored.body != segment.body:
        raise InvalidRecord(
            f"a segment of that id has another body in session {name!r}",
            value=segment.id,
            limit="segments are immutable",
        )
    return stored is not None


def resolve_parent(parent: int, index: int, first_id: int) -> int:
    """The node id that the parent of new node `index` means. InvalidRecord if it does not come
    before it."""
    if parent >= ROOT:
        return parent
    if -1 - parent >= index:
        raise InvalidRecord(
            f"the parent of new node {index} does not come before it in the commit", value=parent
        )
    return first_id + (-1 - parent)


def resolve_head(head: int | None, old_head: int, node_ids: tuple[int, ...]) -> int:
    """The node id that `Changes.head` means."""
    if head is None:
        return old_head
    if head >= ROOT:
        return head
    if -1 - head >= len(node_ids):
        raise InvalidRecord(
            "the head names a new node that is not in the commit",
            value=head,
            limit=f"{len(node_ids)} new nodes",
        )
    return node_ids[-1 - head]


def resolve_log_keep(kept: int | None, length: int) -> int:
    """How many entries of a log of `length` stay. InvalidRecord if it does not have so many."""
    if kept is None:
        return length
    if not 0 <= kept <= length:
        raise InvalidRecord("log_keep is outside the log", value=kept, limit=f"0 to {length}")
    return kept
