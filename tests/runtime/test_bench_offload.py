# SPDX-License-Identifier: Apache-2.0
"""The bench of experts from the disk, in small. Oracles: counts that are known beforehand, and a
naive least-recently-used list."""

import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from freetoken_runtime.bench import offload, offload_prefill
from freetoken_runtime.bench.offload_model import Stage, Tape, prepare, shapes, staged
from freetoken_runtime.bench.offload_rates import DiskProbe, KernelProbe, PreparedExperts
from freetoken_runtime.bench.timing import Figure
from freetoken_runtime.config import EngineConfig
from freetoken_runtime.experts.traces import Key, Trace, TraceShape, generate
from freetoken_runtime.spec import LayerSpec, ModelSpec
from freetoken_runtime.specs.attention import AttentionSpec
from freetoken_runtime.specs.moe import ExpertSpec, MoeSpec, RouterSpec
from freetoken_runtime.weight_source import Quant
from freetoken_storage.weights_direct import DirectReader

LAYERS, EXPERTS, TOP_K = 3, 32, 4
SHAPE = TraceShape(LAYERS, EXPERTS, TOP_K)

pytestmark = pytest.mark.usefixtures("one_thread")


def small() -> ModelSpec:
    """The form of the real one: every layer a mixture."""
    attention = AttentionSpec(4, 2, 16, None, qk_norm="head")
    mixture = MoeSpec(RouterSpec(EXPERTS, TOP_K, "softmax", normalise=True), ExpertSpec(32))
    layers = (LayerSpec(attention, mixture),) * LAYERS
    return replace(shapes(1), vocab_size=4000, hidden_size=64, layers=layers)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prepared")


@pytest.fixture
def stage(folder: Path) -> Iterator[Stage]:
    path = prepare(folder, small(), "int4", lambda share: None)
    trace = generate(SHAPE, 64, seed=3, locality=0.9)
    with staged(path, "int4", trace, EngineConfig(threads=1)) as stage:
        yield stage


def by_name(figures: list[Figure]) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures}


def test_the_shapes_are_those_of_the_model() -> None:
    """Oracle: 30.5 billion parameters with its 48 layers, of which 0.6 are the head and table of
    its own vocabulary; an expert in int4 is 2.8 MiB."""
    spec = shapes(48)
    count = 0
    for shape in spec.parameter_shapes().values():
        count += shape[0] * (shape[1] if len(shape) == 2 else 1)
    table = spec.vocab_size * spec.hidden_size
    assert 29.8e9 < count - 2 * table < 30.0e9


def test_a_prepared_model_is_prepared_once(tmp_path: Path) -> None:
    """Oracle: progress is reported for what is new only; another form is."""
    seen: list[float] = []
    path = prepare(tmp_path, small(), "int4", seen.append)
    assert seen[-1] == 1.0
    count = len(seen)
    assert prepare(tmp_path, small(), "int4", seen.append) == path
    assert len(seen) == count
    assert prepare(tmp_path, small(), None, seen.append) != path
    assert len(seen) > count


def test_routers_take_what_the_tape_says(stage: Stage) -> None:
    """A prompt of three rows, then three tokens. Oracle: five steps of the tape, of each layer; of
    its experts, those that were not there are fetched."""
    stage.give_slots(0)
    stage.give_slots(SHAPE.layers * SHAPE.experts)
    before, step = stage.store.counts, stage.tape.step
    stage.run([5, 6, 7], 3)
    assert stage.tape.at == [step + 5] * LAYERS
    wanted = set(stage.tape.played(step, step + 5).accesses())
    now = stage.store.counts
    assert now.fetched - before.fetched == now.misses - before.misses == len(wanted)
    assert now.read_bytes - before.read_bytes == len(wanted) * stage.store.demands()[0].size_bytes


def test_the_store_hits_as_often_as_a_list_of_the_least_recent(stage: Stage) -> None:
    """A quarter of the slots. Oracle: such a list, over the same steps; within a pass its order is
    not the router's, which may move a hit or two."""
    slots = SHAPE.slots(0.25)
    stage.give_slots(0)
    stage.give_slots(slots)
    before, step = stage.store.counts, stage.tape.step
    stage.run([9], 60)
    now = stage.store.counts
    held: list[Key] = []
    hits = 0
    for key in stage.tape.played(step, step + 60).accesses():
        hits += key in held
        held = [*(other for other in held if other != key), key][-slots:]
    asked = 60 * LAYERS * TOP_K
    assert now.hits - before.hits + now.misses - before.misses == asked
    assert abs((now.hits - before.hits) - hits) <= 0.02 * asked


def test_a_tape_begins_again_behind_its_end() -> None:
    """Oracle: the steps themselves."""
    trace = Trace(TraceShape(1, 9, 2), (((1, 2),), ((3, 4),), ((5, 6),)))
    tape = Tape(trace)
    assert tape.take(0, 2).tolist() == [[1, 2], [3, 4]]
    assert tape.take(0, 2).tolist() == [[5, 6], [1, 2]]
    assert tape.step == 4
    assert list(tape.played(2, 4).accesses()) == [(0, 5), (0, 6), (0, 1), (0, 2)]


def test_probes_count_the_bytes_that_they_read(folder: Path, stage: Stage) -> None:
    """Oracles: the sizes of records; the system's own count of what came from the disk."""
    prepared = PreparedExperts(prepare(folder, small(), "int4", lambda share: None))
    assert len(prepared.names) == LAYERS * EXPERTS
    with DirectReader() as reader:
        disk = DiskProbe(prepared, reader, 2)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
        assert disk.turn(50).amount == 50 * prepared.room
        blocks = resource.getrusage(resource.RUSAGE_SELF).ru_inblock - before
        assert reader.buffered or blocks * 512 >= 50 * prepared.room
        kernel = KernelProbe(prepared, reader, stage)
        assert kernel.expert_bytes == prepared.form.layout.size_bytes
        assert kernel.turn().amount == LAYERS * EXPERTS * kernel.expert_bytes


def test_decoding_is_reported_for_every_number_of_slots(folder: Path) -> None:
    """Oracle: what cannot be otherwise. All slots: no miss; fewer: what is read is what missed, and
    no eviction hits more than the best one; a short prompt reads what it chose."""
    turns: list[int] = []
    settings = offload.DecodeSettings(tokens=4, rounds=2, threads=1)
    figures = by_name(
        offload.measure(settings, folder, spec=small(), on_turn=lambda done, _: turns.append(done))
    )
    for share in ("10%", "25%", "50%", "100%"):
        at = f"slots for {share}"
        rate, best = figures[f"{at}: hit rate"].value, figures[f"{at}: hit rate"].baseline
        assert best is not None and 0 <= rate <= best <= 100
        assert figures[f"{at}: decode"].value > 0
    assert figures["slots for 100%: hit rate"].value == 100
    assert figures["slots for 100%: read per token"].value == 0
    assert figures["slots for 25%: decode"].target == offload.BOUND
    short = figures["prefill of 10 tokens: experts read"]
    assert short.met and short.value <= 10 * TOP_K * LAYERS
    assert turns[-1] == 100 + 4 * 3 * 3


@pytest.mark.parametrize("quant", [None, "int8", "int4"])
def test_a_long_prefill_reads_each_expert_once(folder: Path, quant: Quant | None) -> None:
    """Oracle: the number of experts."""
    settings = offload_prefill.PrefillSettings(tokens=200, rounds=1, threads=1)
    figures = offload_prefill.measure(settings, folder, quant, spec=small())
    named = {figure.name.split(": ")[1]: figure for figure in figures}
    assert named["experts read"].value == LAYERS * EXPERTS and named["experts read"].met
    assert named["prefill from the disk"].ratio is not None
    assert named["prefill from the disk"].target == offload_prefill.OVERLAP
