# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts in memory, beside transformers' grouped experts in bf16: four layers of
Qwen3-30B-A3B's shapes with 64 experts, random weights.

Both start from one checkpoint. Ours is measured in every form that `EngineConfig` offers for it,
and decodes once more beside a busy process.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..batch import Form, RowGroup
from ..config import EngineConfig, Prefill, Quant
from ..contention import apart
from ..conversion import convert
from ..engine import Engine
from ..random_checkpoint import write_random_checkpoint
from ..sampler import SamplingParams
from ..weights import load
from .baseline import Baseline, available
from .contestants import BASELINE, Builder, Prompts, Take, in_processes
from .decode import CONTENTION_TARGET
from .timing import Figure, OnTurn, Target, Turn, busy_process, interleave, paired_ratio, rate

CONFIG: Mapping[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
FORMS: Sequence[tuple[Quant, Prefill]] = (
    ("int4", "exact"),
    ("int8", "exact"),
    ("int4", "bfloat16"),
    ("int8", "int16"),
    ("int8", "int8"),
)
DECODE = "decode"
BESIDE_A_HOG = "decode beside a hog"
DECODE_TARGET = Target("at_least", 2.2)
INT8_TARGET = Target("at_least", 2.5)
_WARM_ROWS = 64  # of the prompt before decoding

# What llama.cpp's Q4_0 did with these shapes on two cores with AVX512: for orientation.
_QUOTED = (("prefill 512 tokens", 319.0), (DECODE, 103.0))


@dataclass(frozen=True)
class ExpertsSettings:
    """How much is measured. `targets`: of a prefill with the same weight values, by its length."""

    prompts: Mapping[int, float] = field(default_factory=lambda: {512: 1.1, 2000: 1.5})
    tokens: int = 32
    rounds: int = 3
    forms: Sequence[tuple[Quant, Prefill]] = FORMS
    threads: int | None = None

    @property
    def tasks(self) -> tuple[str, ...]:
        return (*map(_prefill_task, self.prompts), DECODE, BESIDE_A_HOG)


def _prefill_task(tokens: int) -> str:
    return f"prefill {tokens} tokens"


def prepare(folder: Path, config: Mapping[str, Any] = CONFIG) -> Path:
    """The checkpoint and its two quantised conversions in `folder`: those that are there, or new
    ones. Returns the checkpoint's path."""
    checkpoint = folder / "checkpoint"
    if not (checkpoint / "config.json").is_file():
        write_random_checkpoint(checkpoint, config)
    assert json.loads((checkpoint / "config.json").read_text()) == dict(config), "other shapes"
    for quant in ("int8", "int4"):
        if not (folder / quant).is_dir():
            convert(checkpoint, folder / quant, quant=quant)
    return checkpoint


def measure(
    settings: ExpertsSettings,
    folder: Path,
    *,
    config: Mapping[str, Any] = CONFIG,
    on_turn: OnTurn | None = None,
) -> list[Figure]:
    """Every form and transformers take turns at every task. `folder` keeps the models."""
    checkpoint = apart(lambda: prepare(folder, config))
    builders: dict[str, Builder] = {
        _name(quant, prefill): partial(_ours, folder, quant, prefill, settings)
        for quant, prefill in settings.forms
    }
    if available():
        builders[BASELINE] = partial(_theirs, checkpoint, settings)
    with in_processes(builders) as takes:
        contestants = {
            (name, task): _at(take, settings.tasks.index(task), len(settings.tasks))
            for name, take in takes.items()
            for task in settings.tasks
            if _is_measured(name, task)
        }
        labels = {f"{task}, {name}": (name, task) for name, task in contestants}
        turns = interleave(
            {label: contestants[key] for label, key in labels.items()},
            settings.rounds,
            on_turn=on_turn,
        )
    by_key = {key: turns[label] for label, key in labels.items()}
    figures = [_figure(key, by_key, settings) for key in by_key if key[0] != BASELINE]
    return figures + _quoted() + apart(lambda: _errors(folder / "int8"))


def _name(quant: Quant, prefill: Prefill) -> str:
    return quant if prefill == "exact" else f"{quant}, activations in {prefill}"


def _is_measured(name: str, task: str) -> bool:
    """Decoding is the same in every form of prefill."""
    if name == BASELINE:
        return task != BESIDE_A_HOG
    return "activations" not in name or task not in (DECODE, BESIDE_A_HOG)


def _at(take: Take, task: int, tasks: int) -> Take:
    """One of a contestant's tasks; its process gets both numbers in one."""
    return lambda number: take((number + 1) * tasks + task)


def _figure(
    key: tuple[str, str],
    turns: Mapping[tuple[str, str], list[Turn]],
    settings: ExpertsSettings,
) -> Figure:
    name, task = key
    own = turns[key]
    other, note = (BASELINE, task), "transformers bf16, grouped experts"
    if task == BESIDE_A_HOG:
        other, note = (name, DECODE), "its own quiet speed"
    if other not in turns:
        return Figure(f"{task}, {name}", rate(own), "tokens/s")
    return Figure(
        f"{task}, {name}",
        rate(own),
        "tokens/s",
        baseline=rate(turns[other]),
        ratio=paired_ratio(own, turns[other]),
        target=_target(name, task, settings),
        note=note,
    )


def _target(name: str, task: str, settings: ExpertsSettings) -> Target | None:
    if task == BESIDE_A_HOG:
        return CONTENTION_TARGET
    if task == DECODE:
        return DECODE_TARGET
    if name == _name("int8", "int8"):
        return INT8_TARGET
    if name == _name("int4", "bfloat16"):
        return None  # its weights are rounded, too
    needed = {_prefill_task(tokens): value for tokens, value in settings.prompts.items()}
    return Target("at_least", needed[task])


def _quoted() -> list[Figure]:
    note = "quoted: another machine of two cores, where transformers had 267 and 25"
    return [Figure(f"{task}, llama.cpp Q4_0", at, "tokens/s", note=note) for task, at in _QUOTED]


def _errors(path: Path) -> list[Figure]:
    """What rounded activations do to one mixture's output, against the exact way."""
    model = load(path, quant="int8")
    mixture = model.decoder.mixtures[0]
    rows = torch.randn(256, model.spec.hidden_size, generator=torch.Generator().manual_seed(0))

    def compute(form: Form) -> torch.Tensor:
        with torch.inference_mode():
            return mixture(rows, [RowGroup(0, len(rows), form)])

    exact = compute(Form.MANY)
    return [
        Figure(
            f"error of a mixture's output, int8, activations in {prefill}",
            float((compute(form) - exact).abs().max() / (exact.max() - exact.min())),
            "of its range",
        )
        for prefill, form in (("int16", Form.MANY_INT16), ("int8", Form.MANY_INT8))
    ]


@contextmanager
def _ours(
    folder: Path, quant: Quant, prefill: Prefill, settings: ExpertsSettings
) -> Iterator[Take]:
    config = EngineConfig(
        quant=quant,
        prefill=prefill,
        threads=settings.threads,
        offload="none",
    )
    with Engine.load(folder / quant, config) as engine:

        def prefilled(ids: list[int]) -> Turn:
            started = time.perf_counter()
            generation = engine.generate(ids, SamplingParams(max_tokens=1))
            next(generation)
            seconds = time.perf_counter() - started
            generation.close()
            assert generation.usage.prefill_tokens == len(ids), generation.usage
            return Turn(seconds, len(ids))

        def decoded(ids: list[int]) -> Turn:
            generation = engine.generate(ids, SamplingParams(max_tokens=settings.tokens))
            next(generation)
            started = time.perf_counter()
            made = sum(1 for _ in generation)
            return Turn(time.perf_counter() - started, made)

        yield _tasks(Prompts(folder / quant), settings, prefilled, decoded)


@contextmanager
def _theirs(checkpoint: Path, settings: ExpertsSettings) -> Iterator[Take]:
    baseline = Baseline.of_checkpoint(checkpoint, torch.bfloat16, settings.threads)

    def prefilled(ids: list[int]) -> Turn:
        started = time.perf_counter()
        baseline.prefill(ids)
        return Turn(time.perf_counter() - started, len(ids))

    def decoded(ids: list[int]) -> Turn:
        made, seconds = baseline.decode(ids, settings.tokens)
        return Turn(seconds, len(made) - 1)

    yield _tasks(Prompts(checkpoint), settings, prefilled, decoded)


def _tasks(
    prompts: Prompts,
    settings: ExpertsSettings,
    prefilled: Callable[[list[int]], Turn],
    decoded: Callable[[list[int]], Turn],
) -> Take:
    lengths = list(settings.prompts)

    def take(number: int) -> Turn:
        task = number % len(settings.tasks)
        if task < len(lengths):
            return prefilled(prompts.draw(lengths[task]))
        ids = prompts.draw(_WARM_ROWS)
        if settings.tasks[task] == DECODE:
            return decoded(ids)
        with busy_process():
            return decoded(ids)

    return take
