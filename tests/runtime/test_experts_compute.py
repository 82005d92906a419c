# SPDX-License-Identifier: Apache-2.0
"""Threads that compute experts beside the one that asks. Oracles: the same mixture computed by one
thread, bit for bit; jobs counted by the test."""

import gc
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial

import pytest
import torch

from freetoken_runtime.contention import ThreadGovernor
from freetoken_runtime.errors import WorkerStalled
from freetoken_runtime.kernels.experts.cpu import Demand, Serve, Task, mix
from freetoken_runtime.kernels.experts.workers import Job, Workers
from freetoken_storage.errors import FreetokenError

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, EXPERTS, HIDDEN = 23, 12, 40


class Played:
    """Experts that note who computes them and when they are released."""

    def __init__(self, act: Callable[[int], None] = lambda expert: None) -> None:
        self.act = act
        self.threads: dict[int, threading.Thread] = {}
        self.released: list[int] = []
        self.closed = False
        generator = torch.Generator().manual_seed(0)
        self.matrices = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator)

    def compute(self, expert: int, numbers: torch.Tensor | None, part: int) -> torch.Tensor:
        assert expert not in self.released
        self.threads[expert] = threading.current_thread()
        self.act(expert)
        return (self.x if numbers is None else self.x[numbers]) @ self.matrices[expert]

    def serve(self, wanted: Sequence[Demand]) -> Generator[Task]:
        try:
            for demand in wanted:
                release = partial(self.released.append, demand.expert)
                yield Task(demand.expert, partial(self.compute, demand.expert), release)
        finally:
            self.closed = True

    def run(self, workers: Workers, rows: int = ROWS, serve: Serve | None = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(rows, HIDDEN, generator=generator)
        chosen = torch.rand(rows, EXPERTS, generator=generator).topk(3).indices
        weights = torch.rand(rows, 3, generator=generator)
        return mix(HIDDEN, chosen, weights, serve or self.serve, [rows], workers)


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers(3, timeout_s=5.0)
    yield made
    made.close()


def meet(count: int) -> Callable[[int], None]:
    """The first `count` experts wait for each other: they are computed at the same time."""
    barrier = threading.Barrier(count, timeout=30.0)
    left = list(range(count))

    def act(expert: int) -> None:
        if left:
            left.pop()
            barrier.wait()

    return act


@pytest.mark.parametrize("rows", [1, 2, ROWS])
def test_bits_do_not_depend_on_who_computes(workers: Workers, rows: int) -> None:
    """Oracle: one thread. At least three threads take part where there are three experts."""
    alone, shared = Played(), Played(meet(3))
    expected = alone.run(Workers(), rows)
    assert torch.equal(shared.run(workers, rows), expected)
    assert set(alone.threads.values()) == {threading.current_thread()}
    assert len(set(shared.threads.values())) >= 3
    assert sorted(shared.released) == sorted(alone.released) == sorted(alone.threads)
    assert shared.closed


def test_many_rounds_leave_nothing_behind(workers: Workers) -> None:
    """Oracle: the same result each time, by the same threads; none runs any more when it is closed:
    one on its way out of torch would abort a process that ends."""
    expected = Played().run(Workers())
    seen: set[threading.Thread] = set()
    for _ in range(40):
        played = Played()
        assert torch.equal(played.run(workers), expected)
        seen |= set(played.threads.values())
    assert len(seen) <= 4
    workers.close()
    assert not any(thread.is_alive() for thread in seen - {threading.current_thread()})
    assert torch.equal(Played().run(workers), expected)  # with new ones


def test_threads_end_with_their_owner() -> None:
    """Oracle: the interpreter's list of threads."""
    workers, played = Workers(2), Played(meet(3))
    played.run(workers)
    helpers = set(played.threads.values()) - {threading.current_thread()}
    assert len(helpers) == 2
    del workers
    gc.collect()
    assert not any(thread.is_alive() for thread in helpers)


def test_every_thread_has_one_compute_thread(workers: Workers) -> None:
    """Oracle: torch's count in each of them."""
    counts: dict[threading.Thread, int] = {}
    meeting = meet(3)

    def act(expert: int) -> None:
        meeting(expert)
        counts[threading.current_thread()] = torch.get_num_threads()

    Played(act).run(workers)
    assert len(counts) >= 3 and set(counts.values()) == {1}


def test_a_team_computes_alone(workers: Workers) -> None:
    """Oracle: the threads seen. With two compute threads of its own, the asking one needs none."""
    torch.set_num_threads(2)
    played = Played()
    played.run(workers)
    assert set(played.threads.values()) == {threading.current_thread()}


def test_a_team_is_left_while_experts_are_fetched(workers: Workers) -> None:
    """Oracle: the threads seen; torch's count after it, also after an error. Without helpers the
    team stays."""
    expected = Played().run(Workers())
    torch.set_num_threads(2)
    played = Played(meet(3))
    with workers.instead_of_team():
        assert torch.equal(played.run(workers), expected)
    assert len(set(played.threads.values())) >= 3
    assert torch.get_num_threads() == 2
    with pytest.raises(ValueError, match="broken"), workers.instead_of_team():
        raise ValueError("broken")
    assert torch.get_num_threads() == 2
    with Workers().instead_of_team():
        assert torch.get_num_threads() == 2


def test_m2_under_contention_experts_are_shared_out(workers: Workers) -> None:
    """Oracle: the threads seen. A governor whose team stalls leaves one compute thread to the pass,
    and then the helpers compute with it; bits stay."""
    stalled = ThreadGovernor(2, probe=lambda: 1.0)
    expected = Played().run(Workers())
    torch.set_num_threads(2)
    stalled.before_pass()
    played = Played(meet(3))
    assert torch.equal(played.run(workers), expected)
    assert len(set(played.threads.values())) >= 3


@pytest.mark.parametrize("rows", [1, ROWS])
def test_what_an_expert_raises_comes_out(workers: Workers, rows: int) -> None:
    """Oracle: the error itself, whichever thread met it; whatever was handed out is released, the
    iterator closed, and the next pass right."""

    class Broken(Exception):
        pass

    def act(expert: int) -> None:
        if expert % 2:
            raise Broken(expert)

    for crew in (workers, Workers()):
        played = Played(act)
        with pytest.raises(Broken):
            played.run(crew)
        assert played.closed and set(played.threads) <= set(played.released)
        assert torch.equal(Played().run(crew), Played().run(Workers()))


def test_nothing_is_begun_after_a_failure() -> None:
    """Oracle: what was done. The second job comes when the first one has failed and was released;
    it is released, too."""
    workers = Workers(1)
    done: list[int] = []
    failed, released = threading.Event(), []  # type: tuple[threading.Event, list[int]]

    def fail() -> None:
        raise ValueError("first")

    def jobs() -> Iterator[Job]:
        yield Job(fail, failed.set)
        assert failed.wait(30.0)
        for number in range(3):
            yield Job(partial(done.append, number), partial(released.append, number))

    with pytest.raises(ValueError, match="first"):
        workers.run(jobs())
    assert not done and released
    workers.close()


def test_what_serving_raises_comes_out_when_all_are_back(workers: Workers) -> None:
    """Oracle: nobody computes any more when the error arrives."""
    going = threading.Semaphore(0)
    finished: list[int] = []

    def act(expert: int) -> None:
        going.release()
        time.sleep(0.05)
        finished.append(expert)

    played = Played(act)

    def serve(wanted: Sequence[Demand]) -> Generator[Task]:
        yield from list(played.serve(wanted[:2]))
        assert going.acquire(timeout=30.0)
        raise FreetokenError("the disk is gone")

    chosen, played.x = torch.arange(EXPERTS)[:, None], torch.ones(EXPERTS, HIDDEN)
    with pytest.raises(FreetokenError, match="disk"):
        mix(HIDDEN, chosen, torch.ones(EXPERTS, 1), serve, [EXPERTS], workers)
    assert sorted(finished) == sorted(played.threads)
    assert sorted(played.released) == [0, 1]


def test_serving_may_wait_for_a_release(workers: Workers) -> None:
    """Oracle: a pool of two slots: the third expert comes when one was released, by a helper."""
    expected = Played().run(Workers())
    slots = threading.Semaphore(2)
    played = Played()

    def serve(wanted: Sequence[Demand]) -> Generator[Task]:
        for task in played.serve(wanted):
            assert slots.acquire(timeout=30.0)

            def release(task: Task = task) -> None:
                task.release()
                slots.release()

            yield Task(task.expert, task.compute, release)

    assert torch.equal(played.run(workers, serve=serve), expected)


def test_m21_a_thread_that_does_not_come_back_is_an_error(workers: Workers) -> None:
    """Oracle: the error within the timeout. The late thread releases nothing, for its expert may be
    another's by then; the next pass has other threads, and other memory for its results."""
    workers.timeout_s = 0.2
    wake, owner = threading.Event(), threading.current_thread()
    stuck: list[int] = []
    shared = meet(2)

    def act(expert: int) -> None:
        shared(expert)
        if threading.current_thread() is not owner and not stuck:
            stuck.append(expert)
            assert wake.wait(60.0)

    played = Played(act)
    played.matrices.neg_()  # what it writes late is seen
    started = time.monotonic()
    with pytest.raises(WorkerStalled, match=r"0\.2 s"):
        played.run(workers)
    assert time.monotonic() - started < 30.0
    workers.timeout_s = 30.0
    expected = Played().run(workers)
    late = played.threads[stuck[0]]

    def let_it_write(expert: int) -> None:
        if expert == EXPERTS - 1:
            wake.set()
            late.join(30.0)

    assert torch.equal(Played(let_it_write).run(Workers()), expected)
    assert stuck[0] != EXPERTS - 1
    assert not late.is_alive() and stuck[0] not in played.released


def test_m21_a_thread_that_dies_is_an_error(workers: Workers) -> None:
    """Oracle: what ended the thread's work is raised, even if it is no ordinary exception."""

    def act(expert: int) -> None:
        raise SystemExit(expert)

    with pytest.raises(SystemExit):
        Played(act).run(workers)
    assert torch.equal(Played().run(workers), Played().run(Workers()))


def test_two_who_ask_at_once_do_not_mix(workers: Workers) -> None:
    """Oracle: each one's own result; one of them computes alone."""
    expected = Played().run(Workers())
    results: list[torch.Tensor] = []

    def ask() -> None:
        torch.set_num_threads(1)
        for _ in range(10):
            results.append(Played().run(workers))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert len(results) == 30 and all(torch.equal(result, expected) for result in results)


def test_jobs_are_done_once_each(workers: Workers) -> None:
    """Oracle: a count of each, for more jobs than any queue holds back."""
    done: list[int] = []
    released: list[int] = []
    jobs = (Job(partial(done.append, n), partial(released.append, n)) for n in range(500))
    workers.run(jobs)
    assert sorted(done) == sorted(released) == list(range(500))
