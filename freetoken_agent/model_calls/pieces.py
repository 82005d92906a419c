# SPDX-License-Identifier: Apache-2.0
"""The bytes of each id, and text from them at UTF-8 boundaries.

Two families of decoders cover the chat models: byte-level BPE, whose pieces spell bytes in a
256-letter alphabet, and SentencePiece-like ones, whose pieces spell blanks as U+2581 and rare bytes
as `<0xE2>`. Decoding by bytes is independent of chunking, which the library's own decoder is not.
"""

import codecs
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from ..errors import TokenizerUnsupported

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BLANK = "\u2581"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones stand for themselves, the others follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    letters.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return letters


BYTE_ALPHABET = _byte_alphabet()


class PieceTable:
    """Id -> bytes, worked out on first use. Ids outside the vocabulary (a model's padding rows)
    are empty."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        definition: Mapping[str, Any],
        added: Mapping[int, str],
    ) -> None:
        self._tokenizer = tokenizer
        self._byte_level = is_byte_level(definition.get("decoder"))
        self._pieces = {token_id: literal.encode() for token_id, literal in added.items()}

    def __getitem__(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._spell(self._tokenizer.id_to_token(token_id))
        return piece

    def _spell(self, piece: str | None) -> bytes:
        if piece is None:
            return b""
        if self._byte_level:
            try:
                return bytes(BYTE_ALPHABET[letter] for letter in piece)
            except KeyError:
                return piece.encode()
        if match := _BYTE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace(_BLANK, " ").encode()


def is_byte_level(decoder: Any) -> bool:
    """Whether pieces spell bytes by GPT-2's alphabet. TokenizerUnsupported for other decoders than
    the two families of this module."""
    stages = [] if decoder is None else [decoder]
    if stages and decoder["type"] == "Sequence":
        stages = decoder["decoders"]
    kinds = [stage["type"] for stage in stages]
    if kinds == ["ByteLevel"]:
        return True
    if kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return False
    raise TokenizerUnsupported(
        "unknown kind of decoder in tokenizer.json",
        value=kinds or None,
        limit="ByteLevel, or SentencePiece-like (Replace, ByteFallback, Fuse, Strip, Metaspace)",
        remedy="use a byte-level BPE or a SentencePiece model",
    )


class PieceDecoder:
    """A `TextDecoder`. `strip_after`: ids after which the tokenizer had put a blank of its own,
    which is not text."""

    def __init__(
        self, pieces: PieceTable, strip_after: frozenset[int], after: Sequence[int] = ()
    ) -> None:
        self._pieces = pieces
        self._strip_after = strip_after
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = False
        for token_id in after[-4:]:  # a UTF-8 sequence has at most four bytes
            self.feed(token_id)

    def feed(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if self._strip:
            piece = piece.removeprefix(b" ")
        self._strip = token_id in self._strip_after
        return self._decoder.decode(piece)

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
