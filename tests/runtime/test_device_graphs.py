# SPDX-License-Identifier: Apache-2.0
"""When steps are captured, replayed and captured anew, with an accelerator that says what it was
asked for, and what a process without a device imports. That graphs compute the same is shown by
`tests/device`."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import freetoken_runtime
from freetoken_runtime.device.accelerator import CudaAccelerator, HostAccelerator, Replay
from freetoken_runtime.device.graphs import Part, StepGraphs
from freetoken_runtime.errors import InvalidConfig


class Recording(HostAccelerator):
    """As a device does, capturing calls a run and computes nothing: that comes with the replay."""

    def __init__(self) -> None:
        self.computing = True

    def capture(self, run: Callable[[], None]) -> Replay:
        self.computing = False
        run()
        self.computing = True
        return lambda: self.replay(run)

    def replay(self, run: Callable[[], None]) -> None:
        self.replays = getattr(self, "replays", 0) + 1
        run()


class Steps:
    """A step that counts: piece, break, piece. `calls` are those of Python's functions."""

    def __init__(self, device: Recording) -> None:
        self.device = device
        self.x = torch.zeros(3)
        self.breaks = 0
        self.parts = [Part(self._piece, True), Part(self._break, False), Part(self._piece, True)]

    def _piece(self) -> None:
        if self.device.computing:
            self.x.add_(1)

    def _break(self) -> None:
        self.breaks += 1
        self.x.mul_(2)


def test_a_step_runs_plainly_then_is_captured_then_replayed() -> None:
    """Oracle: the numbers that plain calls give after each step, and counts."""
    device = Recording()
    graphs, steps, expected = StepGraphs(device), Steps(device), 0.0
    for number in range(6):
        graphs.run(1, steps.parts, [steps.x])
        expected = (expected + 1) * 2 + 1
        assert steps.x.tolist() == [expected] * 3
        assert graphs.captures == min(number, 1) and steps.breaks == number + 1
    assert device.replays == 2 * 5


def test_each_shape_has_its_graphs_and_the_oldest_go() -> None:
    """Oracle: counts of captures; a shape that went begins again with a plain step."""
    device = Recording()
    graphs, steps = StepGraphs(device, kept_shapes=2), Steps(device)
    for shape in (1, 1, 2, 2, 1):
        graphs.run(shape, steps.parts, [steps.x])
    assert graphs.captures == 2
    graphs.run(3, steps.parts, [steps.x])  # 2 goes, as 1 was used last
    graphs.run(1, steps.parts, [steps.x])
    graphs.run(2, steps.parts, [steps.x])
    assert graphs.captures == 2
    graphs.run(2, steps.parts, [steps.x])
    assert graphs.captures == 3


def test_memory_that_moved_is_never_replayed() -> None:
    """Oracle: the numbers in the new memory; the old memory stays as it was."""
    device = Recording()
    graphs, steps = StepGraphs(device), Steps(device)
    for _ in range(3):
        graphs.run(1, steps.parts, [steps.x])
    old, kept = steps.x, steps.x.clone()
    steps.x = torch.zeros(3)
    for number, expected in enumerate((3.0, 9.0, 21.0)):
        graphs.run(1, steps.parts, [steps.x])
        assert steps.x.tolist() == [expected] * 3 and graphs.captures == 1 + min(number, 1)
    assert torch.equal(old, kept)


def test_what_is_forgotten_is_captured_anew() -> None:
    """Oracle: counts of captures."""
    device = Recording()
    graphs, steps = StepGraphs(device), Steps(device)
    for _ in range(3):
        graphs.run(1, steps.parts, [steps.x])
    graphs.forget()
    for _ in range(3):
        graphs.run(1, steps.parts, [steps.x])
    assert graphs.captures == 2


def test_a_step_that_fails_while_it_is_captured_is_not_replayed() -> None:
    """Oracle: the exception, and the captures of the steps after it."""
    device = Recording()
    graphs, steps = StepGraphs(device), Steps(device)

    def fails() -> None:
        raise RuntimeError("no room")

    graphs.run(1, steps.parts, [steps.x])
    with pytest.raises(RuntimeError, match="no room"):
        graphs.run(1, [*steps.parts, Part(fails, False)], [steps.x])
    graphs.run(1, steps.parts, [steps.x])
    graphs.run(1, steps.parts, [steps.x])
    assert graphs.captures == 2


def test_one_module_calls_cuda() -> None:
    """Oracle: the text of all modules of the runtime: `torch.cuda` is named in one."""
    root = Path(freetoken_runtime.__file__).parent
    files = [file for file in root.rglob("*.py") if "torch.cuda" in file.read_text()]
    assert [file.relative_to(root).as_posix() for file in files] == ["device/accelerator.py"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a device")
def test_m30_a_device_that_is_not_there_is_refused() -> None:
    """Oracle: the error, which names what there is."""
    with pytest.raises(InvalidConfig) as raised:
        CudaAccelerator()
    assert raised.value.limit == "0 devices" and raised.value.remedy
