# SPDX-License-Identifier: Apache-2.0
"""Engine: token ids in, token ids out, for any number of callers' threads.

    plan, anchors, stats   answered in the caller's thread, never behind a forward pass
    generate, warm, …      queued for the owner thread

It knows no chat, no text and no session.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch

from freetoken_storage.records import Snapshots

from .config import EngineConfig, ResolvedConfig, read_host, resolve
from .errors import ContextOverflow, InvalidIds
from .generation import Generation
from .memory import MemoryBudget
from .owner import Owner
from .plan import plan_memory
from .reports import EngineStats, ReusePlan, Usage
from .runner import Runner
from .sampler import SamplingParams
from .scheduler import Scheduler
from .state.anchors import check_anchors
from .state.buffers import Pool, RowShape, StateLayout
from .state.digest import Fingerprint, Ids, fingerprint
from .state.keeper import StateKeeper
from .state.lookup import History, Lookup
from .state.prefix import PrefixIndex
from .state.sequence import Spaces
from .task import Request, Task
from .weights import LoadedModel, load
from .worker import Worker

_DEFAULT_CONFIG = EngineConfig()
_GREEDY = SamplingParams()


class Engine:
    """A loaded model with its states. Made by `Engine.load`; a context manager."""

    def __init__(self, model: LoadedModel, config: ResolvedConfig) -> None:
        spec = model.spec
        self._model = model
        self._config = config
        self.context_limit = spec.context_limit
        self.fingerprint = _fingerprint(model, config)
        pool = Pool(_layout(model))
        plan = plan_memory(spec, config, model.decoder.size_bytes, config.ram_budget_bytes)
        self._budget = MemoryBudget(plan, pool.meter)
        self._index = PrefixIndex()
        history = History()
        self._lookup = Lookup(self.fingerprint.digest, self._index, history)
        self._keeper = StateKeeper(Spaces(pool), self._index, self._lookup, history, self._budget)
        self._runner = Runner(model.decoder)
        self._worker = Worker(
            self._runner,
            Scheduler(config.prefill_chunk, config.max_batch),
            self._keeper,
            spec.context_limit,
        )
        self._owner = Owner(self._worker)
        self._owner.call(lambda: torch.set_num_threads(config.threads))

    @classmethod
    def load(
        cls,
        path: Path | str,
        config: EngineConfig = _DEFAULT_CONFIG,
        snapshots: Snapshots | None = None,
    ) -> Self:
        """Load a Hugging Face folder or a .gguf file. `snapshots`: where states are kept beyond
        RAM, see `attach`. ModelNotFound, UnsupportedArchitecture, UnsupportedConfig, WeightsError,
        BudgetTooSmall."""
        resolved = resolve(config, read_host())
        model = load(path, dtype=resolved.dtype, quant=resolved.quant)
        engine = cls(model, resolved)
        if snapshots is not None:
            engine.attach(snapshots)
        return engine

    def attach(self, snapshots: Snapshots) -> None:
        """Keep states in `snapshots` from now on."""

    def plan(self, ids: Sequence[int] | Ids) -> ReusePlan:
        """Price a path without forwarding anything. InvalidIds, ContextOverflow."""
        return self._plan(self._check(ids))

    def anchors(self, ids: Sequence[int] | Ids) -> Sequence[int]:
        """Positions of the path at which every layer's state can be restored now, from RAM or
        disk. In models whose layers are all sliceable these are all up to the last known one."""
        path = self._check(ids)
        return range(1, self._lookup.known_rows(path) + 1)

    def generate(
        self,
        ids: Sequence[int] | Ids,
        sampling: SamplingParams = _GREEDY,
        *,
        anchors: Sequence[int] = (),
        anchor_after: frozenset[int] | set[int] = frozenset(),
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Generation:
        """Forward what is missing of `ids`, then sample. Returns at once; iterate over the result.

        `anchors`: positions of `ids` to keep the hidden row of; `anchor_after`: ids after which
        generated text gets one. `on_progress(done, total)` counts prefilled rows, in the engine's
        thread. Ends with "length" at the context limit, whatever `max_tokens`. InvalidIds,
        InvalidAnchors, InvalidSampling, ContextOverflow, EngineClosed.
        """
        sampling.check_ids(self._model.spec.vocab_size)
        path = self._check(ids)
        request = Request(
            path,
            sampling,
            anchors=check_anchors(anchors, len(path)),
            anchor_after=frozenset(anchor_after),
            on_progress=on_progress,
        )
        return self._submit(request).stream

    def warm(self, ids: Sequence[int] | Ids, *, anchors: Sequence[int] = ()) -> Usage:
        """Bring the state of `ids` up to date, the last row included. Blocks."""
        path = self._check(ids)
        task = self._submit(Request(path, None, anchors=check_anchors(anchors, len(path))))
        task.stream.wait()
        return task.stream.usage

    def logits(self, ids: Sequence[int] | Ids, *, reuse: bool = True) -> torch.Tensor:
        """[vocab] fp32 after the last id, through the same path as `generate`; `reuse=False` is a
        cold prefill that touches no state but its own. Blocks."""
        task = self._submit(Request(self._check(ids), None, cold=not reuse, want_logits=True))
        task.stream.wait()
        assert task.logits is not None
        return task.logits

    def stats(self) -> EngineStats:
        """A picture of the engine, from any thread."""
        plan = self._budget.plan
        return EngineStats(
            weights_bytes=plan.weights_bytes,
            state_bytes=self._budget.states_bytes,
            working_bytes=plan.working_bytes,
            ram_budget_bytes=plan.budget_bytes,
            resident_paths=len(self._index),
            running=self._worker.running,
            waiting=self._owner.waiting,
            forward_rows=self._runner.rows,
            forward_s=self._runner.seconds,
            reused_rows=self._worker.reused_rows,
            restored_bytes=self._keeper.restored_bytes,
            persisted_bytes=0,
            persist_backlog_bytes=0,
            evicted_paths=self._keeper.evicted,
            compute_threads=self._config.threads,
        )

    def close(self) -> None:
        """Cancel what runs, write what waits, free the memory. Safe to repeat."""
        self._owner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _plan(self, path: Ids) -> ReusePlan:
        route = self._lookup.route(path)
        return ReusePlan(
            input_tokens=len(path),
            reused_tokens=route.reused,
            prefill_tokens=len(path) - route.reused,
            source=route.source,
            anchor=route.reused or None,
            miss=route.miss,
            predicted_s=0.0,
        )

    def _submit(self, request: Request) -> Task:
        if request.cold:
            total = len(request.ids)
            plan = ReusePlan(total, 0, total, "none", None, None, 0.0)
        else:
            plan = self._plan(request.ids)
        return self._owner.submit(request, plan)

    def _check(self, ids: Sequence[int] | Ids) -> Ids:
        """The ids as int32. InvalidIds, ContextOverflow."""
        path = np.asarray(ids)
        if path.ndim != 1 or len(path) == 0 or path.dtype.kind not in "iu":
            raise InvalidIds(
                "a path is a non-empty sequence of token ids", value=_short(ids), remedy="pass ids"
            )
        if len(path) > self.context_limit:
            raise ContextOverflow(
                "the path is longer than the model's context",
                value=f"{len(path)} tokens",
                limit=f"{self.context_limit} tokens",
                remedy="drop or shorten segments, or rewind",
            )
        vocab_size = self._model.spec.vocab_size
        wrong = np.flatnonzero((path < 0) | (path >= vocab_size))
        if len(wrong):
            raise InvalidIds(
                f"id at position {wrong[0]} is not in the vocabulary",
                value=int(path[wrong[0]]),
                limit=f"0 to {vocab_size - 1}",
            )
        return np.array(path, dtype=np.int32)


def _short(ids: object) -> str:
    text = repr(ids)
    return text if len(text) <= 80 else text[:77] + "..."


def _layout(model: LoadedModel) -> StateLayout:
    rows: list[RowShape | None] = []
    for state in model.spec.states():
        shapes = {buffer.name: buffer.shape for buffer in state.rows}
        (heads, key_dim), (_, value_dim) = shapes["k"], shapes["v"]
        rows.append(RowShape(heads, key_dim, value_dim, torch.float32))
    return StateLayout(rows)


def _fingerprint(model: LoadedModel, config: ResolvedConfig) -> Fingerprint:
    """Everything that decides a state; see `digest`."""
    return fingerprint(
        {
            **model.spec.fingerprint_parts(),
            "weights": model.content_hash,
            "quantisation": config.quant or config.dtype,
            "kv_dtype": "float32",
        }
    )
