"""The resources of a worker: opened once when it starts, closed after its last handler."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
    contextmanager,
)
from threading import Event
from typing import Any

from pgqueue import redaction
from pgqueue.context import name_of
from pgqueue.errors import PgQueueError
from pgqueue.job_queue import PgQueue
from pgqueue.worker.event_loop import EventLoop, HostLoop
from pgqueue.worker.threads import WorkerThread

logger = redaction.logger(__name__)

WATCH_EVERY = 0.1
"""Seconds between two checks of signals while resources are opened."""


class Resources(WorkerThread):
    """Opens the resources in their order, and closes them in the opposite order, in one thread.

    The thread runs code of the application, which may block: the worker can be stopped all the
    same.
    """

    def __init__(self, queue: PgQueue, loop: EventLoop | HostLoop) -> None:
        super().__init__(name="resources")
        self.values: dict[Any, Any] = dict(queue.provided)
        """What handlers get, by the functions that have opened it."""
        self._managers = {
            function: manager
            for function, manager in queue.resources.items()
            if function not in self.values
        }
        self._around = queue.around_calls()
        self._loop = loop
        self._has_tried, self._closing = Event(), Event()
        self._error: PgQueueError | None = None

    def open(self, is_over: Callable[[], bool]) -> None:
        """Open all, unless the worker ends meanwhile.  Raises PgQueueError."""
        if not self._managers or is_over():
            return
        self.start()
        while not self._has_tried.wait(WATCH_EVERY) and not is_over():
            pass
        if self._error is not None:
            raise self._error

    def close(self, *, seconds: float) -> None:
        """Close all, and wait so long for it."""
        self._closing.set()
        if self.is_alive():
            self.join(seconds)
        if self.is_alive():
            logger.warning("a resource of this worker is not closed yet; the worker ends without")

    def work(self) -> None:
        with ExitStack() as opened:
            function: Any = self._around
            try:
                opened.enter_context(self._around())
                for function, make in self._managers.items():
                    if self._closing.is_set():
                        return
                    manager = _manager_of(make(), self._loop)
                    self.values[function] = manager.__enter__()
                    opened.callback(_leave, function, manager)
            except BaseException as error:  # the application's code may raise anything
                self._error = PgQueueError(f"{_words(function, error)}; the worker starts no job")
                self._error.__cause__ = error
                return
            finally:
                self._has_tried.set()
            self._closing.wait()


class OpenedOnDemand(dict[Any, Any]):
    """The resources of a child process: each is opened when a handler first asks for it.

    None is closed, because a child is killed at its end.
    """

    def __init__(self, queue: PgQueue) -> None:
        super().__init__(queue.provided)
        self._makers = queue.resources
        self._managers: list[AbstractContextManager[Any]] = []
        """Kept: a generator that is deleted runs its ``finally``."""

    def __missing__(self, function: Any) -> Any:
        if function not in self._makers:
            raise KeyError(function)
        try:
            manager = _manager_of(self._makers[function](), None)
            self[function] = manager.__enter__()
        except Exception as error:
            raise PgQueueError(_words(function, error)) from error
        self._managers.append(manager)
        return self[function]


def _words(function: Any, error: BaseException) -> str:
    return f"the resource {name_of(function)} cannot be opened: {type(error).__name__}: {error}"


def _manager_of(made: Any, loop: EventLoop | HostLoop | None) -> AbstractContextManager[Any]:
    """What a function of the application has returned, to be entered in this thread.

    ``loop``: where an async context manager is entered, if there is one.
    """
    # Asked first: an object of aiohttp has both, and its __enter__ raises.
    if hasattr(type(made), "__aenter__"):
        if loop is None:
            raise PgQueueError(
                "it is async, and a child process has no event loop; make it a plain function, or "
                "omit executor='process'"
            )
        return held_on(loop.running_loop, made)
    if not hasattr(type(made), "__enter__"):
        raise PgQueueError(
            f"it returned {type(made).__name__}; let it yield once, or return a context manager"
        )
    manager: AbstractContextManager[Any] = made
    return manager


@contextmanager
def held_on(
    loop: asyncio.AbstractEventLoop, manager: AbstractAsyncContextManager[Any]
) -> Iterator[Any]:
    """Enter an async context manager on a loop and exit it there, in one asyncio task."""
    entered: Future[Any] = Future()
    leaving = asyncio.Event()

    async def hold() -> None:
        async with manager as value:
            entered.set_result(value)
            await leaving.wait()

    ended = asyncio.run_coroutine_threadsafe(hold(), loop)
    wait((entered, ended), return_when=FIRST_COMPLETED)
    if not entered.done():
        ended.result()
    yield entered.result()
    loop.call_soon_threadsafe(leaving.set)
    ended.result()


def _leave(function: Any, manager: AbstractContextManager[Any]) -> None:
    try:
        manager.__exit__(None, None, None)
    except BaseException:  # the application's code
        logger.exception("the resource %s has failed at its end", name_of(function))
