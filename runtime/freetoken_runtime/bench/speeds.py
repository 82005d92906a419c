# SPDX-License-Identifier: Apache-2.0
"""The speeds that decide what a machine can run: memory as the one-row kernel reads it, the disk at
the size of an expert, computing with many rows. Seconds, not minutes: on a machine that others use
the figures of one probe differ by tens of percent, so each comes with its extremes.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from freetoken_storage.weights import RECORD_ALIGNMENT
from freetoken_storage.weights_direct import Buffers, Extent, Pending

from ..contention import compute_alone
from ..experts.fetch import Disk
from ..experts.records import ExpertForm
from ..experts.supply import FETCH_THREADS
from ..layers.expert import Expert

_COLD_BYTES = 256 << 20  # more than any cache of the machines meant here
_LARGEST_BYTES = 64 << 20  # of what is measured with: some feed-forwards have gigabytes
_ROWS = 256  # a chunk of a long prompt
_ROUNDS = 5
_READ_BYTES = 192 << 20  # of the disk, a round


@dataclass(frozen=True)
class Speed:
    """What was measured: the median of a few rounds, the slowest and the fastest. Per second:
    bytes, or floating-point operations."""

    median: float
    least: float
    most: float

    @property
    def noisy(self) -> bool:
        """Whether the rounds disagree by more than a third."""
        return self.most > self.least * 4 / 3

    @classmethod
    def of(cls, rounds: Sequence[float]) -> "Speed":
        return cls(statistics.median(rounds), min(rounds), max(rounds))


@dataclass(frozen=True)
class KernelSpeeds:
    """`few`: bytes per second of one row on weights that lie in no cache; `many`: operations per
    second with 256 rows. Both by `threads` threads that each work on experts of their own."""

    format: str
    expert_bytes: int
    threads: int
    few: Speed
    many: Speed


@dataclass(frozen=True)
class ReadSpeed:
    """Reads of `record_bytes` at places in no order, `pending` at a time, in up to `depth`
    requests. `direct`: past the page cache; if not, the figure is not the disk's."""

    record_bytes: int
    pending: int
    depth: int
    direct: bool
    speed: Speed


def measure_kernel(form: ExpertForm, threads: int) -> KernelSpeeds:
    """With random weights of this form, which take turns so that each comes from memory. Large
    experts are measured by a part of them."""
    form = _part(form)
    with torch.inference_mode():
        experts = _experts(form, max(2 * threads, -(-_COLD_BYTES // form.layout.size_bytes)))
    shares = [experts[start::threads] for start in range(threads)]
    with ThreadPoolExecutor(threads, initializer=compute_alone) as pool:

        def seconds(
            work: Callable[[Sequence[Expert]], None], each: Sequence[list[Expert]]
        ) -> float:
            started = time.perf_counter()
            list(pool.map(work, each))
            return time.perf_counter() - started

        seconds(_one_row, shares)
        size = sum(expert.size_bytes for expert in experts)
        few = [size / seconds(_one_row, shares) for _ in range(_ROUNDS)]
        firsts = [share[:2] for share in shares]
        seconds(_many_rows, firsts)
        weights = sum(x.outputs * x.inputs for x in (experts[0].up, experts[0].down))
        flops = 2 * _ROWS * weights * sum(map(len, firsts))
        many = [flops / seconds(_many_rows, firsts) for _ in range(_ROUNDS)]
    return KernelSpeeds(
        experts[0].up.format, form.layout.size_bytes, threads, Speed.of(few), Speed.of(many)
    )


def measure_reads(files: Sequence[Path], record_bytes: int) -> ReadSpeed | None:
    """None if the files hold too little to read. OSError, FtwError. Of large records a part is
    read."""
    record_bytes = min(record_bytes, _LARGEST_BYTES)
    places = [
        (path, path.stat().st_size - record_bytes)
        for path in files
        if path.stat().st_size >= 4 * record_bytes
    ]
    if not places:
        return None
    chance = random.Random(0)
    count = max(2 * FETCH_THREADS, _READ_BYTES // record_bytes)
    disk = Disk()
    try:
        reader = disk.reader()
        buffers = Buffers(record_bytes + RECORD_ALIGNMENT)  # as slots are
        free = [buffers.take() for _ in range(FETCH_THREADS)]

        def round_trip() -> float:
            """Bytes per second."""
            under_way: list[tuple[Pending, memoryview]] = []
            memory, total = list(free), 0
            started = time.perf_counter()
            for _ in range(count):
                if not memory:
                    read, done = under_way.pop(0)
                    read.result()
                    memory.append(done)
                path, last = chance.choices(places, [size for _, size in places])[0]
                offset = chance.randrange(last + 1) // RECORD_ALIGNMENT * RECORD_ALIGNMENT
                extent, into = Extent(path, offset, record_bytes), memory.pop()
                under_way.append((reader.submit(extent, into), into))
                total += record_bytes
            for read, _ in under_way:
                read.result()
            return total / (time.perf_counter() - started)

        rounds = [round_trip() for _ in range(_ROUNDS)]
        direct = not reader.buffered
        return ReadSpeed(record_bytes, FETCH_THREADS, reader.depth, direct, Speed.of(rounds))
    finally:
        disk.close()


@contextmanager
def scratch_file(folder: Path, size_bytes: int = _COLD_BYTES) -> Iterator[Path]:
    """A file to read where there is no model. OSError."""
    block = random.Random(0).randbytes(1 << 20)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".speed-") as file:
        for _ in range(size_bytes >> 20):
            file.write(block)
        file.flush()
        yield Path(file.name)


def _part(form: ExpertForm) -> ExpertForm:
    """The first neurons of experts of this form, as many as are not too large."""
    inner = form.spec.intermediate_size
    most = inner * _LARGEST_BYTES // form.layout.size_bytes // form.group * form.group
    if inner <= most:
        return form
    spec = replace(form.spec, intermediate_size=max(form.group, most))
    return ExpertForm.of(spec, form.width, form.quant, form.dtype, form.group)


def _experts(form: ExpertForm, count: int) -> list[Expert]:
    """One that is filled, and copies of it elsewhere in memory."""
    buffers = Buffers(form.layout.size_bytes)  # as slots are
    memories = [buffers.take() for _ in range(count)]
    shapes = dict(form.spec.parameter_shapes(form.width))
    form.fill(memories[0], lambda name: torch.randn(shapes[name]) * 0.02)
    for memory in memories[1:]:
        memory[:] = memories[0]
    return [form.expert(memory) for memory in memories]


@torch.inference_mode()
def _one_row(experts: Sequence[Expert]) -> None:
    row = torch.zeros(1, experts[0].up.inputs)
    inner = torch.zeros(1, experts[0].down.inputs)
    for expert in experts:
        expert.up.few(row)
        expert.down.few(inner)


@torch.inference_mode()
def _many_rows(experts: Sequence[Expert]) -> None:
    rows = torch.ones(_ROWS, experts[0].up.inputs)
    inner = torch.ones(_ROWS, experts[0].down.inputs)
    for expert in experts:
        expert.up.many(rows)
        expert.down.many(inner)
