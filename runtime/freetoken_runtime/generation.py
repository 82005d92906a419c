# SPDX-License-Identifier: Apache-2.0
"""The hand-over of one request: the owner thread puts tokens in, one consumer takes them out.

    owner ──put, finish, fail──▶ Handover ◀──next, cancel── Generation (the caller's)

The hand-over is small, so that a consumer that stops reading stops its own sequence and nobody
else's. The engine never holds the Generation: when the caller drops it, the request is cancelled.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from weakref import finalize

from .reports import FinishReason, ReusePlan, Token, Usage

HANDOVER_TOKENS = 32
_WAKING_S = 1e-4


class Handover:
    """The shared part. Thread-safe."""

    def __init__(
        self, plan: ReusePlan, wake: Callable[[], None], check_caller: Callable[[], None]
    ) -> None:
        """`check_caller` raises where waiting would never end."""
        self.plan = plan
        self.usage = Usage(plan.input_tokens, 0, 0)
        self.finish_reason: FinishReason | None = None
        self.cancelled = False
        self._wake = wake
        self._check_caller = check_caller
        self._changed = threading.Condition()
        self._tokens: deque[Token] = deque()
        self._done = False
        self._error: BaseException | None = None

    # -- the owner thread

    @property
    def has_room(self) -> bool:
        return len(self._tokens) < HANDOVER_TOKENS

    def put(self, token: Token, usage: Usage) -> None:
        with self._changed:
            self.usage = usage
            self._tokens.append(token)
            self._changed.notify_all()
        if usage.output_tokens == 1:
            # Somebody waits for it. Bookkeeping follows, which would keep the interpreter from
            # them for up to a switch interval (5 ms); a thread wakes within this time.
            time.sleep(_WAKING_S)

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

    # -- the consumer

    def next(self) -> Token | None:
        """The next token; None after the last. Raises the request's error, once."""
        with self._changed:
            while not self._tokens and not self._done:
                self._check_caller()
                self._changed.wait()
            if not self._tokens:
                self._raise()
                return None
            was_full = not self.has_room
            token = self._tokens.popleft()
        if was_full:
            self._wake()
        return token

    def wait(self) -> None:
        """Return when the engine is done with the request. Raises its error, once."""
        self.wait_done()
        with self._changed:
            self._raise()

    def wait_done(self) -> None:
        """Return when the engine is done with the request, well or not."""
        with self._changed:
            while not self._done:
                self._check_caller()
                self._changed.wait()

    def cancel(self) -> None:
        """Takes no lock of its own: the garbage collector may call it inside any statement."""
        if self._done or self.cancelled:
            return
        self.cancelled = True
        self._wake()

    def drop(self) -> None:
        """Forget tokens that were not read."""
        with self._changed:
            self._tokens.clear()

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error


class Generation:
    """A running generation: iterate over its tokens, in one thread at a time. Iterating blocks; the
    stop id is delivered too. Leaving the `for` loop cancels, as do `cancel`, `close` and dropping
    the object; after `cancel` the ids that were sampled already are still delivered."""

    def __init__(self, handover: Handover) -> None:
        self._handover = handover
        finalize(self, handover.cancel).atexit = False

    @property
    def plan(self) -> ReusePlan:
        """What was predicted when the request was made."""
        return self._handover.plan

    @property
    def usage(self) -> Usage:
        """Counts so far; final after the last token."""
        return self._handover.usage

    @property
    def finish_reason(self) -> FinishReason | None:
        """None while it runs, or when it failed."""
        return self._handover.finish_reason

    def __iter__(self) -> Iterator[Token]:
        try:
            while (token := self._handover.next()) is not None:
                yield token
        finally:
            self._handover.cancel()

    def __next__(self) -> Token:
        token = self._handover.next()
        if token is None:
            raise StopIteration
        return token

    def cancel(self) -> None:
        """End between two steps. Safe from any thread, at any time, more than once."""
        self._handover.cancel()

    def close(self) -> None:
        """Cancel, drop what was not read, and wait until the engine has let go."""
        self._handover.cancel()
        self._handover.drop()
        self._handover.wait_done()
