# SPDX-License-Identifier: Apache-2.0
"""Decode: tokens per second of one sequence, quiet and beside a busy process."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ..config import Quant
from ..sampler import SamplingParams
from .baseline import Baseline, available
from .contestants import (
    BASELINE,
    Builder,
    Prompts,
    Take,
    in_processes,
    load_engine,
    name_of,
)
from .timing import (
    Figure,
    OnTurn,
    Target,
    Turn,
    busy_process,
    interleave,
    paired_ratio,
    rate,
)

TARGETS = {"int8": Target("at_least", 1.8), "int4": Target("at_least", 2.5)}
CONTENTION_TARGET = Target("at_least", 0.4)


@dataclass(frozen=True)
class DecodeSettings:
    """How much is measured."""

    prompt: int = 64
    tokens: int = 64
    rounds: int = 5
    quants: tuple[Quant | None, ...] = (None, "int8", "int4")
    threads: int | None = None


def measure(path: Path, settings: DecodeSettings, *, on_turn: OnTurn | None = None) -> list[Figure]:
    """Ours beside transformers bf16, then each of ours beside itself with a CPU hog running."""
    builders: dict[str, Builder] = {
        name_of(quant): partial(_ours, path, quant, settings) for quant in settings.quants
    }
    if available():
        builders[BASELINE] = partial(_theirs, path, settings)
    with in_processes(builders) as takes:
        quiet = {name: take for name, take in takes.items() if name != BASELINE}
        busy = {f"{name} beside a hog": _beside_a_hog(take) for name, take in quiet.items()}
        contestants = quiet | busy
        if BASELINE in takes:
            contestants[BASELINE] = takes[BASELINE]
        turns = interleave(contestants, settings.rounds, on_turn=on_turn)
    theirs = turns.get(BASELINE)
    figures = [_against_baseline(name, turns[name], theirs) for name in quiet]
    return figures + [
        Figure(
            f"decode, {contended}",
            rate(turns[contended]),
            "tokens/s",
            baseline=rate(turns[name]),
            ratio=paired_ratio(turns[contended], turns[name]),
            target=CONTENTION_TARGET,
            note="its own quiet speed",
        )
        for name, contended in zip(quiet, busy, strict=True)
    ]


def _against_baseline(name: str, own: list[Turn], theirs: list[Turn] | None) -> Figure:
    if theirs is None:
        return Figure(f"decode, {name}", rate(own), "tokens/s")
    return Figure(
        f"decode, {name}",
        rate(own),
        "tokens/s",
        baseline=rate(theirs),
        ratio=paired_ratio(own, theirs),
        target=TARGETS.get(name),
        note="transformers bf16",
    )


@contextmanager
def _ours(path: Path, quant: Quant | None, settings: DecodeSettings) -> Iterator[Take]:
    """First token to last, so that the prompt's prefill is outside."""
    prompts = Prompts(path)
    with load_engine(path, quant, settings.threads) as engine:

        def take(_: int) -> Turn:
            ids = prompts.draw(settings.prompt)
            generation = engine.generate(ids, SamplingParams(max_tokens=settings.tokens))
            next(generation)
            started = time.perf_counter()
            made = sum(1 for _ in generation)
            assert made == settings.tokens - 1, (made, settings.tokens)
            return Turn(time.perf_counter() - started, made)

        yield take


def _beside_a_hog(take: Take) -> Take:
    def contended(number: int) -> Turn:
        with busy_process():
            return take(number)

    return contended


@contextmanager
def _theirs(path: Path, settings: DecodeSettings) -> Iterator[Take]:
    prompts = Prompts(path)
    baseline = Baseline(path, torch.bfloat16, settings.threads)

    def take(_: int) -> Turn:
        made, seconds = baseline.decode(prompts.draw(settings.prompt), settings.tokens)
        return Turn(seconds, len(made) - 1)

    yield take
