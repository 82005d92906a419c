# SPDX-License-Identifier: Apache-2.0
"""Names of states: a 256-bit hash chain over token ids that starts at the model's fingerprint.

    d(0) = fingerprint        d(p) = H(d(64 * ((p - 1) // 64)) || ids from there to p)

H is BLAKE2b with a 32-byte digest, ids are little-endian int32. Equal digests name the same state,
in every process and on every machine that computes it.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

BLOCK = 64  # tokens of a full block
STATE_FORMAT = "1"  # grows when stored states change meaning
DIGEST_BYTES = 32

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Fingerprint:
    """Where a state comes from. `parts` name what decides it (weights, architecture, rope, …), so
    that a difference can be told; `digest` is d(0) of every chain."""

    digest: bytes
    parts: Mapping[str, str]

    def difference(self, other: "Fingerprint") -> str | None:
        """The first part, by name, in which two fingerprints differ; None if they are equal."""
        names = sorted(self.parts.keys() | other.parts.keys())
        return next((n for n in names if self.parts.get(n) != other.parts.get(n)), None)


def fingerprint(parts: Mapping[str, str]) -> Fingerprint:
    """The fingerprint of these parts and of the state format."""
    whole = {**parts, "format": STATE_FORMAT}
    text = json.dumps(whole, sort_keys=True, separators=(",", ":"))
    digest = hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES, person=b"freetoken-origin")
    return Fingerprint(digest.digest(), whole)


def as_ids(ids: Sequence[int] | Ids) -> Ids:
    """Ids as the chain hashes them."""
    return np.ascontiguousarray(ids, dtype="<i4")


def link(parent: bytes, ids: Ids) -> bytes:
    """d(p) from the digest at the block boundary before p and the ids from there to p."""
    assert 0 < len(ids) <= BLOCK, len(ids)
    return _link(parent, as_ids(ids).data)


def _link(parent: bytes, ids: bytes | memoryview) -> bytes:
    state = hashlib.blake2b(parent, digest_size=DIGEST_BYTES, person=b"freetoken-state\0")
    state.update(ids)
    return state.digest()


def chain(root: bytes, ids: Ids) -> tuple[bytes, ...]:
    """d(0), d(64), d(128), … up to the last full block of `ids`."""
    return _chain(root, as_ids(ids[: len(ids) - len(ids) % BLOCK]).tobytes())


@lru_cache(maxsize=4)  # planning, restoring and writing a path ask for the same one
def _chain(root: bytes, ids: bytes) -> tuple[bytes, ...]:
    digests = [root]
    size_bytes = 4 * BLOCK
    for start in range(0, len(ids), size_bytes):
        digests.append(_link(digests[-1], ids[start : start + size_bytes]))
    return tuple(digests)


def digest_at(boundaries: Sequence[bytes], ids: Ids, position: int) -> bytes:
    """d(position), given the chain's full blocks (at least those before `position`)."""
    if position % BLOCK == 0:
        return boundaries[position // BLOCK]
    start = position - position % BLOCK
    return link(boundaries[start // BLOCK], ids[start:position])


def anchor_digest(state: bytes) -> bytes:
    """The name of the hidden row that belongs to the state `state`."""
    return hashlib.blake2b(state, digest_size=DIGEST_BYTES, person=b"freetoken-anchor").digest()


def catalog_digest() -> bytes:
    """The name under which a store lists the fingerprints it holds states of."""
    return hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"freetoken-catalg").digest()
