# SPDX-License-Identifier: Apache-2.0
"""Are the stored states of sessions right? Each path is computed cold and compared."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freetoken_storage.records import Sessions

from ..branches import codec
from ..branches.binding import bind
from ..branches.branch import Branch
from ..branches.freeing import leaves
from ..branches.path import common_length
from ..local_model import LocalModel

if TYPE_CHECKING:
    from freetoken_runtime import Verification


@dataclass(frozen=True)
class PathCheck:
    """One path's states. `branch`: whose head it is; None for an earlier version."""

    session: str
    branch: str | None
    result: "Verification"


@dataclass(frozen=True)
class Skipped:
    """A session whose states could not be computed, and why."""

    session: str
    reason: str


@dataclass(frozen=True)
class StateCheck:
    """Not `complete`: it was cancelled; what was found until then was dealt with."""

    paths: tuple[PathCheck, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    complete: bool = True

    @property
    def ok(self) -> bool:
        """Whether nothing wrong was found."""
        return not any(path.result.findings for path in self.paths)


@dataclass(frozen=True)
class StoredPath:
    """A path of a session, as in `PathCheck`."""

    session: str
    branch: str | None
    ids: tuple[int, ...]


@dataclass(frozen=True)
class CheckPlan:
    """What there is to check. A path that another one begins with is checked with it."""

    paths: tuple[StoredPath, ...]
    skipped: tuple[Skipped, ...]


def plan_check(
    sessions: Sessions, model: LocalModel, names: Sequence[str], *, earlier_versions: bool = False
) -> CheckPlan:
    """The heads of these sessions, and with `earlier_versions` every path that undo or a fork may
    go back to. SessionNotFound."""
    skipped = []
    paths: list[StoredPath] = []
    for name in names:
        reason = _mismatch(sessions, model, name)
        if reason is not None:
            skipped.append(Skipped(name, reason))
        else:
            paths += _paths(sessions, name, earlier_versions)
    return CheckPlan(tuple(_longest(paths)), tuple(skipped))


def check_states(
    model: LocalModel,
    plan: CheckPlan,
    *,
    on_path: Callable[[StoredPath], None] = lambda path: None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> StateCheck:
    """Verify what the store that is attached to `model` holds of each path; what is wrong leaves
    the store. Blocks; the functions are called in this thread."""
    checked: list[PathCheck] = []
    for path in plan.paths:
        if cancelled():
            break
        on_path(path)
        ids = path.ids[: model.context_limit]
        result = model.engine.verify(ids, on_progress=on_progress, cancelled=cancelled)
        checked.append(PathCheck(path.session, path.branch, result))
    complete = len(checked) == len(plan.paths) and all(path.result.complete for path in checked)
    return StateCheck(tuple(checked), plan.skipped, complete)


def _mismatch(sessions: Sessions, model: LocalModel, name: str) -> str | None:
    """Why the session's ids mean nothing to the model."""
    binding = bind(codec.unpack_session(sessions.get(name).body), model)
    return binding.reason if binding.state == "read_only" else None


def _paths(sessions: Sessions, name: str, earlier_versions: bool) -> Iterator[StoredPath]:
    for record in sessions.branches(name):
        yield StoredPath(name, record.name, Branch.load(sessions, name, record.name).path.ids)
    if earlier_versions:
        for ids in leaves(sessions, name):
            yield StoredPath(name, None, ids)


def _longest(paths: Sequence[StoredPath]) -> list[StoredPath]:
    """Without those that another one begins with; in the order given."""
    kept: list[StoredPath] = []
    for path in paths:
        count = len(path.ids)
        if not count or any(common_length(path.ids, other.ids) == count for other in kept):
            continue
        kept = [p for p in kept if common_length(path.ids, p.ids) < len(p.ids)]
        kept.append(path)
    return kept
