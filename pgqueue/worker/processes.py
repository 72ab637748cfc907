"""Handlers in child processes.

    worker --control--> server --forks--> child <--jobs, signals--> worker

The worker forks one server process when it starts, while it has neither threads nor connections of
its own.  The server has the application, which nobody imports again, and runs none of its code: it
forks a child for each request, within milliseconds, and tells the worker how each child has ended.
A child runs one job at a time, of any task, and is kept for the next job.  Messages are pickled, as
``multiprocessing`` does it: a child is the same program as its worker.
"""

import ctypes
import gc
import os
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Lock, Timer
from typing import Any

import psycopg
from sqlalchemy import Engine
from sqlalchemy.util import ThreadLocalRegistry

from pgqueue.context import Around, JobContext, Progress
from pgqueue.database.keepalive import leave_to_parent
from pgqueue.handler.attempt import RunningAttempt
from pgqueue.handler.call import call
from pgqueue.handler.outcome import (
    after_crash,
    after_error,
    after_timeout,
    log_failure,
    log_waiting,
)
from pgqueue.handler.outcome import logger as attempts_logger
from pgqueue.meta import read_meta
from pgqueue.outcomes import (
    AttemptEnd,
    Cancelled,
    Failed,
    Interrupted,
    Outcome,
    Released,
    Retried,
    Unreadable,
)
from pgqueue.repository.claim import Claimed
from pgqueue.tasks import Task

PR_SET_PDEATHSIG = 1
TELL_WITHIN = 10.0
"""Seconds to wait for the exit status of a child, before and after it is killed."""
REPORT_EVERY = 1.0
"""Seconds between two messages about the progress of a handler."""
FORK = b"f"
OF_WORKER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that the worker handles, also if they are sent to the whole process group."""

Tasks = Mapping[str, Task[..., Any]]
RunJobs = Callable[[Connection, Connection], None]


class ProcessPool:
    """The child processes of one worker, and their server, if any task asks for them."""

    name = "the server of the child processes"

    def __init__(self, tasks: Tasks, around: Around, *, max_jobs: int) -> None:
        """``max_jobs``: after how many jobs a child is replaced, for handlers that leak memory."""
        self._is_needed = any(task.in_process for task in tasks.values())
        self._run_jobs = partial(_run_jobs, tasks, around)
        self._max_jobs = max_jobs
        self._lock = Lock()
        self._idle: list[Child] = []
        self._busy: set[Child] = set()
        self._is_closing = False
        self._control: socket.socket | None = None
        self._server = 0

    def start(self) -> None:
        """Fork the server.  Call it before the worker starts threads and opens connections."""
        if not self._is_needed:
            return
        control, end_of_server = socket.socketpair()
        worker = os.getpid()

        def serve() -> None:
            control.close()
            _forget_connections()
            _Server(end_of_server, self._run_jobs).serve(worker)

        with end_of_server:
            self._server = _fork(serve)
        self._control = control

    @property
    def failure(self) -> ChildProcessError | None:
        """Why no child can be started any more: a process with threads must not be forked."""
        if self._control is None or self._is_closing or not wait([self._control], 0):
            return None
        return ChildProcessError("it has ended; its children, if any, were killed")

    def run(self, attempt: RunningAttempt) -> Outcome:
        """Run one attempt in a child."""
        try:
            child = self._taken()
        except OSError as error:  # no more processes or files
            return after_error(attempt.task, attempt.claimed, error)
        if child is None:
            return Released()
        attempt.begin_in(child)
        outcome = child.run(attempt)
        attempt.leave_child()
        self._put_back(child)
        return outcome

    def interrupt(self) -> bool:
        """Kill busy children, and start no more; returns whether any child was busy."""
        with self._lock:
            self._is_closing = True
            busy = list(self._busy)
        for child in busy:
            child.kill(AttemptEnd.INTERRUPTED)
        return bool(busy)

    def close(self) -> None:
        """End all children, and their server."""
        self.interrupt()
        for child in self._idle:
            child.close()
        control, self._control = self._control, None
        if control is None:
            return
        with suppress(OSError):
            control.shutdown(socket.SHUT_RDWR)  # even if a handler has forked this process
        with suppress(ChildProcessError):  # the application has waited for it
            os.waitpid(self._server, 0)
        control.close()

    def _taken(self) -> "Child | None":
        """Take an idle child, or start one; None when the worker stops or the server has ended."""
        with self._lock:
            while self._idle and self._idle[-1].has_ended:
                self._idle.pop().close()
            child = self._idle.pop() if self._idle else None
            control = None if self._is_closing else self._control
        if child is None:
            if control is None:
                return None
            try:
                child = Child(control, max_jobs=self._max_jobs)
            except (BrokenPipeError, ConnectionResetError, EOFError):
                return None  # the server has ended, and so does the worker
        with self._lock:
            self._busy.add(child)
            is_closing = self._is_closing
        if is_closing:
            child.kill(AttemptEnd.INTERRUPTED)
        return child

    def _put_back(self, child: "Child") -> None:
        with self._lock:
            self._busy.discard(child)
            stays = child.may_stay and not self._is_closing
            if stays:
                self._idle.append(child)
        if not stays:
            child.close()


class Child:
    """The worker's side of a child process.  One slot at a time uses it; any thread may kill it."""

    def __init__(self, control: socket.socket, *, max_jobs: int) -> None:
        self.killed_for: AttemptEnd | None = None
        self._control = control
        self._jobs_left = max_jobs
        self._jobs, jobs = Pipe()
        """Carries jobs to the child, and progress and outcomes from it."""
        self._signals, signals = Pipe()
        """Carries cancels and stops to the child.  From the server come the child's pid, or the
        error of the fork, and later the child's exit status."""
        with jobs, signals:
            socket.send_fds(control, [FORK], [jobs.fileno(), signals.fileno()])
        started = self._signals.recv()
        if isinstance(started, OSError):
            raise started
        self._pid: int | None = started

    @property
    def has_ended(self) -> bool:
        return self._signals.poll()

    @property
    def may_stay(self) -> bool:
        """Whether it can run another job."""
        return self._pid is not None and self.killed_for is None and self._jobs_left > 0

    def run(self, attempt: RunningAttempt) -> Outcome:
        """Run one attempt; returns by its timeout, whatever the handler does."""
        self._jobs_left -= 1
        attempt.begin()
        with suppress(EOFError, OSError):  # it has died, or has closed its connection
            self._jobs.send(attempt.claimed)
            self.notify(attempt)
            while self._answers(until=attempt.deadline):
                message = self._jobs.recv()
                if not isinstance(message, Progress):
                    return self._after_answer(attempt, message)
                attempt.report(message)
        return self._after_death(attempt)

    def notify(self, attempt: RunningAttempt) -> None:
        """Tell the handler whether it is cancelled, and whether the worker stops.

        Never waits, because the heartbeat calls it: a child reads these messages before each job.
        """
        with suppress(OSError):  # the child has died
            if attempt.is_cancelled():
                self._signals.send(attempt.claimed.message_id)
            if attempt.is_stopping():
                self._signals.send(None)

    def kill(self, end: AttemptEnd | None = None) -> None:
        """Kill the child and the processes of its group; its attempt ends as ``end``."""
        self.killed_for = self.killed_for or end
        if (pid := self._pid) is not None:
            for kill in (os.killpg, os.kill):  # its handler may have moved it to another group
                with suppress(ProcessLookupError, PermissionError):
                    kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._pid = None
        self._jobs.close()
        self._signals.close()

    def _answers(self, *, until: float | None) -> bool:
        """Wait for a message from the child; False if it, or its server, has ended.

        Kills it at the deadline.
        """
        left = None if until is None else max(until - time.monotonic(), 0)
        ready = wait([self._jobs, self._signals, self._control], left)
        if not ready or left == 0:
            self.kill(AttemptEnd.TIMEOUT)
            return False
        return self._jobs in ready

    def _after_answer(self, attempt: RunningAttempt, outcome: Outcome) -> Outcome:
        if isinstance(outcome, Retried | Failed) and outcome.end is not AttemptEnd.DISCARDED:
            log_failure(attempt.task, attempt.claimed, outcome)
            if outcome.error.type == "MemoryError":
                self._jobs_left = 0  # its memory may not be enough for the next job
        if isinstance(outcome, Unreadable):
            log_waiting(outcome.error.message)
        return outcome

    def _after_death(self, attempt: RunningAttempt) -> Outcome:
        status = self._exit_status()
        match self.killed_for:
            case AttemptEnd.TIMEOUT:
                return after_timeout(attempt.task, attempt.claimed)
            case AttemptEnd.INTERRUPTED:
                return Interrupted(attempt.task.settings.max_interruptions)
            case AttemptEnd.CANCELLED:
                return Cancelled("a cancel has killed the handler's process")
        reason = f"the handler's process {_reason_of(status)}"
        return after_crash(attempt.task, attempt.claimed, reason)

    def _exit_status(self) -> int | None:
        """The exit status of a child that has ended, or that is killed if it does not end."""
        status = None
        with suppress(EOFError, OSError):  # the server has ended, and its children with it
            if not self._signals.poll(TELL_WITHIN):  # it has only closed its connection
                self.kill()
            if self._signals.poll(TELL_WITHIN):
                status = self._signals.recv()
        if status is None:
            self.kill()
        self._pid = None  # the number may be another process's now
        return status


def _reason_of(status: int | None) -> str:
    if status is None:
        return "was killed together with the server of the child processes"
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a signal without a name
        return f"was killed by signal {-status}"


def _fork(run: Callable[[], None]) -> int:
    """Run a function in a new process, which then ends; returns the pid.

    The new process ends without Python's exit handlers: they are the application's in the worker.
    """
    _flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12, if there are threads
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        _flush()
        os._exit(code)


def _flush() -> None:
    """Write out what was printed: a fork would copy it, and ``os._exit`` lose it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # there is none, or it is closed
            stream.flush()


class _Server:
    """The server process.  Its one thread runs none of the application's code."""

    def __init__(self, control: socket.socket, run_jobs: RunJobs) -> None:
        self._control = control
        self._run_jobs = run_jobs
        self._children: dict[int, Connection] = {}
        # Signals sent to the whole group are handled by the worker, which lets handlers finish.
        # Not SIG_IGN: programs that a handler starts would inherit it, and could not be terminated.
        for number in OF_WORKER:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _ignore)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        self._wake_up, written_by_signals = os.pipe()
        os.set_blocking(written_by_signals, False)
        signal.set_wakeup_fd(written_by_signals, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)

    def serve(self, worker: int) -> None:
        """Fork children until the worker has ended or closes the control socket."""
        # The kernel sends it when the thread that forked this process ends, or the thread that
        # inherits it.  The worker may go on then, so the loop asks for the parent.
        _signal_at_end_of_parent(signal.SIGCHLD)
        while os.getppid() == worker:
            ready = wait([self._control, self._wake_up])
            if self._wake_up in ready:
                os.read(self._wake_up, 4096)
                self._reap()
            if self._control in ready:
                request, ends, *_ = socket.recv_fds(self._control, len(FORK), 2)
                if not request:
                    break
                for end in ends:
                    os.set_inheritable(end, False)
                self._fork(jobs=Connection(ends[0]), signals=Connection(ends[1]))
        for pid in self._children:
            _kill_group(pid)

    def _fork(self, *, jobs: Connection, signals: Connection) -> None:
        try:
            pid = _fork(partial(self._become_child, os.getpid(), jobs, signals))
        except OSError as error:  # no more processes or memory
            _tell(signals, error)
            signals.close()
        else:
            with suppress(OSError):  # it has ended
                os.setpgid(pid, pid)
            self._children[pid] = signals
            _tell(signals, pid)
        jobs.close()

    def _become_child(self, server: int, jobs: Connection, signals: Connection) -> None:
        _signal_at_end_of_parent(signal.SIGKILL)
        if os.getppid() != server:
            return  # the server died before the signal was requested
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _let_forks_be_terminated()
        os.close(self._wake_up)
        self._control.close()
        for other in self._children.values():
            other.close()
        gc.enable()
        self._run_jobs(jobs, signals)

    def _reap(self) -> None:
        """Tell the worker of children that have ended; kill what their handlers have started."""
        for pid in list(self._children):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                _kill_group(pid)  # before the kernel may reuse the number
                _, status = os.waitpid(pid, 0)
                signals = self._children.pop(pid)
                _tell(signals, os.waitstatus_to_exitcode(status))
                signals.close()


def _ignore(_number: int, _frame: object) -> None:
    """Ignore a signal: the worker handles it, or the main loop wakes up by it."""


def _let_forks_be_terminated() -> None:
    """Reset the signals in processes that a handler forks, as exec resets them in programs.

    Until that is done they are blocked: a signal that is sent at once waits.
    """
    masks: list[Any] = []

    def before() -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, OF_WORKER))

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    def after_in_child() -> None:
        for number in OF_WORKER:
            if signal.getsignal(number) is _ignore:
                is_interrupt = number is signal.SIGINT
                default = signal.default_int_handler if is_interrupt else signal.SIG_DFL
                signal.signal(number, default)
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=after_in_child)


def _signal_at_end_of_parent(number: signal.Signals) -> None:
    """Ask the kernel for a signal when the parent ends; elsewhere than on Linux, do without."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def _forget_connections() -> None:
    """Leave the connections that the application has opened to the worker.

    Engines get new pools, and the sessions of a ``scoped_session`` are forgotten.
    """
    gc.disable()  # until a child has started: a collected Session would roll back in the worker
    gc.unfreeze()
    found = gc.get_objects()  # type() below, not isinstance(): a lazy proxy would be evaluated
    leave_to_parent([each for each in found if issubclass(type(each), psycopg.BaseConnection)])
    for each in found:
        if issubclass(type(each), Engine):
            each.dispose(close=False)
        elif issubclass(type(each), ThreadLocalRegistry):
            each.clear()
    del found
    gc.freeze()  # children share the memory of objects that the garbage collector leaves alone


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _tell(signals: Connection, message: int | OSError) -> None:
    with suppress(OSError):  # the worker has closed its end
        signals.send(message)


def _run_jobs(tasks: Tasks, around: Around, jobs: Connection, signals: Connection) -> None:
    """The child process, until its worker has ended."""
    attempts_logger.disabled = True  # the worker logs the outcomes
    notices, sending = _Notices(signals), Lock()
    while True:
        try:
            claimed: Claimed = jobs.recv()
        except EOFError:
            return
        reports = _Reports(jobs, sending)
        notices.read()  # those for earlier jobs, which their handlers have not read
        context = JobContext(
            job_id=claimed.job_id,
            attempt=claimed.attempt,
            max_attempts=claimed.max_attempts,
            queue=claimed.queue,
            task=claimed.task,
            cancelled=partial(notices.is_cancelled, claimed.message_id),
            meta=read_meta(claimed.meta),
            stopping=notices.is_stopping,
            reporting=reports.report,
        )
        task = tasks[claimed.task]
        try:
            with _limited_memory(task):
                outcome = call(task, claimed, context, around=around)
        except MemoryError as error:
            outcome = after_error(task, claimed, error)
        _flush()
        reports.end(outcome)


class _Notices:
    """What the worker tells a child while a handler runs; read when the handler asks."""

    def __init__(self, signals: Connection) -> None:
        self._signals = signals
        self._poll = select.poll()
        self._poll.register(signals, select.POLLIN)
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
        with self._lock, suppress(EOFError):  # the worker has died, and this process is killed
            while self._poll.poll(0):
                notice: int | None = self._signals.recv()
                if notice is None:
                    self._is_stopping = True
                else:
                    self._cancelled = notice


class _Reports:
    """What a child tells its worker of one job: its progress, once a second, then its outcome.

    A thread that the handler has left behind reports nothing any more.
    """

    def __init__(self, jobs: Connection, lock: Lock) -> None:
        """``lock``: held to write to the pipe."""
        self._jobs = jobs
        self._lock = lock
        self._has_ended = False
        self._last: Progress | None = None
        self._timer: Timer | None = None

    def report(self, progress: Progress) -> None:
        with self._lock:
            if self._has_ended:
                return
            self._last = progress
            if self._timer is not None:
                return
            self._send_last()
            timer = Timer(REPORT_EVERY, self._send_later)
            timer.daemon = True
            with suppress(RuntimeError):  # no more threads: the next report is sent at once too
                timer.start()
                self._timer = timer

    def end(self, outcome: Outcome) -> None:
        with self._lock:
            self._send_last()
            self._has_ended = True
            self._jobs.send(outcome)

    def _send_later(self) -> None:
        with self._lock:
            self._timer = None
            self._send_last()

    def _send_last(self) -> None:
        progress, self._last = self._last, None
        if progress is not None:
            with suppress(OSError):  # the outcome fails too, and ends this process
                self._jobs.send(progress)


@contextmanager
def _limited_memory(task: Task[..., Any]) -> Iterator[None]:
    """Limit the address space of this process while a handler runs."""
    limit = task.settings.memory_limit
    if limit is None:
        yield
        return
    import resource  # not on every platform; elsewhere the option is refused

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
        resource.setrlimit(resource.RLIMIT_AS, before)
