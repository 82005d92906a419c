# SPDX-License-Identifier: Apache-2.0
"""Writing an FTW folder: interrupted anywhere, it goes on to the same bytes, and it is never half
there."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from freetoken_storage.testing import file_size_limit
from freetoken_storage.weights import FtwError, FtwTruncated
from freetoken_storage.weights_file import WeightsFile
from freetoken_storage.weights_writer import WeightsWriter

RECORDS = 40
JOB = {"source": "a", "quant": "int4"}


def write(
    folder: Path, *, job: object = JOB, stop_at: int | None = None, pause_s: float = 0
) -> int:
    """Write a folder of random records, the same each time; returns how many were there already.
    Stopped before record `stop_at` it raises KeyboardInterrupt."""
    with WeightsWriter(folder, {"job": job}, shard_bytes=60_000, sync_bytes=8_000) as writer:
        found = len(writer.records)
        for index in range(RECORDS):
            if index == stop_at:
                raise KeyboardInterrupt
            name = f"record {index}"
            if name in writer.records:
                continue
            chance = random.Random(index)
            with writer.record(name) as out:
                for field in ("packed", "scales"):
                    shape = (chance.randrange(1, 40), 7 + index % 3)
                    out.begin(field, "uint8", shape)
                    for _ in range(shape[0]):
                        out.write(chance.randbytes(shape[1]))
                    time.sleep(pause_s)
        writer.finish({"index": RECORDS}, {"config.json": b"{}"})
    return found


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*")}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Of a run without interruption."""
    folder = tmp_path_factory.mktemp("whole") / "model"
    assert write(folder) == 0
    assert [path.name for path in folder.parent.iterdir()] == ["model"], "nothing is left beside it"
    found = content(folder)
    assert len(found) > 4
    return found


@pytest.mark.parametrize("stop_at", [0, 1, 17, RECORDS - 1])
def test_an_interrupted_run_goes_on(
    tmp_path: Path, expected: dict[str, bytes], stop_at: int
) -> None:
    """Twice interrupted, then finished. Until then there is no folder. Oracle: a run without."""
    folder = tmp_path / "model"
    with pytest.raises(KeyboardInterrupt):
        write(folder, stop_at=stop_at)
    assert not folder.exists()
    with pytest.raises(KeyboardInterrupt):
        write(folder, stop_at=min(stop_at + 3, RECORDS - 1))
    assert write(folder) == min(stop_at + 3, RECORDS - 1), "nothing is written twice"
    assert content(folder) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def run_killed(folder: Path, seed: int) -> bool:
    """Run `write` in a process that is killed at a random instant; whether it had finished."""
    chance = random.Random(seed)
    code = (
        "import importlib.util, sys; from pathlib import Path\n"
        f"spec = importlib.util.spec_from_file_location('t', {__file__!r})\n"
        "t = importlib.util.module_from_spec(spec); spec.loader.exec_module(t)\n"
        f"print('go', flush=True); t.write(Path({str(folder)!r}), pause_s=0.002)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"go\n"
        time.sleep(chance.uniform(0, 0.25))
        process.send_signal(signal.SIGKILL)
    return process.returncode == 0


def kill_and_finish(tmp_path: Path, expected: dict[str, bytes], seeds: range) -> None:
    for seed in seeds:
        folder = tmp_path / f"model-{seed}"
        for again in range(3):
            if folder.exists():
                break
            run_killed(folder, 10 * seed + again)
        if not folder.exists():
            write(folder)
        assert content(folder) == expected, f"seed {seed}"
        WeightsFile(folder)


def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path: Path, expected: dict[str, bytes]) -> None:
    """SIGKILL at random instants, three times each. Oracle: a run without interruption."""
    kill_and_finish(tmp_path, expected, range(3))


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bytes_60_times(
    tmp_path: Path, expected: dict[str, bytes]
) -> None:
    kill_and_finish(tmp_path, expected, range(100, 160))


def test_whatever_the_journal_and_shards_became_is_not_believed(
    tmp_path: Path, expected: dict[str, bytes]
) -> None:
    """As after a power loss: the journal cut or altered at any byte, shards cut, altered, gone.
    What is still whole is kept; the end is the same."""
    kept = []
    for seed in range(30):
        chance = random.Random(seed)
        folder = tmp_path / f"model-{seed}"
        with pytest.raises(KeyboardInterrupt):
            write(folder, stop_at=30)
        work = tmp_path / f"model-{seed}.partial"
        victims = [work / "journal", *sorted((work / "model").iterdir())]
        victim = chance.choice(victims)
        stored = bytearray(victim.read_bytes())
        at = chance.randrange(len(stored))
        if chance.random() < 0.3:
            victim.unlink()
        elif chance.random() < 0.5:
            victim.write_bytes(stored[:at])
        else:
            stored[at] ^= 1 << chance.randrange(8)
            victim.write_bytes(stored)
        kept.append(write(folder))
        assert content(folder) == expected, f"seed {seed}: {victim.name}"
    assert min(kept) == 0 and max(kept) >= 15 and len(set(kept)) > 5, kept


def test_another_job_starts_over(tmp_path: Path, expected: dict[str, bytes]) -> None:
    """What an interrupted conversion of something else left is not taken for ours."""
    folder = tmp_path / "model"
    with pytest.raises(KeyboardInterrupt):
        write(folder, job={**JOB, "quant": "int8"}, stop_at=20)
    assert write(folder) == 0
    assert content(folder) == expected


def test_a_record_that_fails_was_never_there(tmp_path: Path, expected: dict[str, bytes]) -> None:
    """An exception in the middle of a record; the same writer goes on."""
    folder = tmp_path / "model"
    with WeightsWriter(folder, {"job": JOB}, shard_bytes=60_000, sync_bytes=8_000) as writer:
        with pytest.raises(ValueError, match="no"), writer.record("record 0") as out:
            out.begin("packed", "uint8", (100,))
            out.write(b"x" * 50)
            raise ValueError("no")
        with pytest.raises(AssertionError), writer.record("record 0") as out:
            out.begin("packed", "uint8", (100,))
            out.write(b"x" * 99)  # one byte less than was announced
        assert writer.records == {}
    write(folder)
    assert content(folder) == expected


def test_a_long_record_that_fails_leaves_no_tail(tmp_path: Path) -> None:
    """It was longer than what follows it. Oracle: the reader, which knows the shard's size."""
    with WeightsWriter(tmp_path / "model", {}) as writer:
        with pytest.raises(ValueError, match="no"), writer.record("a") as out:
            out.begin("weight", "uint8", (90_000,))
            out.write(b"x" * 80_000)
            raise ValueError("no")
        with writer.record("b") as out:
            out.begin("weight", "uint8", (3,))
            out.write(b"abc")
        writer.finish({}, {})
    assert WeightsFile(tmp_path / "model").mapped("b").tobytes() == b"abc"


def test_a_record_is_written_once(tmp_path: Path) -> None:
    with WeightsWriter(tmp_path / "model", {}) as writer:
        with writer.record("a") as out:
            out.begin("weight", "int8", (1,))
            out.write(b"1")
        with pytest.raises(AssertionError, match="written twice"), writer.record("a"):
            pass


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    """An empty one is used."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "mine").write_text("x")
    with pytest.raises(FtwError, match="exists already"):
        write(folder)
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(FtwError, match="exists already"):
        write(file)
    (folder / "mine").unlink()
    write(folder)
    with pytest.raises(FtwError, match="exists already"):
        write(folder)


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    """The second is refused and leaves the first its work."""
    with WeightsWriter(tmp_path / "model", {"job": JOB}) as writer:
        with writer.record("a") as out:
            out.begin("weight", "int8", (3,))
            with pytest.raises(FtwError, match="another process"):
                WeightsWriter(tmp_path / "model", {"job": 2})
            out.write(b"abc")
        writer.finish({}, {})
    assert WeightsFile(tmp_path / "model").mapped("a").tobytes() == b"abc"


def test_a_full_disk_says_so_and_loses_nothing(tmp_path: Path, expected: dict[str, bytes]) -> None:
    """A real limit on file size, met at many places; then room is made and it goes on."""
    folder = tmp_path / "model"
    for size in (4096, 9000, 30_000, 41_000):
        with pytest.raises(FtwError, match="cannot be written") as caught, file_size_limit(size):
            write(folder)
        assert "goes on where it stopped" in str(caught.value)
        assert not folder.exists()
    assert write(folder) > 0
    assert content(folder) == expected


def test_an_unfinished_folder_is_no_model(tmp_path: Path) -> None:
    """What is at work is refused by the reader."""
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "model", stop_at=5)
    with pytest.raises(FtwTruncated, match=r"no model\.ftw"):
        WeightsFile(tmp_path / "model.partial" / "model")


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    """A file where a folder should be."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(FtwError, match="cannot be written"):
        WeightsWriter(tmp_path / "file" / "model", {})
    assert os.listdir(tmp_path) == ["file"]
