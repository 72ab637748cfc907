"""What runs in a child: one job after another, and what their handlers leave in the process."""

import os
import resource
import signal
import socket
import threading

# That of ``signal`` makes enums, which takes ten times as long.  Typeshed has no stub for it.
from _signal import getsignal  # type: ignore[import-not-found]
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import copy_context
from pathlib import Path
from threading import Event, Lock
from typing import Any

from pgqueue.context import Around, Progress, Steps
from pgqueue.handler.attempt import RunningAttempt
from pgqueue.handler.call import call
from pgqueue.handler.outcome import after_error
from pgqueue.handler.outcome import logger as attempts_logger
from pgqueue.tasks import Task
from pgqueue.worker.processes.channel import (
    NOTICE,
    STOP,
    BadMessage,
    Channel,
    ChildAnswer,
    ChildJob,
)
from pgqueue.worker.processes.server import flush

REPORT_EVERY = 1.0
"""Seconds between two messages about the progress of a handler."""
SIGNALS = sorted(map(int, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}))
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)

Tasks = Mapping[str, Task[..., Any]]
StepsOf = Callable[[RunningAttempt], Steps]
"""Makes the steps of an attempt, which a child records itself, on a connection of its own."""


def run_jobs(
    tasks: Tasks,
    around: Around,
    resources: Mapping[Any, Any],
    steps_of: StepsOf,
    jobs: socket.socket,
    notices: socket.socket,
) -> None:
    """The child process, until its worker has ended."""
    attempts_logger.disabled = True  # the worker logs the outcomes
    channel, notes, sending = Channel(jobs), _Notices(notices), Lock()
    child, untouched = os.getpid(), _state()
    while True:
        try:
            job: ChildJob = channel.receive()
        except EOFError:
            return
        claimed, reports = job.claimed, _Reports(channel, sending)
        task = tasks[claimed.task]
        notes.read()  # those for earlier jobs, which their handlers have not read
        attempt = _Attempt(job, task, notes, reports, resources)
        attempt.steps = steps_of(attempt)
        try:
            with _limited_memory(task):
                context = attempt.context()
                outcome = copy_context().run(call, task, claimed, context, around=around)
        except MemoryError as error:
            outcome = after_error(task, claimed, error)
        flush()
        if os.getpid() != child:
            os._exit(0)  # a copy that the handler has forked, and which has returned too
        answer = ChildAnswer(outcome, _difference(untouched, _state()))
        try:
            reports.end(answer)
        except BadMessage as error:
            reports.end(answer._replace(outcome=after_error(task, claimed, error)))


def _state() -> dict[str, object]:
    """What a handler may leave changed for the next one: what in words, and how it is now.

    A thread of a library in C is not among these: such libraries keep theirs for the next call.
    """
    os.umask(umask := os.umask(0o77))
    directory = None
    with suppress(OSError):  # it was deleted
        directory = os.getcwd()
    return {
        "a thread": {one for one in threading.enumerate() if not isinstance(one, _LaterReport)},
        "a timer": [signal.getitimer(timer) for timer in TIMERS],
        "another handler of a signal": [getsignal(number) for number in SIGNALS],
        "a blocked signal": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "another limit of the process": [resource.getrlimit(limit) for limit in LIMITS],
        "another umask": umask,
        "another working directory": directory,
        # The mapping below it, where there is one: decoding all variables takes long.
        "another environment": dict(getattr(os.environ, "_data", os.environ)),
    }


def _difference(before: dict[str, object], now: dict[str, object]) -> str:
    return ", ".join(what for what, value in now.items() if value != before[what])


class _Notices:
    """What the worker tells a child while a handler runs; read when the handler asks."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._lock = Lock()
        self._cancelled: int | None = None
        """The message of the attempt that was cancelled; another one may run by now."""
        self._is_stopping = False

    def is_cancelled(self, message_id: int) -> bool:
        self.read()
        return self._cancelled == message_id

    def is_stopping(self) -> bool:
        self.read()
        return self._is_stopping

    def read(self) -> None:
        with self._lock, suppress(OSError):  # there are no more
            while notice := self._end.recv(NOTICE.size):
                (number,) = NOTICE.unpack(notice)
                if number == STOP:
                    self._is_stopping = True
                else:
                    self._cancelled = number


class _Attempt(RunningAttempt):
    """An attempt in its child: what the worker knows of it comes as notices."""

    def __init__(
        self,
        job: ChildJob,
        task: Task[..., Any],
        notes: _Notices,
        reports: "_Reports",
        resources: Mapping[Any, Any],
    ) -> None:
        super().__init__(
            job.claimed,
            task,
            worker_id=job.worker_id,
            stopping=Event(),
            resources=resources,
            report=lambda _, progress: reports.report(progress),
        )
        self._notes = notes

    def is_cancelled(self) -> bool:
        return self._notes.is_cancelled(self.claimed.message_id)

    def is_stopping(self) -> bool:
        return self._notes.is_stopping()


class _LaterReport(threading.Timer):
    """A thread of ours, which may end a moment after its job."""


class _Reports:
    """What a child tells its worker of one job: its progress, once a second, then its answer.

    A thread that the handler has left behind reports nothing any more.
    """

    def __init__(self, channel: Channel, lock: Lock) -> None:
        """``lock``: held to write to the channel."""
        self._channel = channel
        self._lock = lock
        self._has_ended = False
        self._last: Progress | None = None
        self._timer: _LaterReport | None = None

    def report(self, progress: Progress) -> None:
        with self._lock:
            if self._has_ended:
                return
            self._last = progress
            if self._timer is not None:
                return
            self._send_last()
            timer = _LaterReport(REPORT_EVERY, self._send_later)
            timer.daemon = True
            with suppress(RuntimeError):  # no more threads: the next report is sent at once too
                timer.start()
                self._timer = timer

    def end(self, answer: ChildAnswer) -> None:
        with self._lock:
            self._send_last()
            self._channel.send(answer)
            self._has_ended = True

    def _send_later(self) -> None:
        with self._lock:
            self._timer = None
            self._send_last()

    def _send_last(self) -> None:
        progress, self._last = self._last, None
        if progress is not None:
            with suppress(OSError):  # the answer fails too, and ends this process
                self._channel.send(progress)


@contextmanager
def _limited_memory(task: Task[..., Any]) -> Iterator[None]:
    """Limit the address space of this process while a handler runs."""
    limit = task.settings.memory_limit
    if limit is None:
        yield
        return
    used = 0
    with suppress(OSError):  # not Linux
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        used = pages * os.sysconf("SC_PAGE_SIZE")
    if used >= limit:
        raise MemoryError(
            f"task {task.name}: memory_limit is {limit:,} bytes, and its process has {used:,} "
            "bytes of address space before the handler starts; raise it well above that"
        )
    before = resource.getrlimit(resource.RLIMIT_AS)
    limits = [limit, *(one for one in before if one != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), before[1]))
    try:
        yield
    finally:
        with suppress(ValueError):  # its handler has lowered the limit for good
            resource.setrlimit(resource.RLIMIT_AS, before)
