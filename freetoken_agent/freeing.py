# SPDX-License-Identifier: Apache-2.0
"""Which states only one session could use: those behind what it shares with every other one."""

from collections.abc import Iterator, Sequence

from freetoken_storage.records import Sessions

from .branch import Branch


def exclusive_paths(sessions: Sessions, name: str) -> list[tuple[tuple[int, ...], int]]:
    """For each leaf of a session's tree its ids, and the first position no other session has."""
    others = [
        ids
        for record in sessions.list()
        if record.name != name
        for ids in _leaves(sessions, record.name)
    ]
    found = []
    for ids in _leaves(sessions, name):
        start = max((common_length(ids, other) for other in others), default=0)
        if start < len(ids):
            found.append((ids, start))
    return found


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading ids two paths share."""
    count = min(len(a), len(b))
    if a[:count] == b[:count]:
        return count
    low, high = 0, count
    while low + 1 < high:  # slices compare much faster than single ids
        middle = (low + high) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle
    return low


def _leaves(sessions: Sessions, name: str) -> Iterator[tuple[int, ...]]:
    """The ids of every path that ends at a node without children."""
    nodes = list(sessions.nodes(name))
    inner = {node.parent for node in nodes}
    branch = Branch.load(sessions, name, sessions.branches(name)[0].name)
    for node in nodes:
        if node.id not in inner:
            yield branch.path_to(node.id).ids
