# SPDX-License-Identifier: Apache-2.0
"""The engine: token ids in, token ids out. It knows no chat and no text.

Names are loaded when they are first used: importing the package imports no torch.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import EngineConfig
    from .engine import Engine
    from .generation import Generation
    from .reports import EngineStats, Finding, PathMiss, ReusePlan, Token, Usage, Verification
    from .sampler import SamplingParams, TokenConstraint
    from .state.digest import Fingerprint

# oneDNN, and torch in front of it, keep a compiled GEMM for each number of rows they have met,
# 1,024 of them and half a MB each: a mixture's groups of rows fill that, and no budget counts it.
# Long passes of one model need about 100. Both settings are read at the first GEMM.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
os.environ.setdefault("LRU_CACHE_CAPACITY", "64")

__all__ = [
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Finding",
    "Fingerprint",
    "Generation",
    "PathMiss",
    "ReusePlan",
    "SamplingParams",
    "Token",
    "TokenConstraint",
    "Usage",
    "Verification",
]

_HOMES = {
    "Engine": "engine",
    "EngineConfig": "config",
    "EngineStats": "reports",
    "Finding": "reports",
    "Fingerprint": "state.digest",
    "Generation": "generation",
    "PathMiss": "reports",
    "ReusePlan": "reports",
    "SamplingParams": "sampler",
    "Token": "reports",
    "TokenConstraint": "sampler",
    "Usage": "reports",
    "Verification": "reports",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
