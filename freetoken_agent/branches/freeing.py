# SPDX-License-Identifier: Apache-2.0
"""Letting go of model states: those that only one session could use, and those of other models.

A digest chain starts at the fingerprint of the model that computed it, so the states of a model
that is not here cannot be found path by path. A store therefore remembers every fingerprint it has
kept states for; a purge drops those of absent ones whole, as they are disposable.
"""

from collections.abc import Iterator, Sequence

import msgpack  # type: ignore[import-untyped]

from freetoken_storage.records import Sessions

from ..model import Model
from .branch import Branch
from .handle import Backing
from .path import common_length

_KEY = "fingerprints"


def remember(backing: Backing, model: Model) -> None:
    """Note durably that states of this model may be in the store from now on."""
    known = _fingerprints(backing)
    if model.fingerprint.digest and model.fingerprint.digest not in known:
        backing.set_meta(_KEY, msgpack.packb([*known, model.fingerprint.digest]))


def forget(models: Sequence[Model], paths: Sequence[tuple[tuple[int, ...], int]]) -> int:
    """Drop the states of these models at or after each (ids, position); returns how many went."""
    return sum(
        model.forget(ids[: start + 1], start)
        for model in models
        for ids, start in paths
        if start < min(len(ids), model.context_limit)
    )


def drop_absent(backing: Backing, models: Sequence[Model]) -> int:
    """Drop every state of models that are not here; returns how many went."""
    here = {model.fingerprint.digest for model in models}
    absent = [digest for digest in _fingerprints(backing) if digest not in here]
    gone = [d for digest in absent for d in (digest, *backing.snapshots.children(digest))]
    return backing.snapshots.remove(gone) if gone else 0


def _fingerprints(backing: Backing) -> list[bytes]:
    packed = backing.get_meta(_KEY)
    known: list[bytes] = [] if packed is None else msgpack.unpackb(packed)
    return known


def exclusive_paths(sessions: Sessions, name: str) -> list[tuple[tuple[int, ...], int]]:
    """For each leaf of a session's tree its ids, and the first position no other session has."""
    others = [
        ids
        for record in sessions.list()
        if record.name != name
        for ids in leaves(sessions, record.name)
    ]
    found = []
    for ids in leaves(sessions, name):
        start = max((common_length(ids, other) for other in others), default=0)
        if start < len(ids):
            found.append((ids, start))
    return found


def leaves(sessions: Sessions, name: str) -> Iterator[tuple[int, ...]]:
    """The ids of every path that ends at a node without children."""
    nodes = list(sessions.nodes(name))
    inner = {node.parent for node in nodes}
    branch = Branch.load(sessions, name, sessions.branches(name)[0].name)
    for node in nodes:
        if node.id not in inner:
            yield branch.path_to(node.id).ids
