# SPDX-License-Identifier: Apache-2.0
"""What `bench load` does around its figures. No test asserts a time."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from freetoken_runtime.bench import load as bench
from freetoken_runtime.bench.contestants import ContestantFailed
from freetoken_runtime.bench.first_token import Start
from freetoken_runtime.bench.load import LoadSettings, measure, prepare, run
from freetoken_runtime.bench.page_cache import drop, resident
from freetoken_storage.weights_file import read_ahead

SMALL: dict[str, Any] = {
    **bench.SHAPES["dense"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model as safetensors and converted to int4."""
    path = tmp_path_factory.mktemp("bench")
    prepare(path / "dense", SMALL, ("int4",))
    return path


def test_both_kinds_of_files_are_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes, cold and warm; both give one token, or it would have raised. What is there
    already is not written again. Oracle: the figures' own names, and the files."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = (folder / "dense" / "int4" / "model.ftw").stat().st_mtime_ns
    seen: list[tuple[int, int]] = []
    settings = LoadSettings("dense", ("int4",), rounds=1, threads=1)
    figures = measure(settings, folder, config=SMALL, on_turn=lambda *x: seen.append(x))
    assert [figure.name for figure in figures] == [
        "dense, int4, cold: first token after",
        "dense, int4, cold: first token after",
        "dense, int4, warm: first token after",
        "dense, int4, warm: first token after",
        "dense, int4, converted: anonymous memory while loading",
        "dense, int4, safetensors: anonymous memory while loading",
    ]
    assert all(figure.value > 0 and figure.ratio is not None for figure in figures)
    judged = [figure.target is not None for figure in figures]
    assert judged == [True, False, True, False, True, True] and seen[-1] == (6, 6)
    assert (folder / "dense" / "int4" / "model.ftw").stat().st_mtime_ns == before


def test_a_process_that_fails_says_why(folder: Path, tmp_path: Path) -> None:
    """Oracle: the child's own error."""
    with pytest.raises(ContestantFailed, match="model_not_found|no model at this path"):
        run(tmp_path / "nothing", Start(None, "float32", 1))


def test_different_tokens_are_no_figure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two contestants that hold other weights are not compared."""
    other = dict(SMALL, tie_word_embeddings=False)
    prepare(folder / "other", other, (None,))
    contestants = bench._contestants(folder / "dense", "int4", 1)
    foreign = bench.Contestant(folder / "other" / "none", Start(None, "float32", 1))
    pair = {"converted": contestants["converted"], "safetensors": foreign}
    settings = LoadSettings("dense", ("int4",), rounds=0, threads=1)  # the unmeasured round tells
    with pytest.raises(ContestantFailed, match="different tokens"):
        bench._times("x", pair, "warm", settings, "int4", None)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system has no posix_fadvise")
def test_files_leave_the_page_cache_and_come_back(tmp_path: Path) -> None:
    """Oracle: mincore, on a file of 8 MiB; a mapping that is in use keeps its pages, and that is
    told. File systems in memory keep everything."""
    file = tmp_path / "file"
    file.write_bytes(os.urandom(8 << 20))
    assert resident([file]) == 1.0
    if drop([file]) == 1.0:
        pytest.skip("this file system drops nothing")
    assert resident([file]) == 0.0
    assert len(file.read_bytes()) == 8 << 20 and resident([file]) == 1.0


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system has no posix_fadvise")
def test_converted_weights_are_read_ahead_and_others_are_not(folder: Path) -> None:
    """Oracle: mincore. What cannot be read is nobody's fault yet."""
    for name, wanted in (("int4", True), ("safetensors", False)):
        files = sorted((folder / "dense" / name).glob("*.ftw" if wanted else "*.safetensors"))
        if drop(files) != 0.0:
            pytest.skip("this file system drops nothing")
        read_ahead(folder / "dense" / name)
        deadline = time.monotonic() + (20 if wanted else 0.3)
        while resident(files) != 1.0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (resident(files) == 1.0) is wanted
    read_ahead(folder / "nothing")


def test_an_empty_file_has_no_pages(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    assert resident([empty]) is None
