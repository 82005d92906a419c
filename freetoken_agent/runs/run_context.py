# SPDX-License-Identifier: Apache-2.0
"""What a tool may know about the run that calls it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from ..segments import Usage
    from ..session import Session

Deps = TypeVar("Deps", covariant=True)


@dataclass(frozen=True)
class RunContext(Generic[Deps]):
    """The first parameter of a tool that asks for it by this type; models never see it.

    `deps` is what the run was given. `session` is the run's own: a tool may read and fork it, but
    while a call is open only the loop appends to it. `retry` counts the attempts of this tool, in a
    row, that asked the model to try again; `max_retries` is how many may. `usage` sums the model
    calls of the run so far, `step` numbers the current one from 0.
    """

    deps: Deps
    session: "Session"
    usage: "Usage"
    step: int = 0
    call_id: str = ""  # of the call; empty outside of a tool
    tool_name: str = ""  # of the tool; empty outside of one
    retry: int = 0
    max_retries: int = 0
