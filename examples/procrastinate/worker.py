"""A worker of pgqueue, run as Procrastinate's."""

import asyncio
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pgqueue

if TYPE_CHECKING:
    from .app import App

FOREVER = 365 * 24 * 3600.0
TO_END = 0.5
"""Seconds that plain tasks have to notice ``should_abort()``, after which async tasks are ended."""


class Worker:
    """Runs the jobs of an application."""

    def __init__(
        self,
        app: "App",
        *,
        queues: Iterable[str] | None = None,
        name: str | None = "worker",
        concurrency: int = 1,
        wait: bool = True,
        fetch_job_polling_interval: float = 5.0,
        shutdown_graceful_timeout: float | None = None,
        additional_context: Mapping[str, Any] | None = None,
        install_signal_handlers: bool = True,
        # What pgqueue does in one way only:
        abort_job_polling_interval: float = 5.0,
        listen_notify: bool = True,
        update_heartbeat_interval: float = 10.0,
        stalled_worker_timeout: float = 30.0,
    ) -> None:
        self.name = name
        self.queues = None if queues is None else list(queues)
        self.additional_context = dict(additional_context or {})
        self._waits, self._handles_signals = wait, install_signal_handlers
        timeout = shutdown_graceful_timeout
        self._patience = FOREVER if timeout is None else timeout
        self._stopped_at: float | None = None
        self._is_stopped = asyncio.Event()
        self._worker = pgqueue.Worker(
            app.queue,
            self.queues or ["*"],
            concurrency=concurrency,
            poll_interval=timedelta(seconds=fetch_job_polling_interval),
            grace=timedelta(seconds=min(self._patience + TO_END, FOREVER)),
            ahead=0,  # a job that has been claimed has started
        )

    @property
    def is_out_of_patience(self) -> bool:
        """Whether the worker was stopped, and its ``shutdown_graceful_timeout`` is over."""
        stopped_at = self._stopped_at
        return stopped_at is not None and time.monotonic() >= stopped_at + self._patience

    def stop(self) -> None:
        """Start no more jobs; call it in the event loop of the worker."""
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
            self._is_stopped.set()
            self._worker.stop()

    async def run(self) -> None:
        """Run jobs until :meth:`stop` or a cancel, or until none is left."""
        with self._signals():
            if self._waits:
                async with self._worker:  # async tasks run on this loop
                    try:
                        await self._is_stopped.wait()
                    finally:
                        self.stop()
                return
            running = asyncio.ensure_future(asyncio.to_thread(self._worker.run_until_empty))
            try:
                await asyncio.shield(running)
            finally:
                self.stop()
                await running

    @contextmanager
    def _signals(self) -> Iterator[None]:
        is_main = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGINT, signal.SIGTERM) if self._handles_signals and is_main else ()
        loop = asyncio.get_running_loop()
        for number in numbers:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
