# SPDX-License-Identifier: Apache-2.0
"""What a scrub may remove: nothing that the remaining tree needs."""

from collections.abc import Sequence

from .changes import check_version
from .errors import BranchNotFound, SessionConflict
from .records import BranchRecord, NodeRecord, Scrub


def check_scrub(
    name: str,
    scrub: Scrub,
    *,
    branches: Sequence[BranchRecord],
    nodes: Sequence[NodeRecord],
) -> None:
    """Raise SessionConflict if a branch has moved or the scrub would leave a branch or a node
    hanging, BranchNotFound if it names an unknown branch. Unknown nodes, segments and log entries
    are already gone: no error."""
    known = {branch.name: branch for branch in branches}
    for branch in scrub.logs.keys() | scrub.branch_bodies.keys() | scrub.expected_versions.keys():
        if branch not in known:
            raise BranchNotFound(f"session {name!r} has no such branch", value=branch)
    for branch, expected_version in scrub.expected_versions.items():
        check_version(name, known[branch], expected_version)
    for record in branches:
        if record.head in scrub.node_ids:
            raise SessionConflict(
                f"a scrub of session {name!r} would remove the head of branch {record.name!r}",
                value=record.head,
                remedy="move or delete the branch first, or reload() and repeat",
            )
    for node in nodes:
        if node.id in scrub.node_ids:
            continue
        if node.parent in scrub.node_ids:
            raise SessionConflict(
                f"a scrub of session {name!r} would cut node {node.id} from its parent",
                value=node.parent,
                remedy="name the whole subtree, or reload() and repeat",
            )
        if node.segment_id in scrub.segment_ids:
            raise SessionConflict(
                f"a scrub of session {name!r} would remove the segment of node {node.id}",
                value=node.segment_id,
                remedy="name its nodes too, or reload() and repeat",
            )
