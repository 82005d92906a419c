# SPDX-License-Identifier: Apache-2.0
"""How stored states are judged where they cannot be read, or not be compared themselves. Oracles:
what was planted, and a store that refuses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from freetoken_runtime import Engine
from freetoken_runtime.state_faults import Fault, Planter, write_states
from freetoken_runtime.testing import build_checkpoint
from freetoken_runtime.verification import run
from freetoken_runtime.verification.differences import of_logits
from freetoken_storage import MemoryDatabase
from freetoken_storage.errors import StoreDamaged, StoreFull
from freetoken_storage.records import Snapshot

EngineMaker = Callable[..., Engine]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mamba-2 beside attention, dense: no expert is chosen."""
    folder = tmp_path_factory.mktemp("hybrid")
    build_checkpoint(folder, "falcon_h1")
    return folder


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gated delta nets beside attention, with experts."""
    folder = tmp_path_factory.mktemp("routed")
    build_checkpoint(folder, "qwen3_next")
    return folder


class FaultyReader:
    """A reader that finds some records damaged."""

    def __init__(self, inner: Any, damaged: set[bytes]) -> None:
        self._inner = inner
        self._damaged = damaged

    def read_into(self, digest: bytes, buffers: Any) -> None:
        if digest in self._damaged:
            raise StoreDamaged("a checksum does not match")
        self._inner.read_into(digest, buffers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class FaultySnapshots:
    """A store in which records are damaged, and which can be told to remove nothing."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.damaged: set[bytes] = set()
        self.refuses = False

    @contextmanager
    def reader(self) -> Iterator[FaultyReader]:
        with self._inner.reader() as reader:
            yield FaultyReader(reader, self.damaged)

    def remove(self, digests: list[bytes]) -> int:
        if self.refuses:
            raise StoreFull("no room to remove anything")
        self.damaged -= set(digests)
        removed: int = self._inner.remove(digests)
        return removed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def by_kind(planter: Planter, **wanted: Any) -> Fault:
    """The last fault with these attributes."""
    found = [f for f in planter.faults() if all(getattr(f, k) == v for k, v in wanted.items())]
    return found[-1]


def test_damaged_and_malformed_records(make_engine: EngineMaker) -> None:
    """A record that fails its checksum and one with a buffer missing: each is named, and goes."""
    snapshots = FaultySnapshots(MemoryDatabase().snapshots)
    engine = make_engine(snapshots)
    ids = write_states(engine, 1)
    records = Planter(engine, ids).records
    block = [record for record in records if record.kind == "block"][-1]
    anchor = [record for record in records if record.kind == "anchor"][0]
    with snapshots.reader() as reader:
        info = reader.info(anchor.digest)
    snapshots.remove([anchor.digest])
    snapshots.put([Snapshot(anchor.digest, info.parent, {"other": b"1234"}, info.meta)])
    snapshots.damaged.add(block.digest)
    report = engine.verify(ids)
    causes = {(f.kind, f.position): f.cause for f in report.findings}
    assert causes == {
        ("block", block.stop): "damaged",
        ("anchor", anchor.stop): "malformed",
    }
    assert not snapshots.contains(anchor.digest) and not snapshots.contains(block.digest)
    assert engine.verify(ids).findings == ()


def test_what_cannot_be_removed_is_not_used(make_engine: EngineMaker) -> None:
    """GOLD: a cold prefill. The store refuses; the wrong block and what hangs on it stay there and
    serve nobody, until it can be removed."""
    snapshots = FaultySnapshots(MemoryDatabase().snapshots)
    writer = make_engine(snapshots)
    ids = write_states(writer, 1)
    planter = Planter(writer, ids)
    writer.close()
    fault = next(f for f in planter.faults() if f.record.kind == "block" and f.kind == "permuted")
    planter.plant(fault)
    engine = make_engine(snapshots)
    snapshots.refuses = True
    report = engine.verify(ids)
    assert len(report.findings) == 1 and report.removed_records == 0
    assert snapshots.contains(fault.record.digest)
    assert engine.plan(ids).reused_tokens <= fault.record.start
    assert torch.allclose(engine.logits(ids), engine.logits(ids, reuse=False), atol=1e-4)
    with pytest.raises(StoreFull):
        engine.flush()
    snapshots.refuses = False
    engine.warm(ids)
    engine.flush()  # what was computed anew takes the place of what was wrong
    assert engine.verify(ids).findings == ()
    assert engine.plan(ids).reused_tokens == len(ids)


@pytest.mark.parametrize(
    "form", [{"dtype": "bfloat16"}, {"quant": "int8"}, {"quant": "int4"}], ids=str
)
def test_other_dtypes_compare_the_logits_that_follow(
    make_engine: EngineMaker, form: dict[str, str]
) -> None:
    """Prefilled in another form than decoded, a healthy store is within the limits; heads that are
    permuted or a hidden row that is scaled are not."""
    snapshots = MemoryDatabase().snapshots
    writer = make_engine(snapshots, **form)
    ids = write_states(writer, 1)
    healthy = writer.verify(ids)
    assert healthy.findings == () and healthy.compared == "logits" and healthy.largest < 0.7
    planter = Planter(writer, ids)
    writer.close()
    faults = [by_kind(planter, name="v0", kind="permuted"), by_kind(planter, name="row")]
    for fault in faults:
        planter.plant(fault)
    engine = make_engine(snapshots, **form)
    report = engine.verify(ids)
    assert {f.position for f in report.findings} == {f.record.stop for f in faults}
    assert all(f.buffer is not None and f.buffer.startswith("logits") for f in report.findings)
    assert engine.verify(ids).findings == ()


def test_recurrent_states_in_bfloat16(make_engine: EngineMaker, hybrid: Path) -> None:
    """Each of these is another anchor's, at a different place: the logits that follow tell."""
    snapshots = MemoryDatabase().snapshots
    fields = {"dtype": "bfloat16", "anchor_interval": 100}
    writer = make_engine(snapshots, hybrid, **fields)
    ids = write_states(writer, 1)
    assert writer.verify(ids).findings == ()
    planter = Planter(writer, ids)
    writer.close()
    planted = []
    for record in [r for r in planter.records if r.kind == "anchor"][3:6]:
        fault = by_kind(planter, record=record, name="0.1", kind="swapped")
        planter.plant(fault)
        planted.append(record.stop)
    engine = make_engine(snapshots, hybrid, **fields)
    assert [f.position for f in engine.verify(ids).findings] == planted


def test_behind_a_close_choice_of_experts_logits_decide(
    make_engine: EngineMaker, routed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few per mille in one buffer are wrong where the choice of experts is sure, and could be
    another choice of theirs where they are not; a state that goes on differently is wrong in
    either case. Here every choice is close, or none."""
    snapshots = MemoryDatabase().snapshots
    engine = make_engine(snapshots, routed, anchor_interval=100)
    ids = write_states(engine, 1)
    last = len(ids)
    slight = Planter(engine, ids, scale=1.003)
    (tail,) = [
        f
        for f in slight.faults()
        if f.record.stop == last and f.record.kind == "anchor"
        if (f.name, f.kind) == ("0.0", "scaled")
    ]
    slight.plant(tail)
    monkeypatch.setattr(run, "CLOSE_MARGIN", float("inf"))
    assert engine.verify(ids).findings == ()
    row = Planter(engine, ids, scale=3.0)
    row.plant(by_kind(row, name="row", kind="scaled"))
    (found,) = engine.verify(ids).findings
    assert (found.kind, found.position) == ("anchor", last) and found.buffer is not None
    assert found.buffer.startswith("logits")
    engine.warm(ids)
    engine.flush()
    slight.plant(tail)
    monkeypatch.setattr(run, "CLOSE_MARGIN", 0.0)
    (found,) = engine.verify(ids).findings
    assert (found.position, found.layer) == (last, 0)


def test_logits_of_routed_models_are_judged_by_their_medians() -> None:
    """Arithmetic: two ids of nine with other experts say nothing, five do, and so does the row."""
    generator = torch.Generator().manual_seed(1)
    cold = torch.randn(10, 50, generator=generator)

    def is_wrong(*others: int, routed: bool) -> bool:
        stored = cold.clone()
        stored[list(others)] = torch.randn(len(others), 50, generator=generator)
        return any(difference.excess > 1 for difference in of_logits(stored, cold, routed=routed))

    assert not is_wrong(1, 9, routed=True) and is_wrong(1, 9, routed=False)
    assert is_wrong(1, 3, 5, 7, 9, routed=True) and is_wrong(0, routed=True)
    assert not is_wrong(routed=True) and not is_wrong(routed=False)
    assert all(d.excess > 1 for d in of_logits(cold * torch.nan, cold, routed=False))
