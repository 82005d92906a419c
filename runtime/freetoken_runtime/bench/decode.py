# SPDX-License-Identifier: Apache-2.0
"""Decode: tokens per second of one sequence, quiet and beside a busy process."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..config import Quant
from ..engine import Engine
from ..sampler import SamplingParams
from ..weights import open_source
from .baseline import Baseline, available
from .contestants import BASELINE, Prompts, engines
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
    with engines(path, settings.quants, settings.threads) as loaded:
        prompts = Prompts(open_source(path).spec.vocab_size)
        quiet = {name: _ours(engine, prompts, settings) for name, engine in loaded.items()}
        busy = {f"{name} beside a hog": _beside_a_hog(take) for name, take in quiet.items()}
        contestants = quiet | busy
        if available():
            reference = Baseline(path, torch.bfloat16)
            contestants[BASELINE] = _theirs(reference, prompts, settings)
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


def _ours(engine: Engine, prompts: Prompts, settings: DecodeSettings) -> Callable[[int], Turn]:
    """First token to last, so that the prompt's prefill is outside."""

    def take(_: int) -> Turn:
        ids = prompts.draw(settings.prompt)
        generation = engine.generate(ids, SamplingParams(max_tokens=settings.tokens))
        next(generation)
        started = time.perf_counter()
        made = sum(1 for _ in generation)
        assert made == settings.tokens - 1, (made, settings.tokens)
        return Turn(time.perf_counter() - started, made)

    return take


def _beside_a_hog(take: Callable[[int], Turn]) -> Callable[[int], Turn]:
    def contended(number: int) -> Turn:
        with busy_process():
            return take(number)

    return contended


def _theirs(
    baseline: Baseline, prompts: Prompts, settings: DecodeSettings
) -> Callable[[int], Turn]:
    def take(_: int) -> Turn:
        made, seconds = baseline.decode(prompts.draw(settings.prompt), settings.tokens)
        return Turn(seconds, len(made) - 1)

    return take
