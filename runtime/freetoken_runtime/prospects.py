# SPDX-License-Identifier: Apache-2.0
"""What a machine of known speeds allows for a model, before any weight is read.

A token reads the dense weights and L·k experts of S bytes once, and what has no slot from the disk.
With nothing overlapped that takes

    (dense + L·k·S) / B_ram  +  L·k·S·(1 - hit) / B_disk                     seconds,

B_ram being what the one-row kernel reads of weights that lie in no cache. Overlap makes it faster,
everything else (attention, sampling, Python) slower; it is a measure, not a promise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from freetoken_storage.weights import RECORD_ALIGNMENT, aligned

from .config import ResolvedConfig
from .errors import BudgetTooSmall
from .experts.records import ExpertForm
from .experts.supply import FETCH_THREADS
from .plan import MemoryPlan, SlotDemand, plan_memory, weights_estimate
from .reports import Offload
from .spec import ModelSpec
from .specs.mlp import MlpSpec
from .specs.moe import ExpertSpec, MoeSpec, RouterSpec
from .weights import INT4_GROUP


@dataclass(frozen=True)
class Speeds:
    """Bytes per second of the one-row kernel on cold weights and of reads from the disk, and
    floating-point operations per second with many rows. `disk` is None where it was not measured.
    """

    kernel: float
    disk: float | None
    many_rows: float


@dataclass(frozen=True)
class Needs:
    """Bytes: of weights that every token reads, of the experts that one token takes in all layers
    together, and of all experts. `flops`: of one row of a long prompt."""

    dense_bytes: int
    token_experts_bytes: int
    experts_bytes: int
    experts: int
    flops: int

    def token_s(self, speeds: Speeds, hit_rate: float) -> float:
        """What a token takes, as above; infinite where experts would have to be read from a disk
        of unknown speed."""
        missing = self.token_experts_bytes * (1.0 - hit_rate)
        memory_s = (self.dense_bytes + self.token_experts_bytes) / speeds.kernel
        if missing <= 0.0:
            return memory_s
        return memory_s + (missing / speeds.disk if speeds.disk else float("inf"))


@dataclass(frozen=True)
class Pace:
    """Decoding at a hit rate. `waiting`: the part of a token's time that the disk takes."""

    hit_rate: float
    tokens_per_s: float
    waiting: float


@dataclass(frozen=True)
class Prospect:
    """What would happen. `plan` is None if the budget does not hold the model, `problem` says why.
    `even_hit_rate`: of slots, if all experts were taken alike, so about the least. `prompt_rate`:
    tokens per second of a long prompt, whichever of computing and reading takes longer."""

    level: Offload
    quant: str | None
    plan: MemoryPlan | None
    problem: str | None
    needs: Needs
    even_hit_rate: float
    paces: tuple[Pace, ...]
    prompt_rate: float

    @property
    def even_pace(self) -> Pace:
        return next(pace for pace in self.paces if pace.hit_rate == self.even_hit_rate)

    @property
    def slots(self) -> int:
        return sum(self.plan.slots) if self.plan is not None else 0


def probed_expert(spec: ModelSpec) -> tuple[ExpertSpec, int]:
    """What the kernel is measured with, and the width of its rows: a routed expert of the model,
    or the feed-forward of one that has none."""
    parts = [layer.feed_forward for layer in spec.layers if layer.feed_forward is not None]
    for part in parts:
        if isinstance(part, MoeSpec):
            return part.expert, _width(part, spec)
    inner = next((x.intermediate_size for x in parts if isinstance(x, MlpSpec)), spec.hidden_size)
    return ExpertSpec(inner), spec.hidden_size


def _width(part: MoeSpec, spec: ModelSpec) -> int:
    return spec.hidden_size if part.latent is None else part.latent.size


def form_of(expert: ExpertSpec, width: int, config: ResolvedConfig) -> ExpertForm:
    """As an engine of this configuration would hold it."""
    dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
    return ExpertForm.of(expert, width, config.quant, dtype, INT4_GROUP)


def needs_of(spec: ModelSpec, config: ResolvedConfig) -> Needs:
    flops = 0
    for layer in spec.layers:
        for name, shape in layer.parameter_shapes(spec.hidden_size).items():
            if len(shape) == 2 and not name.startswith("experts."):
                flops += 2 * prod(shape)
    token_experts = experts_bytes = experts = 0
    for router, form in _mixtures(spec, config):
        token_experts += router.top_k * form.layout.size_bytes
        experts_bytes += router.num_experts * form.layout.size_bytes
        experts += router.num_experts
        shapes = [shape for _, shape in form.spec.parameter_shapes(form.width)]
        flops += router.top_k * sum(2 * prod(shape) for shape in shapes if len(shape) == 2)
    dense = weights_estimate(spec, config, experts=False)
    if not spec.tied_head:
        dense -= 4 * spec.vocab_size * spec.hidden_size  # a table of which a token reads one row
    return Needs(dense, token_experts, experts_bytes, experts, flops)


def demands_of(spec: ModelSpec, config: ResolvedConfig) -> tuple[SlotDemand, ...]:
    """The pools of slots that an engine would have."""
    pools: dict[ExpertForm, tuple[int, int]] = {}
    for router, form in _mixtures(spec, config):
        experts, least = pools.get(form, (0, 0))
        pools[form] = (experts + router.num_experts, max(least, router.top_k))
    return tuple(
        SlotDemand(aligned(form.layout.size_bytes, RECORD_ALIGNMENT), experts, least)
        for form, (experts, least) in pools.items()
    )


def _mixtures(spec: ModelSpec, config: ResolvedConfig) -> Iterator[tuple[RouterSpec, ExpertForm]]:
    """Of each layer that has experts."""
    for layer in spec.layers:
        part = layer.feed_forward
        if isinstance(part, MoeSpec):
            yield part.router, form_of(part.expert, _width(part, spec), config)


def prospect(
    spec: ModelSpec,
    config: ResolvedConfig,
    level: Offload,
    speeds: Speeds,
    hit_rates: Sequence[float] = (),
) -> Prospect:
    """`config.quant`: what the weights are held in; `level`: where experts without a slot lie.
    `hit_rates`: for which a pace is told, besides the even one. Pure."""
    needs = needs_of(spec, config)
    offloaded = level == "disk" and needs.experts > 0
    weights = weights_estimate(spec, config, experts=not offloaded)
    demands: tuple[SlotDemand, ...] = ()
    if offloaded:
        demands = demands_of(spec, config)
        weights += FETCH_THREADS * _scratch_bytes(form_of(*probed_expert(spec), config))
    try:
        plan = plan_memory(spec, config, weights, config.ram_budget_bytes, demands)
    except BudgetTooSmall as error:
        return Prospect(level, config.quant, None, str(error), needs, 0.0, (), 0.0)
    even = 1.0
    if offloaded:
        even = min(1.0, sum(plan.slots) / needs.experts)
    rates = sorted({even, *(rate for rate in hit_rates if offloaded), 1.0})
    paces = tuple(_pace(needs, speeds, rate) for rate in rates)
    prompt_rate = _prompt_rate(needs, speeds, even, config.prefill_chunk)
    return Prospect(level, config.quant, plan, None, needs, even, paces, prompt_rate)


def _scratch_bytes(form: ExpertForm) -> int:
    """What a thread that fetches works in: an expert as it is stored, in fp32 at most, and what is
    made of it."""
    shapes = form.spec.parameter_shapes(form.width)
    return form.largest_bytes + 4 * sum(prod(shape) for _, shape in shapes)


def in_int4(spec: ModelSpec, config: ResolvedConfig, speeds: Speeds) -> Prospect:
    """The same model converted to int4. `speeds`: with an int4 kernel."""
    config = replace(config, quant="int4")
    whole = prospect(spec, config, "none", speeds)
    return prospect(spec, config, "disk", speeds) if whole.plan is None else whole


def advice(found: Prospect, converted: bool, int4: Prospect) -> str:
    """One line: what would help most. `converted`: whether the weights are in our own format;
    `int4`: what the same model would do in that."""
    smaller = found.quant != "int4" and int4.plan is not None
    if found.plan is None:
        if smaller:
            return f"it does not fit as it is; converted with --quant int4: {_outlook(int4)}"
        return "it does not fit: give it more memory, or take a smaller model"
    if found.quant is None and smaller:
        return f"converted with --quant int4: {_outlook(int4)}, instead of {_outlook(found)}"
    if found.level == "none" or not found.needs.experts:
        return "all of it fits in memory: nothing is fetched"
    if not converted:
        return "convert it: an expert is then one record in the form that computes, with a checksum"
    if found.even_pace.waiting > 0.5:
        missing = found.needs.experts_bytes - found.plan.slots_bytes
        return f"the disk sets the pace: {missing / (1 << 30):.1f} GiB more would hold all experts"
    return "memory sets the pace, not the disk"


def _outlook(found: Prospect) -> str:
    assert found.plan is not None
    pace = f"{found.even_pace.tokens_per_s:.1f} tokens/s"
    if found.level == "none" or not found.needs.experts:
        return f"all in memory, {pace}"
    return f"{found.slots} of {found.needs.experts} experts in memory, {pace} or more"


def _pace(needs: Needs, speeds: Speeds, hit_rate: float) -> Pace:
    seconds = needs.token_s(speeds, hit_rate)
    waiting = 1.0 - needs.token_s(speeds, 1.0) / seconds
    return Pace(hit_rate, 1.0 / seconds, waiting)


def _prompt_rate(needs: Needs, speeds: Speeds, even: float, chunk: int) -> float:
    """While a layer computes, the next one's missing experts arrive; a chunk is taken to want all
    of them."""
    compute_s = chunk * needs.flops / speeds.many_rows
    missing = needs.experts_bytes * (1.0 - even)
    read_s = missing / speeds.disk if missing > 0.0 and speeds.disk else 0.0
    return chunk / max(compute_s, read_s)
