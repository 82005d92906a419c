# SPDX-License-Identifier: Apache-2.0
"""The part of `doctor` that measures: how fast memory, disk and cores are, and what that allows for
a model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from freetoken_agent.catalog import home
from freetoken_runtime.bench.speeds import (
    KernelSpeeds,
    ReadSpeed,
    Speed,
    measure_kernel,
    measure_reads,
    scratch_file,
)
from freetoken_runtime.config import EngineConfig, Quant, ResolvedConfig, read_host, resolve
from freetoken_runtime.experts.choice import usual_level
from freetoken_runtime.ftw_weights import FtwFolder
from freetoken_runtime.prospects import (
    Prospect,
    Speeds,
    advice,
    form_of,
    in_int4,
    probed_expert,
    prospect,
)
from freetoken_runtime.spec import ModelSpec
from freetoken_runtime.specs.moe import ExpertSpec
from freetoken_runtime.weight_source import WeightSource
from freetoken_runtime.weights import open_source, usable_quant
from freetoken_storage.errors import FreetokenError

HIT_RATES = (0.6, 0.9)
_USUAL_EXPERT, _USUAL_WIDTH = ExpertSpec(768), 2048  # of Qwen3-30B-A3B
_GIB = 1 << 30


@dataclass(frozen=True)
class Capacity:
    """What was measured. `int4`: of the same expert in int4, where `kernel` is another form;
    `reads` is None where nothing could be read, `problem` says why."""

    kernel: KernelSpeeds
    int4: KernelSpeeds | None
    reads: ReadSpeed | None
    problem: str | None = None

    @property
    def noisy(self) -> bool:
        speeds = [self.kernel.few, *([self.reads.speed] if self.reads else [])]
        return any(speed.noisy for speed in speeds)

    def speeds(self, kernel: KernelSpeeds | None = None) -> Speeds:
        kernel = kernel or self.kernel
        disk = self.reads.speed.median if self.reads else None
        return Speeds(kernel.few.median, disk, kernel.many.median)


@dataclass(frozen=True)
class ModelCapacity:
    """A model on this machine."""

    path: Path
    architecture: str
    converted: bool
    speeds: Capacity
    found: Prospect
    in_int4: Prospect
    advice: str


def this_machine(ram_bytes: int | None = None, spec: ModelSpec | None = None) -> ResolvedConfig:
    """The settings of an engine, for a model if there is one, where nothing else is asked."""
    return resolve(EngineConfig(ram_budget_bytes=ram_bytes), read_host(), spec)


def measure(config: ResolvedConfig, source: WeightSource | None) -> Capacity:
    """A few seconds. Without a model: an expert of a common shape in int4, and a file in the
    folder of models that disappears afterwards."""
    expert, width = (_USUAL_EXPERT, _USUAL_WIDTH)
    config = config if source is not None else replace(config, quant="int4")
    if source is not None:
        expert, width = probed_expert(source.spec)
    form = form_of(expert, width, config)
    kernel = measure_kernel(form, config.threads)
    other = None
    if config.quant != "int4":
        other = measure_kernel(
            form_of(expert, width, replace(config, quant="int4")), config.threads
        )
    try:
        size = form.layout.size_bytes
        reads = measure_reads(source.files, size) if source is not None else None
        if reads is None:
            home().mkdir(parents=True, exist_ok=True)
            with scratch_file(home()) as file:
                reads = measure_reads([file], size)
    except (OSError, FreetokenError) as error:
        return Capacity(kernel, other, None, str(error))
    return Capacity(kernel, other, reads)


def model_capacity(
    path: Path, ram_bytes: int | None, quant: Quant | None, hit_rates: Sequence[float]
) -> ModelCapacity:
    """What an engine would do with a model, without loading it. The errors of opening it."""
    source = open_source(path)
    config = this_machine(ram_bytes, source.spec)
    config = replace(config, quant=usable_quant(source, quant))
    speeds = measure(config, source)
    level, spec = usual_level(source, config), source.spec
    found = prospect(spec, config, level, speeds.speeds(), hit_rates or HIT_RATES)
    smaller = in_int4(spec, config, speeds.speeds(speeds.int4))
    converted = isinstance(source, FtwFolder)
    said = advice(found, converted, smaller)
    return ModelCapacity(path, spec.architecture, converted, speeds, found, smaller, said)


def speeds_table(found: Capacity) -> Group:
    table = Table("speed", "", "from – to", "of", box=None, pad_edge=False)
    for kernel in filter(None, (found.kernel, found.int4)):
        size = f"{kernel.format}, {kernel.expert_bytes / (1 << 20):.1f} MiB each"
        of = f"cold experts in {size}; {kernel.threads} threads"
        _row(table, "memory, by the kernel for one row", kernel.few, "GB/s", of)
        _row(table, "computing, 256 rows", kernel.many, "GFLOP/s", of)
    if found.reads is not None:
        reads = found.reads
        how = (
            "past the page cache"
            if reads.direct
            else "THROUGH THE PAGE CACHE: not the disk's speed"
        )
        of = f"{reads.record_bytes / (1 << 20):.1f} MiB, {reads.pending} at a time in up to "
        _row(table, "disk, reading", reads.speed, "GB/s", f"{of}{reads.depth} requests, {how}")
    lines: list[Table | Text] = [table]
    if found.problem:
        lines.append(Text(f"the disk was not measured: {found.problem}"))
    if found.noisy:
        lines.append(Text("the rounds differ by more than a third: the machine is busy, or shared"))
    return Group(*lines)


def _row(table: Table, name: str, speed: Speed, unit: str, of: str) -> None:
    figures = (speed.median, speed.least, speed.most)
    median, least, most = (f"{figure / 1e9:.3g}" for figure in figures)
    table.add_row(name, f"{median} {unit}", f"{least} – {most}", of)


def model_table(found: ModelCapacity) -> Group:
    """Where the model's bytes would lie, and how fast it would decode."""
    return Group(
        speeds_table(found.speeds),
        Text(),
        _memory(found),
        *_paces(found.found),
        Text(f"→ {found.advice}"),
    )


def _memory(found: ModelCapacity) -> Table:
    table = Table(str(found.path), found.architecture, box=None, pad_edge=False)
    outlook, plan = found.found, found.found.plan
    held = f"{outlook.quant or 'not quantised'}{', converted' if found.converted else ''}"
    table.add_row("weights", held)
    table.add_row("offload", outlook.level)
    if plan is None:
        table.add_row("memory", outlook.problem)
        return table
    table.add_row("budget", f"{plan.budget_bytes / _GIB:.2f} GiB")
    table.add_row("  weights that stay", f"{plan.weights_bytes / _GIB:.2f} GiB")
    if plan.slots:
        slots = f"{outlook.slots:,} of {outlook.needs.experts:,} experts"
        table.add_row("  slots", f"{plan.slots_bytes / _GIB:.2f} GiB: {slots}")
    table.add_row("  working memory", f"{plan.working_bytes / _GIB:.2f} GiB")
    tokens = f" ({plan.states_bytes // plan.token_bytes:,} tokens)" if plan.token_bytes else ""
    table.add_row("  states", f"{plan.states_bytes / _GIB:.2f} GiB{tokens}")
    return table


def _paces(found: Prospect) -> list[Table | Text]:
    if found.plan is None:
        return []
    table = Table("hit rate", "tokens/s", "of which the disk", box=None, pad_edge=False)
    for pace in found.paces:
        even = " (all experts alike)" if pace.hit_rate == found.even_hit_rate < 1.0 else ""
        waiting = f"{pace.waiting:.0%}"
        table.add_row(f"{pace.hit_rate:.0%}{even}", f"{pace.tokens_per_s:.1f}", waiting)
    return [Text(), table, Text(f"long prompts: up to {found.prompt_rate:,.0f} tokens/s")]
