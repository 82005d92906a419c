# SPDX-License-Identifier: Apache-2.0
"""Long prefills with experts that come from the disk: while one layer computes, the next one's
arrive.

    C          the same prefill with every expert in its slot
    D          every expert read, and nothing computed
    ideal      max(C, D) + min(C, D) / L        the first layer is waited for, or the last one's
                                                computing
"""

import random
import statistics
from dataclasses import dataclass
from pathlib import Path

from ..config import EngineConfig
from ..experts.traces import calibrated
from ..spec import ModelSpec
from ..weight_source import Quant
from .offload_model import Stage, prepare, shapes, staged, trace_shape
from .timing import Figure, OnTurn, Target

OVERLAP = Target("at_most", 1.10)
GAIN = Target("at_least", 1.25)
ONCE = Target("equal", 1.0)
GAINFUL = 0.4  # of the longer one, from which on overlapping must show
NUM_LAYERS = 6
NUM_LAYERS_PLAIN = 3  # weights that are not quantised would take 7 GB
TRACE_STEPS = 400
_PREPARING_TURNS = 100


@dataclass(frozen=True)
class PrefillSettings:
    """How much is measured."""

    tokens: int = 2000
    rounds: int = 3
    threads: int | None = None


@dataclass(frozen=True)
class Round:
    """Seconds of each way, and how many experts the overlapped one fetched."""

    computed_s: float
    read_s: float
    overlapped_s: float
    fetched: int

    def ideal_s(self, layers: int) -> float:
        short, long = sorted((self.computed_s, self.read_s))
        return long + short / layers


def measure(
    settings: PrefillSettings,
    folder: Path,
    quant: Quant | None,
    *,
    spec: ModelSpec | None = None,
    on_turn: OnTurn | None = None,
) -> list[Figure]:
    """`folder`: where the model is prepared, or has been."""
    spec = spec or shapes(NUM_LAYERS if quant else NUM_LAYERS_PLAIN)
    total = _PREPARING_TURNS + settings.rounds

    def done(turns: int) -> None:
        if on_turn is not None:
            on_turn(turns, total)

    path = prepare(folder, spec, quant, lambda share: done(int(_PREPARING_TURNS * share)))
    trace = calibrated(trace_shape(spec), TRACE_STEPS, seed=1)
    config = EngineConfig(threads=settings.threads, prefill_chunk=settings.tokens)
    with staged(path, quant, trace, config) as stage:
        draw = random.Random(0)
        rounds = []
        for number in range(-1, settings.rounds):  # the first one is not measured
            rounds.append(_round(stage, draw, settings.tokens))
            done(_PREPARING_TURNS + number + 1)
        return _figures(stage, quant, settings.tokens, rounds[1:])


def _round(stage: Stage, draw: random.Random, tokens: int) -> Round:
    shape = stage.tape.trace.shape

    def prefill() -> float:
        return stage.run([draw.randrange(stage.model.spec.vocab_size) for _ in range(tokens)])

    stage.give_slots(0)
    stage.give_slots(shape.slots(1.0))
    read_s = stage.read_all()
    computed_s = prefill()
    stage.give_slots(0)
    stage.give_slots(2 * shape.experts)
    fetched = stage.store.counts.fetched
    overlapped_s = prefill()
    return Round(computed_s, read_s, overlapped_s, stage.store.counts.fetched - fetched)


def _figures(stage: Stage, quant: Quant | None, tokens: int, rounds: list[Round]) -> list[Figure]:
    shape, median = stage.tape.trace.shape, statistics.median
    at = f"{quant or 'bf16'}, {shape.layers} layers"
    every = shape.layers * shape.experts
    computed_s = median(x.computed_s for x in rounds)
    read_s = median(x.read_s for x in rounds)
    overlapped_s = median(x.overlapped_s for x in rounds)
    gain = median((x.computed_s + x.read_s) / x.overlapped_s for x in rounds)
    worth = min(computed_s, read_s) / max(computed_s, read_s)
    size_bytes = every * stage.store.demands()[0].size_bytes
    fetched = max(x.fetched for x in rounds)
    return [
        Figure(
            f"{at}: {tokens} tokens computed alone",
            computed_s,
            "s",
            note=f"{stage.threads} threads",
        ),
        Figure(f"{at}: read alone", read_s, "s", note=f"{size_bytes / read_s / 1e9:.2f} GB/s"),
        Figure(
            f"{at}: prefill from the disk",
            overlapped_s,
            "s",
            baseline=median(x.ideal_s(shape.layers) for x in rounds),
            ratio=median(x.overlapped_s / x.ideal_s(shape.layers) for x in rounds),
            target=OVERLAP,
            note=f"the longer and 1/{shape.layers} of the shorter",
        ),
        Figure(
            f"{at}: speed by overlapping",
            gain,
            "x",
            target=GAIN if worth >= GAINFUL else None,
            note=f"one after another; the shorter is {worth:.2f} of the longer",
        ),
        Figure(
            f"{at}: experts read",
            fetched,
            "experts",
            baseline=every,
            ratio=fetched / every,
            target=ONCE,
            note="each once",
        ),
    ]
