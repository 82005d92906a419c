# SPDX-License-Identifier: Apache-2.0
"""Anchors: what a path keeps of a position so that it can be restored there, and which ones stay.

An anchor holds the hidden row of its last token, so that the path can answer without a forward, and
the buffers that every token overwrites. In models whose layers are all sliceable every stored
position can be restored and the row is all there is. Under a byte budget the older anchors are
thinned; what is kept longest is what most edits need: pinned paths, the ends of system and tools,
the ends of paths, then the newest turns.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import index

import torch

from ..errors import InvalidAnchors
from .buffers import Fixed

MAX_ANCHORS = 512  # kept per path
RECENT_ROWS = 4  # how far back an anchor can still be made of generated text


class Rank(IntEnum):
    """Why an anchor was taken; of two in one place the higher rank stays."""

    INTERIOR = 0  # after a number of tokens
    NAMED = 1  # the caller named the position, or a generation ended there
    LASTING = 2  # many paths will go on from there: the end of system or tools


@dataclass(frozen=True, eq=False)
class Anchor:
    """`row`: [H] fp32. `fixed`: per layer, the overwritten buffers. Nothing changes them. `stale`:
    it comes from a store, so the volatile ones have to be filled before it can be grown from."""

    row: torch.Tensor
    fixed: Fixed
    rank: Rank = Rank.NAMED
    stale: bool = False

    @property
    def size_bytes(self) -> int:
        return self.row.nbytes + sum(t.nbytes for buffers in self.fixed for t in buffers)


@dataclass(frozen=True)
class AnchoredPath:
    """One path's anchors by position. `lasting`: all of them are to stay (the path is pinned)."""

    anchors: Mapping[int, Anchor]
    end: int
    lasting: bool = False


def ranked(
    num_tokens: int, named: Sequence[int], lasting: Sequence[int], interval: int | None
) -> dict[int, Rank]:
    """The anchors to make of a path of `num_tokens`, those after every `interval` tokens included.
    InvalidAnchors as `check_anchors`."""
    inner = range(interval, num_tokens, interval) if interval else ()
    places = dict.fromkeys(inner, Rank.INTERIOR)
    places |= dict.fromkeys(check_anchors(named, num_tokens), Rank.NAMED)
    return places | dict.fromkeys(check_anchors(lasting, num_tokens), Rank.LASTING)


def check_anchors(anchors: Sequence[int], num_tokens: int) -> frozenset[int]:
    """The positions as a set. InvalidAnchors for one that is not within 1..num_tokens."""
    positions = check_ids("anchors", anchors)
    for position in positions:
        if not 1 <= position <= num_tokens:
            raise InvalidAnchors(
                "an anchor lies outside the path",
                value=position,
                limit=f"1 to {num_tokens}",
                remedy="name positions of the ids that are passed",
            )
    return positions


def check_ids(name: str, numbers: Iterable[int]) -> frozenset[int]:
    """The numbers as a set. InvalidAnchors, naming the argument, for what is not whole numbers."""
    try:
        return frozenset(index(number) for number in numbers)
    except TypeError as error:
        raise InvalidAnchors(
            f"{name} are not whole numbers", value=repr(numbers)[:80], remedy="pass a list of them"
        ) from error


def check_backs(backs: Mapping[int, int]) -> dict[int, int]:
    """Ids and how many tokens before each an anchor is wanted. InvalidAnchors for what is out of
    reach."""
    check_ids("anchor_before", backs)
    for back in backs.values():
        if isinstance(back, bool) or not isinstance(back, int) or not 0 <= back < RECENT_ROWS:
            raise InvalidAnchors(
                "an anchor before generated text is out of reach",
                value=repr(back),
                limit=f"0 to {RECENT_ROWS - 1} tokens",
            )
    return {int(number): back for number, back in backs.items()}


def thinned(anchors: Mapping[int, Anchor], end: int, step: int) -> set[int]:
    """The positions to keep when anchors stand at least `step` tokens apart, and the further from
    `end` the sparser: at most one per 2^k tokens at an age of 2^(k+3). Lasting ones and the one at
    the end always stay; among the others of one place the higher rank, then the later one."""
    keep = {p for p, anchor in anchors.items() if anchor.rank is Rank.LASTING or p == end}
    places: dict[tuple[int, int], int] = {}
    others = anchors.keys() - keep
    for position in sorted(others, key=lambda p: (anchors[p].rank, p), reverse=True):
        gap = max(step, 1 << max((end - position).bit_length() - 4, 0))
        places.setdefault((gap, position // gap), position)
    return keep | set(places.values())


def retained(paths: Sequence[AnchoredPath], limit_bytes: int) -> list[set[int]]:
    """For each path the positions to keep, so that all anchors together take at most `limit_bytes`,
    or as little as thinning can bring about. The path that holds most is thinned first, among
    equals the first one: none pays for another. An anchor that several paths share counts once."""
    kept = [set(path.anchors) for path in paths]
    steps = [1] * len(paths)
    while _bytes_of(paths, kept) > limit_bytes:
        thinnable = [
            i for i, path in enumerate(paths) if not path.lasting and steps[i] <= 2 * path.end
        ]
        if not thinnable:
            break
        most = max(thinnable, key=lambda i: len(kept[i]))
        kept[most] = thinned(paths[most].anchors, paths[most].end, steps[most])
        steps[most] *= 2
    return kept


def _bytes_of(paths: Sequence[AnchoredPath], kept: Sequence[set[int]]) -> int:
    sizes = {
        id(anchor): anchor.size_bytes
        for path, positions in zip(paths, kept, strict=True)
        for anchor in (path.anchors[p] for p in positions)
    }
    return sum(sizes.values())
