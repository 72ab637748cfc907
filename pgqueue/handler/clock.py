"""Ends an async handler: at its timeout, or when it must stop."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

from pgqueue.handler.attempt import RunningAttempt
from pgqueue.outcomes import Cancel


class HandlerClock:
    """Around an async handler, in its asyncio task.

    ``asyncio.timeout`` raises CancelledError in the handler, once: at its timeout, or earlier if
    the attempt is told to stop.  The block then raises TimeoutError, or passes the CancelledError
    on.  A handler that suppresses the CancelledError has not been ended.
    """

    def __init__(self, attempt: RunningAttempt) -> None:
        timeout = attempt.settings.timeout
        self.stopped_for: BaseException | None = None
        """Why the handler had to stop before its timeout, if it had to."""
        self.task: asyncio.Task[Any] | None = None
        self._attempt = attempt
        self._timeout = asyncio.timeout(None if timeout is None else timeout.total_seconds())
        self._may_end = False
        """Whether the handler runs, and commits nothing at this moment."""

    async def __aenter__(self) -> None:
        self._loop, self.task = asyncio.get_running_loop(), asyncio.current_task()
        await self._timeout.__aenter__()
        self._attempt.clock, self._may_end = self, True
        if self._attempt.is_cancelled():  # told before it began
            self._stop()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._attempt.clock, self._may_end = None, False
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            if self.stopped_for is None:
                raise
            # The block passes its own error on.

    @property
    def is_over(self) -> bool:
        """Whether the handler ran past its timeout."""
        return self._timeout.expired() and self.stopped_for is None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let nothing end the handler in this block, which commits: after an interrupted COMMIT it
        is unknown whether it was carried out."""
        if self._timeout.expired():
            yield
            return
        ends_at, self._may_end = self._timeout.when(), False
        self._timeout.reschedule(None)
        try:
            yield
        finally:
            self._may_end = True
            self._timeout.reschedule(ends_at)
            if self._attempt.is_cancelled():
                self._stop()

    def interrupt(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._may_end and not self._timeout.expired():
            # Nobody reads the outcome of an attempt that was taken away.
            self.stopped_for = self._attempt.stopped_for or Cancel()
            self._timeout.reschedule(self._loop.time())
