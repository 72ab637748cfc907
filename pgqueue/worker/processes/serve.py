"""The main loop of a child process: runs the jobs of one task, one after another."""

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread, Timer
from typing import Any, NamedTuple
from uuid import UUID

from pgqueue import execution
from pgqueue.context import Around, Finishing, JobContext, Progress
from pgqueue.errors import TaskDefinitionError
from pgqueue.execution.attempt import logger as attempts_logger
from pgqueue.execution.error_reports import report
from pgqueue.job_queue import PgQueue
from pgqueue.meta import read_meta
from pgqueue.middleware import around_handlers, layers_of
from pgqueue.repository import Claimed
from pgqueue.tasks import Task
from pgqueue.worker.processes import protocol
from pgqueue.worker.processes.finishing import ChildDatabase, ChildFinishing
from pgqueue.worker.processes.protocol import AttemptKey

REPORT_EVERY = 1.0
"""Seconds between two lines about the progress of a handler."""


def serve(
    link: socket.socket,
    lines: Iterable[bytes],
    setup: Mapping[str, Any],
    failure: BaseException | None,
) -> None:
    """Get ready, report it, and run jobs until the worker sends ``leave``."""
    with ExitStack() as home:
        try:
            if failure is not None:
                raise failure
            task = _find(setup["task"], *setup["address"])
            home.enter_context(task.owner.in_child(setup["home"]))
            owner = task.owner
            assert isinstance(owner, PgQueue), "which has registered the task"
            around = around_handlers(layers_of(owner.around_jobs(), owner.middlewares))
            inbox = Inbox(lines)
            inbox.start()
            _limit_memory(setup["memory_limit"], task.name)
        except BaseException as error:  # the application's code, which may even exit
            link.sendall(protocol.refusal(report(error)))
            return
        # The worker logs the outcomes.
        attempts_logger.disabled = True
        link.sendall(protocol.READY)
        _work(task, inbox, Outbox(link), around, ChildDatabase(owner))


def _work(
    task: Task[..., Any], inbox: "Inbox", outbox: "Outbox", around: Around, database: ChildDatabase
) -> None:
    while (job := inbox.jobs.get()) is not None:
        claimed = job.claimed
        of = AttemptKey(claimed.message_id, claimed.attempt)
        context = inbox.context(
            claimed, partial(outbox.report, of), _finishing(task, job, database, outbox)
        )
        outcome = execution.run(task, claimed, context, around=around).outcome
        outbox.send(protocol.answer(of, outcome))


class ToRun(NamedTuple):
    """A job to run, and the worker that has its lease if its handler may end it itself."""

    claimed: Claimed
    worker_id: UUID | None


def _finishing(
    task: Task[..., Any], job: ToRun, database: ChildDatabase, outbox: "Outbox"
) -> Callable[[], Finishing] | None:
    claimed, worker_id = job
    if worker_id is None:
        return None
    of = AttemptKey(claimed.message_id, claimed.attempt)
    announce = partial(outbox.send, protocol.finished(of))
    return cache(lambda: ChildFinishing(task, claimed, worker_id, database, on_done=announce))


class Inbox(Thread):
    """Reads from the worker while a handler runs: jobs, cancels, stops, the end of the worker."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        super().__init__(name="pgqueue-inbox", daemon=True)
        self.jobs: SimpleQueue[ToRun | None] = SimpleQueue()
        self._lines = lines
        self._cancelled: AttemptKey | None = None
        self._is_stopping = False

    def run(self) -> None:
        for line in self._lines:
            match json.loads(line):
                case {"run": fields, "worker_id": worker_id}:
                    of_worker = None if worker_id is None else UUID(worker_id)
                    self.jobs.put(ToRun(Claimed(*fields), of_worker))
                case {"of": of, "cancelled": cancelled, "stopping": stopping}:
                    self._cancelled = AttemptKey(*of) if cancelled else None
                    self._is_stopping = stopping
                case {"leave": True}:
                    self.jobs.put(None)
        # The worker has died.  Kill this process and those that its handler has started.
        os.killpg(0, signal.SIGKILL)

    def context(
        self,
        claimed: Claimed,
        reporting: Callable[[Progress], None],
        finishing: Callable[[], Finishing] | None,
    ) -> JobContext:
        of = AttemptKey(claimed.message_id, claimed.attempt)
        return JobContext(
            job_id=claimed.job_id,
            attempt=claimed.attempt,
            max_attempts=claimed.max_attempts,
            queue=claimed.queue,
            task=claimed.task,
            cancelled=lambda: self._cancelled == of,
            meta=read_meta(claimed.meta),
            stopping=lambda: self._is_stopping,
            reporting=reporting,
            finishing=finishing,
        )


class Outbox:
    """Writes to the worker: how the job has ended, and before it what the handler reports, once a
    second."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._lock = Lock()
        self._report: bytes | None = None
        self._timer: Timer | None = None

    def report(self, of: AttemptKey, progress: Progress) -> None:
        with self._lock:
            self._report = protocol.report(of, progress)
            if self._timer is not None:
                return
            self._send_report()
            timer = Timer(REPORT_EVERY, self._send_later)
            timer.daemon = True
            with suppress(RuntimeError):  # no more threads: the next report is sent at once too
                timer.start()
                self._timer = timer

    def send(self, line: bytes) -> None:
        with self._lock:
            self._send_report()
            self._link.sendall(line)

    def _send_later(self) -> None:
        with self._lock:
            self._timer = None
            self._send_report()

    def _send_report(self) -> None:
        line, self._report = self._report, None
        if line is not None:
            with suppress(OSError):  # the answer fails too, and ends this process
                self._link.sendall(line)


def _find(name: str, module: str, path: str) -> Task[Any, Any]:
    """Find the task by its function's name, inside other decorators if there are any."""
    found: Any = sys.modules[module] if module == "__main__" else import_module(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    while found is not None and not isinstance(found, Task):
        found = getattr(found, "__wrapped__", None)
    if found is None or found.name != name:
        raise TaskDefinitionError(
            f"task {name}: executor='process' looks for it in another process, and {path!r} in "
            f"{module} is not this task; leave the decorated function under its own name"
        )
    return found


def _limit_memory(limit: int | None, task_name: str) -> None:
    """Limit the address space of this process; the handler cannot raise the limit."""
    if limit is None:
        return
    import resource  # not on every platform; elsewhere the option is refused

    used = _address_space()
    if used >= limit:
        raise MemoryError(
            f"task {task_name}: memory_limit is {limit:,} bytes, and its process has {used:,} "
            "bytes of address space before the handler starts; raise it well above that"
        )
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _address_space() -> int:
    try:
        pages = Path("/proc/self/statm").read_text().split()[0]
    except OSError:  # not Linux
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
