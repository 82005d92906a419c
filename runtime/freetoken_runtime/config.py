# SPDX-License-Identifier: Apache-2.0
"""What was asked of the engine, checked at once; and the machine it was asked on.

The environment is read here and nowhere else, by `read_host`. `resolve` is pure: the same
question on the same machine gives the same answer.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .errors import InvalidConfig
from .reports import Offload
from .spec import ModelSpec
from .specs.moe import MoeSpec

DType = Literal["auto", "float32", "bfloat16"]
Quant = Literal["int8", "int4"]
Prefill = Literal["exact", "bfloat16", "int16", "int8"]

_PREFILLS: Mapping[Quant | None, tuple[Prefill, ...]] = {
    None: ("exact",),
    "int8": ("exact", "int16", "int8"),
    "int4": ("exact", "bfloat16"),
}
CHUNK, SPARSE_CHUNK = 512, 1024
SPARSE = 8  # a mixture is, from so many experts on for each that a row takes
MAX_THREADS = 256
MAX_CHUNK = 8192
MAX_BATCH = 256
MAX_EXPERT_SLOTS = 1 << 20


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine. None means: chosen for this machine. InvalidConfig, naming field,
    value and limit, for anything else.

    dtype             of weights that are not quantised: "float32" or "bfloat16"; "auto" is float32
    quant             None, "int8" (per channel) or "int4" (groups) for linear layers
    threads           compute threads
    ram_budget_bytes  weights, states and working memory together
    prefill           how passes over many rows round activations between integer weights: "exact"
                      keeps fp32; faster on CPUs with instructions for it, lossy, and without a
                      stored state in common with others are "int16" and "int8" for quant="int8",
                      "bfloat16" for quant="int4"
    prefill_chunk     rows of one prompt that are forwarded in one pass; None is 512, and 1,024 for
                      a mixture whose rows take an eighth of its experts or fewer
    max_batch         sequences that decode in one pass
    anchor_interval   tokens between the interior anchors of layers that cannot be sliced
    offload           where experts lie that have no slot: "ram" holds them in the dtype of the
                      file where that is smaller than what computes, "disk" fetches them when they
                      are needed, "none" keeps all as they compute; None is "none" if that fits
                      the budget, else "disk"
    expert_slots      how many experts stay in memory in the form that computes; None is what the
                      budget leaves
    hash_cache        a file that remembers the content hashes of weight files; without one they
                      are hashed at each load
    """

    dtype: DType = "auto"
    quant: Quant | None = None
    threads: int | None = None
    ram_budget_bytes: int | None = None
    prefill: Prefill = "exact"
    prefill_chunk: int | None = None
    max_batch: int = 8
    anchor_interval: int = 1024
    hash_cache: Path | None = None
    offload: Offload | None = None
    expert_slots: int | None = None

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, ("auto", "float32", "bfloat16"))
        _one_of("quant", self.quant, (None, "int8", "int4"))
        _one_of("prefill", self.prefill, _PREFILLS[self.quant])
        if self.threads is not None:
            _within("threads", self.threads, 1, MAX_THREADS)
        if self.ram_budget_bytes is not None:
            _within("ram_budget_bytes", self.ram_budget_bytes, 1, 1 << 50)
        if self.prefill_chunk is not None:
            _within("prefill_chunk", self.prefill_chunk, 1, MAX_CHUNK)
        _within("max_batch", self.max_batch, 1, MAX_BATCH)
        _within("anchor_interval", self.anchor_interval, 1, 1 << 30)
        _one_of("offload", self.offload, (None, "none", "ram", "disk"))
        if self.expert_slots is not None:
            _within("expert_slots", self.expert_slots, 1, MAX_EXPERT_SLOTS)
        if not isinstance(self.hash_cache, Path | None):
            raise InvalidConfig("hash_cache is no path", value=self.hash_cache, limit="a Path")


@dataclass(frozen=True)
class Host:
    """What the machine offers this process."""

    cores: int
    memory_bytes: int
    threads: int | None  # OMP_NUM_THREADS, where it is set


@dataclass(frozen=True)
class ResolvedConfig:
    """An EngineConfig without open questions."""

    dtype: Literal["float32", "bfloat16"]
    quant: Quant | None
    threads: int
    ram_budget_bytes: int
    prefill: Prefill
    prefill_chunk: int
    max_batch: int
    anchor_interval: int
    hash_cache: Path | None
    offload: Offload | None  # None: by what fits, which only the weights can tell
    expert_slots: int | None

    def fingerprint_parts(self) -> dict[str, str]:
        """What of it decides a state. The exact way has no name: it is everybody's."""
        return {} if self.prefill == "exact" else {"prefill": self.prefill}

    def notes(self) -> tuple[str, ...]:
        """What deserves to be known, one sentence each."""
        if self.prefill == "exact":
            return ()
        return (f"prefill is lossy: activations between integer weights are {self.prefill}",)


def resolve(config: EngineConfig, host: Host, spec: ModelSpec | None = None) -> ResolvedConfig:
    """Answer what the config left open: float32 (the fastest prefill on CPUs without matrix units,
    and exact), the threads of OMP_NUM_THREADS or one per core, three quarters of the memory, and
    the chunk that suits the model, if there is one."""
    return ResolvedConfig(
        dtype="float32" if config.dtype == "auto" else config.dtype,
        quant=config.quant,
        threads=config.threads or host.threads or host.cores,
        ram_budget_bytes=config.ram_budget_bytes or host.memory_bytes * 3 // 4,
        prefill=config.prefill,
        prefill_chunk=config.prefill_chunk or usual_chunk(spec),
        max_batch=config.max_batch,
        anchor_interval=config.anchor_interval,
        hash_cache=config.hash_cache,
        offload=config.offload,
        expert_slots=config.expert_slots,
    )


def usual_chunk(spec: ModelSpec | None) -> int:
    """Rows of one pass (docs/decisions/0089-chunks-of-512.md)."""
    mixtures = [] if spec is None else [layer.feed_forward for layer in spec.layers]
    routers = [mixture.router for mixture in mixtures if isinstance(mixture, MoeSpec)]
    sparse = any(router.num_experts >= SPARSE * router.top_k for router in routers)
    return SPARSE_CHUNK if sparse else CHUNK


def read_host(environment: Mapping[str, str] | None = None) -> Host:
    """Look at the machine: cores this process may use, memory within its control group."""
    environment = os.environ if environment is None else environment
    threads = environment.get("OMP_NUM_THREADS", "").split(",")[0]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file():
        text = limit.read_text().strip()
        memory = min(memory, int(text)) if text.isdigit() else memory
    return Host(
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=memory,
        threads=int(threads) if threads.isdigit() and int(threads) > 0 else None,
    )


def _one_of(field: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise InvalidConfig(f"unknown {field}", value=value, limit=f"one of {list(allowed)}")


def _within(field: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidConfig(
            f"{field} is out of range", value=value, limit=f"an integer from {low} to {high}"
        )
