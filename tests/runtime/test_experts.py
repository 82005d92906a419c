# SPDX-License-Identifier: Apache-2.0
"""Experts in slots compute what experts in memory compute, bit for bit, wherever they come from.
The oracle of every test is the same model with all weights in memory, unless it names another."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from freetoken_runtime.batch import Form
from freetoken_runtime.conversion import convert
from freetoken_runtime.errors import InvalidConfig
from freetoken_runtime.expert_cases import ALONE, EXPERTS, FOUR, TOP_K, build_half, outputs, same
from freetoken_runtime.experts.slots import Slot
from freetoken_runtime.experts.store import ExpertStore
from freetoken_runtime.experts.tiers import Tier
from freetoken_runtime.family_configs import FAMILY_CONFIGS
from freetoken_runtime.kernels.experts.cpu import Demand
from freetoken_runtime.models.registry import FAMILIES
from freetoken_runtime.reports import Offload
from freetoken_runtime.specs.moe import MoeSpec
from freetoken_runtime.testing import build_checkpoint
from freetoken_runtime.weight_source import Quant
from freetoken_runtime.weights import LoadedModel, load, open_source

pytestmark = pytest.mark.usefixtures("one_thread")

SLOTS = (TOP_K, 2 * TOP_K, EXPERTS // 2, EXPERTS)
MIXTURES = [
    family
    for family in FAMILIES
    if family in FAMILY_CONFIGS
    and any("experts" in x or x == "moe_k" for x in FAMILY_CONFIGS[family])
]
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    @cache
    def build(family: str) -> Path:
        return build_half(tmp_path_factory.mktemp(family), family)

    return build


def in_slots(
    path: Path, level: Offload, slots: int | None = None, quant: Quant | None = None
) -> LoadedModel:
    """A model whose free slots are NaN."""
    model = load(path, offload=level, expert_slots=slots, quant=quant)
    counts = [len(pool) for pool in model.experts._pools.values()]
    model.experts.resize(counts, poison=True)
    return model


class Loads:
    """Every load of a store's tiers, in order, as (layer, expert)."""

    def __init__(self, store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys: list[tuple[int, int]] = []
        for number, layer in enumerate(store._layers):
            monkeypatch.setattr(layer.tier, "load", self._counted(number, layer.tier))

    def _counted(self, number: int, tier: Tier) -> Callable[[int, memoryview], int]:
        load = tier.load

        def counted(expert: int, memory: memoryview) -> int:
            self.keys.append((number, expert))
            return load(expert, memory)

        return counted

    def take(self) -> list[tuple[int, int]]:
        keys, self.keys = self.keys, []
        return keys


def wanted_by(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> list[set[tuple[int, int]]]:
    """What each pass asks of a store, filled as passes go on."""
    passes: list[set[tuple[int, int]]] = []
    serve = model.experts.serve

    def watched(number: int, wanted: Sequence[Demand], rows: int) -> Any:
        if number == 0:
            passes.append(set())
        passes[-1] |= {(number, demand.expert) for demand in wanted}
        return serve(number, wanted, rows)

    monkeypatch.setattr(model.experts, "serve", watched)
    return passes


def test_every_family_with_experts_is_here() -> None:
    """Oracle: the specs of all families' small models."""
    assert len(MIXTURES) >= 16


@pytest.mark.parametrize("family", MIXTURES)
def test_m16_offload_gives_the_same_bits(folder: Folders, family: str) -> None:
    """None, RAM and disk, k to E slots, one sequence and four."""
    path = folder(family)
    resident = load(path)
    layers = [x for x in resident.spec.layers if isinstance(x.feed_forward, MoeSpec)]
    assert layers and resident.experts.level == "none"
    expected = [outputs(resident, steps) for steps in (ALONE, FOUR)]
    levels: tuple[Offload, ...] = ("ram", "disk")
    for level in levels:
        for slots in SLOTS:
            model = in_slots(path, level, slots)
            for steps, theirs in zip((ALONE, FOUR), expected, strict=True):
                assert same(outputs(model, steps), theirs), (level, slots)
            counts = model.experts.counts
            assert (counts.level, counts.slots) == (level, slots)
            assert counts.misses > 0 and (counts.read_bytes > 0) == (level == "disk")
            assert model.decoder.size_bytes < resident.decoder.size_bytes
            assert model.fingerprint_parts() == resident.fingerprint_parts()
            model.experts.close()


@pytest.mark.parametrize("quant", [None, "int8", "int4"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_quantised_experts_from_files_and_from_records(
    folder: Folders, tmp_path: Path, family: str, quant: Quant | None
) -> None:
    """From safetensors each fetch quantises anew; a record's bytes are the slot's where they are
    of its form, and converted where weights stay floating point or are quantised from there."""
    original = folder(family)
    expected = outputs(load(original, quant=quant), FOUR)
    convert(original, tmp_path / "same", quant=quant)
    convert(original, tmp_path / "plain")
    for path in (original, tmp_path / "same", tmp_path / "plain"):
        for slots in (TOP_K, EXPERTS):
            model = in_slots(path, "disk", slots, quant)
            assert same(outputs(model, FOUR), expected), (path.name, slots)
            model.experts.close()


def test_m15_poison_in_free_slots_does_not_leak(folder: Folders) -> None:
    """Free slots hold NaN before each pass, whatever somebody left there, and slots that lose their
    expert again; and no NaN comes out."""
    path = folder("mixtral")
    model, expected = in_slots(path, "disk", 48), outputs(load(path), ALONE)
    (pool,) = model.experts._pools.values()

    def poisoned(slot: Slot) -> bool:
        return all(bool(x.isnan().all()) for x in pool.form.tensors(slot.memory).values())

    assert all(poisoned(slot) for slot in pool._free)
    for slot in pool._free:
        slot.memory[:] = bytes(len(slot.memory))
    outputs(model, ALONE[-1:])
    assert 30 < len(pool._free) < 48 and all(poisoned(slot) for slot in pool._free)
    ours = outputs(model, ALONE)
    assert same(ours, expected) and all(bool(x.isfinite().all()) for x in ours)
    for slot in list(pool.slots()):
        assert not poisoned(slot)
        pool.drop(slot)
        assert poisoned(slot)
    assert same(outputs(model, ALONE), expected)


def test_m17_more_experts_than_slots_are_served_in_waves(folder: Folders) -> None:
    """Oracle also: division. Two slots, a pass that wants all twelve: six waves in each layer."""
    path = folder("mixtral")
    model = in_slots(path, "disk", TOP_K)
    steps = [([200], [Form.MANY])]
    assert same(outputs(model, steps), outputs(load(path), steps))
    layers = model.spec.num_layers
    counts = model.experts.counts
    assert counts.hits + counts.misses == EXPERTS * layers
    assert counts.waves == layers * EXPERTS // TOP_K


@pytest.mark.parametrize("level", ["ram", "disk"])
@pytest.mark.parametrize("slots", [*SLOTS, 30, 48])
def test_m18_a_pass_fetches_an_expert_once(
    folder: Folders, level: Offload, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the loads themselves. A long pass fetches each of a layer's experts at most once,
    rows that decode beside it included, whether layers stream or not."""
    model = in_slots(folder("mixtral"), level, slots)
    loads = Loads(model.experts, monkeypatch)
    for streams in (True, False):
        model.experts.streams = streams
        for steps in (ALONE[:1], FOUR[:1], [([256], [Form.MANY])]):
            outputs(model, steps)
            keys = loads.take()
            assert len(keys) == len(set(keys)), (streams, keys)


def test_m18_a_short_suffix_moves_only_what_it_routes_to(
    folder: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: what the routers chose. Ten rows are no reason to stream layers, even with room."""
    model = in_slots(folder("mixtral"), "disk", 48)
    model.experts._layers[:] = [
        type(x)(x.tier, x.pool, num_experts=64, top_k=8) for x in model.experts._layers
    ]  # coverage of ten rows as in a large model: 0.74
    loads, passes = Loads(model.experts, monkeypatch), wanted_by(model, monkeypatch)
    outputs(model, [([10], [Form.FEW])])
    assert sorted(loads.take()) == sorted(passes[0])


def test_a_long_pass_fetches_the_next_layer_ahead(
    folder: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: counts. With room for all, only the first layer's experts are waited for as misses;
    without streaming every expert is one. Both fetch the same experts."""
    path = folder("mixtral")
    for streams, misses in ((True, EXPERTS), (False, 4 * EXPERTS)):
        model = in_slots(path, "disk", 48)
        model.experts.streams = streams
        loads = Loads(model.experts, monkeypatch)
        outputs(model, [([256], [Form.MANY])])
        assert model.experts.counts.misses == misses
        assert sorted(loads.take()) == [(n, e) for n in range(4) for e in range(EXPERTS)]


def test_streaming_leaves_settled_experts_alone(
    folder: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the number of slots. Long passes one after another want 48 experts of 30 slots: plain
    LRU would fetch all 48 each time; what settled is not fetched again."""
    model = in_slots(folder("mixtral"), "disk", 30)
    loads = Loads(model.experts, monkeypatch)
    fetched = []
    for _ in range(6):
        outputs(model, [([256], [Form.MANY])])
        fetched.append(len(loads.take()))
    assert fetched[0] == 48 and max(fetched[2:]) <= 48 - 30 // 2 + 2, fetched


@pytest.mark.parametrize("slots", [12, 20, 30])
def test_a_long_pass_leaves_alone_what_decoding_uses(folder: Folders, slots: int) -> None:
    """Oracle: counts. A token that was decoded a few times finds its eight experts after a long
    pass has brought all 48 through the slots: but for three at most, as long as reading has to go
    on and every other slot is waited for."""
    model = in_slots(folder("mixtral"), "disk", slots)
    for _ in range(5):
        outputs(model, [([1], [Form.FEW])])
    outputs(model, [([256], [Form.MANY])])
    before = model.experts.counts
    outputs(model, [([1], [Form.FEW])])
    after = model.experts.counts
    assert after.hits - before.hits >= TOP_K * 4 - 3


def test_levels_that_have_nothing_to_do_say_so(folder: Folders, tmp_path: Path) -> None:
    """Oracle: the notes. Nothing is done silently in another way than asked."""
    build_checkpoint(tmp_path / "dense", "llama")
    build_checkpoint(tmp_path / "fp32", "mixtral")
    dense = load(tmp_path / "dense", offload="disk")
    assert "no experts" in dense.notes[-1] and dense.experts.demands() == ()
    wide = load(tmp_path / "fp32", offload="ram")
    assert "no smaller" in wide.notes[-1] and wide.experts.demands() == ()
    disk = load(folder("mixtral"), offload="disk")
    assert "without checksums" in disk.notes[-1]
    convert(folder("mixtral"), tmp_path / "converted")
    assert not load(tmp_path / "converted", offload="disk").notes


def test_a_source_without_places_is_refused(folder: Folders) -> None:
    """Oracle: the error's type and text."""
    source = open_source(folder("mixtral"))
    source.stored_at = lambda tensor: None  # type: ignore[method-assign]
    with pytest.raises(InvalidConfig, match=r"cannot be served.*remedy: convert"):
        load(source, offload="disk")
