# SPDX-License-Identifier: Apache-2.0
"""The digest chain. Oracle: the formula of the module, written out with hashlib and struct."""

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken_runtime.state.digest import (
    BLOCK,
    anchor_digest,
    as_ids,
    catalog_digest,
    chain,
    digest_at,
    fingerprint,
)

ROOT = fingerprint({"weights": "w"}).digest


def plain(ids: list[int]) -> bytes:
    """d(len(ids)), from the formula."""
    if not ids:
        return ROOT
    start = BLOCK * ((len(ids) - 1) // BLOCK)
    data = plain(ids[:start]) + struct.pack(f"<{len(ids) - start}i", *ids[start:])
    return hashlib.blake2b(data, digest_size=32, person=b"freetoken-state\0").digest()


@given(st.lists(st.integers(0, 2**31 - 1), max_size=200))
def test_every_position_follows_the_formula(ids: list[int]) -> None:
    """d(p) at every position of a path."""
    path = as_ids(ids)
    names = chain(ROOT, path)
    assert len(names) == 1 + len(ids) // BLOCK
    for position in range(len(ids) + 1):
        assert digest_at(names, path, position) == plain(ids[:position])


def test_int64_lists_and_slices_hash_alike() -> None:
    """The dtype and memory layout of the ids do not matter."""
    ids = list(range(300))
    strided = np.array([[i, 0] for i in ids])[:, 0]
    assert chain(ROOT, as_ids(ids)) == chain(ROOT, as_ids(strided))


def test_fingerprints_name_their_difference() -> None:
    """Equal parts, in any order, are equal; a changed or missing part is named."""
    one = fingerprint({"weights": "a", "rope": "b"})
    assert one == fingerprint({"rope": "b", "weights": "a"})
    assert one.difference(one) is None
    other = fingerprint({"weights": "a", "rope": "c"})
    assert other.digest != one.digest and one.difference(other) == "rope"
    assert one.difference(fingerprint({"weights": "a"})) == "rope"


def test_a_format_change_changes_every_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state format is part of the fingerprint."""
    one = fingerprint({"weights": "a"})
    monkeypatch.setattr("freetoken_runtime.state.digest.STATE_FORMAT", "next")
    assert one.difference(fingerprint({"weights": "a"})) == "format"


def test_kinds_of_records_cannot_collide() -> None:
    """A state, its anchor's row and the catalog have different names."""
    state = chain(ROOT, as_ids(range(64)))[1]
    assert len({state, anchor_digest(state), catalog_digest(), ROOT}) == 4
