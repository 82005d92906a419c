# SPDX-License-Identifier: Apache-2.0
"""What a state says next: the logits of the ids that follow it."""

import torch

from ..runner import Runner, Work
from ..state.anchors import Anchor
from ..state.digest import Ids, as_ids
from ..state.sequence import Sequence

FOLLOWING = 32  # ids forwarded from a state that is judged by its logits


class Follower:
    """Goes on from states of one path. Owner thread only."""

    def __init__(self, runner: Runner, ids: Ids, context_limit: int) -> None:
        self._runner = runner
        self._ids = ids
        self._context_limit = context_limit

    def logits(self, rows: Sequence, anchor: Anchor, position: int) -> torch.Tensor:
        """[1 + n, V] of the state at `position`: that of its hidden row, then of the ids behind it.
        Where the path ends before 32 of them, its first ones go on: any ids tell two states apart,
        as long as both get the same."""
        room = min(FOLLOWING, self._context_limit - position)
        following = self._ids[position : position + room].tolist()
        while len(following) < room:
            following += self._ids[: room - len(following)].tolist()
        hidden = anchor.row.unsqueeze(0)
        if following:
            hidden = torch.cat([hidden, self._forward(rows, anchor, position, as_ids(following))])
        return self._runner.logits(hidden)

    def _forward(
        self, rows: Sequence, anchor: Anchor, position: int, following: Ids
    ) -> torch.Tensor:
        twin = rows.fork(position)
        try:
            twin.resume(anchor)
            if twin.replay:
                last = twin.ids[position - twin.replay :]
                self._runner.forward([Work(twin, last, (), replay=True)])
            work = Work(twin, following, tuple(range(len(following))))
            return self._runner.forward([work])[0]
        finally:
            twin.close()
