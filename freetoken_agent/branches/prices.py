# SPDX-License-Identifier: Apache-2.0
"""Plans and usages in terms of segments: what is reused, what is forwarded, and why not less.

The model speaks of positions. Which segment holds one, and what the session had there before, is
found here; see `Miss`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from ..model import ContextOverflow, Model, PathMiss, PathPlan, PathUsage
from ..segments import Miss, MissChange, MissPart, ReusePlan, Usage
from .earlier import EarlierPaths
from .path import Path
from .views import segments

OTHER_IDS = "different_ids"
MAX_COMPARED = 32  # earlier paths that are tried for what stood in a place: each costs a plan


@dataclass(frozen=True)
class Pricing:
    """A path that `model` is to forward: its `ids`, perhaps with an opener behind them."""

    model: Model
    path: Path
    ids: tuple[int, ...]
    earlier: EarlierPaths

    def plan(self) -> ReusePlan:
        """What it would cost."""
        return self.plans()[0]

    def plans(self) -> tuple[ReusePlan, PathPlan | None]:
        """The same, with the plan as the model made it; None where it made none."""
        if not self.ids:
            return _plan(PathPlan(0, 0, 0, "none", None, None, 0.0), None), None
        try:
            made = self.model.plan(self.ids)
        except ContextOverflow:
            limit, total = self.model.context_limit, len(self.ids)
            overflow = PathPlan(total, 0, total, "none", None, None, math.inf)
            beyond = PathMiss(limit, "context_overflow", total - limit)
            return _plan(overflow, self._explained(beyond, None)), None
        miss = made.miss
        return _plan(made, None if miss is None else self._explained(miss, made.anchor)), made

    def paid(self, usage: PathUsage, announced: ReusePlan, *, thinking_tokens: int = 0) -> Usage:
        """The model's counts, with the reason for what was forwarded: that of the announced plan,
        unless something ran in between."""
        miss = self._paid_miss(usage, announced)
        if not usage.unforwarded_tokens:
            self.earlier.branch.note_computed(self.path)
        return Usage(
            input_tokens=usage.input_tokens,
            reused_tokens=usage.reused_tokens,
            prefill_tokens=usage.prefill_tokens,
            output_tokens=usage.output_tokens,
            thinking_tokens=thinking_tokens,
            ttft_s=usage.ttft_s,
            decode_s=usage.decode_s,
            changed=usage.changed,
            miss=miss,
        )

    def _paid_miss(self, usage: PathUsage, announced: ReusePlan) -> Miss | None:
        reused = usage.reused_tokens
        if reused == usage.input_tokens:
            return None
        nothing_ran = not reused and not usage.prefill_tokens
        if reused == announced.reused_tokens or nothing_ran:
            return announced.miss
        # Of a model that does not say why, all that is certain is where the rest begins.
        told = usage.miss or PathMiss(reused, "never_computed", usage.input_tokens - reused)
        return self._explained(told, reused or None)

    def _explained(self, miss: PathMiss, anchor: int | None) -> Miss:
        """A miss in token positions, with its segment, and what stood there if other ids did."""
        path, position = self.path, miss.position
        index = path.at(position)
        part: MissPart = "opener"
        if index is not None:
            part = "frame" if position < path.content_start(index) else "content"
        other = None
        if miss.cause == OTHER_IDS:
            named = None if index is None else path.places[index].body.id
            other = self.earlier.forwarded(self.ids, position)
            if other is None:
                candidates = self.earlier.going_on(self.ids, position, named)
                other = self._computed(candidates, position)
        there = None if other is None else _counterpart(path, index, other, position)
        known = None if other is None or there is None else (other, there)
        return Miss(
            position=position,
            segment=None if index is None else segments(path, [index])[0],
            part=part,
            cause=miss.cause,
            change=None if known is None else _change(path, index, *known),
            was=None if known is None else segments(known[0], [known[1]])[0],
            tokens=miss.tokens,
            anchor=anchor,
            gap=miss.gap,
            dropped=miss.dropped,
        )

    def _computed(self, paths: Iterable[Path], position: int) -> Path | None:
        """Of paths that all go on at the position, the first that the model knows from there to the
        end of a segment, or else furthest. None if it knows none: the path that it knows is then
        another session's."""
        best, best_rows = None, position
        for path in islice(paths, MAX_COMPARED):
            there = path.at(position)
            assert there is not None, "the path goes on"
            end = min(path.ends[there], self.model.context_limit)
            miss = self.model.plan(path.ids[:end]).miss
            if miss is None or miss.cause == "no_anchor":
                return path
            if miss.position > best_rows:
                best, best_rows = path, miss.position
        return best


def _plan(made: PathPlan, miss: Miss | None) -> ReusePlan:
    return ReusePlan(
        input_tokens=made.input_tokens,
        reused_tokens=made.reused_tokens,
        prefill_tokens=made.prefill_tokens,
        source=made.source,
        anchor=made.anchor,
        miss=miss,
        predicted_s=made.predicted_s,
    )


def _counterpart(path: Path, index: int | None, other: Path, position: int) -> int | None:
    """The place of `other` that stands where the one at `index` does. It may end before the
    position: a content that only grew holds all of the old one."""
    if index is not None:
        start = path.start(index)
        there = other.at(start)
        if there is not None and other.start(there) == start:
            return there
    return other.at(position)


def _change(path: Path, index: int | None, other: Path, there: int) -> MissChange:
    """How the segment at `index` came to stand where `other` has the one at `there`."""
    was = other.places[there].body
    if index is None:
        return "diverged" if was.id in path.index else "removed"
    now = path.places[index].body
    if now.id == was.id:
        return "framed"
    if now.origin == was.origin:
        return "edited"
    if path.index.get(was.id, index) > index:
        return "inserted"
    if other.index.get(now.id, there) > there and was.id not in path.index:
        return "removed"
    return "diverged"
