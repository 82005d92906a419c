# SPDX-License-Identifier: Apache-2.0
"""The bench on a hybrid, in small. Oracle: the counts that its own targets name."""

from pathlib import Path

import pytest

from freetoken_runtime.bench.hybrid import HybridSettings, measure, shapes
from freetoken_runtime.spec import LayerSpec, ModelSpec
from freetoken_runtime.specs.attention import AttentionSpec
from freetoken_runtime.specs.gated_delta import GatedDeltaSpec
from freetoken_runtime.specs.mlp import MlpSpec


def test_the_shapes_are_those_of_the_model() -> None:
    """Oracle: 35 billion parameters, of which the head and the table are 1.0, with all layers and
    experts; three of four layers overwrite 2 MiB and a convolution's tail."""
    spec = shapes(40, 256)
    count = sum(_product(shape) for name, shape in spec.parameter_shapes().items())
    table = spec.parameter_shapes()["embedding"]
    assert 33.0e9 < count - 2 * _product(table) < 34.5e9
    assert sum(state.bytes_per_anchor() > 1 << 21 for state in spec.states()) == 30


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


@pytest.mark.usefixtures("one_thread")
def test_rows_gap_and_restart(tmp_path: Path) -> None:
    """Rows as planned, a gap within the interval, a restart that forwards nothing."""
    delta = GatedDeltaSpec(2, 4, key_dim=8, head_dim=8, kernel=4)
    layers = (LayerSpec(delta, MlpSpec(64)), LayerSpec(AttentionSpec(4, 2, 8, None), None))
    spec = ModelSpec("small", 300, 32, layers, 1e-6, tied_head=False, context_limit=4096)
    settings = HybridSettings(tokens=300, rounds=2, threads=1, prefill_chunk=64, anchor_interval=50)
    turns: list[int] = []
    figures = measure(settings, tmp_path, spec=spec, on_turn=lambda done, _: turns.append(done))
    by_name = {figure.name: figure for figure in figures}
    assert by_name["edit at 50 %: rows beside the plan"].value == 0
    assert 0 <= by_name["edit at 50 %: gap to the anchor"].value <= 50
    assert by_name["restart: to the first token"].note == "0 rows forwarded"
    assert turns == list(range(1, 9))
