# SPDX-License-Identifier: Apache-2.0
"""Paths and edits as pure values: no store, no model."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken_agent.branches import codec, edits
from freetoken_agent.branches.pairing import Pair, open_calls, pairs
from freetoken_agent.branches.path import Body, New, Path, Place, settled
from freetoken_agent.chat_templates.items import Options
from freetoken_agent.chat_templates.layout import Layout, new_call_id, new_segment_id
from freetoken_agent.errors import PairingError, UnsupportedContent
from freetoken_agent.template import ChatFormat
from freetoken_agent.testing import CHATML
from freetoken_agent.tokenizers.byte_tokenizer import ByteTokenizer
from freetoken_storage.errors import StoreDamaged

TOKENIZER = ByteTokenizer()
LAYOUT = Layout(ChatFormat.learn(CHATML, TOKENIZER), TOKENIZER, Options())


def _path(*news: New) -> Path:
    path = Path()
    for new in news:
        path = edits.append(LAYOUT, path, [new])
    return path


def _stored(path: Path) -> Path:
    return path.committed(0, list(range(1, len(path.places) + 1)))


def _place(kind: str, call_id: str | None = None) -> Place:
    name = new_segment_id()
    body = Body(name, kind, "", "", (), name, call_id=call_id)  # type: ignore[arg-type]
    return Place(body, (), "")


def test_path_positions_and_turns() -> None:
    """Oracle: sums of lengths by hand."""
    path = _path(New("system", "s"), New("user", "ab"), New("text", "c"), New("user", "d"))
    flat: list[int] = []
    for index, place in enumerate(path.places):
        assert path.start(index) == len(flat)
        flat += place.gap_ids
        assert path.content_start(index) == len(flat)
        flat += place.body.ids
        assert path.ends[index] == len(flat)
        assert path.at(len(flat) - 1) == index
    assert path.ids == tuple(flat)
    assert path.at(len(flat)) is None
    assert (path.turns, path.num_turns) == ((None, 0, 0, 1), 2)
    assert path.preamble_length == 1
    assert Path().num_turns == 0 and Path().ids == () and Path().last is None


def test_path_only_touched_gaps_are_laid_out_again() -> None:
    """Oracle: object identity of the places an edit does not touch."""
    path = _stored(_path(*(New("user", str(i)) for i in range(6))))
    after = edits.delete(LAYOUT, path, {2})
    assert after.places[:2] == path.places[:2]
    assert [p.node for p in after.places] == [1, 2, None, None, None]
    assert [p.body for p in after.places] == [p.body for p in path.places if p.node != 3]
    assert edits.delete(LAYOUT, path, set()) is path


def test_path_layout_runs_see_nothing_to_their_right() -> None:
    """Oracle: the items the format was given, recorded."""
    seen: list[tuple[int, int]] = []

    class Listening:
        report = LAYOUT.format.report
        preamble_order = LAYOUT.format.preamble_order

        def layout(self, items: list[object], *, start: int, options: Options) -> object:
            seen.append((start, len(items)))
            return LAYOUT.format.layout(items, start=start, options=options)  # type: ignore[arg-type]

    layout = replace(LAYOUT, format=Listening())  # type: ignore[arg-type]
    path = _path(*(New("user", str(i)) for i in range(8)))
    edits.delete(layout, path, {1, 5})
    assert seen == [(1, 2), (4, 5)]  # the right neighbours of the two holes
    seen.clear()
    edits.append(layout, path, [New("text", "a"), New("user", "b")])
    assert seen == [(8, 10)]  # a list is one run
    seen.clear()
    edits.set_preamble(layout, path, "system", "s")
    assert seen == [(0, 2)]


def test_path_settled_keeps_nodes_up_to_the_first_difference() -> None:
    """Oracle: by hand."""
    path = _stored(_path(New("user", "a"), New("text", "b"), New("user", "c")))
    again = [replace(place, node=None) for place in path.places]
    assert settled(path, again, path.tail) is path
    changed = [again[0], replace(again[1], stale=True), again[2]]
    assert [p.node for p in settled(path, changed, "closed").places] == [1, None, None]
    assert [p.node for p in settled(path, again[:2], "open").places] == [1, 2]


def test_path_joins_follow_the_turn_not_the_neighbours() -> None:
    """Oracle: what belongs to one message and what does not, by hand."""
    path = _path(
        New("user", "u"),
        New("thinking", "t"),
        New("text", "a"),
        New("tool_call", name="f", arguments={}, call_id="c1"),
        New("tool_result", "r", call_id="c1"),
        New("text", "b"),
    )
    assert [p.joins for p in path.places] == [False, False, True, True, False, False]
    without_calls = edits.delete(LAYOUT, path, {3})
    assert [p.kind for p in without_calls.places] == ["user", "thinking", "text", "text"]
    assert [p.joins for p in without_calls.places] == [False, False, True, False]
    without_thought = edits.delete(LAYOUT, path, {1})
    assert [p.joins for p in without_thought.places] == [False, False, True, False, False]
    cut = path.cut(2)
    assert cut.tail == "open"
    assert path.cut(3).tail == "open"
    assert path.cut(5).tail == "closed"
    assert cut.items()[-1].open and not cut.items()[-1].partial
    assert path.cut(3).items()[-1].partial  # a text has no closer: it goes on itself


def test_path_a_text_in_two_segments_is_partial_at_the_first() -> None:
    """Oracle: no gap between them, and a cut there goes on with the content."""
    path = edits.append(LAYOUT, _path(New("user", "u")), [New("text", "on")], tail="partial")
    path = edits.append(LAYOUT, path, [New("text", "e")])
    assert path.places[-1].gap_ids == ()
    assert [i.partial for i in path.items()] == [False, True, False]
    assert path.cut(2).tail == "partial"
    assert path.cut(3).tail == "closed"


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("u", []),
        ("c1", [Pair(0, None)]),
        ("c1 r1", [Pair(0, 1)]),
        ("c1 c2 r1 r2", [Pair(0, 2), Pair(1, 3)]),
        ("u c1 c2 r2", [Pair(1, None), Pair(2, 3)]),
        ("c1 r1 u c1 r1", [Pair(0, 1), Pair(3, 4)]),  # an id that comes again
    ],
)
def test_path_pairs(kinds: str, expected: list[Pair]) -> None:
    """Oracle: by hand."""
    names = {"u": "user", "c": "tool_call", "r": "tool_result"}
    places = [_place(names[k[0]], k[1:] or None) for k in kinds.split()]
    assert pairs(places) == expected
    assert open_calls(places) == [p.call for p in expected if p.result is None]


def test_path_an_orphan_result_is_refused() -> None:
    """Oracle: PairingError."""
    with pytest.raises(PairingError):
        edits.append(LAYOUT, _path(New("user", "u")), [New("tool_result", "r", call_id="x")])


def test_path_ids_have_their_shape() -> None:
    """Oracle: lengths and alphabets; 10,000 of them are distinct."""
    made = {new_segment_id() for _ in range(10_000)}
    assert len(made) == 10_000
    assert all(len(i) == 12 and i.isalnum() and i == i.lower() for i in made)
    assert all(len(i) == 9 and i.isalnum() for i in (new_call_id() for _ in range(100)))


_TEXT = st.text(max_size=20)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)
_BODIES = st.builds(
    Body,
    id=_TEXT,
    kind=st.sampled_from(edits.KINDS),
    content=_TEXT,
    text=_TEXT,
    ids=st.lists(st.integers(0, 2**32 - 1), max_size=30).map(tuple),
    origin=_TEXT,
    name=st.none() | _TEXT,
    arguments=st.none() | st.dictionaries(_TEXT, _JSON, max_size=3),
    call_id=st.none() | _TEXT,
    error=st.booleans(),
    replaces=st.none() | _TEXT,
    source=st.sampled_from(("caller", "model", "interrupted")),
    meta=st.dictionaries(_TEXT, _JSON, max_size=3),
)


@given(body=_BODIES, gap=st.lists(st.integers(0, 2**32 - 1)).map(tuple), flags=st.booleans())
def test_path_records_read_back_as_written(body: Body, gap: tuple[int, ...], flags: bool) -> None:
    """Oracle: the values before packing."""
    assert codec.unpack_segment(codec.pack_segment(body)) == body
    place = Place(body, gap, "gap", joins=flags, stale=not flags, node=7)
    assert codec.unpack_node(codec.pack_node(place), body, 7) == place


@given(st.binary(max_size=60))
def test_path_hostile_records_are_damage_never_a_crash(data: bytes) -> None:
    """Oracle: StoreDamaged (or StoreNewer) is the only outcome for bytes we did not write."""
    for unpack in (codec.unpack_segment, codec.unpack_log, codec.unpack_session):
        with pytest.raises(StoreDamaged):
            unpack(data)


def test_path_half_a_surrogate_pair_is_refused_and_storable() -> None:
    """Oracle: UnsupportedContent for what is to be tokenised; what a model wrote reads back."""
    for new in (
        New("user", "a\ud800"),
        New("tool_call", name="\udfff", arguments={}, call_id="c"),
        New("tool_call", name="f", arguments={"a": ["\ud800"]}, call_id="c"),
    ):
        with pytest.raises(UnsupportedContent):
            edits.append(LAYOUT, _path(New("user", "u")), [new])
    body = Body("i", "tool_call", "", "t", (1,), "i", name="f", arguments={"a": "\ud800"})
    assert codec.unpack_segment(codec.pack_segment(body)) == body


def test_path_a_tombstone_is_no_segment() -> None:
    """Oracle: None."""
    assert codec.unpack_segment(codec.pack_tombstone("x")) is None
