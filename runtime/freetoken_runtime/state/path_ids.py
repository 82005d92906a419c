# SPDX-License-Identifier: Apache-2.0
"""What a caller may pass as a token path."""

from collections.abc import Sequence

import numpy as np

from ..errors import ContextOverflow, InvalidIds
from .digest import Ids


def check_path(ids: Sequence[int] | Ids, vocab_size: int, context_limit: int) -> Ids:
    """The ids as int32. InvalidIds, ContextOverflow."""
    try:
        path = np.asarray(ids)
    except ValueError:  # a list of lists of unequal lengths
        path = np.empty((0, 0))
    if path.ndim != 1 or len(path) == 0 or path.dtype.kind not in "iu":
        raise InvalidIds(
            "a path is a non-empty sequence of token ids", value=_short(ids), remedy="pass ids"
        )
    if len(path) > context_limit:
        raise ContextOverflow(
            "the path is longer than the model's context",
            value=f"{len(path)} tokens",
            limit=f"{context_limit} tokens",
            remedy="drop or shorten segments, or rewind",
        )
    wrong = np.flatnonzero((path < 0) | (path >= vocab_size))
    if len(wrong):
        raise InvalidIds(
            f"id at position {wrong[0]} is not in the vocabulary",
            value=int(path[wrong[0]]),
            limit=f"0 to {vocab_size - 1}",
        )
    return np.array(path, dtype=np.int32)


def _short(ids: object) -> str:
    text = repr(ids)
    return text if len(text) <= 80 else text[:77] + "..."
