# SPDX-License-Identifier: Apache-2.0
"""`bench elastic`: turns of a session beside one that decodes, with memory that moves between
experts and states, and without."""

import tempfile
from pathlib import Path

from freetoken_runtime.bench.timing import Figure, OnTurn

from .bench_measures import Measure

ELASTIC_MODEL = "random weights, a mixture of 48 experts"


def elastic_measures(tokens: int, threads: int | None) -> dict[str, Measure]:
    """The measurement, by its label. `tokens`: of the longest turn."""

    def measure(on_turn: OnTurn) -> list[Figure]:
        from freetoken_runtime.bench import elastic

        settings = elastic.ElasticSettings(tokens, threads=threads)
        with tempfile.TemporaryDirectory(prefix="freetoken-bench-") as folder:
            return elastic.measure(settings, Path(folder), on_turn=on_turn)

    return {"elastic": measure}
