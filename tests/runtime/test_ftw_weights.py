# SPDX-License-Identifier: Apache-2.0
"""Converted weights: the same bits as their source, used in place, and refused where they are not
what was written."""

import hashlib
import json
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from freetoken_runtime.batch import Form
from freetoken_runtime.config import EngineConfig
from freetoken_runtime.conversion import convert
from freetoken_runtime.engine import Engine
from freetoken_runtime.errors import UnsupportedQuantization, WeightsError, WeightsMismatch
from freetoken_runtime.ftw_weights import FtwFolder, Place, tensor_of
from freetoken_runtime.kernels.int4_linear import cpu as int4
from freetoken_runtime.sampler import SamplingParams
from freetoken_runtime.testing import ListState, batch_of, build_checkpoint
from freetoken_runtime.weight_source import Quant
from freetoken_runtime.weights import LoadedModel, load, open_source
from freetoken_storage.errors import FreetokenError
from freetoken_storage.weights import FtwAltered, FtwNewer, FtwTruncated
from freetoken_storage.weights_faults import damage

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3_moe": {"tie_word_embeddings": False},
    "gpt_oss": {},
    "qwen3_next": {},
}
QUANTS: list[Quant | None] = [None, "int8", "int4"]
IDS = [5 * index % 211 for index in range(70)]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model of each family."""
    folder = tmp_path_factory.mktemp("sources")
    for family, settings in FAMILIES.items():
        build_checkpoint(folder / family, family, **settings)
    return folder


@pytest.fixture(scope="module")
def converted(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with each of them converted, as `<family>-<quant>`."""
    folder = tmp_path_factory.mktemp("converted")
    for family in FAMILIES:
        for quant in QUANTS:
            convert(sources / family, folder / f"{family}-{quant}", quant=quant)
    return folder


@pytest.fixture
def moe(converted: Path, tmp_path: Path) -> Path:
    """A copy of a converted mixture in int4 that a test may spoil."""
    return Path(shutil.copytree(converted / "qwen3_moe-int4", tmp_path / "moe.ftw"))


def logits(model: LoadedModel, ids: list[int] = IDS) -> torch.Tensor:
    """Of a prompt's rows and of one row after it."""
    state = ListState(model.spec.states())
    many = batch_of([(state, ids)], [Form.MANY])
    rows = [model.decoder.logits(model.decoder.forward(many, torch.arange(len(ids))), Form.MANY)]
    state.commit(ids)
    few = batch_of([(state, [7])], [Form.FEW])
    rows.append(model.decoder.logits(model.decoder.forward(few, torch.arange(1))))
    return torch.cat(rows)


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_bits_of_the_source(
    family: str, quant: Quant | None, sources: Path, converted: Path
) -> None:
    """Oracle: the source, loaded with the same quantisation. Its report is the same, too."""
    expected = load(sources / family, quant=quant)
    for asked in {quant, None}:
        model = load(converted / f"{family}-{quant}", quant=asked)
        assert torch.equal(logits(model), logits(expected))
        assert model.formats == expected.formats
        told = [note for note in expected.notes if "without checksums" not in note]
        assert list(model.notes) == told and len(told) == len(expected.notes) - 1
        assert model.spec == expected.spec
        assert model.decoder.size_bytes == expected.decoder.size_bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_unquantised_weights_may_be_quantised_as_they_are_loaded(
    family: str, sources: Path, converted: Path
) -> None:
    """Oracle: the source. bf16 matrices too."""
    for forms in ({"quant": "int8"}, {"quant": "int4"}, {"dtype": "bfloat16"}):
        expected = load(sources / family, **forms)  # type: ignore[arg-type]
        model = load(converted / f"{family}-None", **forms)  # type: ignore[arg-type]
        assert torch.equal(logits(model), logits(expected))
        assert model.formats == expected.formats


def in_dtypes(source: Path, target: Path, dtypes: Callable[[str], torch.dtype]) -> Path:
    """A checkpoint with its tensors in other dtypes."""
    shutil.copytree(source, target)
    (file,) = target.glob("*.safetensors")
    tensors = {name: tensor.to(dtypes(name)) for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    return target


def mixed(name: str) -> torch.dtype:
    """Different ones within a stack: q, k, v and gate, up are stored as one each."""
    if re.search(r"q_proj|gate_proj|router|norm", name):
        return torch.float16
    return torch.bfloat16 if re.search(r"k_proj|up_proj|embed|experts", name) else torch.float32


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "mixed"])
def test_every_tensor_keeps_its_bits(family: str, kind: str, sources: Path, tmp_path: Path) -> None:
    """Oracle: the source's tensors, one by one. Where neighbours in a stack have other dtypes, all
    are stored in the one that holds both, which changes no value."""
    dtype_of = mixed if kind == "mixed" else lambda name: getattr(torch, kind)
    source = in_dtypes(sources / family, tmp_path / "source", dtype_of)
    convert(source, tmp_path / "ftw")
    expected, found = open_source(source), open_source(tmp_path / "ftw")
    assert isinstance(found, FtwFolder)
    names = list(found.spec.parameter_shapes())
    assert len(names) > 20
    for name in names:
        want, have = expected.read(name), found.read(name)
        assert have.shape == want.shape
        if kind != "mixed":
            assert have.dtype == want.dtype
        wider = torch.promote_types(want.dtype, have.dtype)
        assert have.dtype == wider, f"{name} is stored in less"
        assert torch.equal(have, want.to(wider)), name
    found.finish()
    for dtype in ("float32", "bfloat16"):
        ours, theirs = load(tmp_path / "ftw", dtype=dtype), load(source, dtype=dtype)
        assert torch.equal(logits(ours), logits(theirs))


def test_an_expert_is_one_contiguous_record(converted: Path) -> None:
    """All of its parameters and nothing else; the experts of a model share one layout."""
    for quant in QUANTS:
        file = FtwFolder(converted / f"gpt_oss-{quant}").file
        experts = {name: file.records[name] for name in file.records if "experts" in name}
        assert len(experts) == 4 * 12
        assert len({record.layout for record in experts.values()}) == 1
        main = {None: ["weight"], "int8": ["values", "scales"]}.get(
            quant, ["packed", "scales_zeros"]
        )
        (layout,) = {record.layout for record in experts.values()}
        assert [field.name for field in layout.fields] == [
            f"{unit}.{kind}" for unit in ("gate up", "down") for kind in (*main, "bias")
        ]


def test_places_and_names_are_inverse(converted: Path) -> None:
    """Every parameter of the spec is found where `Place.of` puts it."""
    folder = FtwFolder(converted / "qwen3_next-int4")
    for name, part in folder._parts.items():
        stem = name.removesuffix(".bias") if part.kind == "bias" else name
        unit = part.place.prefix.rstrip(".") or part.place.record.rpartition(".")[2]
        names = [f"{stem.rpartition('.')[0]}.{x}".lstrip(".") for x in unit.split(" ")]
        assert stem in names and Place.of(names) == part.place


def mapped_ranges(folder: Path) -> list[tuple[int, int]]:
    """Where this process has the folder's shards mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if str(folder.resolve()) in line]
    return [(int(start, 16), int(stop, 16)) for start, stop in spans]


def tensors_in(thing: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """Every tensor that an object of ours holds, whatever it is made of."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield thing
        return
    parts: Iterable[object] = ()
    if isinstance(thing, list | tuple):
        parts = thing
    elif isinstance(thing, dict):
        parts = thing.values()
    elif type(thing).__module__.startswith("freetoken_runtime") and hasattr(thing, "__dict__"):
        parts = vars(thing).values()
    for part in parts:
        yield from tensors_in(part, seen)


@pytest.mark.parametrize("quant", QUANTS)
def test_matrices_are_used_in_the_files_own_pages(quant: Quant | None, converted: Path) -> None:
    """Oracle: /proc/self/maps. Every matrix of every layer and expert; what is copied is small."""
    folder = converted / f"qwen3_moe-{quant}"
    model = load(folder)
    ranges = mapped_ranges(folder)
    inside, copied = 0, 0
    for tensor in tensors_in(model.decoder._parts, set()):
        if any(start <= tensor.data_ptr() < stop for start, stop in ranges):
            inside += tensor.nbytes
        else:
            assert tensor.dim() == 1, tensor.shape
            copied += tensor.nbytes
    assert inside + copied == model.decoder.size_bytes
    assert copied < model.decoder.size_bytes / 50


def test_the_content_hash_is_the_headers_digest(converted: Path) -> None:
    """The fingerprint follows from it; other weights of the same shape have another."""
    stored = (converted / "llama-int8" / "model.ftw").read_bytes()
    assert load(converted / "llama-int8").content_hash == stored[24:56].hex()
    others = {load(converted / f"llama-{quant}").content_hash for quant in QUANTS}
    assert len(others) == 3


def test_the_engine_generates_the_same_tokens(sources: Path, converted: Path) -> None:
    """The public way in, with the default configuration. Oracle: the source."""
    tokens, greedy = [], SamplingParams(max_tokens=6, temperature=0.0)
    for path, quant in ((sources / "qwen3_next", "int4"), (converted / "qwen3_next-int4", None)):
        config = EngineConfig(threads=1, quant=quant, ram_budget_bytes=1 << 30)  # type: ignore[arg-type]
        with Engine.load(path, config) as engine:
            tokens.append([token.id for token in engine.generate(IDS, greedy)])
            assert engine.logits(IDS, reuse=False).isfinite().all()
    assert tokens[0] == tokens[1] and len(tokens[0]) == 6


def test_another_quantisation_is_refused(converted: Path) -> None:
    """Quantised weights cannot be what they were."""
    for stored, asked in (("int8", "int4"), ("int4", "int8")):
        with pytest.raises(UnsupportedQuantization, match="convert the original"):
            load(converted / f"llama-{stored}", quant=asked)  # type: ignore[arg-type]


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header and give it its right checksum."""
    path = folder / "model.ftw"
    content = json.loads(path.read_bytes()[56:])
    change(content)
    text = json.dumps(content).encode()
    fixed = struct.pack("<8sIIQ", b"FTWEIGHT", 1, 0, len(text))
    path.write_bytes(fixed + hashlib.sha256(fixed + text).digest() + text)


def drop(header: dict[str, Any], name: str) -> None:
    header["records"] = [record for record in header["records"] if record[0] != name]


def rename(header: dict[str, Any], name: str, new: str) -> None:
    for record in header["records"]:
        record[0] = new if record[0] == name else record[0]


def relayout(header: dict[str, Any], name: str, change: Callable[[list[Any]], None]) -> None:
    """Change the fields of one record's layout, on a copy."""
    for record in header["records"]:
        if record[0] == name:
            layout = json.loads(json.dumps(header["layouts"][record[1]]))
            change(layout[1])
            header["layouts"].append(layout)
            record[1] = len(header["layouts"]) - 1


FOREIGN: dict[str, tuple[type[FreetokenError], str, Callable[[dict[str, Any]], None]]] = {
    "a newer meta": (FtwNewer, "another version", lambda h: h["meta"].update(version=2)),
    "unknown meta": (FtwNewer, "another version", lambda h: h["meta"].update(adapter="x")),
    "unknown quantisation": (
        FtwNewer,
        "unknown quantisation",
        lambda h: h["meta"].update(quant="int2"),
    ),
    "an unknown packing": (
        FtwNewer,
        "unknown quantisation",
        lambda h: h["meta"].update(packing="8 triples"),
    ),
    "a group no kernel has": (
        FtwNewer,
        "unknown quantisation",
        lambda h: h["meta"].update(group=7),
    ),
    "an unknown mixer": (
        FtwNewer,
        "unknown model",
        lambda h: h["meta"]["spec"]["layers"][0]["mixer"].update(type="Mamba9Spec"),
    ),
    "an unknown field of the spec": (
        FtwNewer,
        "unknown model",
        lambda h: h["meta"]["spec"].update(logit_bias=1),
    ),
    "another packing": (
        UnsupportedQuantization,
        "another machine",
        lambda h: h["meta"].update(packing=other_layout().name),
    ),
    "another model": (
        WeightsMismatch,
        "wrong shape",
        lambda h: h["meta"]["spec"].update(hidden_size=64),
    ),
    "fewer layers": (WeightsMismatch, "not used", lambda h: h["meta"]["spec"]["layers"].pop()),
    "more layers": (
        WeightsMismatch,
        "missing",
        lambda h: h["meta"]["spec"]["layers"].append(h["meta"]["spec"]["layers"][0]),
    ),
    "an expert missing": (WeightsMismatch, "missing", lambda h: drop(h, "layers.2.experts.3")),
    "M9 a parameter twice": (
        WeightsMismatch,
        "stored twice",
        lambda h: rename(h, "layers.1.q k v", "layers.1.o q"),
    ),
    "a stack in another order": (
        WeightsMismatch,
        "not stored in this form",
        lambda h: rename(h, "layers.1.q k v", "layers.1.k q v"),
    ),
    "another stack": (
        WeightsMismatch,
        "not stored in this form",
        lambda h: rename(h, "layers.0.gate up", "layers.0.up gate"),
    ),
    "rows that are columns": (
        WeightsMismatch,
        "wrong shape",
        lambda h: relayout(h, "layers.0.down", lambda fields: fields[0][2].reverse()),
    ),
    "another dtype": (
        WeightsMismatch,
        "wrong shape or dtype",
        lambda h: relayout(h, "layers.0.down", lambda fields: fields[0].__setitem__(1, "int8")),
    ),
    "a norm of integers": (
        WeightsMismatch,
        "wrong shape or dtype",
        lambda h: relayout(
            h, "norm", lambda f: f[0].__setitem__(1, "int8") or f[0].__setitem__(2, [240])
        ),
    ),
}


def other_layout() -> int4.ByteLayout:
    """One that this machine does not have."""
    return next(layout for layout in int4.LAYOUTS if layout != int4.byte_layout())


@pytest.mark.parametrize("case", FOREIGN)
def test_what_was_not_written_here_is_refused(moe: Path, case: str) -> None:
    """Headers with right checksums that say something else than the records hold."""
    error, message, change = FOREIGN[case]
    rewrite(moe, change)
    with pytest.raises(error, match=message):
        load(moe)


def test_m6_m7_missing_and_truncated_files_are_refused_by_the_engine(moe: Path) -> None:
    """By name, and before anything is computed; the source stays refused by `load` too."""
    (shard,) = moe.glob("records-*")
    stored = shard.read_bytes()
    shard.write_bytes(stored[:-4096])
    with pytest.raises(FtwTruncated, match=shard.name):
        Engine.load(moe)
    shard.unlink()
    with pytest.raises(FtwTruncated, match=shard.name):
        Engine.load(moe)
    shard.write_bytes(stored[:20_000] + bytes([stored[20_000] ^ 1]) + stored[20_001:])
    with pytest.raises(FtwAltered, match="checksum"):
        Engine.load(moe)


def batter(source: Path, tmp_path: Path, seeds: range) -> dict[str | None, int]:
    """Load a copy with random damage, for each seed. Outcomes by the code of the refusal; None
    where it loaded, and computed the bits of the intact model."""
    expected = logits(load(source), IDS[:9])
    outcomes: dict[str | None, int] = {}
    for seed in seeds:
        folder = tmp_path / "battered"
        shutil.copytree(source, folder)
        how = damage(folder, seed)
        outcome = None
        try:
            assert torch.equal(logits(load(folder), IDS[:9]), expected), f"seed {seed}: {how}"
        except FreetokenError as error:
            outcome = error.code
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        shutil.rmtree(folder)
    return outcomes


def test_damaged_weights_never_compute(converted: Path, tmp_path: Path) -> None:
    """Flips, cuts, swaps in header and records: refused, or the same bits as the intact model."""
    outcomes = batter(converted / "qwen3_moe-int4", tmp_path, range(60))
    assert outcomes.get(None, 0) < 20 and sum(outcomes.values()) == 60


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_damaged_weights_never_compute_in_1000_cases(converted: Path, tmp_path: Path) -> None:
    """As above, 1,000 times over the three quantisations."""
    for index, quant in enumerate(QUANTS):
        seeds = range(10_000 + 334 * index, 10_334 + 334 * index)
        outcomes = batter(converted / f"qwen3_moe-{quant}", tmp_path, seeds)
        assert outcomes.get(None, 0) < 334 // 3, outcomes


def test_a_damaged_model_leaves_the_process_healthy(converted: Path, moe: Path) -> None:
    """Refused, and then another one is loaded in the same process."""
    damage(moe, 4)
    with pytest.raises((FreetokenError, WeightsError)):
        for seed in range(20):
            damage(moe, seed)
            load(moe)
    assert logits(load(converted / "qwen3_moe-int4")).isfinite().all()


def test_views_of_records_are_the_stored_numbers(converted: Path) -> None:
    """`tensor_of`, for whoever reads records into memory of its own. Oracle: the bytes."""
    file = FtwFolder(converted / "llama-int8").file
    record = file.records["layers.0.o"]
    view = file.mapped(record.name)
    for field in record.layout.fields:
        tensor = tensor_of(view, field)
        assert tuple(tensor.shape) == field.shape
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert raw == view[field.offset : field.stop].tobytes()
