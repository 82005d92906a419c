# SPDX-License-Identifier: Apache-2.0
"""From a row of logits to a token id.

Order, as in transformers: constraint, penalties, temperature, top-k, top-p, min-p, draw. The draw
at path position p uses one uniform number that depends on (seed, p) alone, so a request samples
the same ids alone, in a batch, and when it is continued later from the same path.
"""

import hashlib
import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Protocol

import numpy as np
import torch

from .errors import ConstraintDeadEnd, EngineFault, InvalidSampling
from .reports import Token

MAX_LOGPROBS = 1000
_TINY = torch.finfo(torch.float32).tiny  # a smaller divisor may be 0 in fp32, and 0 / 0 NaN
_NUCLEUS = 1024  # candidates tried for top-p before the whole vocabulary is sorted


class TokenConstraint(Protocol):
    """Restricts the next token. Mutable; one per request. Knows ids only."""

    @property
    def accepting(self) -> bool:
        """Whether the output so far may end here."""

    def mask(self, row: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        """Set the logits [vocab] of every id that may not come next to -inf, in place."""

    def accept(self, token_id: int) -> None:
        """Advance by an id that was allowed."""

    def forced(self) -> Sequence[int]:
        """The ids that must come next in any case; may be empty."""

    def copy(self) -> "TokenConstraint":
        """One of its own, at the same point."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. InvalidSampling names the field, its value and the limit.

    `repetition_penalty` looks at the whole path, `presence_penalty` and `frequency_penalty` at the
    ids this request produced. `force`: ids fed as if they had been sampled, then sampling goes on.
    `logprobs`: how many of the most likely ids to report. `seed=None` draws one.
    """

    max_tokens: int = 1024  # how many are sampled at most
    temperature: float = 0.0  # 0 takes the most likely id
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0  # above 0, up to 1
    min_p: float = 0.0  # of the most likely one's probability
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop_ids: frozenset[int] = frozenset()  # end the generation, and are delivered
    logprobs: int = 0
    force: Sequence[int] | None = None
    constraint: TokenConstraint | None = None  # what may be sampled next; copied

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_ids", frozenset(_indices("stop_ids", self.stop_ids)))
        if self.force is not None:
            object.__setattr__(self, "force", _indices("force", self.force))
        _whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _number("temperature", self.temperature, 0.0, 1000.0)
        _whole("top_k", self.top_k, 0, 2**31 - 1)
        _number("top_p", self.top_p, 0.0, 1.0, above=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 1000.0, above=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**63 - 1)
        _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)

    def check_ids(self, vocab_size: int) -> None:
        """InvalidSampling if a stop id, a forced id or `logprobs` exceeds the vocabulary."""
        for name, ids in (("stop_ids", self.stop_ids), ("force", self.force or ())):
            for token_id in ids:
                _whole(name, token_id, 0, vocab_size - 1)
        _whole("logprobs", self.logprobs, 0, vocab_size)


class Sampler:
    """Chooses the tokens of one request. Mutable; used by one thread at a time.

    `path`: the ids before the first token that will be sampled."""

    def __init__(self, params: SamplingParams, vocab_size: int, path: Sequence[int]) -> None:
        params.check_ids(vocab_size)
        self.params = params
        self._position = len(path)
        self._seed = secrets.randbits(63) if params.seed is None else params.seed
        self._force = list(reversed(params.force or ()))
        self._constraint = params.constraint.copy() if params.constraint is not None else None
        self._ahead: list[int] | None = None  # what the constraint forces; None: not asked yet
        self._seen: torch.Tensor | None = None  # distinct ids of the path
        if params.repetition_penalty != 1.0:
            self._seen = torch.tensor(sorted(set(path)), dtype=torch.int64)
        self._counts: torch.Tensor | None = None
        if params.presence_penalty or params.frequency_penalty:
            self._counts = torch.zeros(vocab_size)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor) -> Token:
        """logits [vocab] fp32 of the path's last position -> the next token, which joins the path.
        The row is not changed. EngineFault if it holds NaN or no finite value."""
        peak = float(logits.max())
        if not math.isfinite(peak):
            raise EngineFault("the logits are not finite", value=peak)
        token_id = self._choose(logits)
        token = self._report(logits, token_id)
        self._position += 1
        if self._constraint is not None:
            self._constraint.accept(token_id)
            self._ahead = self._ahead[1:] or None if self._ahead else None
        if self._seen is not None and not (self._seen == token_id).any():
            self._seen = torch.cat((self._seen, torch.tensor([token_id])))
        if self._counts is not None:
            self._counts[token_id] += 1
        return token

    def is_stop(self, token_id: int) -> bool:
        return token_id in self.params.stop_ids

    def certain(self, limit: int) -> list[int]:
        """The next ids that the constraint leaves no choice about: at most `limit`, and none that
        ends the request."""
        ids = [] if self._force else self._forced()
        ends = (i for i, token_id in enumerate(ids) if self.is_stop(token_id))
        return list(ids[: min(limit, next(ends, len(ids)))])

    def _forced(self) -> list[int]:
        if self._constraint is None:
            return []
        if self._ahead is None:
            self._ahead = list(self._constraint.forced())
        return self._ahead

    def _choose(self, logits: torch.Tensor) -> int:
        if self._force:
            return self._force.pop()
        scores = self._penalised(self._constrained(logits))
        if self.params.temperature == 0.0:
            return int(scores.argmax())
        ids, weights = candidates(scores, self.params)
        sums = weights.double().cumsum(0)
        total = float(sums[-1])
        target = uniform(self._seed, self._position) * total
        below = math.nextafter(total, 0.0)  # rounding must not lead past the last nonzero weight
        return int(ids[int(torch.searchsorted(sums, min(target, below), right=True))])

    def _constrained(self, logits: torch.Tensor) -> torch.Tensor:
        if self._constraint is None:
            return logits
        forced = self._forced()
        scores = logits.clone()
        if forced:
            kept = scores[forced[0]].clone()
            scores.fill_(-math.inf)[forced[0]] = kept
        else:
            self._constraint.mask(scores.numpy())
        if float(scores.max()) == -math.inf:
            raise ConstraintDeadEnd(
                "the constraint allows no token", value=f"position {self._position}"
            )
        return scores

    def _penalised(self, scores: torch.Tensor) -> torch.Tensor:
        params = self.params
        if self._seen is None and self._counts is None:
            return scores
        scores = scores.clone()
        if self._seen is not None:
            old = scores[self._seen]
            penalty = max(params.repetition_penalty, _TINY)
            changed = torch.where(old < 0, old * penalty, old / penalty)
            scores[self._seen] = changed.clamp(max=torch.finfo(torch.float32).max)  # inf - inf: NaN
        if self._counts is not None:
            scores -= params.frequency_penalty * self._counts
            scores -= params.presence_penalty * (self._counts > 0)
        return scores

    def _report(self, logits: torch.Tensor, token_id: int) -> Token:
        total = logits.logsumexp(0)
        logprob = float(logits[token_id] - total)
        if not self.params.logprobs:
            return Token(token_id, logprob)
        values, ids = logits.topk(self.params.logprobs)
        pairs = zip(ids.tolist(), (values - total).tolist(), strict=True)
        return Token(token_id, logprob, tuple(pairs))


def candidates(scores: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids that may be drawn and their weights (not normalised), by ascending id, or by
    descending weight where top-p had to sort them. scores [vocab] fp32, temperature > 0."""
    scaled = (scores - scores.max()) / max(params.temperature, _TINY)  # the best is 0
    ids: torch.Tensor | None = None
    if 0 < params.top_k < len(scaled):
        ids = _at_least(scaled, scaled.topk(params.top_k).values[-1])
    if params.top_p < 1.0:
        ids = _nucleus(scaled, ids, params.top_p)
    if ids is None:
        ids = _at_least(scaled, torch.tensor(-math.inf))
    if params.min_p > 0.0:
        ids = ids[scaled[ids] >= math.log(params.min_p)]
    return ids, scaled[ids].exp()


def _at_least(scaled: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    return (scaled >= bound).nonzero()[:, 0]


def _nucleus(scaled: torch.Tensor, ids: torch.Tensor | None, top_p: float) -> torch.Tensor:
    """The fewest most likely ids (of `ids`, or of all) whose mass reaches top_p, best first; ties
    by ascending id."""
    if ids is not None:
        return _fewest(scaled, ids, top_p, float(scaled[ids].double().exp().sum()))
    mass = float(scaled.double().exp().sum())
    likely = _at_least(scaled, scaled.topk(min(_NUCLEUS, len(scaled))).values[-1])
    if float(scaled[likely].double().exp().sum()) < top_p * mass:
        likely = torch.arange(len(scaled))  # too flat for a short list: sort everything
    return _fewest(scaled, likely, top_p, mass)


def _fewest(scaled: torch.Tensor, ids: torch.Tensor, top_p: float, mass: float) -> torch.Tensor:
    values, order = scaled[ids].sort(descending=True, stable=True)
    weights = values.double().exp()
    before = weights.cumsum(0) - weights
    return ids[order[: int((before < top_p * mass).sum())]]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on seed and position only, on every machine."""
    key = seed.to_bytes(16, "little", signed=True) + position.to_bytes(8, "little")
    bits = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return (bits >> 11) * 2.0**-53


def _indices(name: str, ids: Iterable[int]) -> tuple[int, ...]:
    """The ids as plain ints; they may come from an array or an iterator."""
    try:
        return tuple(index(token_id) for token_id in ids)
    except TypeError as error:
        raise InvalidSampling(f"{name} is invalid", value=repr(ids)[:80], limit="ids") from error


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidSampling(f"{name} is invalid", value=value, limit=f"integer {low} to {high}")


def _number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high or (above and value == low):  # type: ignore[operator]
        start = f"above {low:g}, at most" if above else f"{low:g} to"
        raise InvalidSampling(f"{name} is invalid", value=value, limit=f"{start} {high:g}")
