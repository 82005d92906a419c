# SPDX-License-Identifier: Apache-2.0
"""The bandwidths that bound a token: that of the one-row kernel on weights that are in no cache,
and that of the disk at the size of one expert."""

import random
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch

from freetoken_storage.weights_direct import Buffers, DirectReader, Pending

from ..experts.choice import own_form
from ..experts.records import ExpertForm
from ..ftw_weights import FtwFolder
from ..layers.expert import Expert
from ..specs.moe import MoeSpec
from ..weights import INT4_GROUP
from .offload_model import Stage
from .timing import Turn

_COLD_BYTES = 256 << 20  # more than any cache of the machines meant here


class PreparedExperts:
    """All experts of an FTW folder, one layer's after another's."""

    def __init__(self, path: Path) -> None:
        source = FtwFolder(path)
        spec = source.spec
        mixture = spec.layers[0].feed_forward
        assert isinstance(mixture, MoeSpec)
        self.file = source.file
        self.names = [
            f"layers.{layer}.experts.{expert}"
            for layer in range(len(spec.layers))
            for expert in range(mixture.router.num_experts)
        ]
        self.room = max(self.file.extent(name).room for name in self.names)
        dtype = torch.float32 if source.quant else torch.bfloat16
        form = ExpertForm.of(mixture.expert, spec.hidden_size, source.quant, dtype, INT4_GROUP)
        self.form = own_form(form, source, "layers.0.experts.")


class KernelProbe:
    """The one-row kernel on experts that take turns, so that each comes from memory, with the
    engine's own team: threads with a part of the experts each read a third less."""

    def __init__(self, prepared: PreparedExperts, reader: DirectReader, stage: Stage) -> None:
        self.expert_bytes = prepared.form.layout.size_bytes
        count = min(len(prepared.names), -(-_COLD_BYTES // self.expert_bytes))
        self._experts: list[Expert] = []
        buffers = Buffers(prepared.room)  # as slots are
        for name in prepared.names[:count]:
            memory = buffers.take()
            prepared.file.read(name, reader, memory)
            self._experts.append(prepared.form.expert(memory))
        self._stage = stage

    def turn(self) -> Turn:
        """Each expert's matrices meet one row; counts bytes."""
        seconds = self._stage.in_engine(lambda: _one_row(self._experts))
        return Turn(seconds, self.expert_bytes * len(self._experts))


class DiskProbe:
    """Experts read and nothing else done, `pending` of them at a time."""

    def __init__(self, prepared: PreparedExperts, reader: DirectReader, pending: int) -> None:
        self.pending = pending
        self.depth = reader.depth
        self._prepared = prepared
        self._reader = reader
        buffers = Buffers(prepared.room)  # as slots are: other memory would be slower
        self._buffers = [buffers.take() for _ in range(pending)]
        self._random = random.Random(0)

    def turn(self, count: int) -> Turn:
        """So many experts in no order; counts bytes."""
        names = self._random.choices(self._prepared.names, k=count)
        free, under_way = list(self._buffers), deque[tuple[Pending, memoryview]]()
        total = 0
        started = time.perf_counter()
        for name in names:
            if not free:
                read, memory = under_way.popleft()
                read.result()
                free.append(memory)
            memory, extent = free.pop(), self._prepared.file.extent(name)
            under_way.append((self._reader.submit(extent, memory), memory))
            total += extent.room
        for read, _ in under_way:
            read.result()
        return Turn(time.perf_counter() - started, total)


@torch.inference_mode()
def _one_row(experts: Sequence[Expert]) -> float:
    row = torch.zeros(1, experts[0].up.inputs)
    inner = torch.zeros(1, experts[0].down.inputs)
    started = time.perf_counter()
    for expert in experts:
        expert.up.few(row)
        expert.down.few(inner)
    return time.perf_counter() - started
