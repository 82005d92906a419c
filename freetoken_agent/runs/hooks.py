# SPDX-License-Identifier: Apache-2.0
"""Calls functions of users that may be plain or async."""

import inspect
from collections.abc import Callable
from typing import Any


async def call_hook(function: Callable[..., Any] | None, *arguments: Any) -> Any:
    """What it returns; None where there is no function. A plain one runs in the event loop."""
    if function is None:
        return None
    value = function(*arguments)
    return await value if inspect.isawaitable(value) else value
