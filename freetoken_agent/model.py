# SPDX-License-Identifier: Apache-2.0
"""What a session needs of a model: ids in, ids out, prices first.

`LocalModel` runs the engine of `freetoken_runtime`; `testing.ScriptedModel` plays scripts without
weights. Neither knows segments: positions are token positions, the session adds the names.
Plans and counts are the runtime's own records; its modules named here import no torch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from freetoken_runtime.errors import ContextOverflow, InvalidSampling
from freetoken_runtime.errors import EngineClosed as ModelClosed
from freetoken_runtime.reports import PathMiss
from freetoken_runtime.reports import ReusePlan as PathPlan
from freetoken_runtime.reports import Usage as PathUsage
from freetoken_storage.errors import FreetokenError
from freetoken_storage.records import Snapshots

from .template import ChatFormat
from .tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from .local_model import LocalModel as LocalModel

__all__ = [
    "ContextOverflow",
    "Fingerprint",
    "InvalidSampling",
    "LocalModel",
    "Model",
    "ModelClosed",
    "ModelUnusable",
    "NO_IDS",
    "PathMiss",
    "PathPlan",
    "PathUsage",
    "SamplingOptions",
    "Token",
    "TokenConstraint",
    "TokenStream",
]


NO_IDS: Mapping[int, int] = MappingProxyType({})


class ModelUnusable(FreetokenError):
    """The model cannot do what a session needs: it has no chat template, or no weights were loaded.
    What is wrong with its files is said by the runtime's errors."""

    code = "model_unusable"


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen. Values are checked by the model (InvalidSampling names the field)."""

    max_tokens: int = 1024
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop_ids: frozenset[int] = frozenset()
    logprobs: int = 0
    force: tuple[int, ...] = ()  # ids fed as if they had been sampled, then sampling goes on
    constraint: "TokenConstraint | None" = None


class TokenConstraint(Protocol):
    """What may be sampled next. Mutable; a model works on a copy of its own."""

    @property
    def accepting(self) -> bool:
        """Whether the output so far may end here."""

    def mask(self, row: Any) -> None:
        """Set the logits [vocab] fp32 of what may not come next to -inf, in place."""

    def accept(self, token_id: int) -> None:
        """Advance by an id that was allowed."""

    def forced(self) -> Sequence[int]:
        """The ids that must come next in any case; may be empty."""

    def copy(self) -> "TokenConstraint": ...


class Token(Protocol):
    """One sampled id. `logprob`: natural log under the unmodified distribution; `top`: the most
    likely (id, logprob) pairs when `logprobs` were asked for."""

    @property
    def id(self) -> int: ...

    @property
    def logprob(self) -> float: ...

    @property
    def top(self) -> tuple[tuple[int, float], ...]: ...


class TokenStream(Protocol):
    """A running generation. Iterating blocks the calling thread; the stop id is delivered too.
    After `cancel()` the ids already sampled are still delivered, then the iteration ends."""

    @property
    def usage(self) -> PathUsage:
        """Grows while it runs, final after the last token."""

    @property
    def finish_reason(self) -> Literal["stop", "length", "cancelled"] | None:
        """None until the last token was delivered."""

    def __iter__(self) -> Iterator[Token]: ...

    def __next__(self) -> Token: ...

    def cancel(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Fingerprint:
    """Names a state's origin. `parts` say which of weights, architecture, quantisation, KV dtype,
    rope, context and format it was made from, for a named reason when two differ."""

    digest: bytes
    parts: Mapping[str, str] = field(default_factory=dict)


class Model(Protocol):
    """A model as sessions use it. Methods may be called from any thread."""

    @property
    def name(self) -> str:
        """For people: in lists, traces and messages."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back; contents can never make a control id."""

    @property
    def format(self) -> ChatFormat:
        """What was learned of the chat template: frames, openers, how calls are written."""

    @property
    def fingerprint(self) -> Fingerprint:
        """What its states depend on. Equal: states may be shared."""

    @property
    def context_limit(self) -> int:
        """How many tokens a path may have; ContextOverflow beyond."""

    def attach(self, snapshots: Snapshots) -> None:
        """Keep states in `snapshots` from now on. StoreMismatch if attached to another store."""

    def detach(self) -> None:
        """Finish pending writes and let go of the attached store (the store is closing)."""

    def plan(self, ids: Sequence[int]) -> PathPlan:
        """Price a path. Never waits for a forward pass. ContextOverflow if it is too long."""

    def anchors(self, ids: Sequence[int]) -> Sequence[int]:
        """The positions, 1 to len(ids), at which this path's state can be restored now, ascending
        (a `range` where every position can). Never waits for a forward pass."""

    def generate(
        self,
        ids: Sequence[int],
        sampling: SamplingOptions,
        *,
        anchors: Sequence[int] = (),
        lasting: Sequence[int] = (),
        anchor_after: frozenset[int] = frozenset(),
        anchor_before: Mapping[int, int] = NO_IDS,
        on_progress: Callable[[int, int], None] | None = None,
        announced: PathPlan | None = None,
    ) -> TokenStream:
        """Forward what is missing of `ids`, then sample. `anchors`: positions to keep states at;
        `lasting`: those that many paths will go on from, kept longest; `anchor_after`: ids after
        which generated text gets one; `anchor_before`: ids that get one so many tokens before
        themselves, 0 to 3. `on_progress(done, total)` counts prefilled rows and is called from the
        engine's thread. `announced`: the plan of `ids` that was shown before; `usage.changed` says
        why it did not come true."""

    def warm(
        self,
        ids: Sequence[int],
        *,
        anchors: Sequence[int] = (),
        lasting: Sequence[int] = (),
    ) -> PathUsage:
        """Bring the state of `ids` up to date, the last row included; anchors as in `generate`."""

    def forget(self, ids: Sequence[int], start: int) -> int:
        """Drop every state, in RAM and on disk, of any path that begins with ids[: start + 1],
        at or after position `start` (states of ids[:start] stay). Returns how many went."""

    def pin(self, owner: str, paths: Sequence[Sequence[int]]) -> None:
        """Protect the states of these paths from eviction for `owner`, replacing its earlier
        pins; an empty sequence unpins."""

    def flush(self) -> None:
        """Return when every captured state is on disk."""

    def close(self) -> None:
        """Let go of weights and states. ModelClosed for all that is asked afterwards."""


def __getattr__(name: str) -> object:
    """`LocalModel` on first use: it brings the tokenizer library, which the protocol must not."""
    if name == "LocalModel":
        from .local_model import LocalModel

        return LocalModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
