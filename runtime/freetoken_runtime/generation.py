# SPDX-License-Identifier: Apache-2.0
"""The hand-over of one request: the owner thread puts tokens in, one consumer takes them out.

The hand-over is small, so that a consumer that stops reading stops its own sequence and nobody
else's. It knows no tensor.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator

from .reports import FinishReason, ReusePlan, Usage
from .sampler import Token

HANDOVER_TOKENS = 32


class Generation:
    """A running generation: iterate over its tokens. Iterating blocks the calling thread; the stop
    id is delivered too. Leaving the `for` loop cancels, as do `cancel` and `close`; ids that were
    sampled already are still delivered after `cancel`. `usage` grows while it runs."""

    def __init__(self, plan: ReusePlan, wake: Callable[[], None]) -> None:
        self.plan = plan
        self.usage = Usage(plan.input_tokens, 0, 0)
        self.finish_reason: FinishReason | None = None
        self._wake = wake
        self._changed = threading.Condition()
        self._tokens: deque[Token] = deque()
        self._done = False
        self._cancelled = False
        self._error: BaseException | None = None

    # -- the consumer

    def __iter__(self) -> Iterator[Token]:
        try:
            while (token := self._next()) is not None:
                yield token
        finally:
            self.cancel()

    def __next__(self) -> Token:
        token = self._next()
        if token is None:
            raise StopIteration
        return token

    def cancel(self) -> None:
        """End between two steps. Safe from any thread, at any time, more than once."""
        with self._changed:
            if self._done or self._cancelled:
                return
            self._cancelled = True
        self._wake()

    def close(self) -> None:
        """Cancel, drop what was not read, and wait until the engine has let go."""
        self.cancel()
        with self._changed:
            self._tokens.clear()
            while not self._done:
                self._changed.wait()

    def _next(self) -> Token | None:
        with self._changed:
            while not self._tokens and not self._done:
                self._changed.wait()
            if self._tokens:
                was_full = len(self._tokens) >= HANDOVER_TOKENS
                token = self._tokens.popleft()
            elif self._error is not None:
                error, self._error = self._error, None
                raise error
            else:
                return None
        if was_full:
            self._wake()
        return token

    def wait(self) -> None:
        """Return when the engine is done with it; raises the request's error, if any."""
        with self._changed:
            while not self._done:
                self._changed.wait()
            if self._error is not None:
                error, self._error = self._error, None
                raise error

    # -- the owner thread

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    @property
    def has_room(self) -> bool:
        return len(self._tokens) < HANDOVER_TOKENS

    def put(self, token: Token, usage: Usage) -> None:
        with self._changed:
            self.usage = usage
            self._tokens.append(token)
            self._changed.notify_all()

    def finish(self, reason: FinishReason, usage: Usage) -> None:
        with self._changed:
            self.usage = usage
            self.finish_reason = reason
            self._done = True
            self._changed.notify_all()

    def fail(self, error: BaseException, usage: Usage) -> None:
        """The consumer gets the tokens sampled so far, then the error."""
        with self._changed:
            self.usage = usage
            self._error = error
            self._done = True
            self._changed.notify_all()
