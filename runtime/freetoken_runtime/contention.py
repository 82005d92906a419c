# SPDX-License-Identifier: Apache-2.0
"""How many compute threads are worth using right now.

Beside one busy process an OpenMP team of two takes about 8 ms for any operation, because a member
that was descheduled is waited for; one thread keeps its speed. So a team is probed with a tiny
parallel operation before it is trusted with a pass, and given up when the probe stalls. Experts are
then computed by threads without teams (`kernels.experts.workers`), everything else by one.

OpenMP keeps a team for every thread that ever used one, and where all teams together have more
threads than the machine has cores, none of them waits actively any more: a token of int4 then takes
13 ms instead of 9. So only the owner thread may keep a team; other work of ours runs `apart`.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")

STALL_S = 0.002  # a probe takes 10 µs in a healthy team, 25 right after a pass
PROBE_EVERY_S = 0.02  # while the team is in use
PROBE_EVERY_PASSES = 4.0  # the same for long passes, which show by themselves that they stall
SLOW = 1.5  # a pass that takes so many times what was expected is looked into
RETRY_S = 0.25  # after a stall; doubles with each further one
MAX_RETRY_S = 4.0
_PROBES = 3  # before a team is taken back; one in use is probed once, but often
_PROBE_ELEMENTS = 1 << 16  # torch splits them over the team; bytes, for they are read from memory


def apart(work: Callable[[], T]) -> T:
    """The result of `work`, done in a thread that ends with it, and its team with the thread."""
    with ThreadPoolExecutor(1, thread_name_prefix="freetoken-apart") as thread:
        return thread.submit(work).result()


def compute_alone() -> None:
    """Let the calling thread have no team. torch keeps the setting for each thread, but takes the
    last one that anybody made when a thread first computes: asked for here, it is taken now."""
    torch.set_num_threads(1)
    torch.get_num_threads()


class ThreadGovernor:
    """Chooses between all threads (`most`) and one. Used by the owner thread, before each pass."""

    def __init__(
        self,
        threads: int,
        clock: Callable[[], float] = time.perf_counter,
        probe: Callable[[], float] | None = None,
    ) -> None:
        self.most = threads
        self._clock = clock
        self._probe = probe if probe is not None else _Team().probe
        self._retry_s = RETRY_S
        self._next = 0.0  # when to probe again
        self._probed = 0.0  # when a team was last found well
        self.threads = threads

    def before_pass(self) -> None:
        """Probe the team if it is time to, and set the number of compute threads."""
        if self.most == 1 or self._clock() < self._next:
            return
        probes = 1
        if self.threads == 1:
            torch.set_num_threads(self.most)
            probes = _PROBES
        stalled = any(self._probe() > STALL_S for _ in range(probes))
        if stalled:
            torch.set_num_threads(1)
            if self.threads == 1:
                self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
            self.threads = 1
            self._next = self._clock() + self._retry_s
        else:
            self.threads = self.most
            self._retry_s = RETRY_S
            self._probed = self._clock()
            self._next = self._probed + PROBE_EVERY_S

    def after_pass(self, seconds: float, expected_s: float | None) -> None:
        """Tell how long a pass took, and how long passes of its kind have taken (None: unknown).
        A slow one brings the next probe forward, a long one of the usual speed puts it off: a
        probe that meets a busy neighbour costs 8 ms."""
        if self.threads == 1:
            return
        if expected_s is not None and seconds > SLOW * expected_s > 0:
            self._next = 0.0
        else:
            self._next = max(self._next, self._probed + PROBE_EVERY_PASSES * seconds)


class _Team:
    """A tiny operation that needs every thread."""

    def __init__(self) -> None:
        self._values: torch.Tensor | None = None

    def probe(self) -> float:
        if self._values is None:  # not earlier: this is the thread that computes
            self._values = torch.zeros(_PROBE_ELEMENTS, dtype=torch.int8)
        started = time.perf_counter()
        self._values.neg_()
        return time.perf_counter() - started
