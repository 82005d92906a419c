# SPDX-License-Identifier: Apache-2.0
"""Prefill: rows per second of a prompt that nothing is known about."""

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
    with engines(path, settings.quants, settings.threads) as loaded:
        prompts = Prompts(open_source(path).spec.vocab_size)
        contestants = {
            name: _ours(engine, prompts, settings.tokens) for name, engine in loaded.items()
        }
        if available():
            reference = Baseline(path, torch.float32)
            contestants[BASELINE] = _theirs(reference, prompts, settings.tokens)
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


def _ours(engine: Engine, prompts: Prompts, tokens: int) -> Callable[[int], Turn]:
    def take(_: int) -> Turn:
        ids = prompts.draw(tokens)
        started = time.perf_counter()
        generation = engine.generate(ids, SamplingParams(max_tokens=1))
        next(generation)
        seconds = time.perf_counter() - started
        generation.close()
        assert generation.usage.prefill_tokens == tokens, generation.usage
        return Turn(seconds, tokens)

    return take


def _theirs(baseline: Baseline, prompts: Prompts, tokens: int) -> Callable[[int], Turn]:
    def take(_: int) -> Turn:
        ids = prompts.draw(tokens)
        started = time.perf_counter()
        baseline.prefill(ids)
        return Turn(time.perf_counter() - started, tokens)

    return take
