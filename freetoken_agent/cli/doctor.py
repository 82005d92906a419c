# SPDX-License-Identifier: Apache-2.0
"""`doctor`: is this machine, its disk, its models and its store fit to run agents? How fast is it,
and what does that allow for a model?"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from freetoken_agent.catalog import PulledModel, home, pulled, resolve, weights_digest
from freetoken_runtime.bench.machine import DiskSpeed, Machine, measure_disk, read_machine
from freetoken_storage import verify_store

from .opening import StorePath, store_path
from .output import EXIT_FAULT_FOUND, Json, emit, progress

if TYPE_CHECKING:
    from .capacity import Capacity

Status = Literal["ok", "warn", "fault"]

_GIB = 1 << 30
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SLOW_DISK_BYTES_PER_S = 100e6  # below it, persisting states falls behind a decoding model
_SLOW_COMMIT_MS = 20.0  # an edit returns after one commit
_SMALL_MEMORY_BYTES = 2 * _GIB  # SmolLM2 in fp32, its KV at 8,192 tokens, and the process
_STYLE = {"ok": "green", "warn": "yellow", "fault": "bold red"}


@dataclass(frozen=True)
class Check:
    """One finding. `remedy` says what to do about anything but `ok`."""

    name: str
    status: Status
    found: str
    remedy: str | None = None


@dataclass(frozen=True)
class Diagnosis:
    """Everything found, with the raw facts for whoever reads the JSON."""

    checks: tuple[Check, ...]
    machine: Machine
    disk: DiskSpeed | None
    speeds: "Capacity"


def doctor_command(
    model: Annotated[
        str | None,
        typer.Argument(help="A pulled name, a folder or a .gguf: say what the machine allows it."),
    ] = None,
    ram: Annotated[
        str | None, typer.Option("--ram", help="The memory budget of the model: bytes, 512M, 12G.")
    ] = None,
    quant: Annotated[
        Literal["none", "int8", "int4"], typer.Option("--quant", help="Quantised at load.")
    ] = "none",
    hit: Annotated[
        list[float] | None,
        typer.Option("--hit", min=0, max=1, help="A hit rate of the slots; may be repeated."),
    ] = None,
    store: StorePath = None,
    json: Json = False,
) -> None:
    """Check the CPU, threads, memory, disk speed, the pulled models and the store, and measure a
    few seconds; with MODEL, say what the speeds allow for it."""
    from . import capacity  # torch loads here

    if model is not None:
        ram_bytes = None if ram is None else size_in_bytes(ram)
        asked = None if quant == "none" else quant
        with progress("measuring"):
            found = capacity.model_capacity(resolve(model), ram_bytes, asked, hit or ())
        emit(found, capacity.model_table(found))
        return
    with progress("looking at the machine") as bar:
        machine = read_machine()
        checks = [check_cpu(machine), check_threads(machine), check_memory(machine)]
        bar.label("measuring the disk")
        disk, check = check_disk(home())
        checks.append(check)
        bar.label("measuring memory")
        speeds = capacity.measure(capacity.this_machine(), None)
        bar.label("hashing the models")
        checks.extend(check_models(pulled()))
        bar.label("reading the store")
        checks.append(check_store(store_path(store)))
    diagnosis = Diagnosis(checks=tuple(checks), machine=machine, disk=disk, speeds=speeds)
    table = Table("check", "", "found", box=None, pad_edge=False)
    for check in diagnosis.checks:
        found_text = check.found + (f"\n→ {check.remedy}" if check.remedy else "")
        table.add_row(check.name, Text(check.status, _STYLE[check.status]), Text(found_text))
    emit(diagnosis, Group(table, Text(), capacity.speeds_table(speeds)))
    if any(check.status == "fault" for check in diagnosis.checks):
        raise typer.Exit(EXIT_FAULT_FOUND)


def size_in_bytes(text: str) -> int:
    """ "12G", "512 MiB", "8e9" -> bytes; powers of 1024."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    try:
        return int(float(match[1]) * _UNITS[match[2]]) if match else int(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no size; write bytes, or 512M, 12G") from error


def check_cpu(machine: Machine) -> Check:
    """The packed int8/int4 kernels need AVX2, and are fast from AVX-512 on."""
    found = f"{machine.cpu}; {', '.join(machine.flags) or 'no vector flags known'}"
    found += f"; torch {machine.torch} uses {machine.torch_capability}"
    if "avx512f" in machine.flags:
        return Check("cpu", "ok", found)
    remedy = "quantised decode will be slow here; prefer quant=None and measure with `bench decode`"
    return Check("cpu", "warn", found, remedy)


def check_threads(machine: Machine) -> Check:
    """Compute threads beyond the CPUs we may use stall each other."""
    granted = machine.cpu_quota or machine.logical_cpus
    found = f"{machine.torch_threads} compute threads on {machine.logical_cpus} CPUs"
    if machine.cpu_quota is not None:
        found += f", of which a control group grants {machine.cpu_quota:g}"
    if machine.torch_threads > max(1, int(granted)):
        remedy = f"set OMP_NUM_THREADS={max(1, int(granted))} or EngineConfig(threads=…)"
        return Check("threads", "warn", found, remedy)
    if machine.load_1m is not None and machine.load_1m > machine.logical_cpus:
        found += f"; other processes keep them busy (load {machine.load_1m:.1f})"
        return Check("threads", "warn", found, "timings and decode speed suffer; stop what is idle")
    return Check("threads", "ok", found)


def check_memory(machine: Machine) -> Check:
    """What is available now, under whatever limit holds."""
    sizes = (machine.memory_available_bytes, machine.memory_limit_bytes)
    usable = min((size for size in sizes if size is not None), default=None)
    if usable is None:
        return Check(
            "memory", "warn", "unknown on this system", "set EngineConfig(ram_budget_bytes=…)"
        )
    found = f"{usable / _GIB:.1f} GiB usable"
    if machine.memory_bytes is not None:
        found += f" of {machine.memory_bytes / _GIB:.1f} GiB"
    if usable < _SMALL_MEMORY_BYTES:
        return Check("memory", "warn", found, "use quant='int4' and a small ram_budget_bytes")
    return Check("memory", "ok", found)


def check_disk(folder: Path) -> tuple[DiskSpeed | None, Check]:
    """The disk that holds models and sessions: is it writable, roomy and fast enough?"""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        disk = measure_disk(folder)
    except OSError as error:
        remedy = "free some space, or set FREETOKEN_HOME to a folder that can be written"
        return None, Check("disk", "fault", f"{folder}: {error.strerror or error}", remedy)
    write, read = disk.write_bytes_per_s / 1e6, disk.read_bytes_per_s / 1e6
    found = f"{folder}: {disk.free_bytes / _GIB:.1f} GiB free, write {write:.0f} MB/s, "
    found += f"read {read:.0f} MB/s one by one, commit {disk.commit_ms:.2f} ms"
    if disk.free_bytes < _GIB:
        return disk, Check("disk", "warn", found, "states are evicted early; free some space")
    if disk.write_bytes_per_s < _SLOW_DISK_BYTES_PER_S or disk.commit_ms > _SLOW_COMMIT_MS:
        return disk, Check("disk", "warn", found, "put FREETOKEN_HOME on a faster disk")
    return disk, Check("disk", "ok", found)


def check_models(models: list[PulledModel]) -> list[Check]:
    """Every pulled file still has the hash it was pulled with."""
    if not models:
        return [Check("model", "warn", "none pulled", "freetoken-agent pull smollm2")]
    return [_check_model(model) for model in models]


def _check_model(model: PulledModel) -> Check:
    name = f"model {model.name}"
    try:
        digest = weights_digest(model.path)
    except OSError as error:
        remedy = f"remove {model.path.parent} and pull again"
        return Check(name, "fault", f"{model.path}: {error.strerror or error}", remedy)
    if digest != model.sha256:
        remedy = f"remove {model.path.parent} and pull again"
        return Check(name, "fault", f"{model.path} was altered (SHA-256 {digest})", remedy)
    return Check(name, "ok", f"{model.title}, {model.quantisation}, hash verified")


def check_store(folder: Path) -> Check:
    """Every page and value of the store can be read; `verify` reads them in a child process."""
    if not (folder / "sessions").exists():
        return Check("store", "ok", f"{folder}: none yet")
    report = verify_store(folder)
    counts = report.counts
    found = f"{folder}: {counts['sessions']} sessions, {counts['snapshots']} states"
    found += f", {counts['bytes'] / _GIB:.2f} GiB"
    if report.ok:
        return Check("store", "ok", found)
    first = report.faults[0]
    found += f"; {len(report.faults)} faults, the first in {first.database}: {first.what}"
    if all(fault.database == "states" for fault in report.faults):
        return Check("store", "warn", found, "states are computed again; no session lost a word")
    return Check("store", "fault", found, "restore it from a backup; `sessions verify` lists all")
