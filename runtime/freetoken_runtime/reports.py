# SPDX-License-Identifier: Apache-2.0
"""What the engine says about its work: prices before, counts after."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled"]
Offload = Literal["none", "ram", "disk"]


@dataclass(frozen=True)
class Token:
    """One sampled id. `logprob`: natural log under the unmodified distribution; `top`: the most
    likely (id, logprob) pairs, best first, when `logprobs` were asked for."""

    id: int  # of the vocabulary
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class PathMiss:
    """Why a plan reuses no more. `position`: the first token that is not known, or the last one of
    a path that is; `tokens`: how many are forwarded because of it. `gap`: how many of these an
    anchor at `position` would have saved; `dropped`: the deepest anchor among them that was there
    and gave way to the memory budget. `cause` is one of

    different_ids       a known path goes on with other ids
    never_computed      nothing known goes on from here
    evicted             it was known and gave way to other states
    damaged             it was stored and failed its checksum
    no_anchor           all rows are known, the state at their end is not
    fingerprint:<part>  the store holds it for a model that differs in <part>
    """

    position: int
    cause: str
    tokens: int
    gap: int = 0
    dropped: int | None = None


@dataclass(frozen=True)
class ReusePlan:
    """What forwarding a path would cost. `reused_tokens + prefill_tokens == input_tokens`."""

    input_tokens: int
    reused_tokens: int
    prefill_tokens: int
    source: Literal["ram", "disk", "none"]  # where the reused state lies
    anchor: int | None  # position of the state that is restored; None when nothing is reused
    miss: PathMiss | None  # why no more is reused; None: nothing is forwarded
    predicted_s: float  # seconds of the forward pass, by what was measured


@dataclass(frozen=True)
class Usage:
    """What happened. `prefill_tokens` is counted by the runner from rows it really forwarded.
    `input_tokens == reused_tokens + prefill_tokens + unforwarded_tokens`."""

    input_tokens: int
    reused_tokens: int
    prefill_tokens: int
    output_tokens: int = 0  # sampled
    ttft_s: float = 0.0  # seconds from the request to the first token
    decode_s: float = 0.0  # seconds from the first token to the last
    changed: str | None = None  # what ran between the plan and the forward pass, if it mattered
    miss: PathMiss | None = None  # why no more was reused, where the request itself found out

    @property
    def unforwarded_tokens(self) -> int:
        """Rows of the path that a cancel or an error left out; 0 once a token was sampled."""
        return self.input_tokens - self.reused_tokens - self.prefill_tokens


@dataclass(frozen=True)
class Finding:
    """A stored state that is not what its ids give: a block of rows [start, position) or the anchor
    at `position`. `cause` is one of

    differs     `buffer`, of `layer` if it is one layer's, differs from a cold pass by `difference`
                of its range, over the `limit`; of all that differ, the worst
    damaged     it failed its checksum
    malformed   it has other buffers than a state of this model
    """

    kind: Literal["block", "anchor"]  # which kind of state
    start: int  # of an anchor: its position
    position: int
    cause: str
    buffer: str | None = None
    layer: int | None = None
    difference: float | None = None
    limit: float | None = None


@dataclass(frozen=True)
class Verification:
    """What a cold pass says of the stored states of a path. `compared`: the tensors themselves, or,
    where weights are not fp32, the logits of the ids that follow. `blocks`, `anchors`: how many
    were; `largest`: the largest difference among those that are right, as a part of its limit;
    `removed_records`: the wrong ones with what hung on them. `sure_tokens`: behind them an expert
    was chosen by a hair, so that states which differ were judged by their logits. Not `complete`:
    it was cancelled."""

    input_tokens: int  # of the path
    compared: Literal["states", "logits"]
    blocks: int = 0
    anchors: int = 0
    findings: tuple[Finding, ...] = ()  # what is wrong
    largest: float = 0.0
    forwarded_tokens: int = 0  # what the cold pass took
    sure_tokens: int = 0
    removed_records: int = 0
    complete: bool = True


@dataclass(frozen=True)
class ExpertStats:
    """Experts that do not stay in memory, counted since load. `level`: the lowest place they come
    from. A layer's experts that a pass wants are `hits` if they had a slot, or were on their way
    to one, and `misses` else; `fetched`: how many were brought into slots, those fetched ahead
    included; `read_bytes`: from the disk; `waves`: rounds that layers needed to bring the experts
    of a pass through their slots; `evictions`: experts that gave way; `in_place`: how many were
    computed from where they lie, without a slot; `waited_s`: seconds in which nothing could be
    computed because experts were on their way. `prefetched`: guesses at what the next layer wants
    that were begun to fetch, of which `prefetched_used` were right and saved `prefetch_saved_s` of
    waiting at most. `ways`: what passes over one row do now, "split" (missing experts are computed
    where they lie as well) and "prefetch"; `link_bytes_per_s`, `compute_bytes_per_s`: the measured
    rates of fetching and of computing in place, None where there is no choice."""

    level: Offload
    slots: int = 0
    slot_bytes: int = 0
    hits: int = 0
    misses: int = 0
    fetched: int = 0
    read_bytes: int = 0
    waves: int = 0
    evictions: int = 0
    in_place: int = 0
    waited_s: float = 0.0
    prefetched: int = 0
    prefetched_used: int = 0
    prefetch_saved_s: float = 0.0
    ways: tuple[str, ...] = ()
    link_bytes_per_s: float | None = None
    compute_bytes_per_s: float | None = None

    @property
    def prefetch_precision(self) -> float | None:
        """The part of the guesses that were right; None before the first."""
        return self.prefetched_used / self.prefetched if self.prefetched else None


@dataclass(frozen=True)
class Moves:
    """What has gone to and fro between slots of experts and states since load, changes of the
    budget aside; the last of it in words."""

    count: int = 0
    size_bytes: int = 0
    last: str | None = None


@dataclass(frozen=True)
class EngineStats:
    """A picture of the engine. Bytes are counted per allocation, once."""

    weights_bytes: int  # slots of experts included
    state_bytes: int  # KV allocations and anchors' rows in RAM
    working_bytes: int  # set aside for activations
    ram_budget_bytes: int  # what all of it may take
    resident_paths: int  # paths whose states are in RAM
    running: int  # requests in the batch
    waiting: int  # requests in the queue
    forward_rows: int  # rows forwarded since load, by every request
    forward_s: float  # seconds the owner thread spent in forward passes and logits
    reused_rows: int  # rows that were not forwarded, since load
    restored_bytes: int  # read back from the store
    persisted_bytes: int  # written to the store
    persist_backlog_bytes: int  # captured, not yet written
    evicted_paths: int  # that gave way, since load
    compute_threads: int  # of the forward passes
    store_error: str | None = None  # the last write error that no flush has reported yet
    experts: ExpertStats = ExpertStats("none")  # of a mixture
    state_limit_bytes: int = 0  # what KV and anchors may take as memory is divided now
    moves: Moves = Moves()  # memory that moved between experts and states
