# SPDX-License-Identifier: Apache-2.0
"""Engine: token ids in, token ids out, for any number of callers' threads.

    plan, anchors, stats   answered in the caller's thread, never behind a forward pass
    generate, warm, …      queued for the owner thread

It knows no chat, no text and no session.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self
from weakref import finalize

import torch

from freetoken_storage.errors import StorageError
from freetoken_storage.records import Snapshots

from .attachment import Attachment
from .balance import Balance
from .config import EngineConfig, ResolvedConfig, read_host, resolve
from .contention import ThreadGovernor, apart
from .errors import InvalidAnchors, InvalidConfig, InvalidIds
from .experts.choice import usual_level
from .generation import Generation
from .memory import MemoryBudget, return_freed_memory
from .owner import Owner
from .plan import reserve_rows
from .reports import EngineStats, ReusePlan, Usage, Verification
from .runner import Runner
from .sampler import SamplingParams
from .scheduler import Scheduler
from .state.anchors import check_anchors, check_backs, check_ids, ranked
from .state.buffers import Pool, StateLayout
from .state.digest import Fingerprint, Ids, fingerprint
from .state.disk import DiskStates
from .state.keeper import StateKeeper
from .state.lookup import History, Lookup
from .state.path_ids import check_path
from .state.prefix import PrefixIndex
from .state.reserve import Reserve
from .state.sequence import Sequence as StateSequence
from .state.spaces import Spaces
from .state.worth import Worth
from .task import Request, Task
from .verification.run import Run, Tools
from .weights import LoadedModel, load, open_source
from .worker import Worker

_DEFAULT_CONFIG = EngineConfig()
_GREEDY = SamplingParams()


class Engine:
    """A loaded model with its states. Made by `Engine.load`; a context manager. `context_limit`:
    tokens of a path; `fingerprint`: what its states depend on; `notes`: what was not as asked."""

    def __init__(self, model: LoadedModel, config: ResolvedConfig, *, poison: bool = False) -> None:
        """`load` is the usual way. `poison`: fresh KV rows and free expert slots are NaN, so that
        what is read before it was written shows."""
        spec = model.spec
        self._model = model
        self._config = config
        self.context_limit: int = spec.context_limit
        self.formats: Mapping[str, str] = model.formats  # matrix -> how its weights are held
        self.notes: tuple[str, ...] = model.notes + config.notes()
        # Everything that decides a state; see `digest`.
        parts = {**model.fingerprint_parts(), **config.fingerprint_parts()}
        self.fingerprint: Fingerprint = fingerprint({**parts, "kv_dtype": "float32"})
        self._pool = pool = Pool(StateLayout.of(spec.states(), torch.float32), poison=poison)
        plan = model.plan(config)
        model.experts.resize(plan.slots, poison=poison)
        self._budget = MemoryBudget(plan, pool.meter)
        self._index = PrefixIndex()
        self._history = History()
        self._lookup = Lookup(self.fingerprint.digest, self._index, self._history)
        self._spaces = Spaces(pool)
        self._governor = ThreadGovernor(config.threads)
        self._runner = Runner(model.decoder, self._governor, config.prefill)
        worth = Worth(self._spaces, self._index, self._runner.rates)
        self._keeper = StateKeeper(
            self._spaces, self._index, self._lookup, self._history, self._budget, worth
        )
        self._keeper.on_restored = self._runner.rates.restored
        self._worker = Worker(
            self._runner,
            Scheduler(config.prefill_chunk, config.max_batch),
            self._keeper,
            spec.context_limit,
            self._anchor_interval,
        )
        self._balance = Balance(
            self._budget,
            model.experts,
            self._keeper,
            worth,
            self._runner,
            pinned=config.expert_slots is not None,
        )
        self._worker.between_passes = self._balance.between_passes
        self._owner = Owner(self._worker)
        self._attachment = Attachment(self._owner, self._keeper, self._lookup, self._history)
        finalize(self, self._owner.end)
        self._owner.call(self._prepare)

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
        source = apart(lambda: open_source(path))
        resolved = resolve(config, read_host(), source.spec)
        rows = reserve_rows(source.spec, resolved.ram_budget_bytes)
        reserve = Reserve(rows, source.spec.bytes_per_token()) if rows else None
        model = apart(
            lambda: load(
                source,
                dtype=resolved.dtype,
                quant=resolved.quant,
                hash_cache=resolved.hash_cache,
                offload=resolved.offload or usual_level(source, resolved),
            )
        )
        return_freed_memory()  # what loading left with malloc counts in the budget, too
        engine = cls(model, resolved)
        if reserve is not None:
            engine._owner.call(lambda: engine._pool.adopt(reserve))
        if snapshots is not None:
            engine.attach(snapshots)
        return engine

    # -- the store

    def attach(self, snapshots: Snapshots) -> None:
        """Keep states in `snapshots` from now on, those in RAM included. StoreMismatch if another
        store is attached."""
        self._owner.check_caller()
        layout, hidden = self._pool.layout, (self._model.spec.hidden_size, torch.float32)
        disk = DiskStates(snapshots, self.fingerprint, layout, hidden)
        self._attachment.take(disk, layout.token_bytes)

    def detach(self) -> None:
        """Write what waits and let go of the store. What is in RAM stays there."""
        if self._owner.inherited or self._owner.closed:
            return
        self._owner.check_caller()
        with self._attachment.lock:
            if not self._owner.closed:
                self._attachment.drop()

    def flush(self) -> None:
        """Return when every state captured so far would survive a power loss. Raises what a write
        raised (StoreFull, …); states that could not be written stay in RAM and are tried again by
        the next flush. Without a store there is nothing to do."""
        persister = self._attachment.persister
        if persister is not None:
            self._owner.call(self._keeper.persist_all)
            persister.flush()

    def forget(self, ids: Sequence[int] | Ids, start: int) -> int:
        """Drop every state, in RAM and on disk, of any path that begins with ids[: start + 1], at
        or after position `start`; states of ids[:start] stay. How many went. InvalidAnchors."""
        path = self._check(ids)
        if not 0 <= start < len(path):
            raise InvalidAnchors(
                "the start lies outside the path", value=start, limit=f"0 to {len(path) - 1}"
            )
        return self._owner.call(lambda: self._keeper.forget(path, start))

    def pin(self, owner: str, paths: Sequence[Sequence[int] | Ids]) -> None:
        """Protect the states of these paths from eviction for `owner`, in RAM and on disk,
        replacing its earlier pins; no paths unpin. What the store refuses is said by the next
        `flush`, and tried again when more of the path is written."""
        checked = [self._check(path) for path in paths]
        self._owner.call(lambda: self._keeper.pin(owner, checked))
        disk, persister = self._lookup.disk, self._attachment.persister
        if disk is None or persister is None:
            return
        try:
            disk.pins.pin(owner, checked)
        except StorageError as error:
            persister.failed(error)

    def set_budget(self, *, ram_bytes: int | None = None, vram_bytes: int | None = None) -> None:
        """Change the memory budget; over it, the least valuable states and slots of experts go at
        once. BudgetTooSmall, and nothing changes, if it does not hold the model, what runs and what
        is pinned. InvalidConfig for `vram_bytes`: this engine computes on the CPU."""
        if vram_bytes is not None:
            raise InvalidConfig(
                "there is no accelerator to give memory to", value=vram_bytes, remedy="leave it out"
            )
        if ram_bytes is None:
            return
        EngineConfig(ram_budget_bytes=ram_bytes)  # InvalidConfig unless it may be asked for
        plan = self._model.plan(replace(self._config, ram_budget_bytes=ram_bytes))
        self._owner.call(lambda: self._balance.change(plan))

    # -- asking

    def plan(self, ids: Sequence[int] | Ids) -> ReusePlan:
        """Price a path without forwarding anything. InvalidIds, ContextOverflow."""
        return self._plan(self._check(ids))

    def anchors(self, ids: Sequence[int] | Ids) -> Sequence[int]:
        """Positions of the path at which every layer's state can be restored now, from RAM or
        disk, ascending. In models whose layers are all sliceable these are all up to the last known
        one."""
        path, step = self._check(ids), self._pool.layout.step
        if step == 1:
            return range(1, self._lookup.known_rows(path) + 1)
        sliced = range(step, self._lookup.known_rows(path) + 1, step) if step else ()
        return sorted(self._lookup.positions(path).union(sliced) - {0})

    def generate(
        self,
        ids: Sequence[int] | Ids,
        sampling: SamplingParams = _GREEDY,
        *,
        anchors: Sequence[int] = (),
        lasting: Sequence[int] = (),
        anchor_after: frozenset[int] | set[int] = frozenset(),
        anchor_before: Mapping[int, int] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        announced: ReusePlan | None = None,
    ) -> Generation:
        """Forward what is missing of `ids`, then sample. Returns at once; iterate over the result.

        `anchors`: positions of `ids` to make anchors of; `lasting`: those of them that many paths
        will go on from, such as the ends of system and tools: they stay longest; `anchor_after`:
        ids after which generated text gets one; `anchor_before`: ids that get one so many tokens
        before themselves (0: right before them, up to 3). `on_progress(done, total)` counts
        prefilled rows, in the engine's thread. `announced`: what `plan` said of `ids` earlier, so
        that it is not asked again; `usage.changed` names what came in between. Ends with "length"
        at the context limit, whatever `max_tokens`. InvalidIds, InvalidAnchors, InvalidSampling,
        ContextOverflow, EngineClosed.
        """
        sampling.check_ids(self._model.spec.vocab_size)
        path = self._check(ids)
        request = Request(
            path,
            sampling,
            anchors=ranked(len(path), anchors, lasting, self._anchor_interval),
            anchor_after=check_ids("anchor_after", anchor_after),
            anchor_before=check_backs(anchor_before or {}),
            on_progress=on_progress,
        )
        return Generation(self._submit(request, announced).stream)

    def warm(
        self,
        ids: Sequence[int] | Ids,
        *,
        anchors: Sequence[int] = (),
        lasting: Sequence[int] = (),
    ) -> Usage:
        """Bring the state of `ids` up to date, the last row included; anchors as in `generate`.
        Blocks."""
        path = self._check(ids)
        self._owner.check_caller()
        places = ranked(len(path), anchors, lasting, self._anchor_interval)
        task = self._submit(Request(path, None, anchors=places))
        task.stream.wait()
        return task.stream.usage

    def logits(self, ids: Sequence[int] | Ids, *, reuse: bool = True) -> torch.Tensor:
        """[vocab] fp32 after the last id, through the same path as `generate`; `reuse=False` is a
        cold prefill that touches no state but its own. Blocks."""
        self._owner.check_caller()
        path = self._check(ids)
        places = ranked(len(path), (), (), self._anchor_interval) if reuse else {}
        task = self._submit(Request(path, None, places, cold=not reuse, want_logits=True))
        task.stream.wait()
        assert task.logits is not None
        return task.logits

    def verify(
        self,
        ids: Sequence[int] | Ids,
        *,
        positions: Sequence[int] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Verification:
        """Compare what the store holds of `ids` with a cold pass over them; what is wrong leaves
        the store, and RAM what may have come from it. `positions`: only these anchors and the rows
        before them. Other requests go on between two chunks. `on_progress(done, total)` and
        `cancelled()` are called in the caller's thread. Blocks. BudgetTooSmall, InvalidAnchors."""
        path = self._check(ids)
        chosen = None if positions is None else check_anchors(positions, len(path))
        disk = self._lookup.disk
        exact = all(form == "float32" for name, form in self.formats.items() if name != "embedding")
        tools = Tools(self._model.decoder, self._runner, self._keeper, self._index, disk, exact)
        run = Run(tools, path, chosen, self._config.prefill_chunk)
        return run.drive(self._owner, on_progress, cancelled)

    def stats(self) -> EngineStats:
        """A picture of the engine, from any thread."""
        plan, persister = self._budget.plan, self._attachment.persister
        error = persister.last_error if persister is not None else None
        return EngineStats(
            weights_bytes=plan.weights_bytes + plan.slots_bytes,
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
            persisted_bytes=persister.written_bytes if persister is not None else 0,
            persist_backlog_bytes=persister.backlog_bytes if persister is not None else 0,
            evicted_paths=self._keeper.evicted,
            compute_threads=self._governor.threads,
            store_error=str(error) if error is not None else None,
            experts=self._model.experts.counts,
            state_limit_bytes=plan.states_bytes,
            moves=self._balance.moves,
        )

    def close(self) -> None:
        """Cancel what runs, write what waits, free the memory. Safe to repeat, and in a child that
        fork() made, which owns nothing of it. WrongThread in a callback."""
        if self._owner.inherited or self._owner.closed:
            return
        self._owner.check_caller()
        with self._attachment.lock:
            if self._owner.closed:
                return
            self._owner.end_requests()
            self._attachment.drop()
            self._owner.call(self._keeper.clear)
            self._owner.close()
        self._model.experts.close()
        self._model.decoder.workers.close()
        return_freed_memory()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _prepare(self) -> None:
        """First thing in the owner thread."""
        torch.set_num_threads(self._config.threads)
        self._runner.calibrate(StateSequence(self._spaces))

    def _plan(self, path: Ids) -> ReusePlan:
        route = self._lookup.route(path)
        missing = len(path) - route.reused
        predicted_s = self._runner.rates.predict(
            missing,
            route.reused,
            many=missing >= self._runner.few_rows,
            restored_bytes=sum(p.stored_rows for p in route.disk.pieces)
            * self._budget.plan.token_bytes,
        )
        return ReusePlan(
            input_tokens=len(path),
            reused_tokens=route.reused,
            prefill_tokens=missing,
            source=route.source,
            anchor=route.restored or None,
            miss=self._lookup.miss(path, route),
            predicted_s=predicted_s,
        )

    @property
    def _anchor_interval(self) -> int | None:
        """None where any prefix, or every group's end, can be taken without an anchor."""
        return None if self._pool.layout.step else self._config.anchor_interval

    def _submit(self, request: Request, announced: ReusePlan | None = None) -> Task:
        total = len(request.ids)
        if request.cold:
            plan = ReusePlan(total, 0, total, "none", None, None, 0.0)
        elif announced is None:
            plan = self._plan(request.ids)
        elif announced.input_tokens == total:
            plan = announced
        else:
            raise InvalidIds(
                "the announced plan is another path's",
                value=f"{total} tokens",
                limit=f"{announced.input_tokens} tokens planned",
                remedy="pass what plan() says of these ids",
            )
        return self._owner.submit(request, plan)

    def _check(self, ids: Sequence[int] | Ids) -> Ids:
        return check_path(ids, self._model.spec.vocab_size, self.context_limit)
