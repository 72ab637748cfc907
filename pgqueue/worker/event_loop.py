"""The one event loop of a worker, on a thread of its own, for all its async handlers."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import URL

from pgqueue import async_session
from pgqueue.unit_of_work import watch_session

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

T = TypeVar("T")

DISPOSE_FOR = 1.0


class EventLoop:
    """Started by the first async handler.  A slot waits for its coroutine, so the number of
    slots bounds async jobs as it bounds the others."""

    def __init__(self, url: URL) -> None:
        self._url = url
        self._lock = Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine: AsyncEngine | None = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._started()).result()

    @property
    def engine(self) -> "AsyncEngine":
        """The engine of this loop; to be asked for on the loop."""
        if self._engine is None:
            self._engine = async_session.create_engine(self._url)
            watch_session(self._engine.sync_engine)
        return self._engine

    def stop(self) -> None:
        """End the loop's thread, unless a handler that was given up still blocks it."""
        loop = self._loop
        if loop is None:
            return
        if self._engine is not None:
            disposed = asyncio.run_coroutine_threadsafe(self._engine.dispose(), loop)
            with suppress(TimeoutError):  # a handler that was given up may block the loop
                disposed.result(timeout=DISPOSE_FOR)
        loop.call_soon_threadsafe(loop.stop)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                Thread(target=self._loop.run_forever, name="pgqueue-loop", daemon=True).start()
            return self._loop
