# SPDX-License-Identifier: Apache-2.0
"""The bench of mixtures in memory on a tiny one. Oracles: what is asked of it; transformers itself,
which loads the same checkpoint; figures that other figures of the run imply."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from freetoken_runtime.bench.baseline import Baseline, available
from freetoken_runtime.bench.experts import CONFIG, FORMS, ExpertsSettings, measure, prepare
from freetoken_runtime.config import Prefill, Quant
from freetoken_runtime.models.registry import read_family
from freetoken_runtime.oracle import distance, forward, new_state
from freetoken_runtime.weights import load

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = {
    **CONFIG,
    "vocab_size": 3000,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("experts")
    prepare(made, TINY)
    return made


def test_the_shapes_are_those_of_the_model() -> None:
    """Oracle: numbers of Qwen3-30B-A3B's card: a token meets 3.3 billion of 30.5 billion parameters
    in 48 layers of 128 experts. Here 64 of them, in 4 layers."""
    _, spec = read_family({**CONFIG, "num_hidden_layers": 48, "num_experts": 128})
    count = sum(torch.Size(shape).numel() for shape in spec.parameter_shapes().values())
    tables = 2 * (151_936 - CONFIG["vocab_size"]) * 2048  # of its own vocabulary
    assert round((count + tables) / 1e9, 1) == 30.5
    assert (CONFIG["num_hidden_layers"], CONFIG["num_experts"]) == (4, 64)


def test_both_hold_the_same_weights(folder: Path) -> None:
    """Oracle: transformers' logits after the same ids, fp32, within 1e-4 of their range."""
    if not available():
        pytest.skip("transformers is not installed")
    ids = list(range(100, 140))
    theirs = Baseline.of_checkpoint(folder / "checkpoint", torch.float32)
    with torch.inference_mode():
        expected = theirs._model(torch.tensor([ids])).logits[0]
    decoder = load(folder / "checkpoint").decoder
    ours = forward(decoder, [(new_state(decoder), ids)])[0]
    assert distance(ours, expected) < 1e-4


@pytest.mark.parametrize(
    "forms", [FORMS[::4], pytest.param(FORMS, marks=pytest.mark.slow)], ids=["two", "all"]
)
def test_every_form_is_measured_and_judged(
    folder: Path, forms: Sequence[tuple[Quant, Prefill]]
) -> None:
    """Oracle: the tasks and forms asked for. Rates are positive, ratios are those of the rates (one
    round), rounding to int8 errs more than rounding to two parts of it, and neither not at all."""
    settings = ExpertsSettings({40: 1.1, 80: 1.5}, tokens=4, rounds=1, forms=forms, threads=1)
    figures = {figure.name: figure for figure in measure(settings, folder, config=TINY)}
    prefills = [name for name in figures if name.startswith("prefill") and "llama" not in name]
    assert len(prefills) == 2 * len(forms)
    for quant in (quant for quant, prefill in forms if prefill == "exact"):
        hog = figures[f"decode beside a hog, {quant}"]
        assert hog.baseline == figures[f"decode, {quant}"].value
        assert hog.target is not None and hog.target.value == 0.4
    for name in prefills:
        figure = figures[name]
        assert figure.value > 0
        if available():
            assert figure.baseline is not None and figure.ratio is not None
            assert figure.ratio == pytest.approx(figure.value / figure.baseline)
    targets = {name: target.value for name in prefills if (target := figures[name].target)}
    assert targets["prefill 80 tokens, int4"] == 1.5
    assert targets["prefill 40 tokens, int8, activations in int8"] == 2.5
    assert "prefill 40 tokens, int4, activations in bfloat16" not in targets
    coarse, fine = (
        figures[f"error of a mixture's output, int8, activations in {way}"].value
        for way in ("int8", "int16")
    )
    assert 0.0 < fine < coarse < 0.1
    assert figures["decode, llama.cpp Q4_0"].met is None
