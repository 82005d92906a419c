# SPDX-License-Identifier: Apache-2.0
"""Copies records from where the host has them into slots on a device, by a kernel.

The other way is the device's copy engine, one record after another. A kernel starts once for many
records, and takes compute units while it waits for the link. `tests/device` measures both.
Importing this module needs the `gpu` extra.
"""

import torch
import triton
import triton.language as tl

WORDS_PER_PROGRAM = 1024


def copy_records(addresses: torch.Tensor, size_bytes: int) -> None:
    """addresses [m, 2] int64 on the device, each where a record lies and where it goes, multiples
    of 16; `size_bytes` of each is copied, to the next multiple of 16. A record may lie in
    page-locked memory of the host. Source and target do not overlap."""
    pairs = triton.cdiv(size_bytes, 16)  # of words
    _copy[(len(addresses), triton.cdiv(2 * pairs, WORDS_PER_PROGRAM))](
        *(addresses.contiguous(), pairs), block=WORDS_PER_PROGRAM
    )


@triton.jit
def _copy(addresses: tl.tensor, pairs: tl.tensor, block: tl.constexpr) -> None:
    record = tl.program_id(0)
    source = tl.load(addresses + 2 * record).to(tl.pointer_type(tl.int64), bitcast=True)
    target = tl.load(addresses + 2 * record + 1).to(tl.pointer_type(tl.int64), bitcast=True)
    word = tl.program_id(1) * block + tl.arange(0, block)
    inside = word < 2 * pairs
    words = tl.load(tl.multiple_of(source, 16) + word, mask=inside)
    tl.store(tl.multiple_of(target, 16) + word, words, mask=inside)
