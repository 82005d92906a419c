# SPDX-License-Identifier: Apache-2.0
"""Layers that keep one row per group of tokens, and state that only a replay brings back.

The model here is made for it: its first layer mixes each embedding with the three before it and
keeps them in no store (`replay_tokens` = 3); the others attend to the means of keys and values over
closed groups of 4 or 128 tokens and to the raw rows of the open group, which anchors carry.
Oracles: the same sums over a whole path in plain torch, and a cold prefill.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken_runtime import Engine, EngineConfig, SamplingParams
from freetoken_runtime.batch import Batch, SequenceRows
from freetoken_runtime.config import read_host, resolve
from freetoken_runtime.layers.embedding import TableEmbedding
from freetoken_runtime.layers.linear import DenseLinear, Linear
from freetoken_runtime.layers.norm import RmsNorm
from freetoken_runtime.layers.parts import Rope
from freetoken_runtime.models.decoder import Decoder, DecoderParts, Layer, MixerBlock
from freetoken_runtime.spec import BufferSpec, LayerSpec, MixerSpec, ModelSpec, StateSpec
from freetoken_runtime.weights import LoadedModel
from freetoken_storage.testing import MemoryDatabase

pytestmark = pytest.mark.usefixtures("one_thread")

HIDDEN, HEADS, DIM, VOCAB = 24, 3, 8, 61
REPLAY = 3


@dataclass(frozen=True)
class ShiftSpec:
    """Embeddings of a token and the three before it, weighted."""

    rope = None

    def parameter_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        return {"out": (hidden_size, hidden_size)}

    def state(self) -> StateSpec:
        tail = BufferSpec("tail", (REPLAY, HIDDEN))
        return StateSpec(volatile=(tail,), replay_tokens=REPLAY)


@dataclass(frozen=True)
class GroupSpec:
    """Attention over means of closed groups and the rows of the open one."""

    group: int
    rope = None

    def parameter_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        return {"qkv": (3 * HEADS * DIM, hidden_size), "out": (hidden_size, HEADS * DIM)}

    def state(self) -> StateSpec:
        row, raw = (HEADS, DIM), (self.group, HEADS, DIM)
        return StateSpec(
            rows=(BufferSpec("k", row), BufferSpec("v", row)),
            carry=(BufferSpec("open_k", raw), BufferSpec("open_v", raw)),
            granularity=self.group,
        )


WEIGHTS = torch.tensor([0.2, -0.5, 0.7, 1.0])  # of the tokens at t - 3 … t


@dataclass(frozen=True)
class Shift:
    output: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.output,)

    @property
    def size_bytes(self) -> int:
        return self.output.size_bytes

    def __call__(
        self, x: torch.Tensor, batch: Batch, layer: int, rope: Rope | None
    ) -> torch.Tensor:
        mixed = [self._mix(x[s.start : s.stop], s, layer) for s in batch.sequences]
        return self.output(torch.cat(mixed), batch.groups)

    def _mix(self, x: torch.Tensor, rows: SequenceRows, layer: int) -> torch.Tensor:
        (tail,) = rows.state.fixed(layer)
        known = torch.cat((tail, x))
        for stop in (*rows.cuts, len(x)):
            rows.state.keep(layer, stop, (known[stop : stop + REPLAY].clone(),))
        return torch.stack([WEIGHTS @ known[t : t + REPLAY + 1] for t in range(len(x))])


@dataclass(frozen=True)
class Groups:
    spec: GroupSpec
    qkv: Linear
    output: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.qkv, self.output)

    @property
    def size_bytes(self) -> int:
        return self.qkv.size_bytes + self.output.size_bytes

    def __call__(
        self, x: torch.Tensor, batch: Batch, layer: int, rope: Rope | None
    ) -> torch.Tensor:
        rows = self.qkv(x, batch.groups).view(len(x), 3, HEADS, DIM)
        mixed = [self._mix(rows[s.start : s.stop], s, layer) for s in batch.sequences]
        return self.output(torch.cat(mixed).reshape(len(x), -1), batch.groups)

    def _mix(self, rows: torch.Tensor, part: SequenceRows, layer: int) -> torch.Tensor:
        state, group, count = part.state, self.spec.group, len(rows)
        first = state.length
        held = first % group  # rows of the open group
        open_k, open_v = state.fixed(layer)
        k = torch.cat((open_k[:held], rows[:, 1]))  # from the open group's start on
        v = torch.cat((open_v[:held], rows[:, 2]))
        closed = len(k) // group
        means_k = k[: closed * group].view(closed, group, HEADS, DIM).mean(1)
        means_v = v[: closed * group].view(closed, group, HEADS, DIM).mean(1)
        past = state.pieces(layer, new=False)
        all_k = torch.cat([*(piece[0] for piece in past), means_k])
        all_v = torch.cat([*(piece[1] for piece in past), means_v])
        state.write(layer, means_k, means_v)
        for stop in (*part.cuts, count):
            at = held + stop
            raw = slice(at - at % group, at)
            state.keep(layer, stop, (_padded(k[raw], group), _padded(v[raw], group)))
        mixed = []
        for t in range(count):
            at = held + t
            raw, groups = slice(at - at % group, at + 1), first // group + at // group
            keys, values = torch.cat((all_k[:groups], k[raw])), torch.cat((all_v[:groups], v[raw]))
            mixed.append(attend(rows[t, 0], keys, values))
        return torch.stack(mixed)


def _padded(rows: torch.Tensor, group: int) -> torch.Tensor:
    return torch.cat((rows, rows.new_zeros(group - len(rows), HEADS, DIM)))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [H, D], k and v [S, H, D] -> [H, D]."""
    weights = torch.softmax(torch.einsum("hd,shd->hs", q, k) * DIM**-0.5, -1)
    return torch.einsum("hs,shd->hd", weights, v)


class GroupModel:
    """The model's weights, its plain-torch logits, and engines over it."""

    def __init__(self, groups: tuple[int, ...]) -> None:
        torch.manual_seed(7)
        self.groups = groups
        self.embedding = torch.randn(VOCAB, HIDDEN)
        self.head = torch.randn(VOCAB, HIDDEN) * 0.3
        self.shift = torch.randn(HIDDEN, HIDDEN) * 0.2
        self.qkv = [torch.randn(3 * HEADS * DIM, HIDDEN) * 0.3 for _ in groups]
        self.out = [torch.randn(HIDDEN, HEADS * DIM) * 0.3 for _ in groups]

    def logits(self, ids: list[int]) -> torch.Tensor:
        """[T, V], one token after another over the whole path."""
        x = self.embedding[ids]
        tail = torch.cat((torch.zeros(REPLAY, HIDDEN), norm(x)))
        x = x + torch.stack([WEIGHTS @ tail[t : t + 4] for t in range(len(ids))]) @ self.shift.T
        for group, qkv, out in zip(self.groups, self.qkv, self.out, strict=True):
            q, k, v = (norm(x) @ qkv.T).view(len(ids), 3, HEADS, DIM).unbind(1)
            mixed = []
            for t in range(len(ids)):
                open_at = t - t % group
                parts = [slice(a, a + group) for a in range(0, open_at, group)]
                keys = torch.stack([k[p].mean(0) for p in parts] + list(k[open_at : t + 1]))
                values = torch.stack([v[p].mean(0) for p in parts] + list(v[open_at : t + 1]))
                mixed.append(attend(q[t], keys, values))
            x = x + torch.stack(mixed).reshape(len(ids), -1) @ out.T
        return norm(x) @ self.head.T

    def engine(self, prefill_chunk: int = 64) -> Engine:
        shapes: list[MixerSpec] = [ShiftSpec(), *(GroupSpec(group) for group in self.groups)]
        spec = ModelSpec(
            architecture="groups",
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            layers=tuple(LayerSpec(mixer, None) for mixer in shapes),
            norm_eps=1e-6,
            tied_head=False,
            context_limit=4096,
        )
        mixers = [Shift(DenseLinear(self.shift))] + [
            Groups(GroupSpec(group), DenseLinear(qkv), DenseLinear(out))
            for group, qkv, out in zip(self.groups, self.qkv, self.out, strict=True)
        ]
        layers = tuple(Layer(MixerBlock(ONES, mixer, None), None, 1.0) for mixer in mixers)
        parts = DecoderParts(TableEmbedding(self.embedding), layers, ONES, DenseLinear(self.head))
        model = LoadedModel(Decoder(spec, parts), spec, "groups", {}, ())
        config = EngineConfig(threads=1, prefill_chunk=prefill_chunk, ram_budget_bytes=1 << 28)
        return Engine(model, resolve(config, read_host()), poison=True)


ONES = RmsNorm(torch.ones(HIDDEN), 1e-6)


def norm(x: torch.Tensor) -> torch.Tensor:
    return torch.rms_norm(x, (HIDDEN,), eps=1e-6)


def ids_of(seed: int, count: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.manual_seed(seed)).tolist()


def equal(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    assert bool(ours.isfinite().all())
    return bool((ours - expected).abs().max() <= 1e-4 * (expected.max() - expected.min()))


MODELS = {"4": (4, 4), "128": (128,), "4 and 128": (4, 128)}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> GroupModel:
    return GroupModel(MODELS[request.param])


@pytest.fixture
def engine(model: GroupModel) -> Iterator[Engine]:
    with model.engine() as engine:
        yield engine


@pytest.mark.parametrize("chunk", [1, 7, 64, 257])
def test_chunks_equal_the_whole_path(model: GroupModel, chunk: int) -> None:
    """Oracle: plain torch over 200 tokens at once."""
    ids = ids_of(1, 200)
    with model.engine(prefill_chunk=chunk) as engine:
        assert equal(engine.logits(ids, reuse=False), model.logits(ids)[-1])
        generated = [token.id for token in engine.generate(ids, SamplingParams(max_tokens=2))]
    for count in range(2):
        assert generated[count] == int(model.logits(ids + generated[:count])[-1].argmax())


@pytest.mark.parametrize("at", [1, 3, 4, 65, 128, 131, 256])
def test_an_edit_costs_the_gap_and_the_replay(model: GroupModel, engine: Engine, at: int) -> None:
    """Without an anchor a path is restored at the end of a group that all layers share, and three
    tokens before it are forwarded again; with one, at the anchor itself. Oracle: arithmetic for
    the counts, plain torch for the logits."""
    step = max(model.groups)
    ids, changed = ids_of(2, 300), ids_of(3, 40)
    engine.warm(ids)
    path = ids[:at] + [(ids[at] + 1) % VOCAB] + changed
    plan = engine.plan(path)
    restored = at - at % step
    assert plan.reused_tokens == max(0, restored - REPLAY)
    usage = engine.warm(path)
    assert (usage.reused_tokens, usage.prefill_tokens) == (plan.reused_tokens, plan.prefill_tokens)
    assert equal(engine.logits(path), model.logits(path)[-1])
    anchored = model.engine()
    anchored.warm(ids, anchors=[at])
    assert anchored.plan(path).reused_tokens == at  # in RAM nothing of it is lost
    assert equal(anchored.logits(path), model.logits(path)[-1])
    anchored.close()


@pytest.mark.parametrize("at", [2, 64, 66, 129])
def test_anchors_on_disk_carry_the_open_group(model: GroupModel, at: int) -> None:
    """In a new engine over the same store: the anchor brings the open group's rows, and the replay
    what no store keeps. Replayed rows count as prefill. Oracle: plain torch."""
    database = MemoryDatabase()
    ids, more = ids_of(4, 256), ids_of(5, 10)
    with model.engine() as engine:
        engine.attach(database.snapshots)
        engine.warm(ids, anchors=[at])
        engine.flush()
        assert engine.verify(ids).findings == ()
    with model.engine() as engine:
        engine.attach(database.snapshots)
        path = ids[:at] + more
        plan = engine.plan(path)
        assert plan.reused_tokens == max(0, at - REPLAY) and plan.source == "disk"
        before = engine.stats().forward_rows
        usage = engine.warm(path)
        assert usage.prefill_tokens == plan.prefill_tokens == engine.stats().forward_rows - before
        assert usage.reused_tokens + usage.prefill_tokens == len(path)
        assert equal(engine.logits(path), model.logits(path)[-1])
        assert engine.plan(path).prefill_tokens == 0, "the path itself needs no replay"
        whole = engine.plan(ids)
        assert (whole.reused_tokens, whole.prefill_tokens) == (256 - REPLAY, REPLAY)
        assert equal(engine.logits(ids), model.logits(ids)[-1])


def evict_all(engine: Engine) -> None:
    for resident in engine._index:
        engine._owner.call(partial(engine._keeper.evict, resident))


steps = st.lists(
    st.tuples(st.sampled_from(["grow", "edit", "cut", "reopen", "evict"]), st.integers(0, 300)),
    min_size=3,
    max_size=8,
)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(list(MODELS)), steps)
def test_programs_equal_a_cold_prefill(kind: str, program: list[tuple[str, int]]) -> None:
    """Random growth, edits, rewinds, evictions and restarts. Oracles: a cold prefill for the
    logits, the plan for the counts."""
    model, database = GroupModel(MODELS[kind]), MemoryDatabase()
    engine = model.engine()
    engine.attach(database.snapshots)
    path = ids_of(0, 140)
    for number, (action, amount) in enumerate(program):
        if action == "grow":
            path = [*path, *ids_of(number, 1 + amount % 150)]
        elif action == "edit":
            at = amount % len(path)
            path = [*path[:at], (path[at] + 1) % VOCAB, *path[at + 1 :]]
        elif action == "cut":
            path = path[: 1 + amount % len(path)]
        elif action == "reopen":
            engine.close()
            engine = model.engine()
            engine.attach(database.snapshots)
        else:
            engine.flush()
            evict_all(engine)
        anchors = [p for p in (len(path) // 3, len(path) // 2) if p]
        plan = engine.plan(path)
        usage = engine.warm(path, anchors=anchors)
        assert usage.prefill_tokens == plan.prefill_tokens, (action, usage, plan)
        assert equal(engine.logits(path), engine.logits(path, reuse=False))
    engine.close()
