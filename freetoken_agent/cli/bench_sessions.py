# SPDX-License-Identifier: Apache-2.0
"""What sessions cost: an edit, a fork, and an edit while the disk and the engine are busy.

Times are what a caller sees, commit and layout included; the engine's own counters say how much of
them was forward pass.
"""

import asyncio
import itertools
import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from freetoken_runtime.bench.timing import Figure, OnTurn, Target, percentile

if TYPE_CHECKING:
    from freetoken_agent import LocalModel, Reply, Session, Store
    from freetoken_runtime.config import Quant

ADDED_MS = Target("at_most", 10.0)
FORK_MS = Target("at_most", 10.0)
COMMIT_P95_MS = Target("at_most", 100.0)
PLAN_MS = Target("at_most", 5.0)
NONE = Target("equal", 0.0)

_WORDS = "time year people way day man thing woman life child world school state family student"


@dataclass(frozen=True)
class SessionSettings:
    """How much is measured."""

    model: str = "smollm2"
    tokens: int = 4000
    rounds: int = 5
    forks: int = 20
    persist_bytes: int = 512 << 20
    quant: "Quant | None" = None
    threads: int | None = None


@contextmanager
def loaded(settings: SessionSettings, folder: Path) -> Iterator[tuple["LocalModel", "Store"]]:
    """A model and an empty store in `folder`."""
    from freetoken_agent import LocalModel, Store
    from freetoken_runtime import EngineConfig

    config = EngineConfig(quant=settings.quant, threads=settings.threads)
    with LocalModel.load(settings.model, config=config) as model, Store(folder) as store:
        yield model, store


def fill(session: "Session", tokens: int, seed: int = 0) -> None:
    """Append user and assistant turns of seeded words until the path has `tokens` tokens."""
    rng = random.Random(seed)
    with session.batch("fill"):
        for kind in itertools.cycle(("user", "assistant")):
            if len(session.ids()) >= tokens and kind == "assistant":
                return
            session.append(kind, words(rng))


def words(rng: random.Random, count: int = 80) -> str:
    return " ".join(rng.choice(_WORDS.split()) for _ in range(count))


async def first_token(session: "Session") -> tuple[float, "Reply"]:
    """Seconds from the call of generate to its first token, and the reply. What comes after the
    token, the answer's own commit, is not in the time."""
    from freetoken_agent import PlanReady, PrefillProgress

    before = (PlanReady, PrefillProgress)
    first_s: float | None = None
    started = time.perf_counter()
    async with session.generate(max_tokens=1) as generation:
        async for event in generation:
            if first_s is None and not isinstance(event, before):
                first_s = time.perf_counter() - started
        assert first_s is not None
        return first_s, generation.reply


def measure_edit(
    settings: SessionSettings, folder: Path, *, on_turn: OnTurn | None = None
) -> list[Figure]:
    """Replace a message at 10, 50 and 90 % of a conversation and ask again, each time with nothing
    waiting to be written: `measure_load` is about the other case."""
    fractions = (0.1, 0.5, 0.9)
    figures = []
    with loaded(settings, folder) as (model, store):
        session = store.create("edit", model, system="You are a helpful assistant.")
        fill(session, settings.tokens)
        asyncio.run(session.warm())
        total = len(fractions) * settings.rounds
        for index, fraction in enumerate(fractions):
            edits: list[MeasuredEdit] = []
            for number in range(settings.rounds):
                asyncio.run(store.flush())
                edits.append(_one_edit(session, model, fraction, seed=number))
                if on_turn is not None:
                    on_turn(index * settings.rounds + number + 1, total)
            figures += _edit_figures(fraction, edits)
    return figures


@dataclass(frozen=True)
class MeasuredEdit:
    """`beside_plan`: rows that differ from the plan's. `edit_s`: the edit with its commit.
    `added_s`: that, and what the answer took to its first token beside the forward pass."""

    forwarded: int
    beside_plan: int
    edit_s: float
    added_s: float


def _one_edit(session: "Session", model: "LocalModel", fraction: float, seed: int) -> MeasuredEdit:
    path, ids = session.path(), session.ids()
    target = path[int(fraction * len(path))]
    before = model.stats()
    started = time.perf_counter()
    edit = session.replace(target, words(random.Random(f"{fraction} {seed}")))
    edit_s = time.perf_counter() - started
    answer_s, reply = asyncio.run(first_token(session))
    after = model.stats()
    session.undo(2 if reply.segments else 1)  # a first token of blanks alone is no step
    assert session.ids() == ids, "the next edit is of the same conversation"
    assert edit.plan.anchor is not None
    expected = edit.plan.input_tokens - edit.plan.anchor
    forwarded = after.forward_rows - before.forward_rows
    return MeasuredEdit(
        forwarded=forwarded,
        beside_plan=abs(forwarded - expected) + abs(reply.usage.prefill_tokens - expected),
        edit_s=edit_s,
        added_s=edit_s + answer_s - (after.forward_s - before.forward_s),
    )


def _edit_figures(fraction: float, edits: Sequence[MeasuredEdit]) -> list[Figure]:
    label = f"edit at {fraction:.0%}"
    edit_ms = 1e3 * statistics.median(edit.edit_s for edit in edits)
    return [
        Figure(f"{label}: rows forwarded", statistics.median(e.forwarded for e in edits), "rows"),
        Figure(
            f"{label}: rows beside the plan",
            sum(edit.beside_plan for edit in edits),
            "rows",
            target=NONE,
        ),
        Figure(
            f"{label}: added to the forward pass",
            1e3 * statistics.median(edit.added_s for edit in edits),
            "ms",
            target=ADDED_MS,
            note=f"from the edit to the first token; the edit with its commit {edit_ms:.1f} ms",
        ),
    ]


def measure_fork(
    settings: SessionSettings, folder: Path, *, on_turn: OnTurn | None = None
) -> list[Figure]:
    """Fork a conversation in the middle, commit included, and look for copied state."""
    with loaded(settings, folder) as (model, store):
        session = store.create("fork", model, system="You are a helpful assistant.")
        fill(session, settings.tokens)
        asyncio.run(session.warm())
        path = session.path()
        state_bytes = model.stats().state_bytes
        times_ms = []
        for number in range(settings.forks):
            at = path[len(path) // 2 + number % 3]
            started = time.perf_counter()
            fork = session.fork(at=at)
            times_ms.append(1e3 * (time.perf_counter() - started))
            assert fork.plan().reused_tokens > 0
            if on_turn is not None:
                on_turn(number + 1, settings.forks)
        copied = model.stats().state_bytes - state_bytes
    label = f"fork of {settings.tokens} tokens"
    return [
        Figure(f"{label}, with its commit", statistics.median(times_ms), "ms", target=FORK_MS),
        Figure(f"{label}: state copied", copied, "bytes", target=NONE),
    ]


def measure_load(
    settings: SessionSettings, folder: Path, *, on_turn: OnTurn | None = None
) -> list[Figure]:
    """Edits and plans of one session while states of others are persisted and another prefills."""
    with loaded(settings, folder) as (model, store):
        edited = store.create("edited", model, system="You are a helpful assistant.")
        fill(edited, min(500, settings.tokens))
        asyncio.run(edited.warm())
        before = model.stats()
        for number in itertools.count():
            done = model.stats()
            written = done.persisted_bytes + done.persist_backlog_bytes - before.persisted_bytes
            if on_turn is not None:
                on_turn(min(written, settings.persist_bytes), settings.persist_bytes)
            if written >= settings.persist_bytes:
                break
            source = store.create(f"source {number}", model)
            fill(source, settings.tokens, seed=number + 1)
            asyncio.run(source.warm())
        backlog = model.stats().persist_backlog_bytes
        commits_ms, plans_ms = _edit_under_load(edited, store, model, settings)
    label = "while states are persisted and another session prefills"
    note = f"{len(commits_ms)} edits, {backlog >> 20} MiB waiting at the start"
    return [
        Figure(
            f"edit's commit, p95, {label}",
            percentile(commits_ms, 95),
            "ms",
            target=COMMIT_P95_MS,
            note=note,
        ),
        Figure(f"plan, p95, {label}", percentile(plans_ms, 95), "ms", target=PLAN_MS, note=note),
    ]


def _edit_under_load(
    edited: "Session", store: "Store", model: "LocalModel", settings: SessionSettings
) -> tuple[list[float], list[float]]:
    """Milliseconds of edits and plans, from the start of the other session's prefill until it ends
    and no state is waiting to be written."""
    other = store.create("prefilling", model)
    fill(other, settings.tokens, seed=1000)
    flushed = threading.Thread(target=lambda: asyncio.run(store.flush()))
    prefilled = threading.Thread(target=lambda: asyncio.run(other.warm()))
    target = edited.path()[-1]
    commits_ms: list[float] = []
    plans_ms: list[float] = []
    flushed.start()
    prefilled.start()
    while flushed.is_alive() or prefilled.is_alive():
        started = time.perf_counter()
        edit = edited.replace(target, words(random.Random(f"edit {len(commits_ms)}")))
        commits_ms.append(1e3 * (time.perf_counter() - started))
        started = time.perf_counter()
        edited.plan()
        plans_ms.append(1e3 * (time.perf_counter() - started))
        target = edit.added[0]
    flushed.join()
    prefilled.join()
    return commits_ms, plans_ms
