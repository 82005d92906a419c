# SPDX-License-Identifier: Apache-2.0
"""Moves memory between expert slots and states while requests run.

    states need room      slots give way where their bytes save less than the states that would go
                          instead, and for a path that runs as far as a row's experts allow
    states leave room     slots take it
    states hardly used    go for slots that save twice as much: those that a store has, and others
                          where states hold more than was planned for them

`elastic` decides, from what this measures: askings for experts by their stack distance, seconds
waited per missing expert, uses of paths. Slots do not grow again soon after they had to give way.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Protocol

from .elastic import IdlePath, PoolValue, concave, give, grow
from .errors import BudgetTooSmall
from .experts.ghosts import HitCurves
from .experts.store import ExpertStore
from .memory import MemoryBudget, return_freed_memory
from .plan import MemoryPlan, bytes_of
from .reports import Moves
from .state.keeper import StateKeeper
from .state.prefix import Resident
from .state.worth import Worth

EVERY_PASSES = 8
ADVANTAGE = 2.0  # what goes from one use to another has to save so many times as much there
_STEP = 16  # slots take at most one in so many of the bytes to divide at once
_QUANTUM = 64  # and give at least one in so many, if a row's experts leave it
_COOL_S = 0.5  # of work between giving way and growing again; doubles while they alternate
_MAX_COOL_S = 32.0
_MISS_S_PER_BYTE = 1e-9  # until misses were waited for,
_PRIOR_MISSES = 8.0  # which counts as so many
_MISS_MEMORY = 2048  # misses after which the past counts half


class Work(Protocol):
    """What is asked of the runner."""

    seconds: float


class MissPrice:
    """Seconds that passes stand still per byte of missing experts, those of long ago counting less.
    Mutable."""

    def __init__(self, expert_bytes: float) -> None:
        """`expert_bytes`: of one, on average."""
        self._expert_bytes = expert_bytes
        self._misses = _PRIOR_MISSES
        self._waited_s = _PRIOR_MISSES * expert_bytes * _MISS_S_PER_BYTE
        self._seen = (0, 0.0)

    def look(self, misses: int, waited_s: float) -> int:
        """So many there have been in all, and so long all of them took; returns how many are
        new."""
        more, longer = misses - self._seen[0], waited_s - self._seen[1]
        keep = 0.5 ** (more / _MISS_MEMORY)
        self._misses = keep * self._misses + more
        self._waited_s = keep * self._waited_s + longer
        self._seen = (misses, waited_s)
        return more

    @property
    def s_per_byte(self) -> float:
        return self._waited_s / self._misses / self._expert_bytes


class Balance:
    """Owner thread only, but `moves`. `pinned`: the number of slots was asked for, and stays."""

    def __init__(
        self,
        budget: MemoryBudget,
        store: ExpertStore,
        keeper: StateKeeper,
        worth: Worth,
        work: Work,
        *,
        pinned: bool,
    ) -> None:
        self._budget = budget
        self._store = store
        self._keeper = keeper
        self._worth = worth
        self._work = work
        self._demands = store.demands()
        self._elastic = bool(self._demands) and not pinned
        self._curves = HitCurves([x.experts for x in self._demands], store.pool_numbers)
        sizes = [x.size_bytes for x in self._demands]
        self._price = MissPrice(sum(sizes) / max(1, len(sizes)))
        self._passes = 0
        self._looked_s = 0.0
        self._grown_s = self._shrunk_s = -inf  # when slots last took and gave, in seconds of work
        self._cool_s = _COOL_S
        self.moves = Moves()
        store.watch = self._curves.ask if self._elastic else None
        budget.lender = self if self._elastic else None

    def lend(self, wanted_bytes: int, worth: float) -> bool:
        """See `MemoryBudget.lend`. For what runs (`worth` without end), all or nothing."""
        pools, left = self._pools(), self._budget.plan.slots_bytes + self._budget.plan.states_bytes
        counts = give(pools, max(wanted_bytes, left // _QUANTUM), worth)
        given = self._budget.plan.slots_bytes - bytes_of(self._demands, counts)
        if given <= 0 or (worth == inf and given < wanted_bytes):
            return False
        now = self._work.seconds
        if now - self._grown_s < 2 * self._cool_s:
            self._cool_s = min(2 * self._cool_s, _MAX_COOL_S)
        self._shrunk_s = now
        self._resize(counts, "states needed")
        return True

    def between_passes(self) -> None:
        """Look every few passes whether slots should take what states do not need."""
        if not self._elastic:
            return
        self._passes += 1
        if self._passes % EVERY_PASSES:
            return
        now = self._work.seconds
        counts = self._store.counts
        missed = self._price.look(counts.misses, counts.waited_s)
        self._curves.elapsed(now - self._looked_s)
        self._worth.elapsed(now)
        self._looked_s = now
        if missed and now - self._shrunk_s >= self._cool_s:
            self._grow(now)

    def change(self, plan: MemoryPlan) -> None:
        """Another budget. Slots go back to their planned number as far as states in use leave room;
        what of both no longer fits goes. BudgetTooSmall, and nothing changes, if what runs and what
        is pinned does not fit."""
        least = plan.slots
        if self._elastic:
            least = tuple(demand.least for demand in self._demands)
        self._check(plan, bytes_of(self._demands, least))
        low = tuple(map(min, self._budget.plan.slots, plan.slots))
        self._budget.home = self._budget.plan = plan
        self._apply(low)
        self._keeper.make_room(0)
        self._apply(self._towards(plan.slots))
        return_freed_memory()

    # -- inside

    def _check(self, plan: MemoryPlan, slots_bytes: int) -> None:
        kept = self._worth.protected_bytes()
        needed = plan.weights_bytes + plan.working_bytes + slots_bytes + kept
        if needed > plan.budget_bytes:
            parts = f"weights {plan.weights_bytes}, working memory {plan.working_bytes}"
            parts += f", slots for experts {slots_bytes}" if self._demands else ""
            raise BudgetTooSmall(
                "the memory budget does not hold what runs and what is pinned",
                value=plan.budget_bytes,
                limit=f"at least {needed} bytes: {parts}, running and pinned paths {kept}",
                remedy="raise it, unpin paths, or change it when less runs",
            )

    def _grow(self, now: float) -> None:
        pools, budget = self._pools(), self._budget
        left = budget.plan.slots_bytes + budget.plan.states_bytes
        limit = max(left // _STEP, *(pool.slot_bytes for pool in pools))
        free = budget.free_bytes - self._worth.next_growth_bytes()
        paths = self._idle()
        reason = "slots took what was free"
        found = grow(
            pools, free, [path for _, path in paths], limit_bytes=limit, advantage=ADVANTAGE
        )
        if found.evicted is not None:
            self._keeper.evict(paths[found.evicted][0])
            free = budget.free_bytes - self._worth.next_growth_bytes()
            found = grow(pools, free, limit_bytes=limit, advantage=ADVANTAGE)
            reason = "slots save more than an idle path"
        counts = found.counts
        if counts == budget.plan.slots:
            return
        if now - self._shrunk_s > 8 * self._cool_s:
            self._cool_s = max(_COOL_S, self._cool_s / 2)
        self._grown_s, before = now, budget.plan.slots
        try:
            self._resize(counts, reason)
        except (OSError, MemoryError):  # the system has less than the budget says
            self._apply(before)
            self._shrunk_s, self._cool_s = now, _MAX_COOL_S
            self.moves = replace(self.moves, last="the system had no memory for more slots")

    def _idle(self) -> list[tuple[Resident, IdlePath]]:
        """Paths that may go for slots."""
        beyond = self._budget.states_bytes > self._budget.home.states_bytes
        stored = self._keeper.writer is not None
        return [
            (resident, IdlePath(*self._worth.of(resident, stored=stored)))
            for resident in self._worth.idle()
            if beyond or resident.persisted_rows == resident.sequence.length
        ]

    def _pools(self) -> list[PoolValue]:
        price = self._price.s_per_byte
        return [
            PoolValue(
                demand.size_bytes,
                count,
                demand.least,
                demand.experts,
                concave([(n, x * demand.size_bytes * price) for n, x in curve.points()]),
            )
            for demand, count, curve in zip(
                self._demands, self._budget.plan.slots, self._curves.pools, strict=True
            )
        ]

    def _towards(self, wanted: Sequence[int]) -> tuple[int, ...]:
        """As many of the wanted slots as free bytes allow, every pool alike."""
        now = self._budget.plan.slots
        more = bytes_of(self._demands, wanted) - self._budget.plan.slots_bytes
        if more <= 0:
            return now
        free = min(max(0, self._budget.free_bytes), more)
        return tuple(n + (w - n) * free // more for n, w in zip(now, wanted, strict=True))

    def _resize(self, counts: Sequence[int], reason: str) -> None:
        before = self._budget.plan.slots_bytes
        self._apply(counts)
        moved = self._budget.plan.slots_bytes - before
        self.moves = replace(
            self.moves,
            count=self.moves.count + 1,
            size_bytes=self.moves.size_bytes + abs(moved),
            last=f"{reason}: {moved:+} bytes of slots",
        )

    def _apply(self, counts: Sequence[int]) -> None:
        """Memory that slots take is set aside before, what they give is counted after it went."""
        size_bytes = bytes_of(self._demands, counts)
        if size_bytes > self._budget.plan.slots_bytes:
            self._budget.divide(counts, size_bytes)
            self._store.resize(counts)
        else:
            self._store.resize(counts)
            self._budget.divide(counts, size_bytes)
