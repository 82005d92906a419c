# SPDX-License-Identifier: Apache-2.0
"""What every measurement of `bench` is, and where those that prepare models keep them."""

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from freetoken_runtime.bench.timing import Figure, OnTurn

Measure = Callable[[OnTurn], list[Figure]]


def kept_or_temporary(kept: Path | None) -> AbstractContextManager[str]:
    """The folder that keeps prepared models, made if need be; else one that goes again."""
    if kept is None:
        return tempfile.TemporaryDirectory(prefix="freetoken-bench-")
    kept.mkdir(parents=True, exist_ok=True)
    return nullcontext(str(kept))
