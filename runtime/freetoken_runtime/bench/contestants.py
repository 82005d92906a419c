# SPDX-License-Identifier: Apache-2.0
"""Who takes turns in a measurement: engines of every weight form, over the same file."""

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ..config import EngineConfig, Quant
from ..engine import Engine

BASELINE = "transformers"


class Prompts:
    """Seeded random ids, another list at each call: nothing of it can be reused.

    The first 1,000 ids are left out: control tokens live there or at the very end.
    """

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._low = min(1000, vocab_size // 4)
        self._high = vocab_size - self._low

    def draw(self, count: int) -> list[int]:
        return [self._random.randrange(self._low, self._high) for _ in range(count)]


def name_of(quant: Quant | None) -> str:
    """How figures call a weight form."""
    return quant or "fp32"


@contextmanager
def engines(
    path: Path, quants: Sequence[Quant | None], threads: int | None
) -> Iterator[dict[str, Engine]]:
    """One engine per weight form, without a store, by name; closed at the end of the block."""
    with ExitStack() as stack:
        loaded: dict[str, Engine] = {}
        for quant in quants:
            engine = Engine.load(path, EngineConfig(dtype="float32", quant=quant, threads=threads))
            stack.callback(engine.close)
            loaded[name_of(quant)] = engine
        yield loaded
