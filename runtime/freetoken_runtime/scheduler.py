# SPDX-License-Identifier: Apache-2.0
"""Which sequences go into the next pass, and with how many rows. Pure policy: no tensor, no clock.

Every sequence that can decode takes one row; one prompt adds a chunk, so that a long prompt delays
a neighbour by one chunk at a time. A chunk's length depends on its own prompt alone: attention is
not bitwise invariant to how rows are cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """A running request: `missing` rows of its prompt, or 0 when it decodes; `ready`: its consumer
    has room for a token."""

    missing: int
    ready: bool


class Scheduler:
    """Takes turns among prompts and, beyond `max_batch`, among decoding sequences."""

    def __init__(self, prefill_chunk: int, max_batch: int) -> None:
        self._prefill_chunk = prefill_chunk
        self._max_batch = max_batch
        self._prompt_turn = 0
        self._decode_turn = 0

    def next_rows(self, candidates: Sequence[Candidate]) -> dict[int, int]:
        """Rows of the next pass by candidate index; empty when nobody can go on."""
        decoding = [i for i, c in enumerate(candidates) if not c.missing and c.ready]
        prompts = [i for i, c in enumerate(candidates) if c.missing]
        rows: dict[int, int] = {}
        for offset in range(min(len(decoding), self._max_batch)):
            rows[decoding[(self._decode_turn + offset) % len(decoding)]] = 1
        if len(decoding) > self._max_batch:
            self._decode_turn += self._max_batch
        if prompts:
            chosen = prompts[self._prompt_turn % len(prompts)]
            rows[chosen] = min(self._prefill_chunk, candidates[chosen].missing)
            self._prompt_turn += 1
        return rows
