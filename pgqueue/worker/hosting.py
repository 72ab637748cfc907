"""A worker inside of an asyncio application: its threads beside, its async handlers on the loop."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Protocol

from pgqueue import redaction

logger = redaction.logger(__name__)


class Work(Protocol):
    def __call__(self, *, loop: asyncio.AbstractEventLoop, asked: Callable[[], None]) -> object:
        """Run a worker until it is stopped; calls ``asked`` once the database was asked for its
        tables, or is away."""


class HostedWorker:
    """One run of a worker in a block of a coroutine.

    If the worker fails, the task of the coroutine is cancelled, and the end of the block raises the
    error, as that of an ``asyncio.TaskGroup`` does.
    """

    def __init__(self, work: Work, stop: Callable[[], None], end_grace: Callable[[], None]) -> None:
        """``stop`` lets the worker end; ``end_grace`` also ends the grace period."""
        self._work = work
        self._stop = stop
        self._end_grace = end_grace
        self._failure: BaseException | None = None
        self._is_ending = False
        self._has_cancelled = False
        """Whether the block was cancelled because the worker has failed."""

    async def begin(self) -> None:
        """Start the worker.  Raises its error, if it refuses the tables of the database."""
        self._loop, host = asyncio.get_running_loop(), asyncio.current_task()
        assert host is not None, "a coroutine runs in a task"
        self._host = host
        self._asked, self._ended = self._loop.create_future(), self._loop.create_future()
        # A daemon: a process that is ended without the end of the block does not wait for it.
        Thread(target=self._run, name="pgqueue-supervisor", daemon=True).start()
        try:
            await asyncio.wait([self._asked, self._ended], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.end()
            raise
        if self._failure is not None:
            raise self._failure

    async def end(self) -> None:
        """Stop the worker and wait for its end.  A cancel meanwhile ends the grace period."""
        self._is_ending = True
        self._stop()
        cancelled: asyncio.CancelledError | None = None
        while not self._ended.done():
            try:
                await asyncio.shield(self._ended)
            except asyncio.CancelledError as error:
                cancelled = error
                self._end_grace()
        if self._has_cancelled:
            self._host.uncancel()
        if self._failure is not None:
            raise self._failure
        if cancelled is not None:
            raise cancelled

    def _run(self) -> None:
        try:
            self._work(loop=self._loop, asked=lambda: self._tell(self._asked))
        except BaseException as failure:
            self._failure = failure
            logger.error("the worker of this application has failed: %s", failure)
        self._tell(self._ended)

    def _tell(self, future: "asyncio.Future[None]") -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._note, future)

    def _note(self, future: "asyncio.Future[None]") -> None:
        if not future.done():
            future.set_result(None)
        is_in_block = self._asked.done() and not self._is_ending
        if future is self._ended and self._failure is not None and is_in_block:
            self._has_cancelled = self._host.cancel("the worker has failed")
