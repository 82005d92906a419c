# SPDX-License-Identifier: Apache-2.0
"""Stored states against a cold pass. Oracles: the faults that were planted, and the states of an
engine that has no store."""

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from freetoken_runtime import Engine, SamplingParams
from freetoken_runtime.errors import BudgetTooSmall, InvalidAnchors
from freetoken_runtime.family_configs import FAMILY_CONFIGS
from freetoken_runtime.reports import Finding, Verification
from freetoken_runtime.state_faults import Fault, Planter, random_ids, write_states
from freetoken_runtime.testing import build_checkpoint
from freetoken_storage import MemoryDatabase

EngineMaker = Callable[..., Engine]
FAULTS = 50
# Full attention alone; gated delta nets, Mamba-2 and short convolutions beside it.
FAMILIES = ("llama", "qwen3_next", "granitemoehybrid", "lfm2_moe")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints by family, made when they are first asked for."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            build_checkpoint(made[family], family)
        return made[family]

    return folder


def is_gold(engine: Engine, ids: list[int]) -> bool:
    """The engine's logits equal those of a cold prefill."""
    warm, cold = engine.logits(ids), engine.logits(ids, reuse=False)
    span = float(cold.max() - cold.min())
    return bool(torch.isfinite(warm).all()) and float((warm - cold).abs().max()) <= 1e-4 * span


def places(findings: tuple[Finding, ...]) -> list[tuple[str, int, int]]:
    return sorted((finding.kind, finding.start, finding.position) for finding in findings)


def planted_places(faults: list[Fault]) -> list[tuple[str, int, int]]:
    return sorted((f.record.kind, f.record.start, f.record.stop) for f in faults)


def one_per_record(faults: list[Fault], rng: random.Random, count: int) -> list[Fault]:
    """Faults of different records, of every kind as far as they go."""
    rng.shuffle(faults)
    chosen: dict[bytes, Fault] = {}
    for fault in faults:
        chosen.setdefault(fault.record.digest, fault)
    return list(chosen.values())[:count]


@pytest.mark.parametrize(
    "family",
    [
        *FAMILIES,
        *(pytest.param(x, marks=pytest.mark.slow) for x in FAMILY_CONFIGS if x not in FAMILIES),
    ],
)
def test_planted_faults_are_found_and_nothing_else(
    make_engine: EngineMaker, folders: Callable[[str], Path], family: str
) -> None:
    """Oracle: where the faults were planted. Before, the store is healthy; after, what was wrong is
    gone, and what a verification leaves is right."""
    rng = random.Random(7)
    found = rejected = 0
    kinds: set[tuple[str, str]] = set()
    offered: set[tuple[str, str]] = set()
    seed = 0
    while found < FAULTS:
        seed += 100
        snapshots = MemoryDatabase().snapshots
        writer = make_engine(snapshots, folders(family), anchor_interval=100)
        ids = write_states(writer, seed)
        healthy = writer.verify(ids)
        assert healthy.findings == () and healthy.largest < 0.1 and healthy.complete, healthy
        planter = Planter(writer, ids)
        assert healthy.blocks + healthy.anchors == len(planter.records)
        writer.close()
        if healthy.sure_tokens < len(ids):  # an expert was chosen by a hair: another path
            rejected += 1
            continue
        possible = planter.faults()
        offered |= {(fault.record.kind, fault.kind) for fault in possible}
        faults = one_per_record(possible, rng, 12)
        for fault in faults:
            planter.plant(fault)
        engine = make_engine(snapshots, folders(family), anchor_interval=100)
        report = engine.verify(ids)
        assert places(report.findings) == planted_places(faults)
        assert report.removed_records >= len(faults) and report.compared == "states"
        for finding in report.findings:
            assert finding.cause == "differs" and finding.difference is not None
            assert finding.limit is not None and finding.difference > 10 * finding.limit
        remaining = {r.digest for r in Planter(engine, ids).records}
        assert remaining.isdisjoint(fault.record.digest for fault in faults)
        assert engine.verify(ids).findings == ()
        assert is_gold(engine, ids)
        kinds |= {(fault.record.kind, fault.kind) for fault in faults}
        found += len(faults)
        engine.close()
    assert kinds == offered and rejected <= 2, (kinds, offered, rejected)


def chosen(planter: Planter, **wanted: Any) -> Fault:
    """The first fault with these attributes, of itself or its record."""
    for fault in planter.faults():
        looked = {**vars(fault.record), **vars(fault)}
        if all(looked[key] == value for key, value in wanted.items()):
            return fault
    raise AssertionError(wanted)


def test_a_finding_names_layer_buffer_and_extent(
    make_engine: EngineMaker, folders: Callable[[str], Path]
) -> None:
    """x 1.25 is a quarter of the largest value: between an eighth and a quarter of the range."""
    snapshots = MemoryDatabase().snapshots
    engine = make_engine(snapshots, folders("granitemoehybrid"), anchor_interval=100)
    ids = write_states(engine, 3)
    planter = Planter(engine, ids)
    states = engine._model.spec.states()
    recurrent = next(i for i, state in enumerate(states) if state.fixed)
    attending = [i for i, state in enumerate(states) if state.rows]
    in_anchor = chosen(planter, kind="scaled", name=f"{recurrent}.1")
    in_block = chosen(planter, kind="scaled", name="v0", part=0)
    for fault in (in_anchor, in_block):
        planter.plant(fault)
    report = engine.verify(ids)
    names = {(f.kind, f.position): (f.layer, f.buffer) for f in report.findings}
    assert names == {
        ("anchor", in_anchor.record.stop): (recurrent, states[recurrent].fixed[1].name),
        ("block", in_block.record.stop): (attending[0], states[attending[0]].rows[1].name),
    }
    assert all(f.difference is not None and 0.12 < f.difference < 0.26 for f in report.findings)


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@pytest.mark.parametrize("kind", ["block", "anchor"])
def test_what_came_from_a_wrong_state_leaves_ram(
    make_engine: EngineMaker, folders: Callable[[str], Path], family: str, kind: str
) -> None:
    """GOLD: a cold prefill of the same ids. The wrong state was taken up and grown from; after
    the verification nothing of it serves anybody."""
    snapshots = MemoryDatabase().snapshots
    writer = make_engine(snapshots, folders(family), anchor_interval=100)
    ids = write_states(writer, 5)
    planter = Planter(writer, ids)
    writer.close()
    last = max(record.stop for record in planter.records if record.kind == kind)
    name = {"block": "v0", "anchor": "row" if family == "llama" else "0.1"}[kind]
    planter.plant(chosen(planter, stop=last, name=name, part=0))
    engine = make_engine(snapshots, folders(family), anchor_interval=100)
    assert engine.plan(ids).reused_tokens == len(ids)
    longer = [*ids, *random_ids(9, 30)]
    engine.warm(longer)  # grown from the wrong state
    only_row = family == "llama" and kind == "anchor"  # nothing goes on from a row
    assert is_gold(engine, longer) is only_row
    report = engine.verify(ids)
    assert last in {finding.position for finding in report.findings}
    if only_row:
        assert engine.plan(ids).reused_tokens == len(ids) - 1
    else:
        plan = engine.plan(longer)
        assert plan.reused_tokens < last and plan.miss is not None
        assert plan.miss.cause == "damaged"
    assert is_gold(engine, ids) and is_gold(engine, longer)
    engine.flush()
    engine.close()
    again = make_engine(snapshots, folders(family), anchor_interval=100)
    assert again.verify(longer).findings == ()


def test_states_written_from_a_wrong_one_are_found_by_their_own_path(
    make_engine: EngineMaker, folders: Callable[[str], Path]
) -> None:
    """The anchor is wrong in the store, taken up after a restart, and what follows is written:
    a verification of the longer path finds all of it."""
    snapshots = MemoryDatabase().snapshots
    writer = make_engine(snapshots, folders("qwen3_next"), anchor_interval=100)
    ids = write_states(writer, 6)
    planter = Planter(writer, ids)
    writer.close()
    planter.plant(chosen(planter, stop=len(ids), name="0.1", kind="permuted"))
    engine = make_engine(snapshots, folders("qwen3_next"), anchor_interval=100)
    longer = [*ids, *random_ids(9, 130)]
    engine.warm(longer)
    engine.flush()
    engine.close()
    third = make_engine(snapshots, folders("qwen3_next"), anchor_interval=100)
    report = third.verify(longer)
    wrong = {finding.position for finding in report.findings if finding.kind == "anchor"}
    assert {len(ids), len(longer)} <= wrong and min(wrong) == len(ids)
    assert is_gold(third, longer)


def test_other_requests_go_on(make_engine: EngineMaker) -> None:
    """Tokens of a generation that runs beside are those of one alone, and come between chunks."""
    engine = make_engine(MemoryDatabase().snapshots)
    ids, prompt = write_states(engine, 1, turns=8), random_ids(2, 40)
    sampling = SamplingParams(max_tokens=60)
    alone = [token.id for token in engine.generate(prompt, sampling)]
    beside: list[int] = []
    counts: list[int] = []
    begun = threading.Event()

    def generate() -> None:
        for token in engine.generate(prompt, sampling):
            beside.append(token.id)
            begun.set()

    thread = threading.Thread(target=generate)
    thread.start()
    begun.wait(60)
    report = engine.verify(ids, on_progress=lambda done, total: counts.append(len(beside)))
    thread.join()
    assert report.complete and report.findings == () and beside == alone
    assert len(set(counts)) > 3, counts


def test_cancelled_between_two_chunks(make_engine: EngineMaker) -> None:
    """What was found until then counts; the memory is given back, also when the caller's own
    function raises."""
    engine = make_engine(MemoryDatabase().snapshots)
    ids = write_states(engine, 1)
    before = engine.stats().state_bytes
    seen: list[tuple[int, int]] = []
    report = engine.verify(
        ids,
        on_progress=lambda done, total: seen.append((done, total)),
        cancelled=lambda: bool(seen) and seen[-1][0] > 0,
    )
    assert not report.complete and report.forwarded_tokens == 64 and seen[-1] == (64, len(ids))
    assert engine.stats().state_bytes == before

    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.verify(ids, on_progress=interrupt)
    assert engine.stats().state_bytes == before
    assert engine.verify(ids).complete and engine.stats().state_bytes == before


def test_chosen_positions(make_engine: EngineMaker) -> None:
    """Only these anchors, and the rows before them: what lies behind is not forwarded."""
    engine = make_engine(MemoryDatabase().snapshots)
    ids = write_states(engine, 4)
    stored = sorted(r.stop for r in Planter(engine, ids).records if r.kind == "anchor")
    report = engine.verify(ids, positions=[stored[0], stored[1], 1])
    assert (report.anchors, report.forwarded_tokens) == (2, -(-stored[1] // 64) * 64)
    assert engine.verify(ids, positions=[]) == Verification(len(ids), "states")
    with pytest.raises(InvalidAnchors):
        engine.verify(ids, positions=[len(ids) + 1])


def test_without_a_store_there_is_nothing(make_engine: EngineMaker) -> None:
    """And of a path that the store does not know."""
    engine = make_engine()
    assert engine.verify(random_ids(1, 20)) == Verification(20, "states")
    other = make_engine(MemoryDatabase().snapshots)
    write_states(other, 1)
    assert other.verify(random_ids(2, 20)) == Verification(20, "states")


def test_no_room_beside_what_runs(make_engine: EngineMaker) -> None:
    """The cold pass needs the path's rows a second time; a pinned path cannot give way."""
    snapshots = MemoryDatabase().snapshots
    engine = make_engine(snapshots)
    ids = write_states(engine, 1)
    engine.pin("test", [ids])
    used = engine.stats()
    engine.set_budget(ram_bytes=used.weights_bytes + used.working_bytes + used.state_bytes + 65536)
    with pytest.raises(BudgetTooSmall):
        engine.verify(ids)
    engine.pin("test", [])
    assert engine.verify(ids).complete
