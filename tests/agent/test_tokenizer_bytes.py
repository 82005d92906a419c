# SPDX-License-Identifier: Apache-2.0
"""The byte tokenizer, and what every `Tokenizer` promises."""

from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken_agent.tokenizers.byte_tokenizer import CHATML_CONTROLS, ByteTokenizer
from freetoken_agent.tokenizers.tokenizer import encode_mixed

TOKENIZER = ByteTokenizer()
IM_END = TOKENIZER.encode_frame("<|im_end|>")[0]


@settings(deadline=None)
@given(st.text())
def test_contents_round_trip_and_hold_no_control(text: str) -> None:
    """Oracle: the text itself, in UTF-8."""
    encodable = text.encode("utf-8", "replace").decode()
    ids = TOKENIZER.encode_content(text)
    assert bytes(ids).decode() == encodable
    assert TOKENIZER.decode(ids) == encodable
    assert not any(map(TOKENIZER.is_control, ids))


def test_s55_a_control_literal_in_content_stays_bytes() -> None:
    """Oracle: the frame encoder gives one id for the same text."""
    text = "".join(CHATML_CONTROLS)
    assert len(TOKENIZER.encode_frame(text)) == len(CHATML_CONTROLS)
    assert TOKENIZER.encode_content(text) == list(text.encode())


@settings(deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1)), st.integers(0, 8))
def test_stream_equals_decode_whatever_the_ids(ids: list[int], split: int) -> None:
    """Oracle: `decode` of all ids at once; every delta is valid on its own."""
    decoder = TOKENIZER.stream(after=ids[:split])
    deltas = [decoder.feed(token_id) for token_id in ids[split:]] + [decoder.flush()]
    assert "".join(deltas) == TOKENIZER.decode(ids[split:], after=ids[:split])
    assert all(delta.encode().decode() == delta for delta in deltas)


def test_deltas_end_at_utf8_boundaries() -> None:
    """Oracle: a character appears with its last byte."""
    decoder = TOKENIZER.stream()
    assert [decoder.feed(byte) for byte in "é€😀".encode()] == [
        "", "é", "", "", "€", "", "", "", "😀",
    ]  # fmt: skip


def test_a_character_split_between_two_contents_is_whole_in_the_second() -> None:
    """Oracle: the bytes joined."""
    ids = list("é".encode())
    assert TOKENIZER.decode(ids[1:], after=ids[:1]) == "é"


def test_mixed_text_takes_controls_from_literals_only() -> None:
    """Oracle: the ids written by hand."""
    parts = [("<|im_end|>a", False), ("<|im_end|>", True), ("b<|im_end|>", False)]
    plain = list(b"a<|im_end|>b")
    assert encode_mixed(TOKENIZER, parts) == (IM_END, *plain, IM_END)


def test_digest_names_the_controls() -> None:
    """Oracle: equal and different constructions."""
    assert ByteTokenizer().digest == TOKENIZER.digest
    assert ByteTokenizer(CHATML_CONTROLS[:-1]).digest != TOKENIZER.digest
