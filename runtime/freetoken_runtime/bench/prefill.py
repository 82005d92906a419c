# SPDX-License-Identifier: Apache-2.0
"""Prefill: rows per second of a prompt that nothing is known about."""

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
from .timing import Figure, OnTurn, Target, Turn, interleave, paired_ratio, rate

TARGET = Target("at_least", 1.1)


@dataclass(frozen=True)
class PrefillSettings:
    """How much is measured."""

    tokens: int = 1024
    rounds: int = 5
    quants: tuple[Quant | None, ...] = (None, "int8", "int4")
    threads: int | None = None


def measure(
    path: Path, settings: PrefillSettings, *, on_turn: OnTurn | None = None
) -> list[Figure]:
    """Ours (state kept, first token sampled) beside transformers fp32 (cache kept, one row of
    logits), each round on new prompts."""
    builders: dict[str, Builder] = {
        name_of(quant): partial(_ours, path, quant, settings) for quant in settings.quants
    }
    if available():
        builders[BASELINE] = partial(_theirs, path, settings)
    with in_processes(builders) as contestants:
        turns = interleave(contestants, settings.rounds, on_turn=on_turn)
    theirs = turns.pop(BASELINE, None)
    return [_figure(name, own, theirs, settings.tokens) for name, own in turns.items()]


def _figure(name: str, own: list[Turn], theirs: list[Turn] | None, tokens: int) -> Figure:
    label = f"prefill {tokens} tokens, {name}"
    if theirs is None:
        return Figure(label, rate(own), "tokens/s")
    return Figure(
        label,
        rate(own),
        "tokens/s",
        baseline=rate(theirs),
        ratio=paired_ratio(own, theirs),
        target=TARGET if name == "fp32" else None,
        note="transformers fp32",
    )


@contextmanager
def _ours(path: Path, quant: Quant | None, settings: PrefillSettings) -> Iterator[Take]:
    prompts = Prompts(path)
    with load_engine(path, quant, settings.threads) as engine:

        def take(_: int) -> Turn:
            ids = prompts.draw(settings.tokens)
            started = time.perf_counter()
            generation = engine.generate(ids, SamplingParams(max_tokens=1))
            next(generation)
            seconds = time.perf_counter() - started
            generation.close()
            assert generation.usage.prefill_tokens == settings.tokens, generation.usage
            return Turn(seconds, settings.tokens)

        yield take


@contextmanager
def _theirs(path: Path, settings: PrefillSettings) -> Iterator[Take]:
    prompts = Prompts(path)
    baseline = Baseline(path, torch.float32, settings.threads)

    def take(_: int) -> Turn:
        ids = prompts.draw(settings.tokens)
        started = time.perf_counter()
        baseline.prefill(ids)
        return Turn(time.perf_counter() - started, settings.tokens)

    yield take
