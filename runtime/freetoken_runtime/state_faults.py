# SPDX-License-Identifier: Apache-2.0
"""For tests: wrong states in a store, written as right ones are, checksums included."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch

from freetoken_storage.records import Snapshot, Snapshots

from .engine import Engine
from .sampler import SamplingParams
from .state.digest import as_ids
from .verification.records import StoredRecord, records_of

Kind = Literal["swapped", "permuted", "scaled"]
_NOTICEABLE = 1e-3  # of a tensor's range: less than this is no fault to plant


@dataclass(frozen=True)
class Fault:
    """`record`'s buffer `name` is to be wrong; of a block's, the part of one layer in its stack."""

    record: StoredRecord
    name: str
    part: int
    kind: Kind


class Planter:
    """Changes what the store attached to `engine` holds of one path. Nothing may write meanwhile.

    swapped    with the same tensor of another record
    permuted   its heads, or channels, moved on by one
    scaled     by `scale`
    """

    def __init__(self, engine: Engine, ids: Sequence[int], scale: float = 1.25) -> None:
        disk = engine._lookup.disk
        assert disk is not None, "no store is attached"
        self._snapshots: Snapshots = disk.snapshots
        self._layout = engine._pool.layout
        self._scale = scale
        self.records = records_of(disk, as_ids(ids))
        self._right = {record.digest: self._read(record) for record in self.records}

    def faults(self) -> list[Fault]:
        """Everything that can be planted and makes a difference."""
        candidates = [
            Fault(record, name, part, kind)
            for record in self.records
            for name, tensor in self._right[record.digest].items()
            for part in range(len(tensor))
            for kind in get_args(Kind)
        ]
        return [fault for fault in candidates if self._wrong(fault) is not None]

    def plant(self, fault: Fault) -> None:
        """What hangs on the record stays as it is."""
        wrong = self._wrong(fault)
        assert wrong is not None, fault
        digest = fault.record.digest
        tree = _tree(self._snapshots, digest)
        buffers = dict(tree[0].buffers)
        whole = self._right[digest][fault.name].clone()
        whole[fault.part] = wrong
        buffers[fault.name] = whole.numpy().tobytes()
        tree[0] = Snapshot(digest, tree[0].parent, buffers, tree[0].meta)
        self._snapshots.remove([digest])
        self._snapshots.put(tree)

    def _wrong(self, fault: Fault) -> torch.Tensor | None:
        """The part as it is to be; None if it would be about the same."""
        right = self._right[fault.record.digest][fault.name][fault.part]
        if fault.kind == "scaled":
            return _if_other(right * self._scale, right)
        if fault.kind == "permuted":
            heads = 1 if fault.record.kind == "block" else 0  # a block's rows come first
            if right.dim() < 2 or right.shape[heads] < 2:
                return None
            return _if_other(right.roll(1, heads), right)
        for record in self.records:
            other = self._right[record.digest].get(fault.name)
            if record.kind == fault.record.kind and other is not None:
                if other[fault.part].shape == right.shape:
                    wrong = _if_other(other[fault.part], right)
                    if wrong is not None:
                        return wrong
        return None

    def _read(self, record: StoredRecord) -> dict[str, torch.Tensor]:
        """By name, each with its parts along the first dimension."""
        if record.kind == "block":
            dims = self._layout.buffer_dims(record.start, record.end)
        else:
            dims = {
                f"{layer}.{index}": (1, *shape)
                for layer, shapes in enumerate(self._layout.fixed)
                for index, shape in enumerate(shapes)
            }
        stored = _tree(self._snapshots, record.digest)[0].buffers
        return {
            name: torch.frombuffer(bytearray(data), dtype=torch.float32).view(
                dims.get(name, (1, -1))
            )
            for name, data in stored.items()
        }


def random_ids(seed: int, count: int, vocab_size: int = 211) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, vocab_size, count)]


def write_states(engine: Engine, seed: int, turns: int = 3) -> list[int]:
    """Prompts, named anchors, decoded text and a warmed end: all that leaves states in a store.
    Returns the path, which the store then holds as a whole."""
    ids = random_ids(seed, 150)
    for turn in range(turns):
        named = [len(ids) - 113, len(ids) - 64, len(ids) - 20]
        sampling = SamplingParams(max_tokens=30, temperature=1.0, seed=turn)
        ids += [token.id for token in engine.generate(ids, sampling, anchors=named)]
        ids += random_ids(seed + turn + 1, 97)
    engine.warm(ids)
    engine.flush()
    return ids


def _if_other(wrong: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    size = right.max() - right.min()
    return wrong if (wrong - right).abs().max() > _NOTICEABLE * size else None


def _tree(snapshots: Snapshots, digest: bytes) -> list[Snapshot]:
    """A snapshot and all that hangs on it, parents first."""
    found: list[Snapshot] = []
    pending = [digest]
    with snapshots.reader() as reader:
        while pending:
            name = pending.pop(0)
            info = reader.info(name)
            assert info is not None, name.hex()
            buffers = {key: bytearray(size) for key, size in info.sizes.items()}
            reader.read_into(name, {key: memoryview(data) for key, data in buffers.items()})
            copied = {key: bytes(data) for key, data in buffers.items()}
            found.append(Snapshot(name, info.parent, copied, info.meta))
            pending += snapshots.children(name)
    return found
