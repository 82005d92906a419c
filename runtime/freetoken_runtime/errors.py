# SPDX-License-Identifier: Apache-2.0
"""The errors of the engine, below the root that storage defines.

FreetokenError
└── EngineError
    ├── ModelNotFound              nothing that can be loaded at that path
    ├── UnsupportedArchitecture    a model type without a family here
    ├── UnsupportedConfig          a configuration key or value that changes the maths
    ├── UnsupportedQuantization    a quantisation or tensor type that cannot be loaded
    ├── InvalidConfig              an engine setting outside its limits
    ├── InvalidSampling            a sampling field outside its limits
    ├── ConstraintDeadEnd          a token constraint that leaves no token to sample
    ├── InvalidIds                 token ids outside the vocabulary, or none at all
    ├── InvalidAnchors             anchor positions outside the path
    ├── ContextOverflow            more tokens than the context holds
    ├── BudgetTooSmall             the memory budget cannot hold what was asked
    ├── EngineClosed               a call after close(), or in a child that fork() made
    ├── WrongThread                a callback of the engine that waits for the engine
    ├── EngineFault                an unexpected exception of our own, as its cause
    ├── WorkerStalled              a thread that computes experts and does not come back
    └── WeightsError
        ├── WeightsNotFound        a shard that an index names is absent
        ├── WeightsDamaged         truncated, empty, foreign or altered files
        ├── WeightsMismatch        missing, unused, doubled or wrongly shaped tensors
        └── WeightsTimeout         a disk that does not answer
"""

from freetoken_storage.errors import FreetokenError


class EngineError(FreetokenError):
    """Any fault of the runtime."""

    code = "engine_error"


class ModelNotFound(EngineError):
    """No model folder or GGUF file at that path."""

    code = "model_not_found"


class UnsupportedArchitecture(EngineError):
    """The model's type has no family here; the limit lists those that have."""

    code = "unsupported_architecture"


class UnsupportedConfig(EngineError):
    """A configuration key, or its value, that would change the maths and is not implemented."""

    code = "unsupported_config"


class UnsupportedQuantization(EngineError):
    """A quantisation, dtype or stored tensor type that cannot be loaded."""

    code = "unsupported_quantization"


class InvalidConfig(EngineError):
    """An engine setting outside its limits; the message names setting, value and limit."""

    code = "invalid_config"


class InvalidSampling(EngineError):
    """A sampling field outside its limits; the message names field, value and limit."""

    code = "invalid_sampling"


class ConstraintDeadEnd(EngineError):
    """A token constraint excluded the whole vocabulary. The request ends, the path stays."""

    code = "constraint_dead_end"


class InvalidIds(EngineError):
    """Token ids outside the vocabulary, or an empty path."""

    code = "invalid_ids"


class InvalidAnchors(EngineError):
    """Anchor positions outside the path they belong to."""

    code = "invalid_anchors"


class ContextOverflow(EngineError):
    """More tokens than the context holds. Nothing was forwarded."""

    code = "context_overflow"


class BudgetTooSmall(EngineError):
    """The memory budget cannot hold what was asked."""

    code = "budget_too_small"


class EngineClosed(EngineError):
    """The engine was closed, or belongs to the process this one was forked from."""

    code = "engine_closed"


class WrongThread(EngineError):
    """A callback of the engine (`on_progress`, a constraint) called what waits for the engine."""

    code = "wrong_thread"


class EngineFault(EngineError):
    """An unexpected exception of the engine itself (`__cause__`). It ended this request only."""

    code = "engine_fault"


class WorkerStalled(EngineError):
    """A thread that computes experts did not come back in time. The request ends, the engine goes
    on with other threads."""

    code = "worker_stalled"


class WeightsError(EngineError):
    """Any fault of weight files."""

    code = "weights_error"


class WeightsNotFound(WeightsError):
    """A weight file that an index names, or any weight file at all, is absent."""

    code = "weights_not_found"


class WeightsDamaged(WeightsError):
    """A weight file is truncated, empty, foreign or altered. Nothing of it was used."""

    code = "weights_damaged"


class WeightsMismatch(WeightsError):
    """The files and the architecture disagree: tensors missing, unused, doubled or misshapen."""

    code = "weights_mismatch"


class WeightsTimeout(WeightsError):
    """An expert did not arrive from the disk in time, or was not given back. The request ends, the
    engine goes on."""

    code = "weights_timeout"
