# SPDX-License-Identifier: Apache-2.0
"""Which anchors are made and which stay. Oracles: sets, sums of bytes, and distances."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freetoken_runtime.errors import InvalidAnchors
from freetoken_runtime.state.anchors import (
    Anchor,
    AnchoredPath,
    Rank,
    check_anchors,
    check_backs,
    ranked,
    retained,
    thinned,
)

SIZE_BYTES = 4 * (2 + 6)


def anchor(rank: Rank = Rank.INTERIOR) -> Anchor:
    return Anchor(torch.zeros(2), ((), (torch.zeros(2, 3),)), rank)


def anchored(ranks: dict[int, Rank]) -> dict[int, Anchor]:
    return {position: anchor(rank) for position, rank in ranks.items()}


ranks = st.sampled_from(list(Rank))
places = st.dictionaries(st.integers(1, 20_000), ranks, min_size=1, max_size=200).map(anchored)


def test_anchors_outside_the_path_are_refused() -> None:
    """1 to the path's length."""
    assert check_anchors([1, 3, 3], 3) == {1, 3}
    for position in (0, -1, 4):
        with pytest.raises(InvalidAnchors, match="1 to 3"):
            check_anchors([position], 3)


def test_interior_anchors_between_the_named_ones() -> None:
    """One after every interval, short of the end; a named or lasting one in its place ranks
    higher."""
    made = ranked(300, [64, 200], [64, 10], 100)
    assert made == {
        10: Rank.LASTING,
        64: Rank.LASTING,
        100: Rank.INTERIOR,
        200: Rank.NAMED,
    }
    assert ranked(300, [], [], 300) == {} == ranked(300, [], [], None)
    with pytest.raises(InvalidAnchors):
        ranked(300, [], [301], None)


@given(places, st.integers(0, 12), st.integers(0, 100))
def test_thinning_keeps_one_in_every_place(
    anchors: dict[int, Anchor], exponent: int, beyond: int
) -> None:
    """What goes had a neighbour of its rank or a higher one within the gap of its age, and lasting
    anchors and the end stay."""
    end, step = max(anchors) + beyond, 1 << exponent
    kept = thinned(anchors, end, step)
    assert kept <= anchors.keys()
    assert {p for p, a in anchors.items() if a.rank is Rank.LASTING or p == end} <= kept
    for position in anchors.keys() - kept:
        gap = max(step, 1 << max((end - position).bit_length() - 4, 0))
        assert any(
            abs(position - other) < gap and anchors[other].rank >= anchors[position].rank
            for other in kept
        )


def test_the_newest_stay_dense_and_the_old_stay_near() -> None:
    """An edit anywhere finds an anchor within an eighth of its distance from the end."""
    anchors = anchored(dict.fromkeys(range(1, 100_001), Rank.INTERIOR))
    kept = sorted(thinned(anchors, 100_000, 1))
    assert len(kept) < 200
    for position in range(1, 100_000, 997):
        gap = position - max((p for p in kept if p <= position), default=0)
        assert gap <= max(16, (100_000 - position) / 4)
    assert {99_990, 99_995, 100_000} <= set(kept)


@given(st.lists(st.tuples(places, st.booleans()), min_size=1, max_size=4), st.integers(0, 300))
def test_a_budget_is_kept_by_thinning(
    paths: list[tuple[dict[int, Anchor], bool]], room: int
) -> None:
    """Within the budget nothing goes; over it only what may never go remains. Anchors that two
    paths share count once."""
    made = [AnchoredPath(anchors, max(anchors), lasting) for anchors, lasting in paths]
    made.append(made[0])  # a fork: the same anchors
    total = sum(len(anchors) for anchors, _ in paths)
    kept = retained(made, room * SIZE_BYTES)
    count = sum(len(positions) for positions in (kept[0] | kept[-1], *kept[1:-1]))
    if total <= room:
        assert count == total
    floors = [
        set(path.anchors)
        if path.lasting
        else {p for p, a in path.anchors.items() if a.rank is Rank.LASTING or p == path.end}
        for path in made
    ]
    assert all(floor <= positions for floor, positions in zip(floors, kept, strict=True))
    if count > room:  # as little as thinning leaves: one more than the floor and the start's place
        assert all(
            len(positions) <= len(floor) + 2 for floor, positions in zip(floors, kept, strict=True)
        )


def test_one_long_path_does_not_take_the_anchors_of_others() -> None:
    """A path of 100,000 tokens beside one of 2,000: both keep anchors near their ends."""
    long = anchored(dict.fromkeys(range(1024, 100_001, 1024), Rank.INTERIOR))
    short = anchored(dict.fromkeys(range(256, 2_049, 256), Rank.INTERIOR))
    kept = retained([AnchoredPath(long, 100_000), AnchoredPath(short, 2_048)], 40 * SIZE_BYTES)
    assert kept[1] == set(short) and 16 <= len(kept[0]) + len(kept[1]) <= 40


def test_anchors_before_what_was_sampled_are_in_reach() -> None:
    """0 to 3 tokens back."""
    assert check_backs({7: 0, 9: 3}) == {7: 0, 9: 3}
    for back in (-1, 4, True, "1"):
        with pytest.raises(InvalidAnchors, match="0 to 3"):
            check_backs({7: back})  # type: ignore[dict-item]
