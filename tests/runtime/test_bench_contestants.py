# SPDX-License-Identifier: Apache-2.0
"""Contestants in processes of their own. Oracles: process ids, and errors made on purpose."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from freetoken_runtime.bench.contestants import ContestantFailed, Take, in_processes
from freetoken_runtime.bench.timing import Turn


@contextmanager
def honest() -> Iterator[Take]:
    """Its turn says where it was taken."""
    yield lambda number: Turn(1.0, os.getpid() if number == 0 else number)


@contextmanager
def failing() -> Iterator[Take]:
    def take(number: int) -> Turn:
        raise ValueError(f"round {number}")

    yield take


@contextmanager
def dying() -> Iterator[Take]:
    def take(number: int) -> Turn:
        os._exit(7)

    yield take


@contextmanager
def unready() -> Iterator[Take]:
    raise OSError("no weights")
    yield


def test_each_contestant_has_a_process() -> None:
    """Two contestants and this test are three processes, and they stay the same ones."""
    with in_processes({"a": honest, "b": honest}) as takes:
        places = {name: take(0).amount for name, take in takes.items()}
        assert len({*places.values(), os.getpid()}) == 3
        assert takes["a"](5) == Turn(1.0, 5)
        assert takes["a"](0).amount == places["a"]
    for place in places.values():
        with pytest.raises(ProcessLookupError):
            os.kill(int(place), 0)


@pytest.mark.parametrize(
    ("builder", "says"), [(failing, "ValueError: round 3"), (dying, "exit status 7")]
)
def test_a_failing_turn_is_an_error_here(builder: Take, says: str) -> None:
    """What went wrong over there is said, and the others' processes end, too."""
    with pytest.raises(ContestantFailed, match=says), in_processes({"a": builder}) as takes:  # type: ignore[dict-item]
        takes["a"](3)


def test_a_contestant_that_cannot_be_built_is_an_error() -> None:
    """Before the first turn."""
    with pytest.raises(ContestantFailed, match="no weights"), in_processes({"a": unready}):
        pytest.fail("it was not ready")
