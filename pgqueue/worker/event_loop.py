"""The one event loop of a worker for all its async handlers: on a thread of its own, or that of the
application."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from threading import Event, Lock
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Engine

from pgqueue import redaction
from pgqueue.database import async_sessions
from pgqueue.database.opening import connection_parameters
from pgqueue.errors import WorkerBroken
from pgqueue.worker.threads import WorkerThread

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

logger = redaction.logger(__name__)

T = TypeVar("T")

DISPOSE_FOR = 1.0


class LoopEngine:
    """The engine of the handlers on one event loop; use it on the loop only."""

    def __init__(self, engine: Engine) -> None:
        self._like = engine
        self._engine: AsyncEngine | None = None

    def get(self) -> "AsyncEngine":
        if self._engine is None:
            # The number of slots limits the connections.
            self._engine = async_sessions.create_engine(
                self._like.url, lambda: connection_parameters(self._like), max_overflow=1000
            )
        return self._engine

    def dispose(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close its connections, from another thread."""
        if self._engine is not None:
            disposed = asyncio.run_coroutine_threadsafe(self._engine.dispose(), loop)
            with suppress(TimeoutError):  # an abandoned handler may block the loop
                disposed.result(timeout=DISPOSE_FOR)


class HostLoop:
    """The event loop of the application that runs the worker, in place of an :class:`EventLoop`."""

    name = "event-loop"
    failure = None

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = LoopEngine(engine)
        self.running_loop = loop

    def wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.running_loop).result()

    @property
    def engine(self) -> "AsyncEngine":
        return self._engine.get()

    def stop(self) -> None:
        if not self.running_loop.is_closed():
            self._engine.dispose(self.running_loop)


class EventLoop(WorkerThread):
    """Started by the first async handler or resource.  A slot waits for each coroutine it runs
    here, so the number of slots limits async jobs as it limits the others."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(name="event-loop")
        self._engine = LoopEngine(engine)
        self._lock = Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = Event()
        self._ended: Future[None] = Future()
        """Done when the loop has failed: coroutines on it then never return."""

    def wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.running_loop)
        either: tuple[Future[Any], ...] = (future, self._ended)
        wait(either, return_when=FIRST_COMPLETED)
        if not future.done():
            self.join()  # its own failure must be logged first
            raise WorkerBroken("the event loop has ended under its handlers")
        return future.result()

    def work(self) -> None:
        loop = self.running_loop
        try:
            _keep_running(loop, self._stopping.is_set)
        except BaseException:
            self._ended.set_result(None)
            raise
        loop.close()

    @property
    def engine(self) -> "AsyncEngine":
        return self._engine.get()

    def stop(self) -> None:
        """End the loop's thread, unless an abandoned handler still blocks it."""
        loop = self._loop
        if loop is None or not self.is_alive():
            return
        self._engine.dispose(loop)
        self._stopping.set()
        loop.call_soon_threadsafe(loop.stop)

    @property
    def running_loop(self) -> asyncio.AbstractEventLoop:
        """The loop.  The first read starts its thread."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self.start()
            return self._loop


def run_alone(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a loop of its own, in this thread, as ``asyncio.run`` does.

    The loop goes on whatever its tasks raise, even if they stop it.
    """
    loop = asyncio.new_event_loop()
    try:
        return _run_task(loop, coroutine)
    finally:
        _run_task(loop, _end_what_is_left())
        loop.close()


def _run_task(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    task = loop.create_task(coroutine)
    task.add_done_callback(lambda _: loop.stop())
    _keep_running(loop, task.done)
    return task.result()


async def _end_what_is_left() -> None:
    loop = asyncio.get_running_loop()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()


def _keep_running(loop: asyncio.AbstractEventLoop, is_over: Callable[[], bool]) -> None:
    """Run a loop until ``is_over()``, even if a handler ends it before.

    If a task raises SystemExit or KeyboardInterrupt, asyncio raises it in the coroutine that awaits
    the task and also out of the loop.  And any coroutine on the loop may call ``loop.stop()``.
    """
    while not is_over():
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            words = type(error).__name__
            logger.warning("a task of an async handler raised %s; the event loop goes on", words)
