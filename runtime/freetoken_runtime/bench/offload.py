# SPDX-License-Identifier: Apache-2.0
"""Decoding with experts that come from the disk, held against what the two bandwidths allow.

    bound per token     (dense + L·k·S) / B_ram  +  L·k·S·(1 - hit) / B_disk

Dense weights and the token's L·k experts of S bytes are read from memory once by the one-row
kernel, misses are read from the disk, and nothing overlaps. Both bandwidths are measured before and
after each few tokens, for disks that others use are not steady. Which experts a token takes comes
from a trace with a known hit rate (`experts.traces`).
"""

import statistics
from dataclasses import dataclass, field
from pathlib import Path

from ..config import EngineConfig
from ..experts.supply import FETCH_THREADS
from ..experts.traces import best_hit_rate, calibrated
from ..spec import ModelSpec
from .offload_model import Stage, prepare, shapes, staged, trace_shape
from .offload_rates import DiskProbe, KernelProbe, PreparedExperts
from .timing import Figure, OnTurn, Target

SHARES = (1.0, 0.5, 0.25, 0.1)  # descending: what is left of more slots is warm
JUDGED_SHARE = 0.25
BOUND = Target("at_least", 0.8)
EXACT = Target("equal", 1.0)
SHORT_PROMPT = 10
TRACE_STEPS = 400
WARM_TOKENS = 24
_PREPARING_TURNS = 100
_PROBED_EXPERTS = 48


@dataclass(frozen=True)
class DecodeSettings:
    """How much is measured. `tokens`: between two measurements of the bandwidths."""

    tokens: int = 8
    rounds: int = 6
    threads: int | None = None


@dataclass(frozen=True)
class Round:
    """A few tokens. `bound_s`: what one may take, as above; rates in bytes per second."""

    token_s: float
    bound_s: float
    hit_rate: float
    read_bytes: float  # per token
    ram_rate: float
    disk_rate: float


@dataclass
class _Share:
    """What was measured with one number of slots. Mutable: rounds are added."""

    share: float
    first_step: int
    next_step: int
    rounds: list[Round] = field(default_factory=list)


def measure(
    settings: DecodeSettings,
    folder: Path,
    *,
    spec: ModelSpec | None = None,
    on_turn: OnTurn | None = None,
) -> list[Figure]:
    """`folder`: where the int4 model is prepared, or has been."""
    spec = spec or shapes()
    total = _PREPARING_TURNS + len(SHARES) * settings.rounds

    def done(turns: int) -> None:
        if on_turn is not None:
            on_turn(turns, total)

    path = prepare(folder, spec, "int4", lambda share: done(int(_PREPARING_TURNS * share)))
    trace = calibrated(trace_shape(spec), TRACE_STEPS, seed=1)
    with staged(path, "int4", trace, EngineConfig(threads=settings.threads)) as stage:
        experts, reader = PreparedExperts(path), stage.store.disk.reader()
        with KernelProbe(experts, reader, stage.threads) as kernel:
            bench = _Bench(stage, kernel, DiskProbe(experts, reader, FETCH_THREADS))
            turns = _PREPARING_TURNS
            for share in SHARES:
                bench.give_slots(share)
                for _ in range(settings.rounds):
                    bench.round(settings.tokens)
                    turns += 1
                    done(turns)
            return [*bench.rates(), *bench.decoding(), bench.short_prompt()]


class _Bench:
    """One run. Mutable: the tape moves on, and slots come and go."""

    def __init__(self, stage: Stage, kernel: KernelProbe, disk: DiskProbe) -> None:
        self._stage = stage
        self._kernel = kernel
        self._disk = disk
        self._shape = stage.tape.trace.shape
        spec = stage.model.spec
        table_bytes = 2 * spec.vocab_size * spec.hidden_size  # of which a token reads one row
        self._dense_bytes = stage.model.decoder.size_bytes - table_bytes
        self._next_id = 0
        self._shares: list[_Share] = []

    def give_slots(self, share: float) -> None:
        """And decode until they hold what so many slots would hold."""
        self._stage.give_slots(self._shape.slots(share))
        if share == 1.0:
            self._stage.read_all()
        self._decode(WARM_TOKENS)
        step = self._stage.tape.step
        self._shares.append(_Share(share, step, step))

    def round(self, tokens: int) -> None:
        ram_rate, disk_before = self._kernel.rate(), self._disk.rate(_PROBED_EXPERTS)
        counts, step = self._stage.store.counts, self._stage.tape.step
        seconds = self._decode(tokens)
        now, steps = self._stage.store.counts, self._stage.tape.step - step
        ram_rate = (ram_rate + self._kernel.rate()) / 2
        disk_rate = (disk_before + self._disk.rate(_PROBED_EXPERTS)) / 2
        misses = now.misses - counts.misses
        hit_rate = 1 - misses / (now.hits - counts.hits + misses)
        experts_bytes = self._shape.layers * self._shape.top_k * self._kernel.expert_bytes
        bound_s = (self._dense_bytes + experts_bytes) / ram_rate
        bound_s += experts_bytes * (1 - hit_rate) / disk_rate
        read_bytes = (now.read_bytes - counts.read_bytes) / steps
        found = Round(seconds / steps, bound_s, hit_rate, read_bytes, ram_rate, disk_rate)
        self._shares[-1].rounds.append(found)
        self._shares[-1].next_step = self._stage.tape.step

    def short_prompt(self) -> Figure:
        """Ten rows with nothing in the slots: what they choose is read, and nothing else."""
        self._stage.give_slots(0)
        self._stage.give_slots(self._shape.slots(JUDGED_SHARE))
        step, fetched = self._stage.tape.step, self._stage.store.counts.fetched
        self._stage.run([self._fresh_id() for _ in range(SHORT_PROMPT)])
        fetched = self._stage.store.counts.fetched - fetched
        chosen = len(set(self._stage.tape.played(step, step + SHORT_PROMPT).accesses()))
        limit = SHORT_PROMPT * self._shape.top_k * self._shape.layers
        return Figure(
            f"prefill of {SHORT_PROMPT} tokens: experts read",
            fetched,
            "experts",
            baseline=chosen,
            ratio=fetched / chosen,
            target=EXACT,
            note=f"that its rows chose, of at most {limit}",
        )

    def rates(self) -> list[Figure]:
        rounds = [found for share in self._shares for found in share.rounds]
        size = f"experts of {self._kernel.expert_bytes / (1 << 20):.1f} MiB"
        kernel = f"one row, cold {size}, {self._stage.threads} threads"
        disk = f"{size}, {self._disk.pending} at a time, up to {self._disk.depth} requests"
        ram_rate = statistics.median(found.ram_rate for found in rounds)
        disk_rate = statistics.median(found.disk_rate for found in rounds)
        return [
            Figure("memory: int4 kernel", ram_rate / 1e9, "GB/s", note=kernel),
            Figure("disk: direct reads", disk_rate / 1e9, "GB/s", note=disk),
        ]

    def decoding(self) -> list[Figure]:
        figures: list[Figure] = []
        for found in reversed(self._shares):
            figures += self._decoding(found)
        return figures

    def _decoding(self, found: _Share) -> list[Figure]:
        slots, rounds = self._shape.slots(found.share), found.rounds
        median = statistics.median
        at = f"slots for {found.share:.0%}"
        played = self._stage.tape.played(found.first_step - 1, found.next_step)
        best = best_hit_rate(played, slots, start=1)
        return [
            Figure(
                f"{at}: decode",
                1 / median(x.token_s for x in rounds),
                "tok/s",
                baseline=1 / median(x.bound_s for x in rounds),
                ratio=median(x.bound_s / x.token_s for x in rounds),
                target=BOUND if found.share == JUDGED_SHARE else None,
                note="bound without overlap",
            ),
            Figure(
                f"{at}: hit rate",
                100 * statistics.fmean(x.hit_rate for x in rounds),
                "%",
                baseline=100 * best,
                note="no eviction hits more",
            ),
            Figure(
                f"{at}: read per token",
                statistics.fmean(x.read_bytes for x in rounds) / (1 << 20),
                "MiB",
            ),
        ]

    def _decode(self, tokens: int) -> float:
        return self._stage.run([self._fresh_id()], tokens)

    def _fresh_id(self) -> int:
        self._next_id += 1
        return self._next_id
