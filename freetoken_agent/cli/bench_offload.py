# SPDX-License-Identifier: Apache-2.0
"""`bench offload`: decoding and prefilling with experts that come from the disk.

Preparing the models takes minutes and 9 GB of disk, so a folder may be named that keeps them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from freetoken_runtime.bench.timing import Figure, OnTurn
from freetoken_runtime.config import Quant

from .bench_measures import Measure, kept_or_temporary


class Part(StrEnum):
    """What is measured: decoding in int4, or a long prefill in one form of the weights."""

    DECODE = "decode"
    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"


_QUANTS: Mapping[Part, Quant | None] = {Part.NONE: None, Part.INT8: "int8", Part.INT4: "int4"}


@dataclass(frozen=True)
class OffloadSettings:
    """`folder`: where prepared models are kept; None: nowhere."""

    parts: tuple[Part, ...] = tuple(Part)
    folder: Path | None = None
    rounds: int = 6
    threads: int | None = None


def offload_measures(settings: OffloadSettings) -> dict[str, Measure]:
    """A measurement for each part, by its label."""
    return {f"offload: {part}": _measure(settings, part) for part in settings.parts}


def _measure(settings: OffloadSettings, part: Part) -> Measure:
    def measure(on_turn: OnTurn) -> list[Figure]:
        from freetoken_runtime.bench import offload, offload_prefill

        with kept_or_temporary(settings.folder) as name:
            folder = Path(name)
            if part is Part.DECODE:
                decoding = offload.DecodeSettings(rounds=settings.rounds, threads=settings.threads)
                return offload.measure(decoding, folder, on_turn=on_turn)
            rounds = -(-settings.rounds // 2)  # each is longer
            prefilling = offload_prefill.PrefillSettings(rounds=rounds, threads=settings.threads)
            return offload_prefill.measure(prefilling, folder, _QUANTS[part], on_turn=on_turn)

    return measure
