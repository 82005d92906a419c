# SPDX-License-Identifier: Apache-2.0
"""Conversion: one matrix in memory at a time, interrupted anywhere, from every kind of source."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from freetoken_runtime.conversion import Plan, convert
from freetoken_runtime.errors import UnsupportedQuantization, WeightsDamaged
from freetoken_runtime.family_configs import FAMILY_CONFIGS
from freetoken_runtime.ftw_weights import FtwFolder
from freetoken_runtime.gguf_builder import build_gguf
from freetoken_runtime.kernels.int4_linear import cpu as int4
from freetoken_runtime.models.registry import FAMILIES, read_spec
from freetoken_runtime.random_weights import RandomWeights
from freetoken_runtime.spec_records import describe, read
from freetoken_runtime.testing import build_checkpoint, family_config
from freetoken_runtime.weight_source import Quant
from freetoken_runtime.weights import load, open_source
from freetoken_storage.weights import FtwError
from freetoken_storage.weights_writer import WeightsWriter

KNOWN = sorted(FAMILY_CONFIGS.keys() & FAMILIES.keys())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small mixture with a tokenizer's files beside it."""
    folder = tmp_path_factory.mktemp("source") / "moe"
    build_checkpoint(folder, "qwen3_moe")
    (folder / "tokenizer.json").write_text('{"model": "ü"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "notes.txt").write_text("not copied")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("family", KNOWN)
def test_every_family_has_a_plan_and_a_description(family: str) -> None:
    """Every parameter is written exactly once (M9; the plan asserts it), whatever the mixer; the
    spec comes back from its JSON. Oracle: the spec."""
    spec = read_spec(family_config(family).to_dict())
    text = json.dumps(describe(spec), allow_nan=False)
    assert read(json.loads(text)) == spec
    for quant in (None, "int4"):
        source = RandomWeights(spec, 3)
        source.check()
        plan = Plan(source, quant)
        names = [name for unit in plan.units for name in unit.parameters]
        assert sorted(names) == sorted(spec.parameter_shapes())
        records = [unit.place.record for unit in plan.units]
        groups = [name for index, name in enumerate(records) if name not in records[:index]]
        assert records == sorted(records, key=groups.index), "what is one record comes in a row"


@pytest.mark.parametrize("quant", [None, "int8", "int4"])
@pytest.mark.parametrize("family", ["kimi_linear", "nemotron_h", "deepseek_v3", "falcon_h1"])
def test_random_weights_convert_to_the_same_bits(
    family: str, quant: Quant | None, tmp_path: Path
) -> None:
    """Families with every other mixer. Oracle: the source's own tensors, as the builder reads them,
    and the sizes of the decoder that holds them."""
    spec = read_spec(family_config(family).to_dict())

    def fresh() -> RandomWeights:
        source = RandomWeights(spec, 3)
        source.check()
        return source

    convert(fresh(), tmp_path / "ftw", quant=quant)
    converted = load(tmp_path / "ftw")
    expected = load(fresh(), quant=quant)
    assert converted.decoder.size_bytes == expected.decoder.size_bytes
    assert converted.formats == expected.formats
    if quant is None:
        ours, theirs = open_source(tmp_path / "ftw"), fresh()
        for name in spec.parameter_shapes():
            assert torch.equal(ours.read(name), theirs.read(name)), name


@pytest.mark.parametrize("family", KNOWN)
def test_every_family_converts_without_loss(family: str, tmp_path: Path) -> None:
    """Oracle: every parameter of the source, bit by bit."""
    spec = read_spec(family_config(family).to_dict())
    sources = [RandomWeights(spec, 7) for _ in range(2)]
    for source in sources:
        source.check()
    convert(sources[0], tmp_path / "ftw")
    found = open_source(tmp_path / "ftw")
    for name in spec.parameter_shapes():
        assert torch.equal(found.read(name), sources[1].read(name)), name


def test_progress_notes_and_files(source: Path, tmp_path: Path) -> None:
    """Progress ends at the total; what is copied along is the model's, byte for byte."""
    seen: list[tuple[int, int]] = []
    made = convert(source, tmp_path / "ftw", quant="int4", on_progress=lambda *x: seen.append(x))
    done = [count for count, _ in seen]
    assert done == sorted(done) and len(set(done)) == len(done) == made.records
    assert {total for _, total in seen} == {done[-1]}
    assert made.notes == ("the head is int8 per channel, not int4",)
    assert made.digest == FtwFolder(made.folder).file.digest and made.resumed == 0
    files = content(tmp_path / "ftw")
    assert made.size_bytes == sum(len(x) for name, x in files.items() if "records" in name)
    small = {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"}
    assert {name for name in files if "ftw" not in name} == small
    for name in small:
        assert files[name] == (source / name).read_bytes()
    config = FtwFolder(made.folder).config
    assert config == json.loads((source / "config.json").read_bytes())


def test_what_the_source_left_out_is_still_said(source: Path, tmp_path: Path) -> None:
    """Layers for multi-token prediction are not converted; who loads the result hears of it."""
    folder = shutil.copytree(source, tmp_path / "source")
    file = Path(folder) / "model.safetensors"
    save_file({**load_file(file), "mtp.fc.weight": torch.zeros(3)}, file)
    convert(folder, tmp_path / "ftw")
    assert any("multi-token" in note for note in load(tmp_path / "ftw").notes)


def test_a_damaged_source_leaves_nothing(source: Path, tmp_path: Path) -> None:
    """NaN in one tensor: refused by name; no folder appears."""
    folder = shutil.copytree(source, tmp_path / "source")
    file = Path(folder) / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    key = name if name in tensors else next(x for x in tensors if "layers.2.mlp" in x)
    tensors[key].view(-1)[7] = float("nan")
    save_file(tensors, file)
    with pytest.raises(WeightsDamaged, match=r"layers\.2\..*not finite"):
        convert(folder, tmp_path / "ftw")
    assert not (tmp_path / "ftw").exists()


def test_an_existing_folder_stays(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "ftw")
    before = content(tmp_path / "ftw")
    with pytest.raises(FtwError, match="exists already"):
        convert(source, tmp_path / "ftw", quant="int8")
    assert content(tmp_path / "ftw") == before


def test_gguf_keeps_its_integers(tmp_path: Path) -> None:
    """Q4_1 to int4 without a second rounding, also through the folder. Oracle: the file, loaded."""
    settings = {"hidden_size": 96, "intermediate_size": 128, "head_dim": 16}
    model = build_checkpoint(tmp_path / "hf", "llama", **settings)
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    build_gguf(tmp_path / "model.gguf", model, dict.fromkeys(parts, "Q4_1"))
    convert(tmp_path / "model.gguf", tmp_path / "ftw", quant="int4", files={})
    ours, theirs = load(tmp_path / "ftw"), load(tmp_path / "model.gguf", quant="int4")
    assert ours.formats == theirs.formats and ours.spec == theirs.spec
    linears = zip(ours.decoder._linears(), theirs.decoder._linears(), strict=True)
    for have, want in linears:
        a, b = have._weight, want._weight  # type: ignore[attr-defined]
        assert torch.equal(a.packed, b.packed) and torch.equal(a.scales_zeros, b.scales_zeros)


def packed_elsewhere(
    folder: Path, layout: int4.ByteLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Convert as a machine of that layout would: its packing, written down from the layout."""

    def pack(values: torch.Tensor, tiles: int) -> torch.Tensor:
        outputs, inputs = values.shape
        blocks = values.to(torch.uint8).view(-1, layout.block, inputs)
        half = layout.block // 2
        low, high = (
            (blocks[:, 0::2], blocks[:, 1::2])
            if layout.paired
            else (blocks[:, :half], blocks[:, half:])
        )
        return (low | high << 4).transpose(1, 2).reshape(outputs, inputs // 2)

    with monkeypatch.context() as patch:
        patch.setattr(int4, "_pack", pack)
        int4.byte_layout.cache_clear()
        assert int4.byte_layout() == layout
        convert(folder.parent / "source", folder, quant="int4")
    int4.byte_layout.cache_clear()


@pytest.mark.parametrize("layout", int4.LAYOUTS, ids=lambda layout: layout.name)
def test_int4_of_another_machine_is_packed_anew(
    layout: int4.ByteLayout, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused by `load` by name; converted, it is what this machine makes of the original. The
    other machine is played by its packing of integers, from its layout. Oracle: the original."""
    shutil.copytree(source, tmp_path / "source")
    packed_elsewhere(tmp_path / "foreign", layout, monkeypatch)
    if layout != int4.byte_layout():
        with pytest.raises(UnsupportedQuantization, match="another machine"):
            load(tmp_path / "foreign")
    convert(tmp_path / "foreign", tmp_path / "again")
    convert(tmp_path / "source", tmp_path / "here", quant="int4")
    again, here = content(tmp_path / "again"), content(tmp_path / "here")
    assert again == here
    assert (content(tmp_path / "foreign") == here) is (layout == int4.byte_layout())


INTERRUPTED = """
import sys, time
from pathlib import Path
from freetoken_runtime import conversion
from freetoken_storage import weights_writer
sizes = weights_writer.WeightsWriter.__init__.__kwdefaults__
sizes["sync_bytes"], sizes["shard_bytes"] = 20_000, 200_000
def show(done, total):
    print("go", flush=True)
    time.sleep(0.01)
conversion.convert(Path(sys.argv[1]), Path(sys.argv[2]), quant=sys.argv[3], on_progress=show)
"""


def run_killed(source: Path, target: Path, kill_after_s: float) -> None:
    """Convert in a process that is killed so long after its first record."""
    command = [sys.executable, "-c", INTERRUPTED, str(source), str(target), "int8"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"go\n"
        time.sleep(kill_after_s)
        process.send_signal(signal.SIGKILL)
        process.communicate()


def kill_and_finish(
    source: Path, tmp_path: Path, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> int:
    """How many records were found by those who went on."""
    sizes = WeightsWriter.__init__.__kwdefaults__
    assert sizes is not None
    monkeypatch.setitem(sizes, "sync_bytes", 20_000)
    monkeypatch.setitem(sizes, "shard_bytes", 200_000)
    convert(source, tmp_path / "whole", quant="int8")
    expected = content(tmp_path / "whole")
    assert len(expected) > 5
    found = 0
    for seed in seeds:
        target = tmp_path / f"killed-{seed}"
        run_killed(source, target, random.Random(seed).uniform(0, 0.6))
        if not target.exists():
            found += convert(source, target, quant="int8").resumed
        assert content(target) == expected, f"seed {seed}"
    return found


def test_a_killed_conversion_goes_on_to_the_same_bytes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL at random instants of a real conversion; run again. Oracle: one without."""
    assert kill_and_finish(source, tmp_path, range(2), monkeypatch) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_conversion_goes_on_to_the_same_bytes_20_times(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kill_and_finish(source, tmp_path, range(100, 120), monkeypatch) > 20


MEASURED = """
import json, sys, threading, time
from pathlib import Path
def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
import torch
torch.set_num_threads(1)
torch.ones(300, 300) @ torch.ones(300, 300)
from freetoken_runtime.conversion import convert
before, peak, done = anonymous(), 0, False
def sample():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.001)
thread = threading.Thread(target=sample)
thread.start()
quant = None if sys.argv[3] == "none" else sys.argv[3]
convert(Path(sys.argv[1]), Path(sys.argv[2]), quant=quant)
done = True
thread.join()
print(json.dumps([before, peak]))
"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 402 MiB in fp32, its largest tensors the embedding and the head, 100 MiB each."""
    folder = tmp_path_factory.mktemp("wide")
    settings = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
    build_checkpoint(
        folder, "llama", vocab_size=51_200, num_attention_heads=8, head_dim=64, **settings
    )
    return folder


@pytest.mark.parametrize("quant", ["none", "int8", "int4"])
def test_memory_stays_below_the_largest_tensor(quant: str, wide: Path, tmp_path: Path) -> None:
    """RssAnon over imports, sampled each millisecond in a process of its own: at most 96 MiB, where
    the largest tensor has 100 MiB (256 MiB and 1.1 times that tensor are promised)."""
    command = [sys.executable, "-c", MEASURED, str(wide), str(tmp_path / "ftw"), quant]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, peak = json.loads(done.stdout)
    assert peak > before, "something was measured"
    assert peak - before < 96 << 20, f"{(peak - before) / 2**20:.0f} MiB"
