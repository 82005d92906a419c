# SPDX-License-Identifier: Apache-2.0
"""How an engine divides its memory. Pure: a spec and a configuration in, bytes out."""

from dataclasses import dataclass
from math import prod

from .config import ResolvedConfig
from .errors import BudgetTooSmall
from .spec import ModelSpec

_FP32 = 4
_BLOCK = 64  # tokens of a stored block; one is staged while restoring, one while writing
_DEQUANTISED_BYTES = 64 << 20  # the most a pass over many rows unpacks at a time
_RESERVE_BYTES = 256 << 20  # the most, and 1/32 of the budget: memory touched ahead of its use
_UNCOUNTED_BYTES = 32 << 20  # measured: allocator slack, thread stacks, a store's dirty pages


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose. `states_bytes` is what is left for KV rows and anchors."""

    budget_bytes: int
    weights_bytes: int
    working_bytes: int
    token_bytes: int

    @property
    def states_bytes(self) -> int:
        return self.budget_bytes - self.weights_bytes - self.working_bytes


def plan_memory(
    spec: ModelSpec, config: ResolvedConfig, weights_bytes: int, budget_bytes: int
) -> MemoryPlan:
    """Divide the budget. BudgetTooSmall if not even one block of states would fit."""
    token_bytes = spec.bytes_per_token(_FP32)
    working = working_bytes(spec, config)
    needed = weights_bytes + working + _BLOCK * token_bytes
    if budget_bytes < needed:
        raise BudgetTooSmall(
            "the memory budget does not hold the model",
            value=budget_bytes,
            limit=f"at least {needed} bytes: weights {weights_bytes}, working memory {working}",
            remedy="raise ram_budget_bytes, quantise the weights or lower prefill_chunk",
        )
    return MemoryPlan(budget_bytes, weights_bytes, working, token_bytes)


def reserve_rows(spec: ModelSpec, budget_bytes: int) -> int:
    """KV rows to map ahead of their use, in whole blocks; see `state.reserve`."""
    size_bytes = min(_RESERVE_BYTES, budget_bytes // 32)
    if any(state.granularity > 1 for state in spec.states()):
        return 0  # where groups of tokens share a row, an allocation is no multiple of a token
    rows = min(spec.context_limit, size_bytes // max(1, spec.bytes_per_token(_FP32)))
    return rows // _BLOCK * _BLOCK


def working_bytes(spec: ModelSpec, config: ResolvedConfig) -> int:
    """An upper bound of what passes allocate: a chunk's activations in the widest layer, logits of
    a full batch, one dequantised matrix, blocks under way to and from disk, and what a process
    holds beyond what anyone counts."""
    widest = 0
    matrix = 0
    for layer in spec.layers:
        shapes = layer.parameter_shapes(spec.hidden_size).values()
        outputs = sum(shape[0] for shape in shapes if len(shape) == 2)
        # Of stacked experts, a row meets a few: count those as if there were eight.
        outputs += sum(8 * shape[1] for shape in shapes if len(shape) == 3)
        widest = max(widest, outputs)
        matrix = max(matrix, *(prod(shape[-2:]) for shape in shapes))
    rows = config.prefill_chunk + config.max_batch
    activations = rows * (4 * spec.hidden_size + 2 * widest) * _FP32
    logits = 3 * config.max_batch * spec.vocab_size * _FP32
    dequantised = (
        min(matrix * _FP32, _DEQUANTISED_BYTES) if config.quant or config.dtype != "float32" else 0
    )
    blocks = 4 * _BLOCK * spec.bytes_per_token(_FP32)
    # What a pass reads and what it hands over, for every sequence in it.
    overwritten = 2 * config.max_batch * sum(state.bytes_per_anchor() for state in spec.states())
    return activations + logits + dequantised + blocks + overwritten + _UNCOUNTED_BYTES
