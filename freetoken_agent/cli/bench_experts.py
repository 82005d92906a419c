# SPDX-License-Identifier: Apache-2.0
"""`bench experts`: a mixture in memory beside transformers' grouped experts.

Writing the model and its conversions takes minutes and 5 GB of disk, so a folder may be named that
keeps them.
"""

from pathlib import Path

from freetoken_runtime.bench.timing import Figure, OnTurn

from .bench_measures import Measure, kept_or_temporary

EXPERTS_MODEL = "random weights, 4 layers of Qwen3-30B-A3B's shapes with 64 experts"


def experts_measures(folder: Path | None, rounds: int, threads: int | None) -> dict[str, Measure]:
    """The measurement, by its label. `folder`: where the models are kept; None: nowhere."""

    def measure(on_turn: OnTurn) -> list[Figure]:
        from freetoken_runtime.bench import experts

        settings = experts.ExpertsSettings(rounds=rounds, threads=threads)
        with kept_or_temporary(folder) as name:
            return experts.measure(settings, Path(name), on_turn=on_turn)

    return {"experts": measure}
