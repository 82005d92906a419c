# SPDX-License-Identifier: Apache-2.0
"""Views of frozen rows: the parts a path is made of, and a picture of a whole path."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .buffers import KVBuffer
from .digest import Ids


@dataclass(frozen=True)
class Span:
    """The first `rows` rows of a buffer. They never change."""

    buffer: KVBuffer
    rows: int


@dataclass(frozen=True)
class PathView:
    """A frozen picture of a sequence, for the persister: stays valid whatever the sequence does."""

    ids: Ids
    spans: tuple[Span, ...]

    def copy_rows(self, start: int, stop: int) -> dict[str, npt.NDArray[np.uint8]]:
        """The rows of tokens [start, stop) of the path as named, contiguous bytes of
        [L, rows, H, D]. Copied by numpy: torch would start a team of threads of its own here."""
        parts: dict[str, list[npt.NDArray[np.uint8]]] = {}
        offset = 0
        for span in self.spans:
            low, high = max(start, offset), min(stop, offset + span.rows)
            if low < high:
                rows = span.buffer.rows(low - offset, high - offset)
                for name, tensor in rows.items():
                    parts.setdefault(name, []).append(tensor.view(torch.uint8).numpy())
            offset += span.rows
        return {name: np.concatenate(pieces, axis=1) for name, pieces in parts.items()}


def cut(spans: Sequence[Span], rows: int) -> list[Span]:
    """The spans of the first `rows` rows."""
    kept: list[Span] = []
    for span in spans:
        if rows <= 0:
            break
        take = min(rows, span.rows)
        if take:
            kept.append(Span(span.buffer, take))
        rows -= take
    return kept
