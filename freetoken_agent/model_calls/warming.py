# SPDX-License-Identifier: Apache-2.0
"""Bringing a head's state up to date ahead of its use."""

import anyio.to_thread

from ..branches.handle import Handle
from ..branches.prices import Pricing
from ..segments import Usage


async def warm(handle: Handle) -> Usage:
    """Forward the head's path where its state is missing, the last row included. It prices what a
    plan at a closed head says, and costs nothing the second time."""
    return await anyio.to_thread.run_sync(warm_sync, handle)


def warm_sync(handle: Handle) -> Usage:
    """The same in the calling thread."""
    model, _ = handle.bound()
    path = handle.path
    pricing = Pricing(model, path, path.ids, handle.earlier())
    announced = pricing.plan()
    usage = model.warm(path.ids, anchors=path.anchors, lasting=path.lasting_anchors)
    return pricing.paid(usage, announced)
