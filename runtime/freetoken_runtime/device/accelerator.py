# SPDX-License-Identifier: Apache-2.0
"""What a device is asked for: locked host memory, a stream for copies, points in streams, graphs.

This is the only module that calls `torch.cuda`, which serves NVIDIA and, in ROCm builds of torch,
AMD. `HostAccelerator` is the CPU in the same role: everything is done at once and in order. With
it, and Triton's interpreter, all that stands above this module runs without a device.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InvalidConfig

Replay = Callable[[], None]


@dataclass(frozen=True)
class Mark:
    """A point in a stream, passed when all that was asked of the stream before it is done."""

    event: Any  # torch.cuda.Event; None where nothing is asked ahead
    at_s: float  # when it was set


class Accelerator(ABC):
    """Used by one thread. Work goes to the current stream, or, within `copying`, to another one
    that runs beside it."""

    device: torch.device
    name: str  # for reports

    @abstractmethod
    def host_memory(self, size_bytes: int) -> torch.Tensor:
        """[size_bytes] uint8 in the host's memory that the device can copy from while others work,
        and kernels read by its address. A power of two wastes nothing."""

    @abstractmethod
    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """A small tensor of the host on the device, in the current stream. Nothing waits: the
        plain way would, for all that the stream was asked before."""

    @abstractmethod
    def copying(self) -> AbstractContextManager[Any]:
        """Within it, work goes to the stream of copies."""

    @abstractmethod
    def mark(self) -> Mark:
        """The current point of the current stream."""

    @abstractmethod
    def wait(self, mark: Mark) -> None:
        """What is asked of the current stream from here on comes after `mark`. Returns at once."""

    @abstractmethod
    def seconds(self, begin: Mark, end: Mark) -> float:
        """Between two marks of one stream. Waits for the second one."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for all that was asked."""

    @abstractmethod
    def capture(self, run: Callable[[], None]) -> Replay:
        """Record what `run` asks of the device; nothing is computed. What is returned asks it again
        of the same memory, without calling `run`. `run` must have run before, with the same shapes,
        must not wait for the device, and what it leaves behind must lie in memory that outlives
        it. Graphs of one accelerator share what they work in."""


class CudaAccelerator(Accelerator):
    """A GPU of NVIDIA or AMD."""

    def __init__(self, index: int = 0) -> None:
        """InvalidConfig if this torch, or this machine, has none."""
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise InvalidConfig(
                "there is no such device",
                value=index,
                limit=f"{torch.cuda.device_count()} devices",
                remedy="install a torch for CUDA or ROCm, or compute on the CPU",
            )
        self.device = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name(self.device)
        self._copies = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def host_memory(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def copying(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._copies)

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return Mark(event, time.perf_counter())

    def wait(self, mark: Mark) -> None:
        torch.cuda.current_stream(self.device).wait_event(mark.event)

    def seconds(self, begin: Mark, end: Mark) -> float:
        end.event.synchronize()
        return float(begin.event.elapsed_time(end.event)) / 1e3

    def finish(self) -> None:
        torch.cuda.synchronize(self.device)

    def capture(self, run: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return graph.replay


class HostAccelerator(Accelerator):
    """The CPU. A recorded run is called again: it shows that a step works from what lies in its
    memory and nothing else, not that a device would take it."""

    device = torch.device("cpu")
    name = "CPU"

    def host_memory(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def copying(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def mark(self) -> Mark:
        return Mark(None, time.perf_counter())

    def wait(self, mark: Mark) -> None:
        """All that was asked is done."""

    def seconds(self, begin: Mark, end: Mark) -> float:
        return end.at_s - begin.at_s

    def finish(self) -> None:
        """All that was asked is done."""

    def capture(self, run: Callable[[], None]) -> Replay:
        return run
