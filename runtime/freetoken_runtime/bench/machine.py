# SPDX-License-Identifier: Apache-2.0
"""What this machine is and what its disk does. Linux facts come from /proc and /sys; elsewhere they
are absent, never guessed. Reads nothing at import."""

import contextlib
import mmap
import os
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

# What the kernels look for, in the order in which they prefer it.
KERNEL_FLAGS = ("amx_int8", "amx_bf16", "avx512_bf16", "avx512_vnni", "avx512f", "avx2", "f16c")


@dataclass(frozen=True)
class Machine:
    """The facts a measured figure depends on."""

    cpu: str
    logical_cpus: int  # that this process may use
    cpu_quota: float | None  # CPUs granted by a control group; None: no limit
    flags: tuple[str, ...]  # of KERNEL_FLAGS, those present
    torch_capability: str
    torch_threads: int
    load_1m: float | None  # processes running or waiting, this one included
    memory_bytes: int | None
    memory_available_bytes: int | None
    memory_limit_bytes: int | None  # of a control group; None: no limit
    system: str
    python: str
    torch: str


@dataclass(frozen=True)
class DiskSpeed:
    """A folder's disk, measured. `commit_ms`: median of 4-KiB synchronous writes, which is what
    an edit's commit costs at least."""

    folder: str
    free_bytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float
    commit_ms: float


def read_machine() -> Machine:
    """Read the facts anew (the load and the available memory change)."""
    import torch  # a second and a half: paid by whoever asks for the facts, not by --help

    info = _read_text("/proc/cpuinfo")
    present = set(_first_field(info, "flags").split())
    memory = _memory_bytes()
    return Machine(
        cpu=_first_field(info, "model name") or platform.processor() or platform.machine(),
        logical_cpus=_usable_cpus(),
        cpu_quota=_cpu_quota(),
        flags=tuple(flag for flag in KERNEL_FLAGS if flag in present),
        torch_capability=torch.backends.cpu.get_cpu_capability(),
        torch_threads=torch.get_num_threads(),
        load_1m=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        memory_bytes=memory.get("MemTotal"),
        memory_available_bytes=memory.get("MemAvailable"),
        memory_limit_bytes=_number(_read_text("/sys/fs/cgroup/memory.max")),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=torch.__version__,
    )


def measure_disk(folder: Path, *, size_bytes: int = 64 << 20, commits: int = 32) -> DiskSpeed:
    """Write, sync and read back `size_bytes` in `folder`, then time small synchronous writes.
    The file disappears afterwards. OSError if the folder cannot be written or is full."""
    block = memoryview(os.urandom(1 << 20))
    blocks = max(1, size_bytes >> 20)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".speed-") as file:
        descriptor = file.fileno()
        started = time.perf_counter()
        for _ in range(blocks):
            os.write(descriptor, block)
        os.fsync(descriptor)
        write_s = time.perf_counter() - started
        read_s = _read_uncached(file.name, blocks)
        commit_s = []
        for _ in range(commits):
            started = time.perf_counter()
            os.pwrite(descriptor, block[:4096], 0)
            os.fsync(descriptor)
            commit_s.append(time.perf_counter() - started)
    usage = os.statvfs(folder)
    return DiskSpeed(
        folder=str(folder),
        free_bytes=usage.f_bavail * usage.f_frsize,
        write_bytes_per_s=(blocks << 20) / write_s,
        read_bytes_per_s=(blocks << 20) / read_s,
        commit_ms=1e3 * statistics.median(commit_s),
    )


def rss_anon_bytes() -> int | None:
    """This process's anonymous resident memory: what budgets are held against. Mapped database
    pages are not in it."""
    kib = _first_field(_read_text("/proc/self/status"), "RssAnon").split()
    return int(kib[0]) << 10 if kib else None


def _read_uncached(path: str, blocks: int) -> float:
    """Seconds to read the file past the page cache, where the file system allows that."""
    buffer = mmap.mmap(-1, 1 << 20)  # page-aligned, as O_DIRECT wants it
    flags = os.O_RDONLY | getattr(os, "O_DIRECT", 0)
    try:
        descriptor = os.open(path, flags)
    except OSError:  # tmpfs and some network file systems know no O_DIRECT
        descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(AttributeError, OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        for _ in range(blocks):
            os.readv(descriptor, [buffer])
        return time.perf_counter() - started
    finally:
        os.close(descriptor)
        buffer.close()


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_quota() -> float | None:
    fields = _read_text("/sys/fs/cgroup/cpu.max").split()
    if len(fields) != 2 or fields[0] == "max":
        return None
    return int(fields[0]) / int(fields[1])


def _memory_bytes() -> dict[str, int]:
    rows = (line.split() for line in _read_text("/proc/meminfo").splitlines())
    return {row[0].rstrip(":"): int(row[1]) << 10 for row in rows if len(row) == 3}


def _first_field(text: str, name: str) -> str:
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return ""


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
