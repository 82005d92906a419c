# SPDX-License-Identifier: Apache-2.0
"""One request on its way through the engine. The owner thread changes it, nobody else."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from .generation import Handover
from .reports import PathMiss, Usage
from .sampler import Sampler, SamplingParams
from .state.anchors import RECENT_ROWS, Rank
from .state.buffers import Fixed
from .state.digest import Ids
from .state.prefix import Resident


@dataclass(frozen=True)
class Request:
    """What was asked. `sampling` None: bring the state up to date and stop there. `cold`: reuse
    nothing and keep nothing. `anchors`: positions to make anchors of, and why. `anchor_before`: ids
    that get one so many rows before themselves when they are sampled."""

    ids: Ids
    sampling: SamplingParams | None
    anchors: Mapping[int, Rank] = field(default_factory=dict)
    anchor_after: frozenset[int] = frozenset()
    anchor_before: Mapping[int, int] = field(default_factory=dict)
    on_progress: Callable[[int, int], None] | None = None
    cold: bool = False
    want_logits: bool = False


@dataclass(frozen=True, eq=False)
class Moment:
    """A position that decoding has just passed: its hidden row [H] and overwritten buffers."""

    position: int
    row: torch.Tensor
    fixed: Fixed


@dataclass(eq=False)
class Task:
    """A request with its state. `hidden` is the row of the sequence's last position, [1, H]; `rows`
    are those that tokens are to be sampled from, [n, H], the last one the same."""

    request: Request
    stream: Handover
    submitted_s: float = field(default_factory=time.perf_counter)
    resident: Resident | None = None
    sampler: Sampler | None = None
    hidden: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    reused: int = 0
    prefilled: int = 0
    output: list[int] = field(default_factory=list)
    changed: str | None = None
    miss: PathMiss | None = None
    recent: deque[Moment] = field(default_factory=lambda: deque(maxlen=RECENT_ROWS))
    first_token_s: float | None = None
    last_token_s: float = 0.0

    @property
    def missing(self) -> int:
        """Rows of the prompt that are not there yet."""
        return len(self.request.ids) - self.reused - self.prefilled

    @property
    def running(self) -> Resident:
        assert self.resident is not None, "the task was not started"
        return self.resident

    def usage(self) -> Usage:
        first = self.first_token_s
        return Usage(
            input_tokens=len(self.request.ids),
            reused_tokens=self.reused,
            prefill_tokens=self.prefilled,
            output_tokens=len(self.output),
            ttft_s=0.0 if first is None else first - self.submitted_s,
            decode_s=0.0 if first is None else self.last_token_s - first,
            changed=self.changed,
            miss=self.miss,
        )

    def count(self, token_id: int) -> None:
        """One more sampled id."""
        self.last_token_s = time.perf_counter()
        if self.first_token_s is None:
            self.first_token_s = self.last_token_s
        self.output.append(token_id)
