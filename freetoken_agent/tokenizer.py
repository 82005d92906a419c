# SPDX-License-Identifier: Apache-2.0
"""Text to ids and back, with a wall between frames and contents."""

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Two encoders over one vocabulary: `encode_frame` knows the control tokens, `encode_content`
    cannot produce one whatever the text says."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def digest(self) -> str:
        """Hex digest of everything that decides ids; part of a session's binding."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a turn by the model's own configuration."""

    def encode_frame(self, text: str) -> list[int]:
        """Template text: added and control tokens become their ids."""

    def encode_content(self, text: str, *, after: int | None = None) -> list[int]:
        """User, tool or model text: never a control or added id. `after`: the id before it."""

    def decode(self, ids: Sequence[int], *, after: Sequence[int] = ()) -> str:
        """Text of `ids` in the context of their predecessors `after`; control tokens appear as
        their literals; invalid UTF-8 as U+FFFD."""

    def is_control(self, token_id: int) -> bool: ...


class TextDecoder(Protocol):
    """Streaming: text as soon as it is whole. Built by `tokenizer.stream(after=ids)`."""

    def feed(self, token_id: int) -> str:
        """The text that became complete ('' while inside a UTF-8 sequence)."""

    def flush(self) -> str:
        """What is left; an unfinished sequence as U+FFFD."""
