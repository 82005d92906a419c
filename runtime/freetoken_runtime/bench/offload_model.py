# SPDX-License-Identifier: Apache-2.0
"""What the offload bench computes with: layers of Qwen3-30B-A3B's shapes with random weights, as an
FTW folder, and routers that choose what a trace says."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from ..config import EngineConfig, read_host, resolve
from ..contention import apart, compute_alone
from ..conversion import convert
from ..engine import Engine
from ..experts.store import ExpertStore, LayerExperts
from ..experts.traces import Trace, TraceShape
from ..ftw_weights import FtwFolder, is_ftw
from ..kernels.experts.cpu import Demand
from ..layers.moe import Router
from ..layers.routing import Routes
from ..random_weights import RandomWeights
from ..sampler import SamplingParams
from ..spec import LayerSpec, ModelSpec
from ..specs.attention import AttentionSpec
from ..specs.moe import ExpertSpec, MoeSpec, RouterSpec
from ..specs.rope import RopeSpec
from ..weight_source import Quant, Stored
from ..weights import LoadedModel, load

VOCAB_SIZE = 32_000
NUM_EXPERTS = 128
TOP_K = 8
MANY_ROWS = 1 << 14  # of a pass that wants every expert

T = TypeVar("T")
OnShare = Callable[[float], None]  # how much of something is done, 0 to 1


def shapes(num_layers: int = 6, num_experts: int = NUM_EXPERTS) -> ModelSpec:
    """The layers of Qwen3-30B-A3B, fewer of them, and a smaller vocabulary: its own would take
    more of a token's time than six layers."""
    rope = RopeSpec(dim=128, theta=1_000_000.0)
    attention = AttentionSpec(32, 4, 128, rope, qk_norm="head")
    router = RouterSpec(num_experts, TOP_K, "softmax", normalise=True)
    return ModelSpec(
        architecture="qwen3_moe",
        vocab_size=VOCAB_SIZE,
        hidden_size=2048,
        layers=(LayerSpec(attention, MoeSpec(router, ExpertSpec(768))),) * num_layers,
        norm_eps=1e-6,
        tied_head=False,
        context_limit=1 << 15,
    )


class _HalfWeights(RandomWeights):
    """Random weights in bf16, as models come."""

    def _read(self, name: str, stored: Stored) -> torch.Tensor:
        return super()._read(name, stored).bfloat16()


def prepare(folder: Path, spec: ModelSpec, quant: Quant | None, on_share: OnShare) -> Path:
    """The model as an FTW folder in `folder`: the one that is there, or a new one. A run that was
    interrupted is gone on with. Apart, as only the engine may have a team."""
    return apart(lambda: _prepared(folder, spec, quant, on_share))


def _prepared(folder: Path, spec: ModelSpec, quant: Quant | None, on_share: OnShare) -> Path:
    mixture = spec.layers[0].feed_forward
    assert isinstance(mixture, MoeSpec)
    size = f"{len(spec.layers)}x{mixture.router.num_experts}"
    target = folder / f"{quant or 'none'}-{size}"
    if is_ftw(target) and FtwFolder(target).spec == spec:
        return target
    source = _HalfWeights(spec, seed=0)
    source.check()
    convert(source, target, quant=quant, files={}, on_progress=lambda d, n: on_share(d / n))
    return target


def open_model(path: Path, quant: Quant | None) -> LoadedModel:
    """Experts from the disk, as they compute; the rest in memory."""
    return load(path, dtype="float32" if quant else "bfloat16", quant=quant, offload="disk")


def trace_shape(spec: ModelSpec) -> TraceShape:
    mixture = spec.layers[0].feed_forward
    assert isinstance(mixture, MoeSpec)
    return TraceShape(len(spec.layers), mixture.router.num_experts, mixture.router.top_k)


class Tape:
    """A trace that routers play: each row of a pass takes one step. Mutable: `at` is the next step
    of each layer. Behind its end it begins again."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.at = [0] * trace.shape.layers

    @property
    def step(self) -> int:
        """How many steps all layers have played."""
        return self.at[-1]

    def take(self, layer: int, rows: int) -> torch.Tensor:
        """[rows, k] int64."""
        steps = self.trace.steps
        start = self.at[layer]
        self.at[layer] += rows
        return torch.tensor([steps[(start + row) % len(steps)][layer] for row in range(rows)])

    def played(self, start: int, stop: int) -> Trace:
        """The steps from `start` to `stop`."""
        steps = self.trace.steps
        return Trace(self.trace.shape, tuple(steps[n % len(steps)] for n in range(start, stop)))


@dataclass(frozen=True)
class PlayedRouter(Router):
    """Costs what a router costs, and weighs by its logits, but takes the experts of a tape."""

    tape: Tape
    layer: int

    def routes(self, logits: torch.Tensor) -> Routes:
        chosen = self.tape.take(self.layer, len(logits))
        return Routes(chosen, logits.gather(1, chosen).softmax(-1))


def play(model: LoadedModel, tape: Tape) -> None:
    """Let the model's routers take what the tape says."""
    for layer, mixture in enumerate(model.decoder.mixtures):
        router = mixture.router
        mixture.router = PlayedRouter(router.spec, router.linear, router.correction, tape, layer)


@dataclass(frozen=True)
class Stage:
    """A prepared model that runs, its experts coming from the disk."""

    model: LoadedModel
    engine: Engine
    tape: Tape
    threads: int

    @property
    def store(self) -> ExpertStore:
        return self.model.experts

    def give_slots(self, count: int) -> None:
        """Those that are left keep what they hold; 0 empties them all."""
        self.store.resize((count,))

    def read_all(self) -> float:
        """Bring every expert through the slots and compute nothing; returns seconds."""
        shape = self.tape.trace.shape
        wanted = [Demand(expert, 1) for expert in range(shape.experts)]
        started = time.perf_counter()
        for layer in range(shape.layers):
            for served in LayerExperts(self.store, layer).serve(wanted, MANY_ROWS):
                served.release()
        return time.perf_counter() - started

    def in_engine(self, work: Callable[[], T]) -> T:
        """The result of `work`, done by the engine's thread with all of its team."""

        def with_team() -> T:
            before = torch.get_num_threads()
            torch.set_num_threads(self.threads)
            try:
                return work()
            finally:
                torch.set_num_threads(before)

        return self.engine._owner.call(with_team)

    def run(self, ids: Sequence[int], num_tokens: int = 1) -> float:
        """Seconds of a request that nothing is known of."""
        started = time.perf_counter()
        with closing(self.engine.generate(ids, SamplingParams(max_tokens=num_tokens))) as tokens:
            count = sum(1 for _ in tokens)
        seconds = time.perf_counter() - started
        assert count == num_tokens and tokens.usage.prefill_tokens == len(ids), tokens.usage
        return seconds


@contextmanager
def staged(path: Path, quant: Quant | None, trace: Trace, config: EngineConfig) -> Iterator[Stage]:
    """A model at `path`, with a slot for every expert at first. From here on the calling thread
    computes alone: the engine has the only team."""
    compute_alone()
    model, tape = open_model(path, quant), Tape(trace)
    play(model, tape)
    config = replace(config, expert_slots=trace.shape.slots(1.0))
    resolved = resolve(config, read_host(), model.spec)
    with Engine(model, resolved) as engine:
        yield Stage(model, engine, tape, resolved.threads)
