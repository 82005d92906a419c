# SPDX-License-Identifier: Apache-2.0
"""The bench of elastic memory, in small. Oracle: its own parts: the runs must agree."""

from dataclasses import replace
from pathlib import Path

import pytest

from freetoken_runtime.bench.elastic import ElasticSettings, measure, shapes

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_bench_prints_every_figure(tmp_path: Path) -> None:
    """Both times and their ratio; no run with other tokens, nothing counted above the budget."""
    spec = replace(shapes(num_layers=2, num_experts=8), vocab_size=211)
    settings = ElasticSettings(320, answer_tokens=3, beside_tokens=5, threads=1)
    turns: list[tuple[int, int]] = []
    figures = measure(settings, tmp_path, spec=spec, on_turn=lambda *turn: turns.append(turn))
    by_name = {figure.name: figure for figure in figures}
    total = by_name["all turns, elastic"]
    assert total.baseline is not None and total.ratio == total.baseline / total.value
    assert [f.name for f in figures if f.met is not None] == [
        "runs with other tokens",
        "counted above the budget, at most",
    ]
    assert all(figure.met is not False for figure in figures)
    assert turns == [(n, 27) for n in range(1, 28)]
