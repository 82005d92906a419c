# SPDX-License-Identifier: Apache-2.0
"""`doctor`: the judgements on machines described here, and the whole command on this one."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from freetoken_agent.catalog import PulledModel
from freetoken_agent.cli import doctor
from freetoken_agent.cli.main import app
from freetoken_runtime.bench.machine import Machine, measure_disk, read_machine, rss_anon_bytes
from freetoken_runtime.testing import build_checkpoint

GOOD = Machine(
    cpu="test",
    logical_cpus=8,
    cpu_quota=None,
    flags=("avx512f", "avx2"),
    torch_capability="AVX512",
    torch_threads=8,
    load_1m=1.0,
    memory_bytes=32 << 30,
    memory_available_bytes=24 << 30,
    memory_limit_bytes=None,
    system="Linux",
    python="3.11",
    torch="2.13",
)


def machine(**changes: Any) -> Machine:
    return dataclasses.replace(GOOD, **changes)


@pytest.mark.parametrize(
    ("judge", "changes", "status", "says"),
    [
        (doctor.check_cpu, {}, "ok", "avx512f"),
        (doctor.check_cpu, {"flags": ("avx2",)}, "warn", "avx2"),
        (doctor.check_threads, {}, "ok", "8 compute threads"),
        (doctor.check_threads, {"torch_threads": 9}, "warn", "9 compute threads"),
        (doctor.check_threads, {"cpu_quota": 2.0}, "warn", "grants 2"),
        (doctor.check_threads, {"load_1m": 9.0}, "warn", "load 9.0"),
        (doctor.check_memory, {}, "ok", "24.0 GiB usable of 32.0"),
        (doctor.check_memory, {"memory_limit_bytes": 1 << 30}, "warn", "1.0 GiB usable"),
        (doctor.check_memory, {"memory_available_bytes": None}, "warn", "unknown"),
    ],
)
def test_judgement(judge: Any, changes: dict[str, Any], status: str, says: str) -> None:
    """Oracle: the rule stated beside each check; anything but `ok` has a remedy."""
    check = judge(machine(**changes))
    assert (check.status, says in check.found) == (status, True), check
    assert (check.remedy is None) == (status == "ok")


def test_an_altered_model_is_a_fault(tmp_path: Path) -> None:
    """Oracle: the recorded hash is not the file's."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"other bytes")
    facts = {"name": "m", "title": "M", "licence": "", "architecture": "", "quantisation": ""}
    model = PulledModel(
        **facts, path=path, sha256="0" * 64, size_bytes=11, parameters=0, context_tokens=0
    )
    (check,) = doctor.check_models([model])
    assert check.status == "fault" and "altered" in check.found
    path.unlink()
    (check,) = doctor.check_models([model])
    assert check.status == "fault" and str(path) in check.found


def test_doctor_reports_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole command with an empty home: no model is a warning, nothing is a fault."""
    monkeypatch.setenv("FREETOKEN_HOME", str(tmp_path / "home"))
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    found = {check["name"]: check["status"] for check in report["checks"]}
    assert found["model"] == "warn" and found["disk"] in ("ok", "warn")
    assert report["machine"]["logical_cpus"] >= 1
    assert report["disk"]["write_bytes_per_s"] > 0
    speeds = report["speeds"]
    assert speeds["kernel"]["format"].startswith("int4") and speeds["int4"] is None
    for speed in (speeds["kernel"]["few"], speeds["kernel"]["many"], speeds["reads"]["speed"]):
        assert 0 < speed["least"] <= speed["median"] <= speed["most"]


def test_what_this_machine_allows_for_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole command. Oracle: the formula, worked out from the report's own figures, and the
    plan's parts, which add up to the budget; and in words, a line of advice."""
    monkeypatch.setenv("FREETOKEN_HOME", str(tmp_path / "home"))
    sizes = {"hidden_size": 240, "intermediate_size": 512, "num_hidden_layers": 3}
    build_checkpoint(tmp_path / "model", "mixtral", **sizes, num_local_experts=16)
    options = ["doctor", str(tmp_path / "model"), "--ram", "87.5M", "--hit", "0.5"]
    result = CliRunner().invoke(app, [*options, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    found, plan = report["found"], report["found"]["plan"]
    assert found["level"] == "disk" and plan["budget_bytes"] == int(87.5 * (1 << 20))
    assert 2 <= plan["slots"][0] < 48 == found["needs"]["experts"]
    needs, kernel = found["needs"], report["speeds"]["kernel"]["few"]["median"]
    disk = report["speeds"]["reads"]["speed"]["median"]
    assert [pace["hit_rate"] for pace in found["paces"]] == [plan["slots"][0] / 48, 0.5, 1.0]
    for pace in found["paces"]:
        seconds = (needs["dense_bytes"] + needs["token_experts_bytes"]) / kernel
        seconds += needs["token_experts_bytes"] * (1 - pace["hit_rate"]) / disk
        assert pace["tokens_per_s"] == pytest.approx(1 / seconds)
    assert report["in_int4"]["quant"] == "int4" and "--quant int4" in report["advice"]
    shown = CliRunner().invoke(app, options).output
    assert "slots" in shown and "50%" in shown and f"→ {report['advice'][:20]}" in shown


def test_a_model_that_does_not_fit_is_said_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what it needs; without a model, or with a size that is none, an error."""
    monkeypatch.setenv("FREETOKEN_HOME", str(tmp_path / "home"))
    build_checkpoint(tmp_path / "model", "llama")
    result = CliRunner().invoke(app, ["doctor", str(tmp_path / "model"), "--ram", "1M"])
    assert result.exit_code == 0 and "at least" in result.output
    assert "does not fit" in result.output
    assert CliRunner().invoke(app, ["doctor", "no-such-model"]).exit_code == 1
    wrong = CliRunner().invoke(app, ["doctor", str(tmp_path / "model"), "--ram", "much"])
    assert wrong.exit_code == 2


@pytest.mark.parametrize(
    ("text", "size"),
    [("1000", 1000), ("2k", 2048), ("1.5G", 3 << 29), ("512 MiB", 512 << 20), ("8e9", 8 * 10**9)],
)
def test_sizes(text: str, size: int) -> None:
    """Oracle: powers of 1024."""
    assert doctor.size_in_bytes(text) == size


def test_an_unwritable_home_is_a_fault_and_exit_code_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file stands where the home should be; the other checks still report."""
    (tmp_path / "home").write_text("")
    monkeypatch.setenv("FREETOKEN_HOME", str(tmp_path / "home"))
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 3
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert checks["disk"]["status"] == "fault" and "FREETOKEN_HOME" in checks["disk"]["remedy"]
    assert checks["cpu"]["found"]


def test_the_disk_probe_leaves_nothing(tmp_path: Path) -> None:
    """Speeds are positive and the folder is empty afterwards."""
    disk = measure_disk(tmp_path, size_bytes=2 << 20, commits=4)
    assert disk.write_bytes_per_s > 0 and disk.read_bytes_per_s > 0 and disk.commit_ms > 0
    assert list(tmp_path.iterdir()) == []


def test_anonymous_memory_grows_with_what_is_touched() -> None:
    """Oracle: 64 MiB of touched bytes raise RssAnon by about 64 MiB, in a process where nobody else
    takes or gives back memory meanwhile."""
    if rss_anon_bytes() is None:
        pytest.skip("this system has no /proc/self/status")
    module = rss_anon_bytes.__module__
    code = (
        f"from {module} import rss_anon_bytes\n"
        "before = rss_anon_bytes()\n"
        "block = bytearray(b'\\x01') * (64 << 20)\n"
        "print(rss_anon_bytes() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (60 << 20) < int(done.stdout) < (80 << 20)


def test_the_flags_are_those_of_the_kernel() -> None:
    """Oracle: /proc/cpuinfo, read here as plain text."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        pytest.skip("this system has no /proc/cpuinfo")
    for flag in read_machine().flags:
        assert f" {flag} " in cpuinfo.read_text().replace("\n", " ")


def test_a_store_that_cannot_be_made_is_a_named_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same home for a command that needs a store: an error that says what to do."""
    (tmp_path / "home").write_text("")
    monkeypatch.setenv("FREETOKEN_HOME", str(tmp_path / "home"))
    result = CliRunner().invoke(app, ["sessions", "list"])
    assert result.exit_code == 1
    assert "FREETOKEN_HOME" in result.output
