# SPDX-License-Identifier: Apache-2.0
"""Making deleted bytes leave a database file.

LMDB only marks pages as free, and even overwriting leaves old bytes in the gaps of pages. So what
is alive is copied, key by key, into a new file, which then takes the old one's name. That needs the
store alone: a process that still had the old file open would go on writing into it.

    scrub.pending     lies in the store's folder from before the first file is replaced until after
                      the last one was; whoever opens the store alone and finds it finishes the work
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from . import keys
from .environment import DATA_FILE
from .errors import StoreDamaged
from .folders import sync_folder
from .snapshot_rows import load_record
from .transactions import Environment, Transaction
from .worker import run_worker

MARKER = "scrub.pending"
BATCH_BYTES = 8 << 20

Keep = Callable[[bytes], bool]


def keep_all(txn: Transaction) -> Keep:
    """Every key of the sessions is alive."""
    return lambda key: True


def keep_live_states(txn: Transaction) -> Keep:
    """What readable snapshot records lead to, pins and counters. Chunks of blobs that were never
    finished, and whatever hung on a damaged record, stay behind."""
    blobs: set[int] = set()
    stamps: dict[bytes, int] = {}
    for key in [key for key, _ in txn.scan(keys.RECORD)]:
        try:
            stored = load_record(txn, key[1:])
        except StoreDamaged:
            continue
        assert stored is not None, key
        stamps[key[1:]] = stored.stamp
        blobs.add(stored.blob)

    def keep(key: bytes) -> bool:
        kind = key[:1]
        if kind == keys.CHUNK:
            return keys.first_number(key) in blobs
        if kind == keys.USE:
            return stamps.get(keys.tail(key)) == keys.first_number(key)
        if kind in (keys.RECORD, keys.CHILD):
            return key[-keys.DIGEST_BYTES :] in stamps
        return kind != keys.WRITING

    return keep


def rewrite(
    source: Environment, target: Environment, make_keep: Callable[[Transaction], Keep]
) -> None:
    """Copy the living keys of `source` into the empty `target`, whose commits are synced."""
    with source.read() as txn:
        keep = make_keep(txn)
        batch: list[tuple[bytes, bytes]] = []
        batch_bytes = 0
        for key, value in txn.scan(b""):
            if not keep(key):
                continue
            batch.append((key, bytes(value)))
            batch_bytes += len(value)
            if batch_bytes > BATCH_BYTES:
                _write(target, batch)
                batch, batch_bytes = [], 0
        _write(target, batch)


def _write(target: Environment, batch: list[tuple[bytes, bytes]]) -> None:
    with target.write() as txn:
        for key, value in batch:
            txn.put(key, value)


def mark_pending(folder: Path) -> None:
    """Durably note that deleted bytes must still leave the files."""
    (folder / MARKER).touch()
    sync_folder(folder)


def is_pending(folder: Path) -> bool:
    return (folder / MARKER).exists()


def unmark_pending(folder: Path) -> None:
    (folder / MARKER).unlink(missing_ok=True)
    sync_folder(folder)


def replace_file(folder: Path, kind: str) -> None:
    """Rewrite folder/data.mdb in a child process. The caller is alone and has it closed. On any
    error the old file is as it was."""
    temporary = folder.with_name(folder.name + ".new")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        run_worker("rewrite", str(folder), str(temporary), kind)
        os.replace(temporary / DATA_FILE, folder / DATA_FILE)
        sync_folder(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
