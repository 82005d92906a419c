# SPDX-License-Identifier: Apache-2.0
"""What an edit costs on a hybrid: layers of Qwen3.6-35B-A3B's shapes with random weights.

Eight layers, every fourth with full attention and the others with a gated delta net, 64 experts of
which a token takes 8: large enough that a token's work resembles the model's, small enough for a
machine without an accelerator. Weights are fp32, states are kept in a store, times run to the first
token.
"""

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from freetoken_storage import Database

from ..config import EngineConfig, read_host, resolve
from ..engine import Engine
from ..random_weights import random_model
from ..sampler import SamplingParams
from ..spec import LayerSpec, ModelSpec
from ..specs.attention import AttentionSpec
from ..specs.gated_delta import GatedDeltaSpec
from ..specs.mlp import MlpSpec
from ..specs.moe import ExpertSpec, MoeSpec, RouterSpec
from ..specs.rope import RopeSpec
from ..weights import LoadedModel
from .timing import Figure, OnTurn, Target

VOCAB_SIZE = 32_000
NEVER = 1 << 30
SHARE = Target("at_most", 0.03)
NONE = Target("equal", 0.0)


@dataclass(frozen=True)
class HybridSettings:
    """How much is measured."""

    tokens: int = 8000
    rounds: int = 3
    threads: int | None = None
    prefill_chunk: int = 1024
    anchor_interval: int = 1024


def shapes(num_layers: int = 8, num_experts: int = 64) -> ModelSpec:
    """The layers of Qwen3.6-35B-A3B, fewer of them and with fewer experts."""
    rope = RopeSpec(dim=64, theta=10_000_000.0)
    full = AttentionSpec(16, 2, 256, rope, qk_norm="head", gated=True)
    delta = GatedDeltaSpec(16, 32, key_dim=128, head_dim=128, kernel=4)
    moe = MoeSpec(
        RouterSpec(num_experts, 8, "softmax", normalise=True),
        ExpertSpec(512),
        shared=MlpSpec(512),
        shared_gate=True,
    )
    mixers = [full if index % 4 == 3 else delta for index in range(num_layers)]
    return ModelSpec(
        architecture="qwen3_5_moe_text",
        vocab_size=VOCAB_SIZE,
        hidden_size=2048,
        layers=tuple(LayerSpec(mixer, moe) for mixer in mixers),
        norm_eps=1e-6,
        tied_head=False,
        context_limit=1 << 18,
    )


def measure(
    settings: HybridSettings,
    folder: Path,
    *,
    spec: ModelSpec | None = None,
    on_turn: OnTurn | None = None,
) -> list[Figure]:
    """Cold prefills with anchors and without take turns; then edits in the middle, then restarts
    over what the store holds."""
    bench = _Bench(settings, spec or shapes(), folder, on_turn)
    cold_s, share = bench.anchors_cost()
    return [
        Figure(f"cold prefill of {settings.tokens} tokens", cold_s, "s"),
        Figure(
            f"anchors every {settings.anchor_interval} tokens",
            share,
            "of a cold prefill",
            target=SHARE,
            note=f"{bench.anchor_mib:.1f} MiB each",
        ),
        *bench.edits(),
        *bench.restarts(cold_s),
    ]


class _Bench:
    """One run. Mutable: engines are opened and closed as it goes."""

    def __init__(
        self, settings: HybridSettings, spec: ModelSpec, folder: Path, on_turn: OnTurn | None
    ) -> None:
        self._settings = settings
        self._config = EngineConfig(
            threads=settings.threads,
            prefill_chunk=settings.prefill_chunk,
            anchor_interval=settings.anchor_interval,
        )
        self._folder = folder
        self._on_turn = on_turn
        self._turn = 0
        self._vocab_size = spec.vocab_size
        self._model: LoadedModel = random_model(spec)
        self.anchor_mib = sum(state.bytes_per_anchor() for state in spec.states()) / (1 << 20)
        self._path: list[int] = []  # what the engine with anchors has seen last

    def anchors_cost(self) -> tuple[float, float]:
        """Seconds of a cold prefill with anchors, and what they add to one without."""
        taken = {self._config.anchor_interval: [], NEVER: []}  # type: dict[int, list[float]]
        with self._engine(NEVER, "first") as engine:  # the first touch of the weights is slow
            _first_token(engine, self._ids(seed=-1)[: self._settings.prefill_chunk])
        for number in range(self._settings.rounds):
            ids = self._ids(seed=number)
            order = list(taken) if number % 2 else list(taken)[::-1]
            for interval in order:
                with self._engine(interval, f"cold {number} {interval}") as engine:
                    taken[interval].append(_first_token(engine, ids)[0])
                self._done()
        with_anchors, without = taken.values()
        added = statistics.median(a / b - 1 for a, b in zip(with_anchors, without, strict=True))
        return statistics.median(with_anchors), added

    def edits(self) -> list[Figure]:
        """Another id at 50 %, each time on the path of the last edit."""
        half = self._settings.tokens // 2
        ids = self._ids(seed=100)
        beside, gaps, seconds = [], [], []
        with self._engine(self._config.anchor_interval, "kept") as engine:
            engine.warm(ids)
            engine.flush()
            for _ in range(self._settings.rounds):
                ids = [*ids[:half], (ids[half] + 1) % self._vocab_size, *ids[half + 1 :]]
                plan = engine.plan(ids)
                before = engine.stats().forward_rows
                took, prefilled = _first_token(engine, ids)
                engine.flush()
                forwarded = engine.stats().forward_rows - before
                beside.append(abs(prefilled - plan.prefill_tokens) + abs(forwarded - prefilled))
                gaps.append(half - (plan.anchor or 0))
                seconds.append(took)
                half += 1  # the next edit is not at the last one's end
                self._done()
        self._path = ids
        return [
            Figure("edit at 50 %: rows beside the plan", max(beside), "rows", target=NONE),
            Figure(
                "edit at 50 %: gap to the anchor",
                max(gaps),
                "tokens",
                target=Target("at_most", float(self._config.anchor_interval)),
            ),
            Figure("edit at 50 %: to the first token", statistics.median(seconds), "s"),
        ]

    def restarts(self, cold_s: float) -> list[Figure]:
        """The whole path from the store, in an engine that has seen nothing."""
        seconds, prefilled = [], []
        for _ in range(self._settings.rounds):
            with self._engine(self._config.anchor_interval, "kept") as engine:
                took, rows = _first_token(engine, self._path)
            seconds.append(took)
            prefilled.append(rows)
            self._done()
        restart_s = statistics.median(seconds)
        return [
            Figure(
                "restart: to the first token",
                1000 * restart_s,
                "ms",
                baseline=1000 * cold_s,
                ratio=restart_s / cold_s,
                target=SHARE,
                note=f"{max(prefilled)} rows forwarded",
            )
        ]

    @contextmanager
    def _engine(self, interval: int, name: str) -> Iterator[Engine]:
        """A fresh engine over the store of this name."""
        config = resolve(replace(self._config, anchor_interval=interval), read_host())
        with Database(self._folder / name) as store, Engine(self._model, config) as engine:
            engine.attach(store.snapshots)
            yield engine

    def _ids(self, seed: int) -> list[int]:
        draw = random.Random(seed)
        return [draw.randrange(self._vocab_size) for _ in range(self._settings.tokens)]

    def _done(self) -> None:
        self._turn += 1
        if self._on_turn is not None:
            self._on_turn(self._turn, 4 * self._settings.rounds)


def _first_token(engine: Engine, ids: Sequence[int]) -> tuple[float, int]:
    """Seconds to the first token, and the rows that were prefilled."""
    started = time.perf_counter()
    with closing(engine.generate(ids, SamplingParams(max_tokens=1))) as generation:
        next(generation)
        seconds = time.perf_counter() - started
    return seconds, generation.usage.prefill_tokens
