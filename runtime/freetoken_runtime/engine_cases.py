# SPDX-License-Identifier: Apache-2.0
"""For tests: small models of every kind of state, and an engine whose every answer is checked.

Oracles: GOLD, a cold prefill of the same ids in an engine of its own; for reuse, the list of what
was forwarded and kept in `engine_programs.Ledger`; for counts, the runner's rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from freetoken_storage.records import Snapshots

from .config import EngineConfig, read_host, resolve
from .engine import Engine
from .engine_programs import Ledger
from .random_weights import random_model
from .sampler import SamplingParams
from .spec import LayerSpec, ModelSpec
from .specs.attention import AttentionSpec
from .specs.convolution import ShortConvSpec
from .specs.gated_delta import GatedDeltaSpec
from .specs.mamba import Mamba2Spec
from .specs.mlp import MlpSpec
from .specs.moe import ExpertSpec, MoeSpec, RouterSpec
from .specs.rope import RopeSpec
from .testing import build_checkpoint
from .weights import LoadedModel, load

TOLERANCE = 1e-4  # of the range of the logits
GREEDY_TOKENS = 64
VOCAB_SIZE = 211
CONFIG = EngineConfig(threads=1, prefill_chunk=64, anchor_interval=50, ram_budget_bytes=1 << 30)


@dataclass(frozen=True)
class Kind:
    """A family with settings that leave it without experts: a router's ties are no fault of a
    state."""

    family: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def build(self, folder: Path, **settings: Any) -> None:
        """Save a small random model."""
        build_checkpoint(folder, self.family, **{**self.settings, **settings})


KINDS: Mapping[str, Kind] = {
    "full": Kind("llama"),
    "window": Kind("mistral"),
    "gated_delta": Kind("qwen3_5_text"),
    "mamba2": Kind("granitemoehybrid", {"num_local_experts": 0}),
    "convolution": Kind("lfm2_moe", {"num_dense_layers": 4}),
}


def hybrid_spec() -> ModelSpec:
    """Window and full attention, gated delta net, Mamba-2, short convolution; experts and not."""
    rope = RopeSpec(dim=10, theta=10_000.0)
    moe = MoeSpec(
        RouterSpec(num_experts=12, top_k=2, scores="softmax", normalise=True),
        ExpertSpec(36),
        shared=MlpSpec(44),
        shared_gate=True,
    )
    layers = (
        LayerSpec(GatedDeltaSpec(2, 6, key_dim=12, head_dim=20, kernel=4), moe),
        LayerSpec(AttentionSpec(6, 2, 10, rope, window=23), moe),
        LayerSpec(Mamba2Spec(6, 20, 2, state_size=12, kernel=4, norm="of_gated"), moe),
        LayerSpec(ShortConvSpec(channels=60, kernel=3), MlpSpec(84)),
        LayerSpec(AttentionSpec(6, 2, 10, rope), moe),
    )
    return ModelSpec("hybrid", VOCAB_SIZE, 60, layers, 1e-6, tied_head=False, context_limit=4096)


def hybrid_model() -> LoadedModel:
    """All kinds of state in one model, with random weights: the same in every process."""
    return random_model(hybrid_spec(), seed=3)


def ids_of(seed: int, count: int) -> list[int]:
    """Random ids of the small models, none of them special."""
    return [int(i) for i in np.random.default_rng(seed).integers(3, VOCAB_SIZE, count)]


def close_to(warm: torch.Tensor, cold: torch.Tensor) -> bool:
    """Whether logits are those of a cold prefill."""
    span = float(cold.max() - cold.min())
    distance = float((warm - cold).abs().max())
    return bool(torch.isfinite(warm).all()) and distance <= TOLERANCE * span


@dataclass(frozen=True)
class Cold:
    """GOLD of a path: the logits, and greedy ids up to the first that rounding may decide."""

    logits: torch.Tensor
    greedy: Sequence[int]


class CheckedEngine:
    """An engine beside a ledger of what it has to know; every call checks plan, counts and reuse
    against it. `interval` is the config's, at work where the model has layers that cannot be
    sliced."""

    def __init__(
        self, model: LoadedModel | Path, snapshots: Snapshots | None = None, **settings: Any
    ) -> None:
        self.model = load(model) if isinstance(model, Path) else model
        self.config = replace(CONFIG, **settings)
        self.sliceable = all(state.sliceable for state in self.model.spec.states())
        self.interval = self.config.anchor_interval
        self.ledger = Ledger(self.sliceable, self.interval)
        self._snapshots = snapshots
        self.engine = self._open()
        if snapshots is not None:
            self.engine.attach(snapshots)

    def _open(self) -> Engine:
        """Fresh rows are NaN."""
        return Engine(self.model, resolve(self.config, read_host()), poison=True)

    def close(self) -> None:
        self.engine.close()

    def restart(self) -> None:
        """What a new process would find: the store, or nothing."""
        self.engine.close()
        self.ledger.written()
        self.ledger.lost_ram()
        if self._snapshots is None:
            self.ledger = Ledger(self.sliceable, self.interval)
        self.engine = self._open()
        if self._snapshots is not None:
            self.engine.attach(self._snapshots)

    def nearest(self, shared: int, named: Sequence[int] = ()) -> int:
        """The last position that can be restored of a path whose first `shared` tokens are known,
        with anchors at the named ones and after every interval."""
        if self.sliceable:
            return shared
        return max([p for p in named if p <= shared] + [shared - shared % self.interval])

    def warm(self, ids: Sequence[int], anchors: Sequence[int] = ()) -> int:
        """P."""
        expected = self._check_plan(ids)
        before = self.engine.stats().forward_rows
        usage = self.engine.warm(ids, anchors=anchors)
        assert (usage.reused_tokens, usage.changed) == (expected, None)
        assert usage.prefill_tokens == len(ids) - expected
        assert self.engine.stats().forward_rows - before == usage.prefill_tokens
        kept = {len(ids), *(p for p in anchors if p > expected)}
        self.ledger.forwarded(tuple(ids), kept, expected)
        return usage.prefill_tokens

    def generate(
        self, ids: Sequence[int], count: int, anchors: Sequence[int] = ()
    ) -> tuple[list[int], int]:
        """Greedy ids, and P."""
        expected = self._check_plan(ids)
        before = self.engine.stats().forward_rows
        stream = self.engine.generate(ids, SamplingParams(max_tokens=count), anchors=anchors)
        output = [token.id for token in stream]
        usage = stream.usage
        assert (usage.reused_tokens, usage.changed) == (expected, None)
        assert usage.reused_tokens + usage.prefill_tokens == len(ids)
        forwarded = self.engine.stats().forward_rows - before
        assert forwarded == usage.prefill_tokens + len(output) - 1
        path = (*ids, *output[:-1])
        kept = {len(ids), len(path), *(p for p in anchors if p > expected)}
        self.ledger.forwarded(path, kept, expected)
        return output, usage.prefill_tokens

    def _check_plan(self, ids: Sequence[int]) -> int:
        """R, by the ledger and by the plan."""
        expected = self.ledger.reused(tuple(ids))
        plan = self.engine.plan(ids)
        assert (plan.reused_tokens, plan.anchor) == (expected, expected or None)
        assert plan.reused_tokens + plan.prefill_tokens == len(ids)
        return expected

    def cold(self, ids: Sequence[int], count: int) -> Cold:
        """GOLD, in an engine that knows nothing."""
        with self._open() as engine:
            logits = engine.logits(ids)
            span = float(logits.max() - logits.min())
            stream = engine.generate(ids, SamplingParams(max_tokens=count, logprobs=2))
            greedy = []
            for token in stream:
                (_, first), (_, second) = token.top
                if first - second <= 2 * TOLERANCE * span:
                    break
                greedy.append(token.id)
        return Cold(logits, greedy)

    def check_gold(self, ids: Sequence[int], prefill: int, count: int = GREEDY_TOKENS) -> None:
        """P as expected, the same greedy ids and logits as a cold prefill."""
        cold = self.cold(ids, count)
        output, counted = self.generate(ids, count)
        assert counted == prefill, (counted, prefill)
        assert output[: len(cold.greedy)] == list(cold.greedy)
        assert close_to(self.engine.logits(ids), cold.logits)
