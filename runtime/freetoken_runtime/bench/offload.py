# SPDX-License-Identifier: Apache-2.0
"""Decoding with experts that come from the disk, held against what the two bandwidths allow.

    bound per token     (dense + L·k·S) / B_ram  +  L·k·S·(1 - hit) / B_disk

Dense weights and the token's L·k experts of S bytes are read from memory once by the one-row
kernel, misses are read from the disk, and nothing overlaps. Which experts a token takes comes from
a trace with a known hit rate (`experts.traces`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median

from ..config import EngineConfig
from ..experts.supply import FETCH_THREADS
from ..experts.traces import best_hit_rate, calibrated
from ..spec import ModelSpec
from .offload_model import Stage, prepare, shapes, staged, trace_shape
from .offload_rates import DiskProbe, KernelProbe, PreparedExperts
from .timing import Figure, OnTurn, Target, Turn, interleave

SHARES = (1.0, 0.5, 0.25, 0.1)  # descending: what is left of more slots is warm
JUDGED_SHARE = 0.25
BOUND = Target("at_least", 0.8)
EXACT = Target("equal", 1.0)
SHORT_PROMPT = 10
TRACE_STEPS = 400
WARM_TOKENS = 24
_PREPARING_TURNS = 100
_FEWEST_PROBED = 16


@dataclass(frozen=True)
class DecodeSettings:
    """How much is measured. `tokens`: in each round."""

    tokens: int = 8
    rounds: int = 6
    threads: int | None = None


@dataclass(frozen=True)
class Decoded:
    """A few tokens. `read_bytes`: per token."""

    token_s: float
    hit_rate: float
    read_bytes: float


@dataclass(frozen=True)
class Share:
    """What was measured with slots for a share of the experts, round by round; rates in bytes per
    second."""

    share: float
    decoded: list[Decoded]
    ram_rates: list[float]
    disk_rates: list[float]
    best_hit_rate: float


def measure(
    settings: DecodeSettings,
    folder: Path,
    *,
    spec: ModelSpec | None = None,
    on_turn: OnTurn | None = None,
) -> list[Figure]:
    """`folder`: where the int4 model is prepared, or has been."""
    spec = spec or shapes()
    turns = 3 * (settings.rounds + 1)  # for each share
    total = _PREPARING_TURNS + len(SHARES) * turns

    def done(before: int, number: int, _: int = 0) -> None:
        if on_turn is not None:
            on_turn(before + number, total)

    path = prepare(folder, spec, "int4", lambda share: done(0, int(_PREPARING_TURNS * share)))
    trace = calibrated(trace_shape(spec), TRACE_STEPS, seed=1)
    with staged(path, "int4", trace, EngineConfig(threads=settings.threads)) as stage:
        experts, reader = PreparedExperts(path), stage.store.disk.reader()
        kernel = KernelProbe(experts, reader, stage)
        bench = _Bench(stage, kernel, DiskProbe(experts, reader, FETCH_THREADS))
        shares = []
        for place, share in enumerate(SHARES):
            so_far = partial(done, _PREPARING_TURNS + place * turns)
            shares.append(bench.decode(settings, share, so_far))
        decoding = [figure for share in reversed(shares) for figure in bench.figures(share)]
        return [*bench.rates(shares), *decoding, bench.short_prompt()]


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
        self._experts_bytes = self._shape.layers * self._shape.top_k * kernel.expert_bytes
        self._next_id = 0

    def decode(self, settings: DecodeSettings, share: float, on_turn: OnTurn) -> Share:
        """Fill the slots by decoding; then tokens and the two bandwidths take turns. The disk is
        measured on as many experts as the tokens read: many a disk is fast until a budget is spent.
        """
        slots = self._shape.slots(share)
        self._stage.give_slots(slots)
        if share == 1.0:
            self._stage.read_all()
        warm = self._tokens(WARM_TOKENS)
        probed = max(_FEWEST_PROBED, round(settings.tokens * self._missed(warm)))
        decoded: list[Decoded] = []
        first_step = self._stage.tape.step

        def tokens(number: int) -> Turn:
            decoded.append(self._tokens(settings.tokens))
            return Turn(settings.tokens * decoded[-1].token_s, settings.tokens)

        contestants = {
            "tokens": tokens,
            "kernel": lambda _: self._kernel.turn(),
            "disk": lambda _: self._disk.turn(probed),
        }
        turns = interleave(contestants, settings.rounds, on_turn=on_turn)
        played = self._stage.tape.played(first_step - 1, self._stage.tape.step)
        return Share(
            share,
            decoded[1:],  # the first round is not measured
            [turn.amount / turn.seconds for turn in turns["kernel"]],
            [turn.amount / turn.seconds for turn in turns["disk"]],
            best_hit_rate(played, slots, start=1),
        )

    def bounds_s(self, share: Share) -> list[float]:
        """Of a token, in each round; see above."""
        return [
            (self._dense_bytes + self._experts_bytes) / ram_rate
            + self._experts_bytes * (1 - decoded.hit_rate) / disk_rate
            for decoded, ram_rate, disk_rate in zip(
                share.decoded, share.ram_rates, share.disk_rates, strict=True
            )
        ]

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

    def rates(self, shares: Sequence[Share]) -> list[Figure]:
        size = f"experts of {self._kernel.expert_bytes / (1 << 20):.1f} MiB"
        kernel = f"one row, cold {size}, a team of {self._stage.threads} threads"
        disk = f"{size}, {self._disk.pending} at a time, up to {self._disk.depth} requests"
        ram_rate = median(rate for share in shares for rate in share.ram_rates)
        disk_rate = median(rate for share in shares for rate in share.disk_rates)
        return [
            Figure("memory: int4 kernel", ram_rate / 1e9, "GB/s", note=kernel),
            Figure("disk: direct reads", disk_rate / 1e9, "GB/s", note=disk),
        ]

    def figures(self, share: Share) -> list[Figure]:
        at = f"slots for {share.share:.0%}"
        bounds_s, tokens_s = self.bounds_s(share), [x.token_s for x in share.decoded]
        return [
            Figure(
                f"{at}: decode",
                1 / median(tokens_s),
                "tok/s",
                baseline=1 / median(bounds_s),
                ratio=median(a / b for a, b in zip(bounds_s, tokens_s, strict=True)),
                target=BOUND if share.share == JUDGED_SHARE else None,
                note="bound without overlap",
            ),
            Figure(
                f"{at}: hit rate",
                100 * fmean(x.hit_rate for x in share.decoded),
                "%",
                baseline=100 * share.best_hit_rate,
                note="no eviction hits more",
            ),
            Figure(
                f"{at}: read per token",
                fmean(x.read_bytes for x in share.decoded) / (1 << 20),
                "MiB",
            ),
        ]

    def _tokens(self, count: int) -> Decoded:
        store, tape = self._stage.store, self._stage.tape
        counts, step = store.counts, tape.step
        seconds = self._stage.run([self._fresh_id()], count)
        now, steps = store.counts, tape.step - step
        misses = now.misses - counts.misses
        hit_rate = 1 - misses / (now.hits - counts.hits + misses)
        read_bytes = (now.read_bytes - counts.read_bytes) / steps
        return Decoded(seconds / steps, hit_rate, read_bytes)

    def _missed(self, decoded: Decoded) -> float:
        """Experts per token."""
        return self._shape.layers * self._shape.top_k * (1 - decoded.hit_rate)

    def _fresh_id(self) -> int:
        self._next_id += 1
        return self._next_id
