# SPDX-License-Identifier: Apache-2.0
"""A tokenizer of 256 bytes and a few named control tokens: no files, no dependencies."""

import codecs
import hashlib
import re
from collections.abc import Mapping, Sequence

from ..errors import TokenizerUnsupported

CHATML_CONTROLS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)


class ByteDecoder:
    """Joins bytes into text at UTF-8 boundaries. `piece` gives an id's bytes."""

    def __init__(self, pieces: Sequence[bytes], after: Sequence[int] = ()) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in after[-4:]:
            self.feed(token_id)

    def feed(self, token_id: int) -> str:
        return self._decoder.decode(self._pieces[token_id])

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class ByteTokenizer:
    """Ids 0–255 are bytes; `controls` follow from 256 on, in order.

    `stop`: the controls that end a turn. A `Tokenizer`; contents are bytes, so they cannot hold a
    control token.
    """

    def __init__(
        self,
        controls: Sequence[str] = CHATML_CONTROLS,
        *,
        stop: Sequence[str] = ("<|im_end|>", "<|endoftext|>"),
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        if len(set(controls)) != len(controls) or "" in controls:
            raise TokenizerUnsupported(
                "control tokens must be distinct and not empty", value=tuple(controls)
            )
        self._ids = {literal: 256 + index for index, literal in enumerate(controls)}
        self._pieces = [bytes([byte]) for byte in range(256)]
        self._pieces += [literal.encode() for literal in controls]
        longest_first = sorted(controls, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._stop_ids = frozenset(self._ids[name] for name in stop if name in self._ids)
        self._special_tokens = dict(
            {"bos_token": "", "eos_token": stop[0] if stop else ""}
            if special_tokens is None
            else special_tokens
        )
        self._chat_template = chat_template
        self._digest = hashlib.sha256("\0".join(("bytes", *controls)).encode()).hexdigest()

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    @property
    def digest(self) -> str:
        return self._digest

    @property
    def stop_ids(self) -> frozenset[int]:
        return self._stop_ids

    @property
    def special_tokens(self) -> Mapping[str, str]:
        return self._special_tokens

    @property
    def chat_template(self) -> str | None:
        return self._chat_template

    def split_frame(self, text: str) -> list[str | int]:
        parts: list[str | int] = []
        end = 0
        for match in self._pattern.finditer(text):
            if match.start() > end:
                parts.append(text[end : match.start()])
            parts.append(self._ids[match.group()])
            end = match.end()
        if end < len(text):
            parts.append(text[end:])
        return parts

    def encode_frame(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self.split_frame(text):
            if isinstance(part, str):
                ids.extend(part.encode())
            else:
                ids.append(part)
        return ids

    def encode_content(self, text: str, *, after: int | None = None) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def stream(self, *, after: Sequence[int] = ()) -> ByteDecoder:
        return ByteDecoder(self._pieces, after)

    def decode(self, ids: Sequence[int], *, after: Sequence[int] = ()) -> str:
        decoder = self.stream(after=after)
        return "".join(map(decoder.feed, ids)) + decoder.flush()

    def piece(self, token_id: int) -> bytes:
        return self._pieces[token_id] if token_id < len(self._pieces) else b""

    def is_control(self, token_id: int) -> bool:
        return token_id >= 256
