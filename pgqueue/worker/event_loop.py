"""The one event loop of a worker, on a thread of its own, for all its async handlers."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Engine

from pgqueue import async_session
from pgqueue.changed_sessions import watch_session
from pgqueue.unit_of_work import connection_parameters

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

T = TypeVar("T")

DISPOSE_FOR = 1.0


class EventLoop:
    """Started by the first async handler.  A slot waits for what it runs here, so the number of
    slots bounds async jobs as it bounds the others."""

    def __init__(self, engine: Engine) -> None:
        self._like = engine
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
            # The number of slots is the limit.
            self._engine = async_session.create_engine(
                self._like.url, lambda: connection_parameters(self._like), max_overflow=1000
            )
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
                Thread(target=_run, args=(self._loop,), name="pgqueue-loop", daemon=True).start()
            return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()
