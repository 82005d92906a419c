# SPDX-License-Identifier: Apache-2.0
"""The choice of compute threads. Oracle: a clock and a team of threads that are played."""

from collections.abc import Iterator

import pytest
import torch

from freetoken_runtime.contention import (
    MAX_RETRY_S,
    PROBE_EVERY_S,
    RETRY_S,
    STALL_S,
    ThreadGovernor,
)


class Machine:
    """A clock, and how long an operation of the whole team takes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.op_s = 2e-5
        self.probes = 0

    def clock(self) -> float:
        return self.now

    def probe(self) -> float:
        self.probes += 1
        assert torch.get_num_threads() == 2  # probed as a team, whatever was in use
        return self.op_s


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The test's own thread keeps its number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_stalling_team_is_given_up_and_taken_back() -> None:
    """A busy neighbour: one thread; it goes: all threads, after a pause that had grown."""
    machine = Machine()
    governor = ThreadGovernor(2, machine.clock, machine.probe)
    governor.before_pass()
    assert (governor.threads, torch.get_num_threads()) == (2, 2)
    machine.op_s = 4 * STALL_S
    machine.now += PROBE_EVERY_S
    governor.before_pass()
    assert (governor.threads, torch.get_num_threads()) == (1, 1)
    probes = machine.probes
    governor.before_pass()
    assert machine.probes == probes  # not before the pause is over
    pauses = []
    for _ in range(8):
        before = machine.probes
        started = machine.now
        while machine.probes == before:
            machine.now += 0.01
            governor.before_pass()
        pauses.append(machine.now - started)
        assert (governor.threads, torch.get_num_threads()) == (1, 1)
    assert pauses[0] == pytest.approx(RETRY_S, abs=0.02)
    assert pauses[-1] == pytest.approx(MAX_RETRY_S, abs=0.02)
    machine.op_s = 2e-5
    machine.now += MAX_RETRY_S + 0.01
    governor.before_pass()
    assert (governor.threads, torch.get_num_threads()) == (2, 2)


def test_probes_are_rare_while_all_is_well() -> None:
    """A thousand passes within one interval cost one round of probes."""
    machine = Machine()
    governor = ThreadGovernor(2, machine.clock, machine.probe)
    governor.before_pass()
    first = machine.probes
    for _ in range(1000):
        governor.before_pass()
    assert machine.probes == first


def test_long_passes_are_probed_when_they_are_slow() -> None:
    """Of passes of 0.3 s one in four is probed; one that takes twice as long as expected makes the
    next one probe, whatever the time, and a team that stalls then is given up."""
    machine = Machine()
    governor = ThreadGovernor(2, machine.clock, machine.probe)
    for _ in range(40):
        governor.before_pass()
        machine.now += 0.3
        governor.after_pass(0.3, 0.3)
    assert 10 <= machine.probes <= 11
    governor.before_pass()
    probes = machine.probes
    machine.op_s = 4 * STALL_S
    machine.now += 0.6
    governor.after_pass(0.6, 0.3)
    governor.before_pass()
    assert machine.probes == probes + 1 and governor.threads == 1
    governor.after_pass(0.6, 0.3)  # one thread has nothing to be suspected of
    governor.before_pass()
    assert machine.probes == probes + 1


def test_one_thread_is_never_probed() -> None:
    """There is nothing to choose."""
    machine = Machine()
    governor = ThreadGovernor(1, machine.clock, machine.probe)
    governor.before_pass()
    assert machine.probes == 0 and governor.threads == 1


def test_the_real_probe_measures() -> None:
    """Without a played machine the governor takes its time from a real operation."""
    governor = ThreadGovernor(2)
    governor.before_pass()
    assert governor.threads in (1, 2)
    assert torch.get_num_threads() == governor.threads
