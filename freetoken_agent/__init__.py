# SPDX-License-Identifier: Apache-2.0
"""Tool-using agents on a model in your own process, with an editable, durable context.

Names are imported when they are first used, so that importing the package is cheap and loads no
torch. What is not in `__all__` is not public.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freetoken_storage.errors import (
        BranchExists,
        BranchNotFound,
        FreetokenError,
        InvalidName,
        InvalidRecord,
        SessionConflict,
        SessionExists,
        SessionNotFound,
        StorageError,
        StoreAlreadyOpen,
        StoreClosed,
        StoreDamaged,
        StoreForked,
        StoreFull,
        StoreLocked,
        StoreMismatch,
        StoreNewer,
        StoreReadOnly,
        WriteFailed,
    )

    from .binding import Binding
    from .catalog import ModelNotFound
    from .errors import (
        FrameNotEditable,
        GenerationConflict,
        InvalidEdit,
        InvalidMessages,
        NothingToGenerate,
        NothingToRedo,
        NothingToUndo,
        PairingError,
        SegmentError,
        SegmentInUse,
        SegmentNotFound,
        SegmentReplaced,
        SessionBusy,
        SessionReadOnly,
        TemplateUnsupported,
        TokenizerUnsupported,
        UnsupportedContent,
    )
    from .events import (
        GenerationEvent,
        PlanReady,
        PrefillProgress,
        ReplyFinished,
        SegmentFinished,
        TextDelta,
        ThinkingDelta,
        ToolCallDelta,
        ToolCallReady,
        ToolCallStarted,
    )
    from .generate_options import OptionUnsupported, UnknownOption
    from .generation import Generation, GenerationInUse, GenerationUnfinished
    from .local_model import LocalModel
    from .model import (
        ContextOverflow,
        InvalidSampling,
        Model,
        ModelClosed,
        ModelUnusable,
    )
    from .segments import (
        BranchInfo,
        Diff,
        Edit,
        Miss,
        Part,
        PurgeReport,
        Reply,
        ReusePlan,
        Segment,
        SessionInfo,
        Tree,
        TreeNode,
        Turn,
        Usage,
    )
    from .session import Session
    from .store import Store

_MODULES = {
    "freetoken_storage.errors": (
        "BranchExists",
        "BranchNotFound",
        "FreetokenError",
        "InvalidName",
        "InvalidRecord",
        "SessionConflict",
        "SessionExists",
        "SessionNotFound",
        "StorageError",
        "StoreAlreadyOpen",
        "StoreClosed",
        "StoreDamaged",
        "StoreForked",
        "StoreFull",
        "StoreLocked",
        "StoreMismatch",
        "StoreNewer",
        "StoreReadOnly",
        "WriteFailed",
    ),
    ".binding": ("Binding",),
    ".catalog": ("ModelNotFound",),
    ".errors": (
        "FrameNotEditable",
        "GenerationConflict",
        "InvalidEdit",
        "InvalidMessages",
        "NothingToGenerate",
        "NothingToRedo",
        "NothingToUndo",
        "PairingError",
        "SegmentError",
        "SegmentInUse",
        "SegmentNotFound",
        "SegmentReplaced",
        "SessionBusy",
        "SessionReadOnly",
        "TemplateUnsupported",
        "TokenizerUnsupported",
        "UnsupportedContent",
    ),
    ".events": (
        "GenerationEvent",
        "PlanReady",
        "PrefillProgress",
        "ReplyFinished",
        "SegmentFinished",
        "TextDelta",
        "ThinkingDelta",
        "ToolCallDelta",
        "ToolCallReady",
        "ToolCallStarted",
    ),
    ".generate_options": ("OptionUnsupported", "UnknownOption"),
    ".generation": ("Generation", "GenerationInUse", "GenerationUnfinished"),
    ".local_model": ("LocalModel",),
    ".model": ("ContextOverflow", "InvalidSampling", "Model", "ModelClosed", "ModelUnusable"),
    ".segments": (
        "BranchInfo",
        "Diff",
        "Edit",
        "Miss",
        "Part",
        "PurgeReport",
        "Reply",
        "ReusePlan",
        "Segment",
        "SessionInfo",
        "Tree",
        "TreeNode",
        "Turn",
        "Usage",
    ),
    ".session": ("Session",),
    ".store": ("Store",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Binding",
    "BranchExists",
    "BranchInfo",
    "BranchNotFound",
    "ContextOverflow",
    "Diff",
    "Edit",
    "FrameNotEditable",
    "FreetokenError",
    "Generation",
    "GenerationConflict",
    "GenerationEvent",
    "GenerationInUse",
    "GenerationUnfinished",
    "InvalidEdit",
    "InvalidMessages",
    "InvalidName",
    "InvalidRecord",
    "InvalidSampling",
    "LocalModel",
    "Miss",
    "Model",
    "ModelClosed",
    "ModelNotFound",
    "ModelUnusable",
    "NothingToGenerate",
    "NothingToRedo",
    "NothingToUndo",
    "OptionUnsupported",
    "PairingError",
    "Part",
    "PlanReady",
    "PrefillProgress",
    "PurgeReport",
    "Reply",
    "ReplyFinished",
    "ReusePlan",
    "Segment",
    "SegmentError",
    "SegmentFinished",
    "SegmentInUse",
    "SegmentNotFound",
    "SegmentReplaced",
    "Session",
    "SessionBusy",
    "SessionConflict",
    "SessionExists",
    "SessionInfo",
    "SessionNotFound",
    "SessionReadOnly",
    "StorageError",
    "Store",
    "StoreAlreadyOpen",
    "StoreClosed",
    "StoreDamaged",
    "StoreForked",
    "StoreFull",
    "StoreLocked",
    "StoreMismatch",
    "StoreNewer",
    "StoreReadOnly",
    "TemplateUnsupported",
    "TextDelta",
    "ThinkingDelta",
    "TokenizerUnsupported",
    "ToolCallDelta",
    "ToolCallReady",
    "ToolCallStarted",
    "Tree",
    "TreeNode",
    "Turn",
    "UnknownOption",
    "UnsupportedContent",
    "Usage",
    "WriteFailed",
]


def __getattr__(name: str) -> object:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
