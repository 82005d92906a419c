# SPDX-License-Identifier: Apache-2.0
"""Who takes turns in a measurement, each in a process of its own.

In one process they would slow each other: every engine and every caller of torch keeps a team of
compute threads, and teams that together exceed the cores no longer wait actively.
"""

import contextlib
import multiprocessing
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from ..config import EngineConfig, Quant
from ..engine import Engine
from ..errors import EngineError
from ..weights import open_source
from .timing import Turn

BASELINE = "transformers"

Take = Callable[[int], Turn]  # a turn, given the round's number
Builder = Callable[[], AbstractContextManager[Take]]  # picklable: it is called in the new process


class ContestantFailed(EngineError):
    """A contestant's process reported an error, or ended; the value says which."""

    code = "contestant_failed"


class Prompts:
    """Seeded random ids, another list at each call: nothing of it can be reused.

    The first 1,000 ids are left out: control tokens live there or at the very end.
    """

    def __init__(self, path: Path, seed: int = 0) -> None:
        vocab_size = open_source(path).spec.vocab_size
        self._random = random.Random(seed)
        self._low = min(1000, vocab_size // 4)
        self._high = vocab_size - self._low

    def draw(self, count: int) -> list[int]:
        return [self._random.randrange(self._low, self._high) for _ in range(count)]


def name_of(quant: Quant | None) -> str:
    """How figures call a weight form."""
    return quant or "fp32"


def load_engine(path: Path, quant: Quant | None, threads: int | None) -> Engine:
    """An engine without a store."""
    return Engine.load(path, EngineConfig(dtype="float32", quant=quant, threads=threads))


@contextmanager
def in_processes(builders: Mapping[str, Builder]) -> Iterator[dict[str, Take]]:
    """The contestants, ready to take turns; their processes end with the block."""
    with contextlib.ExitStack() as stack:
        processes = {
            name: stack.enter_context(contextlib.closing(_Process(builder)))
            for name, builder in builders.items()
        }
        for process in processes.values():
            process.receive()  # it is ready
        yield {name: process.take for name, process in processes.items()}


class _Process:
    """One contestant, seen from here."""

    def __init__(self, builder: Builder) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, builder), daemon=True)
        self._process.start()
        theirs.close()

    def take(self, number: int) -> Turn:
        self._pipe.send(number)
        turn = self.receive()
        assert turn is not None
        return turn

    def receive(self) -> Turn | None:
        """The answer. ContestantFailed."""
        try:
            answer = self._pipe.recv()
        except EOFError:
            self._process.join()
            answer = f"exit status {self._process.exitcode}"
        if isinstance(answer, str):
            raise ContestantFailed("a contestant failed", value=answer)
        assert answer is None or isinstance(answer, Turn)
        return answer

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10)
        self._process.kill()


def _serve(pipe: Connection, builder: Builder) -> None:
    """The new process: build, say so, take turns until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's business; its end ends us
    try:
        with builder() as take:
            pipe.send(None)
            while True:
                try:
                    number = pipe.recv()
                except EOFError:
                    return
                pipe.send(take(number))
    except Exception as error:  # noqa: BLE001 - the process's edge: it is raised over there
        pipe.send(f"{type(error).__name__}: {error}")
