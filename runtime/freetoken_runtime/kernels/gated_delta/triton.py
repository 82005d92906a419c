# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in Triton, in the chunked form that `cpu` describes and as a step.

Checked in Triton's interpreter on a CPU only; nothing is claimed for its speed. Importing this
module needs the `gpu` extra, and whether kernels are interpreted (`TRITON_INTERPRET=1`) is decided
at that moment.

Two launches: `_chunk_maps` fills what does not depend on the state, all chunks at once; `_apply`
takes a strip of the state's columns through chunk after chunk. Products are in full fp32, decays
are cumulated and subtracted in fp64. Kernels take more parameters than functions should: pointers
are all they can be given.
"""

import torch
import triton
import triton.language as tl

CHUNK = 32
_SMALLEST = 16  # rows and columns of a product
_STRIP = 32  # columns of the state that one program keeps


def scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `cpu.scan`, on the device of its arguments."""
    if len(v) == 1:
        return step(q, k, v, decay, beta, state)
    return chunked(q, k, v, decay, beta, state)


def step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`scan` of one row, with its first dimension of one."""
    heads, key_dim, dim = state.shape
    out, after = torch.empty_like(v), torch.empty_like(state)
    strip = min(_STRIP, _block(dim))
    rows = (x.contiguous() for x in (q, k, v, decay, beta, state))
    _step[(triton.cdiv(dim, strip), heads)](
        *rows, out, after, heads // k.shape[1], key_dim, dim, _block(key_dim), strip
    )
    return out, after


def chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`scan` by chunks of CHUNK rows from the first row on."""
    count, key_heads, key_dim = k.shape
    heads, dim = v.shape[1:]
    chunks, repeat = triton.cdiv(count, CHUNK), heads // key_heads
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    write, mix = k.new_empty(2, chunks, heads, CHUNK, CHUNK)
    past, rest = k.new_empty(2, chunks, heads, CHUNK)
    _chunk_maps[(chunks, heads)](
        *(q, k, decay.contiguous(), beta.contiguous(), write, mix, past, rest),
        *(count, heads, repeat, key_dim, _block(key_dim), CHUNK),
    )
    out, after = torch.empty_like(v), torch.empty_like(state)
    strip = min(_STRIP, _block(dim))
    _apply[(triton.cdiv(dim, strip), heads)](
        *(q, k, v, write, mix, past, rest, state.contiguous(), out, after),
        *(count, heads, repeat, key_dim, dim, _block(key_dim), strip, CHUNK),
    )
    return out, after


def _block(size: int) -> int:
    return max(_SMALLEST, int(triton.next_power_of_2(size)))


@triton.jit
def _step(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    decay: tl.tensor,
    beta: tl.tensor,
    state: tl.tensor,
    out: tl.tensor,
    after: tl.tensor,
    repeat: tl.constexpr,
    key_dim: tl.constexpr,
    dim: tl.constexpr,
    keys: tl.constexpr,
    strip: tl.constexpr,
) -> None:
    """One value head, `strip` columns of its state."""
    head = tl.program_id(1)
    rows = tl.arange(0, keys)
    columns = tl.program_id(0) * strip + tl.arange(0, strip)
    key = (head // repeat) * key_dim + rows
    k_row = tl.load(k + key, mask=rows < key_dim, other=0.0)
    q_row = tl.load(q + key, mask=rows < key_dim, other=0.0)
    at = head * key_dim * dim + rows[:, None] * dim + columns[None, :]
    inside = (rows[:, None] < key_dim) & (columns[None, :] < dim)
    values = head * dim + columns
    kept = tl.load(state + at, mask=inside, other=0.0) * tl.exp(tl.load(decay + head))
    recalled = tl.sum(kept * k_row[:, None], 0)
    wanted = tl.load(v + values, mask=columns < dim, other=0.0)
    learnt = (wanted - recalled) * tl.load(beta + head)
    kept += k_row[:, None] * learnt[None, :]
    tl.store(out + values, tl.sum(kept * q_row[:, None], 0), mask=columns < dim)
    tl.store(after + at, kept, mask=inside)


@triton.jit
def _chunk_maps(
    q: tl.tensor,
    k: tl.tensor,
    decay: tl.tensor,
    beta: tl.tensor,
    write: tl.tensor,
    mix: tl.tensor,
    past: tl.tensor,
    rest: tl.tensor,
    count: tl.tensor,
    heads: tl.constexpr,
    repeat: tl.constexpr,
    key_dim: tl.constexpr,
    keys: tl.constexpr,
    size: tl.constexpr,
) -> None:
    """One chunk of one value head: A⁻¹ diag(beta), (Q Kᵀ) ⊙ D, exp(G), exp(G_c - G). Rows beyond
    the last are zero: they write and decay nothing."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, size)
    columns = tl.arange(0, keys)
    row = chunk * size + i
    key_heads = heads // repeat
    at = (row[:, None] * key_heads + head // repeat) * key_dim + columns[None, :]
    inside = (row[:, None] < count) & (columns[None, :] < key_dim)
    k_rows = tl.load(k + at, mask=inside, other=0.0)
    q_rows = tl.load(q + at, mask=inside, other=0.0)
    betas = tl.load(beta + row * heads + head, mask=row < count, other=0.0)
    decays = tl.load(decay + row * heads + head, mask=row < count, other=0.0).to(tl.float64)
    sums = tl.cumsum(decays, 0)
    total = tl.sum(decays, 0)
    lower = i[:, None] >= i[None, :]
    between = tl.where(lower, sums[:, None] - sums[None, :], float("-inf")).to(tl.float32)
    between = tl.exp(between)
    cross = tl.dot(k_rows, tl.trans(k_rows), input_precision="ieee")
    strict = i[:, None] > i[None, :]
    inverse = tl.where(strict, -betas[:, None] * cross * between, 0.0)
    for n in range(1, size):  # forward substitution: row n from the finished rows above it
        this = i[:, None] == n
        start = tl.sum(tl.where(this, inverse, 0.0), 0)
        inverse = tl.where(this, (start + tl.sum(start[:, None] * inverse, 0))[None, :], inverse)
    inverse += tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    block = (chunk * heads + head) * size
    square = (block + i[:, None]) * size + i[None, :]
    tl.store(write + square, inverse * betas[None, :])
    read = tl.dot(q_rows, tl.trans(k_rows), input_precision="ieee")
    tl.store(mix + square, read * between)
    tl.store(past + block + i, tl.exp(sums.to(tl.float32)))
    tl.store(rest + block + i, tl.exp((total - sums).to(tl.float32)))


@triton.jit
def _apply(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    write: tl.tensor,
    mix: tl.tensor,
    past: tl.tensor,
    rest: tl.tensor,
    state: tl.tensor,
    out: tl.tensor,
    after: tl.tensor,
    count: tl.tensor,
    heads: tl.constexpr,
    repeat: tl.constexpr,
    key_dim: tl.constexpr,
    dim: tl.constexpr,
    keys: tl.constexpr,
    strip: tl.constexpr,
    size: tl.constexpr,
) -> None:
    """One value head, `strip` columns of its state, through all chunks."""
    head = tl.program_id(1)
    i = tl.arange(0, size)
    key = tl.arange(0, keys)
    column = tl.program_id(0) * strip + tl.arange(0, strip)
    cell = head * key_dim * dim + key[:, None] * dim + column[None, :]
    inside = (key[:, None] < key_dim) & (column[None, :] < dim)
    kept = tl.load(state + cell, mask=inside, other=0.0)
    key_heads = heads // repeat
    for chunk in range(0, tl.cdiv(count, size)):
        row = chunk * size + i
        at = (row[:, None] * key_heads + head // repeat) * key_dim + key[None, :]
        known = (row[:, None] < count) & (key[None, :] < key_dim)
        k_rows = tl.load(k + at, mask=known, other=0.0)
        q_rows = tl.load(q + at, mask=known, other=0.0)
        values = (row[:, None] * heads + head) * dim + column[None, :]
        wide = (row[:, None] < count) & (column[None, :] < dim)
        v_rows = tl.load(v + values, mask=wide, other=0.0)
        block = (chunk * heads + head) * size
        square = (block + i[:, None]) * size + i[None, :]
        before = tl.load(past + block + i)[:, None]
        recalled = tl.dot(k_rows, kept, input_precision="ieee")
        written = tl.dot(
            tl.load(write + square), v_rows - before * recalled, input_precision="ieee"
        )
        read = before * tl.dot(q_rows, kept, input_precision="ieee")
        read += tl.dot(tl.load(mix + square), written, input_precision="ieee")
        tl.store(out + values, read, mask=wide)
        kept *= tl.load(past + block + size - 1)
        remaining = tl.load(rest + block + i)[:, None]
        kept += tl.dot(tl.trans(k_rows), remaining * written, input_precision="ieee")
    tl.store(after + cell, kept, mask=inside)
