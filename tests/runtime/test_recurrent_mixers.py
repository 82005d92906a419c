# SPDX-License-Identifier: Apache-2.0
"""Mamba-2, the short convolution and delta rules as mixers, against transformers' own on the same
weights."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from freetoken_runtime.batch import Batch, Form, RowGroup, SequenceRows
from freetoken_runtime.layers.parallel import Parallel
from freetoken_runtime.layers.parts import Mixer
from freetoken_runtime.spec import StateSpec
from freetoken_runtime.specs.parallel import ParallelSpec
from freetoken_runtime.testing import ListState, build_checkpoint
from freetoken_runtime.weights import load

HIDDEN = 60
LENGTHS = [1, 2, 15, 16, 63, 64, 65, 257]
TOLERANCE = 1e-6  # of the range; seen: 4e-7
DRIFT = 5e-6  # of 512 steps, whose projections round otherwise than a prefill's; seen: 2e-6

FALCON = {"ssm_in_multiplier": 1.0}  # which transformers applies within its mixer, we around ours
FALCON_NORMED = {
    **FALCON,
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": True,
    "projectors_bias": True,
}
FALCON_GATED = {
    **FALCON,
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,
    "mamba_conv_bias": False,
}
FAMILIES: dict[str, tuple[str, dict[str, Any], Callable[[Any], Any]]] = {
    "granite": ("granitemoehybrid", {}, lambda model: model.model.layers[1].mamba),
    "granite with limits, biases, one group": (
        "granitemoehybrid",
        {"time_step_limit": (0.03, 0.08), "mamba_proj_bias": True, "mamba_n_groups": 1},
        lambda model: model.model.layers[1].mamba,
    ),
    "nemotron": ("nemotron_h", {}, lambda model: model.model.layers[4].mixer),
    "nemotron with a limit, biases": (
        "nemotron_h",
        {"time_step_min": 0.05, "use_bias": True},
        lambda model: model.model.layers[4].mixer,
    ),
    "falcon without norm": ("falcon_h1", FALCON, lambda model: model.model.layers[2].mamba),
    "falcon, norm then gate": (
        "falcon_h1",
        FALCON_NORMED,
        lambda model: model.model.layers[2].mamba,
    ),
    "falcon, norm of gated": ("falcon_h1", FALCON_GATED, lambda model: model.model.layers[2].mamba),
    "lfm2": ("lfm2_moe", {}, lambda model: model.model.layers[1].conv),
    "lfm2 with biases": (
        "lfm2_moe",
        {"conv_bias": True, "conv_L_cache": 5},
        lambda model: model.model.layers[1].conv,
    ),
    "qwen3_next": ("qwen3_next", {}, lambda model: model.model.layers[1].linear_attn),
    "qwen3_5, a value head per key head": (
        "qwen3_5_text",
        {"linear_num_key_heads": 6, "linear_conv_kernel_dim": 3},
        lambda model: model.model.layers[1].linear_attn,
    ),
    "kimi": ("kimi_linear", {}, lambda model: model.model.layers[1].self_attn),
}
LAYER = {"nemotron_h": 4, "falcon_h1": 2}  # of the mixer under test; 1 in all others


@dataclass(frozen=True)
class Pair:
    """A mixer of ours and transformers' with the same weights."""

    ours: Mixer
    state: StateSpec
    theirs: Any

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        """Transformers on a whole sequence at once."""
        with torch.no_grad():
            out: torch.Tensor = self.theirs(x[None], attention_mask=None)[0]
        return out

    def new_state(self) -> ListState:
        return ListState([self.state])


@pytest.fixture(scope="module", params=FAMILIES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    family, settings, find = FAMILIES[request.param]
    folder: Path = tmp_path_factory.mktemp("mixer")
    model = build_checkpoint(folder, family, **settings)
    decoder = load(folder).decoder
    layer = decoder._parts.layers[LAYER.get(family, 1)].mixer
    spec = decoder.spec.layers[LAYER.get(family, 1)].mixer
    assert layer is not None and spec is not None
    mixer: Mixer = layer.mixer
    if isinstance(mixer, Parallel):
        assert isinstance(spec, ParallelSpec)
        mixer, spec = mixer.mamba, spec.mamba
    yield Pair(mixer, spec.state(), find(model))
    torch.set_num_threads(before)


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def run(
    pair: Pair,
    parts: Sequence[tuple[ListState, torch.Tensor]],
    cuts: Sequence[tuple[int, ...]] | None = None,
) -> list[torch.Tensor]:
    """One pass over new rows of several sequences, each in a group of its own."""
    sequences, groups, start = [], [], 0
    for index, (state, x) in enumerate(parts):
        stop = start + len(x)
        sequences.append(SequenceRows(state, start, stop, cuts[index] if cuts else ()))
        groups.append(RowGroup(start, stop, Form.FEW if len(x) < 16 else Form.MANY))
        start = stop
    nothing = torch.zeros(start, dtype=torch.long)
    out = pair.ours(
        torch.cat([x for _, x in parts]), Batch(nothing, nothing, sequences, groups), 0, None
    )
    for state, x in parts:
        state.commit([0] * len(x))
    return list(torch.split(out.float(), [len(x) for _, x in parts]))


def distance(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference as a part of the range of what is expected."""
    assert ours.shape == expected.shape and bool(ours.isfinite().all())
    return float((ours - expected).abs().max() / (expected.max() - expected.min()))


@pytest.mark.parametrize("length", LENGTHS)
def test_a_sequence_equals_transformers_mixer(pair: Pair, length: int) -> None:
    """Oracle: transformers' mixer in torch, without a cache."""
    x = rows(length)
    (ours,) = run(pair, [(pair.new_state(), x)])
    assert distance(ours, pair.expected(x)) < TOLERANCE


@pytest.mark.parametrize("more", [1, 2, 63, 64, 65, 257])
def test_c34_rows_appended_to_a_populated_state(pair: Pair, more: int) -> None:
    """Oracle: transformers' mixer over the whole sequence."""
    x, state = rows(40 + more), pair.new_state()
    run(pair, [(state, x[:40])])
    (ours,) = run(pair, [(state, x[40:])])
    assert distance(ours, pair.expected(x)[40:]) < TOLERANCE


@pytest.mark.parametrize("length", [63, 64, 65])
def test_m22_a_prefill_equals_a_prefill_and_a_step(pair: Pair, length: int) -> None:
    """Oracle: one pass, of the last row and of every buffer after it."""
    x, one, two = rows(length), pair.new_state(), pair.new_state()
    (whole,) = run(pair, [(one, x)])
    run(pair, [(two, x[:-1])])
    (step,) = run(pair, [(two, x[-1:])])
    assert float((step - whole[-1:]).abs().max() / (whole.max() - whole.min())) < TOLERANCE
    for stepped, expected in zip(two.fixed(0), one.fixed(0), strict=True):
        assert distance(stepped, expected) < TOLERANCE


def test_m23_512_steps_stay_with_a_prefill(pair: Pair) -> None:
    """Oracle: one prefill of ours, and transformers' mixer: outputs and buffers do not drift."""
    x, one, two = rows(512), pair.new_state(), pair.new_state()
    (whole,) = run(pair, [(one, x)])
    steps = torch.cat([run(pair, [(two, row)])[0] for row in torch.split(x, 1)])
    assert distance(steps, whole) < DRIFT
    assert distance(steps, pair.expected(x)) < DRIFT
    for stepped, expected in zip(two.fixed(0), one.fixed(0), strict=True):
        assert distance(stepped, expected) < DRIFT


@pytest.mark.parametrize("cuts", [(1,), (64,), (1, 2, 3), (63, 65, 130)], ids=str)
def test_a_cut_hands_over_the_state_of_its_prefix(pair: Pair, cuts: tuple[int, ...]) -> None:
    """Oracle: the pass without cuts, and at every cut the state after a pass
    over that prefix alone; going on from there gives the rest."""
    x, state = rows(140), pair.new_state()
    (ours,) = run(pair, [(state, x)], [cuts])
    (whole,) = run(pair, [(pair.new_state(), x)])
    assert distance(ours, whole) < TOLERANCE
    for cut in cuts:
        alone = pair.new_state()
        run(pair, [(alone, x[:cut])])
        resumed = state.cut(cut)
        for kept, expected in zip(resumed.fixed(0), alone.fixed(0), strict=True):
            assert distance(kept, expected) < TOLERANCE
        (rest,) = run(pair, [(resumed, x[cut:])])
        assert distance(rest, whole[cut:]) < TOLERANCE


def test_what_is_handed_over_is_memory_of_its_own(pair: Pair) -> None:
    """Oracle: the storage behind each buffer holds nothing else, and overwriting what was handed
    over before changes nothing handed over later."""
    x, state = rows(50), pair.new_state()
    run(pair, [(state, x)], [(1, 20)])
    kept = [state.cut(at).fixed(0) for at in (1, 20, 50)]
    assert all(b.untyped_storage().nbytes() == b.nbytes for buffers in kept for b in buffers)
    last = [buffer.clone() for buffer in kept[2]]
    for buffers in kept[:2]:
        for buffer in buffers:
            buffer.fill_(float("nan"))
    assert all(torch.equal(a, b) for a, b in zip(kept[2], last, strict=True))


def test_a_state_that_is_read_is_not_changed(pair: Pair) -> None:
    """Oracle: a copy made before: an anchor or another sequence may hold the same memory."""
    x, state = rows(90), pair.new_state()
    run(pair, [(state, x[:20])])
    copies = [buffer.clone() for buffer in state.fixed(0)]
    for more in (1, 70):
        run(pair, [(state.cut(20), x[20 : 20 + more])])
        assert all(torch.equal(a, b) for a, b in zip(state.fixed(0), copies, strict=True))


def test_a_row_sees_its_own_sequence_only(pair: Pair) -> None:
    """Oracle: each sequence alone, bit for bit, from a state of its own that is not zero; a
    neighbour full of NaN reaches nobody."""
    lengths = (33, 1, 70, 5)

    def populated(seed: int) -> ListState:
        state = pair.new_state()
        run(pair, [(state, rows(20, 100 + seed))])
        return state

    alone = [run(pair, [(populated(n), rows(n, n))])[0] for n in lengths]
    parts = [(populated(n), rows(n, n)) for n in lengths]
    sick = (pair.new_state(), torch.full((9, HIDDEN), float("nan")))
    together = run(pair, [*parts[:2], sick, *parts[2:]])
    del together[2]
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
