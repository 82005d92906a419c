# SPDX-License-Identifier: Apache-2.0
"""What it brings that memory moves between expert slots and states.

A session grows from one thousandth of its final context to all of it and is rewound, turn by turn,
while another one decodes; in between the budget is halved and doubled. The same turns run with
slots that stay as many as the longest turn leaves room for, and once with all weights in memory:
tokens must be those.
"""

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..config import EngineConfig, read_host, resolve
from ..conversion import convert
from ..engine import Engine
from ..memory import return_freed_memory
from ..random_weights import RandomWeights
from ..reports import EngineStats
from ..sampler import SamplingParams
from ..spec import LayerSpec, ModelSpec
from ..specs.attention import AttentionSpec
from ..specs.moe import ExpertSpec, MoeSpec, RouterSpec
from ..specs.rope import RopeSpec
from ..weight_source import Quant
from ..weights import LoadedModel, load
from .timing import Figure, OnTurn, Target

VOCAB_SIZE = 8_000
NONE = Target("equal", 0.0)
_NEVER_EMPTY = 64  # tokens that the one beside begins with


@dataclass(frozen=True)
class Stage:
    """One turn of the session: its context in tokens, and the part of the budget there is."""

    tokens: int
    budget: float = 1.0


@dataclass(frozen=True)
class ElasticSettings:
    """`beside_tokens`: decoded beside each turn; `answer_tokens`: of each turn."""

    tokens: int = 16_000
    answer_tokens: int = 16
    beside_tokens: int = 96
    threads: int | None = None
    prefill_chunk: int = 512

    @property
    def stages(self) -> tuple[Stage, ...]:
        """There and back."""
        parts = ((16, 1.0), (8, 0.5), (4, 0.5), (2, 0.5), (1, 0.5))
        back = ((1, 1.0), (16, 1.0), (16, 0.5), (16, 1.0))
        return tuple(Stage(self.tokens // part, budget) for part, budget in (*parts, *back))


@dataclass(frozen=True)
class Outcome:
    """What a run gave. `tokens`: of the session and of the one beside it; `over_bytes`: the most
    that was counted above the budget of the moment, 0 if nothing ever was; `rss_bytes`: the most of
    RssAnon; `slots` and `resting_bytes`, RssAnon again, without what malloc holds freed: after each
    turn."""

    seconds: float
    tokens: tuple[tuple[int, ...], tuple[int, ...]]
    over_bytes: int
    rss_bytes: int
    slots: tuple[int, ...]
    resting_bytes: tuple[int, ...]
    stats: EngineStats


def shapes(num_layers: int = 4, num_experts: int = 48) -> ModelSpec:
    """A mixture whose experts and whose longest context take about as much memory."""
    rope = RopeSpec(dim=64, theta=1_000_000.0)
    attention = AttentionSpec(4, 4, 64, rope, qk_norm="head")
    router = RouterSpec(num_experts, 4, "softmax", normalise=True)
    layer = LayerSpec(attention, MoeSpec(router, ExpertSpec(512)))
    return ModelSpec(
        architecture="qwen3_moe",
        vocab_size=VOCAB_SIZE,
        hidden_size=512,
        layers=(layer,) * num_layers,
        norm_eps=1e-6,
        tied_head=True,
        context_limit=1 << 15,
    )


def measure(
    settings: ElasticSettings,
    folder: Path,
    *,
    spec: ModelSpec | None = None,
    on_turn: OnTurn | None = None,
) -> list[Figure]:
    """The model is written to `folder` first."""
    source = RandomWeights(spec or shapes(), seed=0)
    source.check()
    convert(source, folder / "model", quant="int8", files={})
    runs = Runs(settings, folder / "model", "int8", on_turn)
    resident, elastic, still = runs.resident(), runs.elastic(), runs.still()
    differing = sum(run.tokens != resident.tokens for run in (elastic, still))
    counts, moves = elastic.stats.experts, elastic.stats.moves
    slots = ", ".join(map(str, elastic.slots))
    return [
        Figure(
            "all turns, elastic",
            elastic.seconds,
            "s",
            baseline=still.seconds,
            ratio=still.seconds / elastic.seconds,
            note=f"s with {still.slots[0]} slots that stay",
        ),
        Figure("all turns, all weights in memory", resident.seconds, "s"),
        Figure("runs with other tokens", differing, "", target=NONE),
        Figure(
            "counted above the budget, at most",
            max(elastic.over_bytes, still.over_bytes) / (1 << 20),
            "MiB",
            target=NONE,
        ),
        Figure(
            "bytes moved",
            moves.size_bytes / (1 << 20),
            "MiB",
            note=f"{moves.count} times; slots after each turn: {slots}",
        ),
        Figure(
            "hit rate, elastic", _hit_rate(elastic), "%", baseline=_hit_rate(still), note="still"
        ),
        Figure(
            "seconds waited for experts",
            counts.waited_s,
            "s",
            baseline=still.stats.experts.waited_s,
            note="still",
        ),
        Figure(
            "anonymous memory, at most",
            elastic.rss_bytes / (1 << 20),
            "MiB",
            note="over that before loading",
        ),
    ]


def _hit_rate(run: Outcome) -> float:
    counts = run.stats.experts
    return 100.0 * counts.hits / max(1, counts.hits + counts.misses)


class Runs:
    """The three runs over one model. `budget_bytes`: of those with a budget."""

    def __init__(
        self,
        settings: ElasticSettings,
        path: Path,
        quant: Quant | None,
        on_turn: OnTurn | None = None,
    ) -> None:
        self.settings = settings
        self._path = path
        self._quant = quant
        self._on_turn = on_turn
        self._turns = 0
        self._config = EngineConfig(
            threads=settings.threads, prefill_chunk=settings.prefill_chunk, max_batch=2
        )
        self._before_bytes = anonymous_bytes()
        self.budget_bytes, self.slots = self._sizes()

    def resident(self) -> Outcome:
        return self._run(load(self._path, quant=self._quant, offload="none"), None)

    def elastic(self) -> Outcome:
        return self._run(self._offloaded(), None, self.budget_bytes)

    def still(self) -> Outcome:
        return self._run(self._offloaded(), self.slots, self.budget_bytes)

    def _offloaded(self) -> LoadedModel:
        return load(self._path, quant=self._quant, offload="disk")

    def _sizes(self) -> tuple[int, int]:
        """A budget that holds every turn and, when it is whole, half of the experts beside; and how
        many slots leave room for every turn: a path that grows is copied."""
        model = self._offloaded()
        plan = model.plan(resolve(self._config, read_host()))
        (demand,) = model.experts.demands()
        stages = self.settings.stages
        spare = self.settings.answer_tokens + len(stages) * (self.settings.beside_tokens + 512)
        needs = [
            plan.token_bytes * (new.tokens + old.tokens + spare + 2048)
            for old, new in zip((stages[0], *stages), stages, strict=False)
        ]
        fixed = plan.weights_bytes + plan.working_bytes
        least = max(
            int((fixed + need) / stage.budget) for stage, need in zip(stages, needs, strict=True)
        )
        budget = least + demand.size_bytes * demand.experts // 2
        left = min(
            int(stage.budget * budget) - fixed - need
            for stage, need in zip(stages, needs, strict=True)
        )
        slots = max(demand.least, min(demand.experts, left // demand.size_bytes))
        model.experts.close()
        return budget, slots

    def _run(self, model: LoadedModel, slots: int | None, budget: int | None = None) -> Outcome:
        config = replace(self._config, expert_slots=slots, ram_budget_bytes=budget)
        with Engine(model, resolve(config, read_host())) as engine:
            run = _Run(engine, self.settings, budget, self._before_bytes)
            for number, stage in enumerate(self.settings.stages):
                run.turn(number, stage)
                self._turns += 1
                if self._on_turn is not None:
                    self._on_turn(self._turns, 3 * len(self.settings.stages))
            return run.outcome()


@dataclass
class _Run:
    """One engine's turns. Mutable."""

    engine: Engine
    settings: ElasticSettings
    budget: int | None
    before_bytes: int
    seconds: float = 0.0
    path: list[int] = field(default_factory=list)
    beside: list[int] = field(default_factory=lambda: _ids(1, _NEVER_EMPTY))
    tokens: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    over_bytes: int = 0
    rss_bytes: int = 0
    slots: list[int] = field(default_factory=list)
    resting_bytes: list[int] = field(default_factory=list)

    def turn(self, number: int, stage: Stage) -> None:
        """The session goes back or on to so many tokens and gets an answer; beside it the other one
        decodes its share."""
        started = time.perf_counter()
        if self.budget is not None:
            self.engine.set_budget(ram_bytes=int(stage.budget * self.budget))
        kept = self.path[: stage.tokens - 1 - self.settings.tokens // 64]
        self.path = kept + _ids(number + 2, stage.tokens - len(kept))
        neighbour = threading.Thread(target=self._decode_beside)
        neighbour.start()
        answer = self._generate(self.path, self.settings.answer_tokens)
        neighbour.join()
        self.seconds += time.perf_counter() - started
        self.path += answer
        self.tokens[0].extend(answer)
        self._look()
        self.slots.append(self.engine.stats().experts.slots)
        return_freed_memory()  # a pass's matrices stay with malloc for a while, some of them
        self.resting_bytes.append(anonymous_bytes() - self.before_bytes)

    def outcome(self) -> Outcome:
        first, second = self.tokens
        return Outcome(
            self.seconds,
            (tuple(first), tuple(second)),
            self.over_bytes,
            self.rss_bytes,
            tuple(self.slots),
            tuple(self.resting_bytes),
            self.engine.stats(),
        )

    def _decode_beside(self) -> None:
        more = self._generate(self.beside, self.settings.beside_tokens)
        self.beside += more
        self.tokens[1].extend(more)

    def _generate(self, ids: Sequence[int], count: int) -> list[int]:
        stream = self.engine.generate(
            ids, SamplingParams(max_tokens=count), on_progress=lambda done, total: self._look()
        )
        return [token.id for token in stream]

    def _look(self) -> None:
        """Between two passes, so that the counts belong together."""
        stats = self.engine.stats()
        used = stats.weights_bytes + stats.working_bytes + stats.state_bytes
        self.over_bytes = max(self.over_bytes, used - stats.ram_budget_bytes)
        self.rss_bytes = max(self.rss_bytes, anonymous_bytes() - self.before_bytes)


def anonymous_bytes() -> int:
    """RssAnon of this process; 0 where the system does not tell."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return 0
    lines = status.read_text().splitlines()
    return next((int(x.split()[1]) << 10 for x in lines if x.startswith("RssAnon")), 0)


def _ids(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 200) for _ in range(count)]
