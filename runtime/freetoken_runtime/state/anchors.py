# SPDX-License-Identifier: Apache-2.0
"""Where a path keeps the hidden row of its last token, so that it can answer without a forward.

In models whose layers are all sliceable every stored position can be restored; an anchor adds the
row. Rows are small but not free: beyond a limit the older ones are thinned.
"""

from collections.abc import Collection, Iterable, Sequence
from operator import index

from ..errors import InvalidAnchors

MAX_ANCHORS = 512  # rows kept per path


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


def thinned(
    positions: Iterable[int], named: Collection[int], limit: int = MAX_ANCHORS
) -> list[int]:
    """The positions to keep, at most `limit`: the named ones first, then the rest with gaps that
    grow as powers of two towards the start of the path."""
    ordered = sorted(positions, reverse=True)
    if len(ordered) <= limit:
        return ordered
    keep = [p for p in ordered if p in named][:limit]
    others = [p for p in ordered if p not in named]
    last = ordered[0]
    step = 1
    while others and len(keep) < limit:
        chosen: dict[int, int] = {}
        for position in others:
            age = last - position
            gap = max(step, 1 << max(age.bit_length() - 4, 0))
            chosen.setdefault(position // gap, position)
        picked = list(chosen.values())
        room = limit - len(keep)
        if len(picked) <= room or step > last:
            keep.extend(picked[:room])
            break
        step *= 2
    return sorted(keep, reverse=True)
