# SPDX-License-Identifier: Apache-2.0
"""Text to ids and back, with a wall between frames and contents.

A tokenizer here is two encoders over one vocabulary. The frame encoder reads the chat template's
own text and knows the control tokens. The content encoder reads what users, tools and models
wrote and cannot produce a control token, whatever the text says.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol


class TextDecoder(Protocol):
    """Streaming: text as soon as it is whole. Built by `tokenizer.stream(after=ids)`. The pieces
    joined equal `decode(ids, after=…)` of the same ids."""

    def feed(self, token_id: int) -> str:
        """The text that became complete ('' while inside a UTF-8 sequence)."""

    def flush(self) -> str:
        """What is left; an unfinished sequence as U+FFFD."""


class Tokenizer(Protocol):
    """Two encoders over one vocabulary: `encode_frame` knows the control tokens, `encode_content`
    cannot produce one whatever the text says. Methods may be called from any thread."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def digest(self) -> str:
        """Hex digest of everything that decides ids; part of a session's binding."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a turn by the model's own configuration."""

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """What chat templates may name: `bos_token`, `eos_token`, … -> literal."""

    @property
    def chat_template(self) -> str | None:
        """The chat template that came with the tokenizer."""

    def encode_frame(self, text: str) -> list[int]:
        """Template text: added and control tokens become their ids."""

    def encode_content(self, text: str, *, after: int | None = None) -> list[int]:
        """User, tool or model text: never a control or added id. `after`: the id before it."""

    def split_frame(self, text: str) -> list[str | int]:
        """Template text cut at its control tokens: plain runs and control ids, in order."""

    def decode(self, ids: Sequence[int], *, after: Sequence[int] = ()) -> str:
        """Text of `ids` in the context of their predecessors `after`; control tokens appear as
        their literals; invalid UTF-8 as U+FFFD."""

    def stream(self, *, after: Sequence[int] = ()) -> TextDecoder:
        """A decoder for ids that follow `after`."""

    def piece(self, token_id: int) -> bytes:
        """What an id contributes to the text; a control token's literal. Empty outside the
        vocabulary."""

    def is_control(self, token_id: int) -> bool:
        """Whether the id is an added or control token: one that no content can hold."""


def encode_mixed(
    tokenizer: Tokenizer, parts: Sequence[tuple[str, bool]], *, after: int | None = None
) -> tuple[int, ...]:
    """Ids of a text made of template literals and contents. `parts`: (text, is_content).

    Control tokens come from literals only. The plain text between two control tokens is encoded in
    one run, so that a call's JSON gets the ids it would get as a whole.
    """
    ids: list[int] = []
    run = ""

    def close() -> None:
        nonlocal run
        if run:
            ids.extend(tokenizer.encode_content(run, after=ids[-1] if ids else after))
            run = ""

    for text, is_content in parts:
        if is_content:
            run += text
            continue
        for piece in tokenizer.split_frame(text):
            if isinstance(piece, str):
                run += piece
            else:
                close()
                ids.append(piece)
    close()
    return tuple(ids)
