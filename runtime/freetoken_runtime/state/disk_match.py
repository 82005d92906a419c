# SPDX-License-Identifier: Apache-2.0
"""What a look into a store found of a path, and what reading it brought."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Piece:
    """A stored block and how many of its leading rows a path can use."""

    digest: bytes
    start: int
    stored_rows: int
    rows: int


@dataclass(frozen=True)
class DiskMatch:
    """What a store holds of a path: rows [0, position), the pieces from the boundary at or below
    `floor` on. `usable`: the deepest position that can be restored from there, `anchored` if by an
    anchor's record."""

    position: int
    pieces: tuple[Piece, ...]
    usable: int
    anchored: bool
    replay: int  # rows to forward again after that
    goes_on: bool  # the store continues from there with other ids


NOTHING = DiskMatch(0, (), 0, False, 0, False)
Lost = Literal["damaged", "evicted"]


@dataclass(frozen=True)
class Restored:
    """What a restore read, and why it ended early, if it did."""

    size_bytes: int
    lost: Lost | None = None
