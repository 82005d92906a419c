# SPDX-License-Identifier: Apache-2.0
"""The experts of a model on a device: those that are there, those that are fetched, and the rest.

    wanted      those with a slot                  computed at once
                missing, fetched                   copied beside it, computed as they arrive
                missing, left (`placement`)        computed by the CPU from the same bytes
    y           Σ_j weights[:, j] · out[:, j]      in the order of j, wherever out[:, j] was made

More experts than slots are computed in waves, each into rows of its own. Long passes fetch the next
layer while one computes. Only what the CPU computes differs, by rounding, from what the device
would have computed; everything else leaves every bit as it is.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from ..batch import Form, RowGroup
from ..experts.placement import PlacementPolicy
from ..kernels.experts.workers import Job, Workers
from ..layers.expert import Expert
from ..layers.routing import Routes
from ..layers.rows import PickedRows, Rows
from .accelerator import Accelerator, Mark
from .host_records import HostRecords, record_of
from .slots import DeviceSlot, DeviceSlots

STREAMED_COVERAGE = 0.9  # of a layer's experts that a pass is expected to want
# Rows per tile: a row's bits depend on it, so it follows from the row's own form.
ROWS_PER_TILE = {Form.FEW: 16, Form.MANY: 64}


@dataclass(frozen=True)
class Serving:
    """How experts are served. `policy`: None fetches all that is missing. `workers`: who computes
    what is left on the CPU. `gathers`: copy by a kernel instead of the copy engine. `streams`:
    whether long passes fetch ahead."""

    policy: PlacementPolicy | None = None
    workers: Workers = field(default_factory=Workers)
    gathers: bool = False
    streams: bool = True


@dataclass(frozen=True)
class DeviceCounts:
    """Since the start: experts that a layer wanted and that had a slot or not; of the latter those
    fetched and those computed on the CPU; those fetched ahead; launches of the kernels."""

    hits: int = 0
    misses: int = 0
    fetched: int = 0
    computed: int = 0
    ahead: int = 0
    waves: int = 0
    fetched_bytes: int = 0


@dataclass
class _Pass:
    """What is known of the pass that goes on. Mutable. `streams`, `splits`: whether it fetches
    ahead, whether the policy places what is missing. `start`: behind all that came before it;
    `held`, `ahead`: slots that stay, of this layer and of the next one."""

    streams: bool
    start: Mark
    splits: bool = False
    ended_s: float = 0.0
    layer: int = -1
    wanted: int = 0
    pairs: int = 0
    held: list[DeviceSlot] = field(default_factory=list)
    ahead: list[DeviceSlot] = field(default_factory=list)
    copied: tuple[int, Mark, Mark] | None = None  # experts, begin, end: not yet told to the policy


class DeviceExperts:
    """Serves layer by layer in each pass, on the owner thread. `counts` is replaced, not changed;
    `serving` may be replaced between two passes."""

    def __init__(
        self,
        accelerator: Accelerator,
        records: HostRecords,
        slots: DeviceSlots,
        serving: Serving | None = None,
    ) -> None:
        self.records = records
        self.slots = slots
        self.serving = serving or Serving()
        self.counts = DeviceCounts()
        self._accelerator = accelerator
        self._record = record_of(records.form)
        self._pass: _Pass | None = None

    def coverage(self, rows: int, top_k: int) -> float:
        """The part of a layer's experts that so many rows want, if they choose evenly."""
        return float(1.0 - (1.0 - top_k / self.records.num_experts) ** rows)

    def mix(
        self, layer: int, x: torch.Tensor, routes: Routes, parts: Sequence[RowGroup]
    ) -> torch.Tensor:
        """x [n, H] fp32 on the host or on the device, rows in `parts` -> [n, H] fp32, there."""
        from ..kernels.experts import triton as kernel  # here, as it needs an extra

        chosen = routes.chosen.cpu()  # waits for the router, and so for the layer before
        going = self._enter(layer, *chosen.shape)
        counts = torch.bincount(chosen.reshape(-1), minlength=self.records.num_experts).tolist()
        wanted = [expert for expert, count in enumerate(counts) if count]
        there, missing = self._ask(going, wanted)
        try:
            fetched, left = self._split(going, missing, [counts[expert] for expert in missing])
            host = x.cpu() if left else x  # before the device is asked for anything
            work = _Work(
                x=self._there(x),
                chosen=self._there(routes.chosen),
                parts=tuple(parts),
                out=torch.empty(chosen.numel(), x.shape[1], device=self._accelerator.device),
            )
            self._serve(going, work, there, fetched)
            if left:
                self._compute(work, host, chosen, left)
        finally:
            for slot in going.held:
                slot.held = False
            going.held = []
        mixed = kernel.combine(work.out, self._there(routes.weights)).to(x.device)
        going.pairs += chosen.numel()
        going.ended_s = time.perf_counter()
        return mixed

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        device = self._accelerator.device
        return tensor if tensor.device == device else self._accelerator.upload(tensor)

    def mix_resident(
        self, layer: int, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, form: Form
    ) -> torch.Tensor:
        """The same once `fetch_all` found room for every expert, until slots are resized: all on
        the device, through the table, without the host, so that a graph can hold it. An expert
        that is not there gives garbage."""
        from ..kernels.experts import triton as kernel

        out = torch.empty(chosen.numel(), x.shape[1], device=x.device)
        table = self.slots.table[layer]
        kernel.compute(x, chosen, table, self._record, ROWS_PER_TILE[form], out)
        return kernel.combine(out, weights)

    def fetch_all(self) -> bool:
        """Bring every expert for which there is a slot; whether all of them are there. Between two
        passes; tells the table."""
        self._end_pass()
        every = [
            (layer, expert)
            for layer in range(len(self.records))
            for expert in range(self.records.num_experts)
        ]
        free = len(self.slots) - sum(1 for _ in self.slots.keys())
        absent = [key for key in every if self.slots.find(key) is None][:free]
        slots = [slot for key in absent if (slot := self.slots.claim(key)) is not None]
        if slots:
            self._copy(slots, self._accelerator.mark())
        self.slots.publish()
        return all(self.slots.find(key) is not None for key in every)

    def resize(self, budget_bytes: int) -> None:
        """See `DeviceSlots.resize`."""
        self._end_pass()
        self.slots.resize(budget_bytes)

    # -- one pass

    def _enter(self, layer: int, rows: int, top_k: int) -> _Pass:
        """Layers come in ascending order, so that any other order begins a pass."""
        going = self._pass
        if going is None or layer <= going.layer:
            self._end_pass()
            streams = self.serving.streams and self.coverage(rows, top_k) >= STREAMED_COVERAGE
            going = self._pass = _Pass(streams, self._accelerator.mark())
            if self.serving.policy is not None and not streams:
                self.serving.policy.begin_step(rows)
                going.splits = True
        going.layer = layer
        self._report(going)
        return going

    def _end_pass(self) -> None:
        going, self._pass = self._pass, None
        if going is None:
            return
        self._report(going)
        self.slots.demand = going.wanted
        for slot in going.ahead:
            slot.held = False
        if self.serving.policy is not None and going.splits and going.pairs:
            self.serving.policy.end_step(going.ended_s - going.start.at_s, going.pairs)

    def _report(self, going: _Pass) -> None:
        """Tell the policy how long the last layer's copies took: they are done by now, or soon."""
        if self.serving.policy is not None and going.splits and going.copied is not None:
            experts, begin, end = going.copied
            seconds = self._accelerator.seconds(begin, end)
            self.serving.policy.fetched(experts, self.records.record_bytes, seconds)
        going.copied = None

    def _ask(self, going: _Pass, wanted: Sequence[int]) -> tuple[list[DeviceSlot], list[int]]:
        """Slots of those that are there, held; the others."""
        going.wanted += len(wanted)
        self.slots.demand = max(self.slots.demand, going.wanted)
        found = {expert: self.slots.ask((going.layer, expert)) for expert in wanted}
        for slot in going.ahead:
            slot.held = False
        going.ahead = []
        there = [slot for slot in found.values() if slot is not None]
        for slot in there:
            slot.held = True
        going.held += there
        missing = [expert for expert, slot in found.items() if slot is None]
        hits, misses = self.counts.hits + len(there), self.counts.misses + len(missing)
        self.counts = replace(self.counts, hits=hits, misses=misses)
        return there, missing

    def _split(
        self, going: _Pass, missing: list[int], rows: list[int]
    ) -> tuple[list[int], list[int]]:
        if self.serving.policy is None or not going.splits or not missing:
            return missing, []
        made = self.serving.policy.split(rows, self.records.record_bytes)
        return [missing[i] for i in made.fetched], [missing[i] for i in made.computed]

    def _serve(
        self, going: _Pass, work: "_Work", there: list[DeviceSlot], fetched: list[int]
    ) -> None:
        """What is there first; then in waves, the next one being copied while one computes."""
        pending = deque(fetched)
        arriving = self._fetch(going, pending)
        if not pending:
            self._fetch_ahead(going)
        if there:
            self._launch(work, there)
        while pending or arriving:
            if not arriving:
                arriving = self._fetch(going, pending)
                assert arriving, "no slot can be given away"
            ready, arriving = arriving, self._fetch(going, pending)
            if not pending:
                self._fetch_ahead(going)
            self._launch(work, ready)

    def _fetch(self, going: _Pass, pending: deque[int]) -> list[DeviceSlot]:
        """Begin to copy what there is room for, at most half of all slots at once."""
        slots: list[DeviceSlot] = []
        while pending and len(slots) < max(1, len(self.slots) // 2):
            slot = self.slots.claim((going.layer, pending[0]), passing=going.streams)
            if slot is None:
                break
            pending.popleft()
            slot.held = True
            slots.append(slot)
        going.held += slots
        if slots:
            begin, end = self._copy(slots, going.start)
            before = going.copied
            going.copied = (
                len(slots) + (before[0] if before else 0),
                before[1] if before else begin,
                end,
            )
        return slots

    def _fetch_ahead(self, going: _Pass) -> None:
        """Begin to copy the next layer into what this one leaves: its own slots are held yet."""
        after = going.layer + 1
        if not going.streams or going.ahead or after >= len(self.records):
            return
        for expert in range(self.records.num_experts):
            found = self.slots.find((after, expert))
            if found is not None:
                found.held = True
                going.ahead.append(found)
        absent = [e for e in range(self.records.num_experts) if self.slots.find((after, e)) is None]
        fresh: list[DeviceSlot] = []
        for expert in absent:
            slot = self.slots.claim((after, expert), passing=True)
            if slot is None:
                break
            slot.held = True
            fresh.append(slot)
        going.ahead += fresh
        if fresh:
            self._copy(fresh, going.start)
            self.counts = replace(self.counts, ahead=self.counts.ahead + len(fresh))

    def _copy(self, slots: Sequence[DeviceSlot], start: Mark) -> tuple[Mark, Mark]:
        """Copy records into claimed slots beside what computes, once the slots are not used any
        more. Marks around it. If it fails, the slots hold nothing."""
        size = self.records.form.layout.size_bytes
        try:
            with self._accelerator.copying():
                used = [slot.used for slot in slots if slot.used is not None]
                for mark in {id(mark): mark for mark in (start, *used)}.values():
                    self._accelerator.wait(mark)
                begin = self._accelerator.mark()
                self._copy_records(slots, size)
                end = self._accelerator.mark()
        except BaseException:
            for slot in slots:
                slot.held = False
                self.slots.drop(slot)
            raise
        for slot in slots:
            slot.arrived = end
        fetched, total = self.counts.fetched + len(slots), len(slots) * size
        total += self.counts.fetched_bytes
        self.counts = replace(self.counts, fetched=fetched, fetched_bytes=total)
        return begin, end

    def _copy_records(self, slots: Sequence[DeviceSlot], size: int) -> None:
        sources = [self.records.bytes_of(*slot.key) for slot in slots if slot.key is not None]
        if self.serving.gathers:
            from ..kernels.record_copy import triton as kernel

            pairs = [[s.data_ptr(), t.address] for s, t in zip(sources, slots, strict=True)]
            kernel.copy_records(self._accelerator.upload(torch.tensor(pairs)), size)
        else:
            for source, slot in zip(sources, slots, strict=True):
                slot.memory[:size].copy_(source[:size], non_blocking=True)

    def _launch(self, work: "_Work", slots: Sequence[DeviceSlot]) -> None:
        """Compute all rows of experts that are there or on their way, and let their slots go."""
        from ..kernels.experts import triton as kernel

        arrivals = {id(slot.arrived): slot.arrived for slot in slots if slot.arrived is not None}
        for mark in arrivals.values():
            self._accelerator.wait(mark)
        addresses = self.slots.addresses(slots)
        per_row = work.chosen.shape[1]
        for part in work.parts:
            rows = slice(part.start, part.stop)
            pairs = slice(part.start * per_row, part.stop * per_row)
            tile = ROWS_PER_TILE[part.form]
            args = (work.x[rows], work.chosen[rows], addresses, self._record, tile, work.out[pairs])
            kernel.compute(*args)
        used = self._accelerator.mark()
        for slot in slots:
            slot.used, slot.held = used, False
        self.counts = replace(self.counts, waves=self.counts.waves + 1)

    def _compute(
        self, work: "_Work", x: torch.Tensor, chosen: torch.Tensor, experts: Sequence[int]
    ) -> None:
        """Compute experts on the CPU from where they lie, while the device does its part."""
        assert self._pass is not None and self.serving.policy is not None
        begun, flat, per_row = time.perf_counter(), chosen.reshape(-1), chosen.shape[1]
        pairs_of = [(flat == number).nonzero()[:, 0] for number in experts]
        every = torch.cat(pairs_of)
        made = torch.empty(len(every), x.shape[1])
        jobs, start, of_layer = [], 0, Rows(x)
        for number, pairs in zip(experts, pairs_of, strict=True):
            expert = self.records.expert(self._pass.layer, number)
            rows = pairs.div(per_row, rounding_mode="floor")
            for part in work.parts:
                mine = rows[(rows >= part.start) & (rows < part.stop)]  # neighbours, as pairs rise
                if len(mine):
                    out = made[start : start + len(mine)]
                    compute = partial(_compute_rows, expert, of_layer.pick(mine), part.form, out)
                    jobs.append(Job(compute, _stays))
                    start += len(mine)
        self.serving.workers.run(jobs)
        upload = self._accelerator.upload
        work.out.index_copy_(0, upload(every), upload(made))
        rows_of = [len(pairs) for pairs in pairs_of]
        seconds = time.perf_counter() - begun
        self.serving.policy.computed(rows_of, self.records.record_bytes, seconds)
        self.counts = replace(self.counts, computed=self.counts.computed + len(experts))


def _compute_rows(expert: Expert, rows: PickedRows, form: Form, out: torch.Tensor) -> None:
    out.copy_(expert(rows, form))


def _stays() -> None:
    """Host records are there to stay."""


@dataclass(frozen=True)
class _Work:
    """One layer's rows on the device, and where what experts make of them goes."""

    x: torch.Tensor  # [n, H] fp32
    chosen: torch.Tensor  # [n, k] int64
    parts: tuple[RowGroup, ...]
    out: torch.Tensor  # [n · k, H] fp32
