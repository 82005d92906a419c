# SPDX-License-Identifier: Apache-2.0
"""Experts in memory that are computed where they lie: in the page cache, or in another form than
computes. The oracle of every test is the same model with all weights in memory, unless it names
another."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Event

import pytest
import torch
from safetensors.torch import load_file

from freetoken_runtime import Engine, EngineConfig
from freetoken_runtime.batch import Form
from freetoken_runtime.conversion import convert
from freetoken_runtime.errors import BudgetTooSmall, WeightsTimeout
from freetoken_runtime.expert_cases import (
    ALONE,
    EXPERTS,
    FOUR,
    TOP_K,
    Step,
    build_half,
    outputs,
    same,
)
from freetoken_runtime.experts.mapped import DirectExperts
from freetoken_runtime.experts.placement import PlacementPolicy, Split
from freetoken_runtime.experts.rates import ExpertRates
from freetoken_runtime.reports import ExpertStats
from freetoken_runtime.weight_source import Quant
from freetoken_runtime.weights import Dtype, LoadedModel, load
from freetoken_storage.weights import FtwAltered

pytestmark = pytest.mark.usefixtures("one_thread")
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    @cache
    def build(family: str) -> Path:
        return build_half(tmp_path_factory.mktemp(family), family)

    return build


@pytest.mark.parametrize("quant", [None, "int8", "int4"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_m16_mapped_records_give_the_same_bits(
    folder: Folders, tmp_path: Path, family: str, quant: Quant | None
) -> None:
    """Converted weights in RAM: from where they lie if that is as they compute, which takes neither
    slots nor a fetch; else through slots, or a scratch."""
    original = folder(family)
    convert(original, tmp_path / "records", quant=quant)
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    for dtype in dtypes:
        expected = outputs(load(original, quant=quant, dtype=dtype), FOUR)
        model = load(tmp_path / "records", offload="ram", dtype=dtype)
        model.experts.resize([2 for _ in model.experts.demands()], poison=True)
        assert same(outputs(model, FOUR), expected), dtype
        # Biases are bf16 in the file; beside integers they compute in fp32.
        direct = dtype == "bfloat16" if quant is None else family != "gpt_oss"
        counts = model.experts.counts
        assert (counts.slots, counts.read_bytes) == (0 if direct else 2, 0)
        assert (counts.fetched == 0 and counts.in_place > 0) == direct
        assert not any("stay in memory" in note for note in model.notes)
        assert model.experts.fixed_bytes == 0 or not direct


class Halves(PlacementPolicy):
    """Computes every other missing expert in place. `told`: what it heard of times, in order."""

    def __init__(self) -> None:
        super().__init__(ExpertRates())
        self.told: list[tuple[str, int, float]] = []

    def split(self, rows: Sequence[int], size_bytes: int) -> Split:
        every = range(len(rows))
        return Split(tuple(every[::2]), tuple(every[1::2]), 1.0, 1.0)

    def fetched(self, experts: int, size_bytes: int, seconds: float) -> None:
        self.told.append(("fetched", experts, seconds))
        super().fetched(experts, size_bytes, seconds)

    def computed(self, rows: Sequence[int], size_bytes: int, seconds: float) -> None:
        self.told.append(("computed", len(rows), seconds))
        super().computed(rows, size_bytes, seconds)

    def end_step(self, seconds: float, pairs: int) -> None:
        self.told.append(("step", pairs, seconds))
        super().end_step(seconds, pairs)


@pytest.mark.parametrize("helpers", [0, 2])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_next"])
def test_m16_split_layers_give_the_same_bits(
    folder: Folders, tmp_path: Path, family: str, helpers: int
) -> None:
    """Half of what is missing fetched, half converted into scratches by who computes: from RAM and
    from mapped records, alone and with threads that help, with NaN wherever nothing was written."""
    convert(folder(family), tmp_path / "records")
    short: list[Step] = [([3], [Form.FEW]), ([1], [Form.FEW]), ([6], [Form.FEW]), ([1], [Form.FEW])]
    together: list[Step] = [([1] * 4, [Form.FEW] * 4)] * 3
    expected = [outputs(load(folder(family)), steps) for steps in (short, together)]
    for path in (folder(family), tmp_path / "records"):
        for slots in (TOP_K, 5, EXPERTS):
            model = load(path, offload="ram")
            model.experts.resize([slots], poison=True)
            model.experts.placement = Halves()
            for mixture in model.decoder.mixtures:
                mixture.workers.helpers = helpers
            for steps, theirs in zip((short, together), expected, strict=True):
                assert same(outputs(model, steps), theirs), (path.name, slots)
            found = counts(model)
            assert found.in_place > 0 and found.fetched > 0
            assert found.in_place + found.fetched == found.misses
            for mixture in model.decoder.mixtures:
                mixture.workers.close()


def test_the_policy_hears_what_a_step_took(folder: Folders) -> None:
    """Oracle: the counts; and time, which is no longer for a part than for the step that it is of.
    A step's pairs are all that its rows chose, missing or not."""
    model = load(folder("mixtral"), offload="ram", expert_slots=TOP_K)
    policy = model.experts.placement = Halves()
    outputs(model, [([1], [Form.FEW])] * 3)
    model.experts.resize([TOP_K + 1])  # the last step is over
    steps = [told for told in policy.told if told[0] == "step"]
    assert [pairs for _, pairs, _ in steps] == [TOP_K * 4] * 3
    assert sum(n for kind, n, _ in policy.told if kind == "computed") == counts(model).in_place
    assert sum(n for kind, n, _ in policy.told if kind == "fetched") == counts(model).fetched
    assert all(seconds > 0.0 for _, _, seconds in policy.told)
    assert sum(s for kind, _, s in policy.told if kind == "computed") < sum(x[2] for x in steps)
    assert counts(model).link_bytes_per_s and counts(model).compute_bytes_per_s


def counts(model: LoadedModel) -> ExpertStats:
    return model.experts.counts


def test_a_mapped_record_is_verified_when_it_is_first_used(folder: Folders, tmp_path: Path) -> None:
    """Oracle: the checksum's error. What is altered after the folder was opened never computes."""
    convert(folder("mixtral"), tmp_path / "records", quant="int8")
    model = load(tmp_path / "records", offload="ram")
    (shard,) = (tmp_path / "records").glob("records-*.ftw")
    content = bytearray(shard.read_bytes())
    for byte in range(100, len(content), 4096):
        content[byte] ^= 4
    with shard.open("r+b") as stream:
        stream.write(content)
    with pytest.raises(FtwAltered, match=r"experts\.\d+.*fails its checksum"):
        outputs(model, ALONE)


def test_m21_a_stalled_page_cache_is_an_error_in_time(
    folder: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is mapped is verified by fetching threads: where that stands still, the pass ends with
    the error; when it goes on again, so does the model."""
    path = tmp_path / "records"
    convert(folder("mixtral"), path, quant="int8")
    model, goes_on = load(path, offload="ram"), Event()
    tier = model.experts._layers[1].tier
    assert isinstance(tier, DirectExperts)
    in_place = tier.in_place
    monkeypatch.setattr(tier, "in_place", lambda e: goes_on.wait(30.0) and in_place(e))
    model.experts.timeout_s = 0.2
    with pytest.raises(WeightsTimeout, match="did not arrive"):
        outputs(model, ALONE)
    goes_on.set()
    model.experts.timeout_s = 30.0
    assert same(outputs(model, ALONE), outputs(load(folder("mixtral"), quant="int8"), ALONE))


def test_an_engine_whose_experts_are_mapped_needs_no_memory_for_them(
    folder: Folders, tmp_path: Path
) -> None:
    """Oracle: the plan's refusal of the same budget without. Logits are those in memory."""
    convert(folder("mixtral"), tmp_path / "records", quant="int8")
    few = EngineConfig(threads=1, quant="int8", prefill_chunk=8, max_batch=1)
    ids = list(range(3, 43))
    with Engine.load(tmp_path / "records", few) as engine:
        expected, stats = engine.logits(ids), engine.stats()
    experts = sum(
        x.nbytes for x in load_file(next(folder("mixtral").glob("*.safetensors"))).values()
    )
    tight = stats.working_bytes + stats.weights_bytes - experts // 4
    with pytest.raises(BudgetTooSmall):
        Engine.load(tmp_path / "records", replace(few, offload="none", ram_budget_bytes=tight))
    mapped = replace(few, offload="ram", ram_budget_bytes=tight)
    with Engine.load(tmp_path / "records", mapped) as engine:
        assert torch.equal(engine.logits(ids), expected)
        after = engine.stats()
        assert after.experts.in_place > 0 and after.experts.slots == 0
        assert after.weights_bytes < stats.weights_bytes // 2
