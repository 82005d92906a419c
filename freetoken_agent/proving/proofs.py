# SPDX-License-Identifier: Apache-2.0
"""GOLD: a cold prefill of identical ids, the oracle of every reuse.

A comparison costs two or more full prefills; it is for tests and for checking a store by hand.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freetoken_runtime import Engine

LOGIT_TOLERANCE = 1e-4  # of the logit range, in fp32


class Gold:
    """Compares an engine's reused states with cold prefills in a second engine of the same weights.

    The second engine must not share a snapshot store with the first, and serves nothing else.
    """

    def __init__(self, cold: "Engine") -> None:
        self._cold = cold

    def check(self, engine: "Engine", ids: Sequence[int], *, num_tokens: int = 64) -> float:
        """Assert that the logits after `ids`, reused where the engine can, and the next greedy
        tokens are those of a cold prefill. Returns max |Δlogit| as a part of the logit range.

        The engine keeps states of what it generated here.
        """
        delta, _ = self._distance(engine, ids)
        if num_tokens:
            self._compare(engine, ids, _greedy(engine, ids, num_tokens))
        return delta

    def check_tokens(self, engine: "Engine", ids: Sequence[int], tokens: Sequence[int]) -> None:
        """Assert that `tokens`, which `engine` sampled greedily after `ids`, are a cold prefill's.

        A token may differ only where the two best cold logits are nearer than twice the Δ there.
        """
        self._distance(engine, ids)
        self._compare(engine, ids, tokens)

    def _distance(self, engine: "Engine", ids: Sequence[int]) -> tuple[float, float]:
        """max |Δlogit|, and the gap between the two best cold logits; both parts of the range.
        Leaves the state of this one cold prefill in the second engine."""
        self._cold.forget(ids, 0)
        usage = self._cold.warm(ids)
        assert usage.prefill_tokens == len(ids), f"not a cold prefill: {usage}"
        cold, reused = self._cold.logits(ids), engine.logits(ids)
        span = float(cold.max() - cold.min())
        delta = float((reused - cold).abs().max()) / span
        best = cold.topk(2).values
        assert delta <= LOGIT_TOLERANCE, (
            f"logits after {len(ids)} ids differ from a cold prefill by {delta:.2e} of the range"
        )
        return delta, float(best[0] - best[1]) / span

    def _compare(self, engine: "Engine", ids: Sequence[int], got: Sequence[int]) -> None:
        """The second engine holds the cold state of `ids`."""
        want = _greedy(self._cold, ids, len(got))
        pairs = zip(want, got, strict=True)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if first is not None:
            delta, gap = self._distance(engine, [*ids, *want[:first]])
            assert gap <= 2 * delta, (
                f"greedy token {first} after {len(ids)} ids is {got[first]}, a cold prefill says "
                f"{want[first]} with a lead of {gap:.2e} of the range"
            )


def _greedy(engine: "Engine", ids: Sequence[int], num_tokens: int) -> list[int]:
    from freetoken_runtime import SamplingParams

    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
    return [token.id for token in engine.generate(ids, sampling)]
