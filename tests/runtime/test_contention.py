# SPDX-License-Identifier: Apache-2.0
"""The choice of compute threads. Oracle: a clock and a team of threads that are played."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from freetoken_runtime.contention import (
    MAX_RETRY_S,
    PROBE_EVERY_S,
    RETRY_S,
    STALL_S,
    ThreadGovernor,
)
from freetoken_runtime.conversion import convert
from freetoken_runtime.testing import build_checkpoint


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


TEAMS = """
import sys, threading
from pathlib import Path

named = set()

def name(*_):
    '''Threads that OpenMP starts are called like the thread that computes with them.'''
    number = threading.get_native_id()
    if number not in named:
        named.add(number)
        Path(f"/proc/self/task/{number}/comm").write_text(threading.current_thread().name[-15:])

threading.setprofile(name)
name()
import torch
from freetoken_runtime import Engine, EngineConfig, SamplingParams

def teams():
    own = {thread.native_id for thread in threading.enumerate()}
    tasks = [task for task in Path("/proc/self/task").iterdir() if int(task.name) not in own]
    return [(task / "comm").read_text().strip() for task in tasks]

path, quant, prefill, offload = sys.argv[1:]
before = teams()
config = EngineConfig(
    quant=None if quant == "none" else quant, prefill=prefill, offload=offload, threads=2
)
with Engine.load(path, config) as engine:
    list(engine.generate(list(range(3, 60)), SamplingParams(max_tokens=3)))
    after = teams()
for name in before:
    after.remove(name)
print(sorted({name for name in after}))
"""


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough for torch to share work among threads, and as it is converted to int4."""
    folder = tmp_path_factory.mktemp("mixture")
    build_checkpoint(
        folder / "none", "mixtral", hidden_size=240, intermediate_size=512, num_attention_heads=6
    )
    convert(folder / "none", folder / "int4", quant="int4")
    return folder


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are read from /proc")
@pytest.mark.parametrize(
    ("form", "quant", "prefill", "offload"),
    [
        ("int4", "int4", "exact", "none"),
        ("none", "int8", "int16", "none"),
        ("none", "int8", "exact", "disk"),
        ("none", "none", "exact", "disk"),
    ],
)
def test_only_the_engine_has_a_team(
    mixture: Path, form: str, quant: str, prefill: str, offload: str
) -> None:
    """Oracle: the threads of a process by the kernel's list, each called like the one that started
    it. With a second team, none of them waits actively: every operation takes 20 to 60 µs instead
    of 5."""
    done = subprocess.run(
        [sys.executable, "-c", TEAMS, str(mixture / form), quant, prefill, offload],
        capture_output=True,
        text=True,
        timeout=120,
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['reetoken-engine']"
