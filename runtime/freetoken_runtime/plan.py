# SPDX-License-Identifier: Apache-2.0
"""How an engine divides its memory. Pure: a spec and a configuration in, bytes out."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from .config import ResolvedConfig
from .errors import BudgetTooSmall, InvalidConfig
from .spec import LayerSpec, ModelSpec
from .specs.moe import MoeSpec

Shape = tuple[int, ...]

_FP32 = 4
_BLOCK = 64  # tokens of a stored block; one is staged while restoring, one while writing
_DEQUANTISED_BYTES = 64 << 20  # the most a pass over many rows unpacks at a time
_RESERVE_BYTES = 256 << 20  # the most, and 1/32 of the budget: memory touched ahead of its use
_UNCOUNTED_BYTES = 40 << 20  # measured: compiled GEMMs, allocator slack, a store's dirty pages


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose. `states_bytes` is what is left for KV rows and anchors; `weights_bytes` are
    those that stay, `slots` the number of expert slots of each form."""

    budget_bytes: int
    weights_bytes: int
    working_bytes: int
    token_bytes: int
    slots: tuple[int, ...] = ()
    slots_bytes: int = 0

    @property
    def states_bytes(self) -> int:
        return self.budget_bytes - self.weights_bytes - self.working_bytes - self.slots_bytes


@dataclass(frozen=True)
class SlotDemand:
    """Expert slots of one form: bytes of one, how many experts may come into them, and with how
    few a row's experts still fit."""

    size_bytes: int
    experts: int
    least: int


def plan_memory(
    spec: ModelSpec,
    config: ResolvedConfig,
    weights_bytes: int,
    budget_bytes: int,
    demands: Sequence[SlotDemand] = (),
) -> MemoryPlan:
    """Divide the budget. Without `expert_slots`, all experts get a slot if that leaves a quarter to
    states; otherwise slots get three quarters. BudgetTooSmall if not even one block of states, and
    the experts of one row, would fit."""
    token_bytes = spec.bytes_per_token(_FP32)
    working = working_bytes(spec, config)
    left = budget_bytes - weights_bytes - working
    if config.expert_slots is None:
        slots = slots_within(demands, left * 3 // 4)
    else:
        slots = divide_slots(demands, config.expert_slots)
    slots_bytes = bytes_of(demands, slots)
    if left < slots_bytes + _BLOCK * token_bytes:
        needed = weights_bytes + working + slots_bytes + _BLOCK * token_bytes
        parts = f"weights {weights_bytes}, working memory {working}"
        raise BudgetTooSmall(
            "the memory budget does not hold the model",
            value=budget_bytes,
            limit=f"at least {needed} bytes: {parts}"
            + (f", slots for experts {slots_bytes}" if demands else ""),
            remedy="raise ram_budget_bytes, quantise the weights or lower prefill_chunk",
        )
    return MemoryPlan(budget_bytes, weights_bytes, working, token_bytes, slots, slots_bytes)


def divide_slots(demands: Sequence[SlotDemand], total: int) -> tuple[int, ...]:
    """So many slots, shared among forms by the number of their experts; no form gets more than it
    can use. InvalidConfig if a row's experts would not fit."""
    least = sum(demand.least for demand in demands)
    if demands and total < least:
        raise InvalidConfig(
            "expert_slots does not hold the experts of one row", value=total, limit=f">= {least}"
        )
    useful = sum(demand.experts - demand.least for demand in demands)
    return tuple(
        demand.least
        + min(
            demand.experts - demand.least,
            (total - least) * (demand.experts - demand.least) // max(1, useful),
        )
        for demand in demands
    )


def slots_within(demands: Sequence[SlotDemand], size_bytes: int) -> tuple[int, ...]:
    """As many slots as so many bytes hold, every form alike; at least those that it cannot do
    without."""
    least = tuple(demand.least for demand in demands)
    rest = size_bytes - bytes_of(demands, least)
    useful = sum((demand.experts - demand.least) * demand.size_bytes for demand in demands)
    if rest <= 0 or not useful:
        return least
    share = min(rest, useful)
    return tuple(
        demand.least + (demand.experts - demand.least) * share // useful for demand in demands
    )


def bytes_of(demands: Sequence[SlotDemand], slots: Sequence[int]) -> int:
    return sum(x.size_bytes * count for x, count in zip(demands, slots, strict=True))


def weights_estimate(spec: ModelSpec, config: ResolvedConfig, *, experts: bool = True) -> int:
    """Bytes of all weights in memory, known before any is read; an upper bound but for tables
    that a file holds in a wider form. `experts`: with those that are routed to."""
    total = 0
    for name, shape in spec.parameter_shapes().items():
        if not experts and ".experts." in name:
            continue
        exact = name.endswith("router") or (name == "embedding" and not spec.tied_head)
        if len(shape) != 2 or exact:
            total += _FP32 * prod(shape)
            continue
        rows, inputs = shape[0] + -shape[0] % _BLOCK, shape[1] + -shape[1] % 32
        head = name in ("head", "embedding")
        if config.quant == "int8" or (config.quant and head):
            total += shape[0] * (inputs + 2)
        elif config.quant == "int4":
            total += rows * inputs * 5 // 8  # and 4 bytes of scale and zero per 32 weights
        else:
            total += prod(shape) * (2 if config.dtype == "bfloat16" else _FP32)
    return total


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
        shapes = layer.parameter_shapes(spec.hidden_size)
        widest = max(widest, sum(shape[0] for shape in _seen_by_a_row(layer, shapes)))
        matrix = max(matrix, *map(prod, shapes.values()))
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


def _seen_by_a_row(layer: LayerSpec, shapes: Mapping[str, Shape]) -> Iterator[Shape]:
    """The matrices of a layer that one row meets: of all experts, as many as it chooses."""
    mixture = layer.feed_forward
    chosen = mixture.router.top_k if isinstance(mixture, MoeSpec) else 0
    for name, shape in shapes.items():
        expert = re.match(r"experts\.(\d+)\.", name)
        if len(shape) == 2 and (expert is None or int(expert[1]) < chosen):
            yield shape
