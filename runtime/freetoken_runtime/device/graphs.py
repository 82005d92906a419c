# SPDX-License-Identifier: Apache-2.0
"""Steps of one shape as graphs, captured piece by piece around what the host has to decide.

    piece    norms, mixers, routers: asks the device for the same work each time      captured
    break    fetching and computing experts, of which the host learns from a router   called

Pieces hand each other what lies in memory that is there before the first step and stays. A step
runs plainly once, which compiles kernels; the next one is captured while it runs; later ones are
replayed. Experts are found through tables that stay where they are, so that slots may come and go.
What was captured is captured anew if the memory that a step names has moved.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from .accelerator import Accelerator, Replay

KEPT_SHAPES = 16


@dataclass(frozen=True)
class Part:
    """`captured`: a piece, as opposed to a break. `run` is called anew for breaks only."""

    run: Callable[[], None]
    captured: bool


@dataclass
class _Captured:
    """`replays`: one per part, breaks as they are; empty until captured."""

    addresses: tuple[int, ...]
    replays: tuple[Replay, ...] = ()


class StepGraphs:
    """The graphs of steps, by shape. Used by one thread. `captures` counts."""

    def __init__(self, accelerator: Accelerator, kept_shapes: int = KEPT_SHAPES) -> None:
        self.captures = 0
        self._accelerator = accelerator
        self._kept = kept_shapes
        self._steps: OrderedDict[Hashable, _Captured] = OrderedDict()

    def run(self, shape: Hashable, parts: Sequence[Part], memory: Sequence[torch.Tensor]) -> None:
        """A step. `shape`: all that decides what pieces ask for, the number of rows first of all.
        `memory`: every tensor that pieces read or write and that was there before."""
        addresses = tuple(tensor.data_ptr() for tensor in memory)
        known = self._steps.get(shape)
        if known is None or known.addresses != addresses:
            self._steps[shape] = _Captured(addresses)
            self._steps.move_to_end(shape)
            if len(self._steps) > self._kept:
                self._steps.popitem(last=False)
            for part in parts:
                part.run()
            return
        self._steps.move_to_end(shape)
        if known.replays:
            for replay in known.replays:
                replay()
            return
        self.captures += 1
        known.replays = tuple(self._begin(part) for part in parts)

    def forget(self) -> None:
        """Capture everything anew: what pieces depend on beside `memory` has changed."""
        self._steps.clear()

    def _begin(self, part: Part) -> Replay:
        """Run a part, and what will run it from now on."""
        replay = self._accelerator.capture(part.run) if part.captured else part.run
        replay()
        return replay
