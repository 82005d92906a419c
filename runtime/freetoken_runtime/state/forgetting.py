# SPDX-License-Identifier: Apache-2.0
"""Removes what a store holds of a path from a position on, and nothing before it. Owner thread."""

import logging

from freetoken_storage.errors import StorageError

from .digest import BLOCK, Ids, catalog_digest, chain
from .disk import DiskStates
from .stored_form import concerns

_log = logging.getLogger(__name__)


def forget(disk: DiskStates, ids: Ids, start: int) -> int:
    """Remove every state of a path that begins with ids[: start + 1], at or after position `start`,
    whichever model computed it; returns how many snapshots went. Damaged ones that may belong to
    the path go with them. Of the block that `start` lies in, the rows before it are written anew as
    far as a path can go on from there."""
    block = start - start % BLOCK
    wanted = ids[block : start + 1]
    origins = {disk.origin.digest, *disk.snapshots.children(catalog_digest())}
    doomed = []
    with disk.snapshots.reader() as reader:
        for origin in origins:
            parent = chain(origin, ids[:block])[block // BLOCK]
            for digest in disk.snapshots.children(parent):
                info = disk.records.info(reader, digest)
                if info is None or concerns(info.meta, wanted, block):
                    doomed.append(digest)
    if not doomed:
        return 0
    rest = disk.shortened(ids[: disk.usable_end(ids[:start])])
    removed = disk.snapshots.remove(doomed)
    if rest is not None:
        try:
            disk.records.put([rest])
        except StorageError as error:
            _log.warning("what lies before a forgotten token was not stored again: %s", error)
    return removed
