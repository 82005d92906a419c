# SPDX-License-Identifier: Apache-2.0
"""Purge: what was once in a session, gone from the tree, the logs, the states and the files.

A replacement inherits the meta data of the segment that it replaces. What it still has of a purged
segment's goes too: later versions stay, their records are written anew without those entries, and
every branch that had such a version moves on by one, so that no handle writes back what it read
before.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import anyio.to_thread

from freetoken_storage.errors import SessionConflict
from freetoken_storage.records import Scrub, SegmentRecord

from ..errors import SegmentInUse
from ..segments import PurgeReport, Segment
from . import codec, freeing, holders, lookups
from .handle import Context, Handle
from .path import Body, Path

_ATTEMPTS = 10  # other writers may move a branch between looking and scrubbing


async def purge(handle: Handle, segment: Segment | str) -> PurgeReport:
    """See `Session.purge`. Runs in a worker thread."""
    return await anyio.to_thread.run_sync(purge_sync, handle, segment)


def purge_sync(handle: Handle, segment: Segment | str) -> PurgeReport:
    """Remove a segment for good, in the calling thread."""
    handle.bound()
    handle.outside_batch("purge()")
    for attempt in range(_ATTEMPTS):
        removal = _Removal(handle, segment)
        with handle.lock, _reserved(handle.context, removal.branches):
            # States first: whatever stops us here, a second purge finds the segment still there.
            models = handle.context.store.models
            states = freeing.forget(models, removal.paths)
            states += freeing.drop_absent(handle.context.backing, models)
            try:
                handle.context.sessions.scrub(handle.context.name, removal.scrub)
            except SessionConflict:
                if attempt + 1 == _ATTEMPTS:
                    raise
                continue
            for gone in removal.scrub.segment_ids:
                handle.context.bodies.pop(gone, None)
                handle.forget_dropped(gone)
            handle.branch.reload()
            break
    needles = holders.Needles(removal.body)
    others = holders.other_segments(handle.context, needles) | _sharing_meta(handle, removal.body)
    return PurgeReport(
        segments=tuple(sorted(removal.scrub.segment_ids)),
        num_nodes=len(removal.scrub.node_ids),
        num_states=states,
        num_log_entries=sum(len(sequences) for sequences in removal.scrub.logs.values()),
        cleared_segments=tuple(sorted(removal.cleared)),
        other_segments=tuple(sorted(others)),
        other_places=holders.other_places(handle.context, needles),
        other_sessions=holders.other_sessions(handle.context, needles),
        scrubbed=handle.context.backing.compact(),
    )


@contextmanager
def _reserved(context: Context, branches: Iterable[str]) -> Iterator[None]:
    """Keep generations away from branches whose logs are rewritten. SessionBusy if one runs."""
    with ExitStack() as stack:
        for branch in branches:
            context.busy.enter(context.name, branch)
            stack.callback(context.busy.leave, context.name, branch)
        yield


class _Removal:
    """What has to go, as the session is stored now. SegmentInUse if a path holds it."""

    def __init__(self, handle: Handle, segment: Segment | str) -> None:
        context = handle.context
        self.body = lookups.known_body(handle, segment)
        nodes = list(context.sessions.nodes(context.name))
        roots = [node.id for node in nodes if node.segment_id == self.body.id]
        gone = set(roots)
        for node in nodes:  # parents come before children
            if node.parent in gone:
                gone.add(node.id)
        branches = context.sessions.branches(context.name)
        holders = tuple(record.name for record in branches if record.head in gone)
        if holders:
            raise SegmentInUse(
                "a branch's path holds the segment", segment=self.body.id, branches=holders
            )
        # Read before they go: forgetting states needs the ids of the paths.
        self.paths = [_suffix(handle.branch.path_to(node)) for node in roots]
        kept = {node.segment_id for node in nodes if node.id not in gone}
        segments = {node.segment_id for node in nodes if node.id in gone} - kept
        segments.add(self.body.id)
        self.cleared = _cleared(context, self.body, segments)
        stained = {node.id for node in nodes if node.segment_id in self.cleared}
        parents = {node.id: node.parent for node in nodes}
        logs: dict[str, frozenset[int]] = {}
        bodies: dict[str, bytes] = {}
        for record in branches:
            entries = context.sessions.log(context.name, record.name)
            mentions = frozenset(
                e.sequence for e in entries if codec.unpack_log(e.body).before.node in gone
            )
            if mentions:
                logs[record.name] = mentions
            branch = codec.unpack_branch(record.body)
            if branch.tip is not None and branch.tip.node in gone:
                bodies[record.name] = codec.pack_branch(codec.without_tip(branch))
            heads = [record.head, *(codec.unpack_log(e.body).before.node for e in entries)]
            heads += [] if branch.tip is None else [branch.tip.node]
            if any(stained & lookups.ancestors(parents, head) for head in heads):
                bodies.setdefault(record.name, record.body)
        self.branches = logs.keys() | bodies.keys()
        self.scrub = Scrub(
            node_ids=frozenset(gone),
            segment_ids=frozenset(segments),
            logs=logs,
            branch_bodies=bodies,
            expected_versions={record.name: record.version for record in branches},
            tombstones=[
                *(SegmentRecord(i, codec.pack_tombstone(i)) for i in sorted(segments)),
                *(SegmentRecord(i, codec.pack_segment(b)) for i, b in self.cleared.items()),
            ],
        )


def _cleared(context: Context, purged: Body, gone: Collection[str]) -> dict[str, Body]:
    """The versions that replaced the purged one, without what they inherited of its meta data."""
    line = {body.id: body for body in lookups.all_bodies(context) if body.origin == purged.origin}
    cleared = {}
    for body in line.values():
        above: Body | None = body
        while above is not None and above.id != purged.id:
            above = line.get(above.replaces or "")
        shared = _shared_meta(body, purged)
        if above is not None and body.id not in gone and shared:
            meta = {key: value for key, value in body.meta.items() if key not in shared}
            cleared[body.id] = replace(body, meta=meta)
    return cleared


def _sharing_meta(handle: Handle, purged: Body) -> set[str]:
    """Ids of versions that still have entries of the purged one's meta data: those it replaced."""
    return {
        body.id
        for body in lookups.all_bodies(handle.context)
        if body.origin == purged.origin and _shared_meta(body, purged)
    }


def _shared_meta(body: Body, purged: Body) -> set[str]:
    """Keys under which two segments have the same."""
    return {k for k, v in body.meta.items() if k in purged.meta and purged.meta[k] == v}


def _suffix(path: Path) -> tuple[tuple[int, ...], int]:
    """The ids of a path, and where the content of its last segment begins."""
    return path.ids, path.content_start(len(path.places) - 1)
