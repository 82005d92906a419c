# SPDX-License-Identifier: Apache-2.0
"""Memory that is kept, against a count of what is held."""

import gc
import random
import threading

import torch

from freetoken_runtime.kernels.working_memory import SMALLEST_BYTES, WorkingMemory

ROWS = SMALLEST_BYTES // 1024  # of 256 numbers in fp32: the smallest matrix that is kept


def test_what_is_let_go_is_handed_out_again() -> None:
    memory = WorkingMemory()
    first = memory.empty(ROWS, 256)
    address = first.data_ptr()
    assert memory.free_bytes == 0
    del first
    assert memory.free_bytes >= SMALLEST_BYTES
    assert memory.empty(256, ROWS, dtype=torch.int32).data_ptr() == address


def test_a_view_holds_what_it_shows() -> None:
    memory = WorkingMemory()
    whole = memory.empty(ROWS, 256)
    row = whole.fill_(3.0)[-1].view(16, 16)
    del whole
    memory.empty(ROWS, 256).fill_(7.0)
    assert torch.equal(row, torch.full((16, 16), 3.0))


def test_small_ones_come_from_torch() -> None:
    memory = WorkingMemory()
    memory.empty(ROWS - 1, 256)
    assert memory.free_bytes == 0


def test_a_small_matrix_does_not_take_a_large_block() -> None:
    memory = WorkingMemory()
    memory.empty(64 * ROWS, 256)
    before = memory.free_bytes
    kept = memory.empty(ROWS, 256)
    assert memory.free_bytes == before
    del kept


def test_no_more_is_kept_than_the_limit() -> None:
    memory = WorkingMemory(kept_bytes=16 << 20)
    held = [memory.empty(ROWS << power % 4, 256) for power in range(12)]
    held.clear()
    assert 8 << 20 <= memory.free_bytes <= 16 << 20
    memory.release()
    assert memory.free_bytes == 0


def test_threads_never_share_what_both_hold() -> None:
    """Oracle: each matrix still holds the number that its thread filled it with."""
    memory, wrong = WorkingMemory(), []

    def work(seed: int) -> None:
        chance, held = random.Random(seed), list[tuple[torch.Tensor, int]]()
        for step in range(150):
            number = 1000 * seed + step
            matrix = memory.empty(ROWS * chance.randint(1, 4), 256, dtype=torch.int32)
            held.append((matrix.fill_(number), number))
            if len(held) > chance.randrange(6):
                old, expected = held.pop(chance.randrange(len(held)))
                if not bool((old == expected).all()):
                    wrong.append(expected)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    gc.collect()
    assert memory.free_bytes > 0
