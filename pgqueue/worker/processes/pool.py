"""The worker's side: the pool of its child processes, and how each runs an attempt."""

import os
import select
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing.connection import wait
from threading import Lock
from typing import Any

from pgqueue import redaction
from pgqueue.context import Around, Progress
from pgqueue.handler.attempt import RunningAttempt
from pgqueue.handler.error_reports import log_fields
from pgqueue.handler.outcome import (
    after_crash,
    after_error,
    after_timeout,
    log_failure,
    log_waiting,
)
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
from pgqueue.worker.processes.channel import (
    NOTICE,
    STOP,
    BadMessage,
    Channel,
    ChildAnswer,
    ChildJob,
)
from pgqueue.worker.processes.child import StepsOf, Tasks, run_jobs
from pgqueue.worker.processes.server import FORK, NUMBER, kill_group, start_server
from pgqueue.worker.threads import wait_until

logger = redaction.logger(__name__)

STARTS_WITHIN = 10.0
"""Seconds to wait for the server to fork a child; then the job is released."""
ENDS_WITHIN = 10.0
"""Seconds to wait for the end of a child that has closed its connection, and for its status."""
IS_KILLED_WITHIN = 1.0
"""Seconds to wait for the end of a child or of the server that was killed."""
LONGEST_WAIT = 3600.0


class NotStarted(Exception):
    """The server has not forked a child."""


class Died(Exception):
    """A child has ended before its answer, by itself."""


class ProcessPool:
    """The child processes of one worker, and their server, if any task asks for them."""

    name = "the server of the child processes"

    def __init__(
        self, tasks: Tasks, around: Around, resources: Mapping[Any, Any], *, max_jobs: int
    ) -> None:
        """``resources``: what a child has for handlers.  ``max_jobs``: after how many jobs a child
        is replaced, for handlers that leak memory."""
        self._is_needed = any(task.in_process for task in tasks.values())
        self._run_jobs = partial(run_jobs, tasks, around, resources)
        self._max_jobs = max_jobs
        self._lock = Lock()
        self._idle: list[ChildProcess] = []
        self._busy: set[ChildProcess] = set()
        self._is_closing = False
        self._control: socket.socket | None = None
        self._server = 0
        self._noted: set[str] = set()

    def start(self, steps_of: StepsOf) -> None:
        """Fork the server.  Call it before the worker starts threads and opens connections."""
        if self._is_needed:
            self._server, self._control = start_server(partial(self._run_jobs, steps_of))
            self._control.settimeout(STARTS_WITHIN)

    @property
    def failure(self) -> ChildProcessError | None:
        """Why no child can be started any more: a process with threads must not be forked."""
        if self._control is None or self._is_closing or not wait([self._control], 0):
            return None
        return ChildProcessError("it has ended; its children, if any, were killed")

    def run(self, attempt: RunningAttempt) -> Outcome:
        """Run one attempt in a child.

        If the child has run other jobs and dies, one of these may be the reason.  The handler is
        started again, in a fresh child, and only the death of that child counts.
        """
        task, claimed = attempt.task, attempt.claimed
        must_be_fresh = False
        while (child := self._take(fresh=must_be_fresh)) is not None:
            try:
                child.start()
                attempt.begin_in(child)
                answer = child.run(attempt)
                self._note(attempt, answer)
                return answer.outcome
            except NotStarted as reason:
                if not self._is_closing:
                    words = "job %d %s is released: %s"
                    logger.warning(
                        words, claimed.job_id, task.name, reason, extra=log_fields(claimed)
                    )
                return Released()
            except Died as reason:
                if child.is_fresh or attempt.is_cancelled():
                    return after_crash(task, claimed, f"the handler's process {reason}")
                if attempt.is_stopping():
                    return Released()
                logger.warning(
                    "job %d %s: the handler's process %s; it had run other jobs before, so the "
                    "handler is started again in a fresh process",
                    *(claimed.job_id, task.name, reason),
                    extra=log_fields(claimed),
                )
                must_be_fresh = True
            except (BadMessage, OSError) as error:  # OSError: no more processes or files
                return after_error(task, claimed, error)
            finally:
                attempt.leave_child()
                self._keep_or_kill(child)
        return Released()

    def interrupt(self) -> bool:
        """Kill busy children, and start no more; returns whether any handler was interrupted.

        Whoever waits for a child or for the server also waits for the control socket, and wakes up.
        """
        with self._lock:
            self._is_closing = True
            busy, control = list(self._busy), self._control
        for child in busy:
            child.kill(AttemptEnd.INTERRUPTED)
        if control is not None:
            with suppress(OSError):  # it is shut down already
                control.shutdown(socket.SHUT_RDWR)  # even if a handler has forked this process
        return any(child.has_started for child in busy)

    def close(self) -> None:
        """End all children, and their server."""
        self.interrupt()
        with self._lock:
            idle, self._idle = self._idle, []
            control, self._control = self._control, None
        for child in idle:
            child.close()
        if control is not None:
            wait_until(self._has_server_ended, lambda: IS_KILLED_WITHIN)
            if not self._has_server_ended():  # it is frozen
                os.kill(self._server, signal.SIGKILL)
                wait_until(self._has_server_ended, lambda: IS_KILLED_WITHIN)
            control.close()

    def _has_server_ended(self) -> bool:
        try:
            return os.waitpid(self._server, os.WNOHANG) != (0, 0)
        except ChildProcessError:  # it was waited for, here or by the application
            return True

    def _take(self, *, fresh: bool) -> "ChildProcess | None":
        """Take an idle child, or one to start; None when the worker stops."""
        with self._lock:
            if self._is_closing or self._control is None:
                return None
            while self._idle and self._idle[-1].has_ended:
                self._idle.pop().close()
            if self._idle and not fresh:
                child = self._idle.pop()
            else:
                child = ChildProcess(self._control, max_jobs=self._max_jobs)
            self._busy.add(child)
        return child

    def _keep_or_kill(self, child: "ChildProcess") -> None:
        with self._lock:
            self._busy.discard(child)
            is_kept = child.may_stay and not self._is_closing
            if is_kept:
                self._idle.append(child)
        if not is_kept:
            child.close()

    def _note(self, attempt: RunningAttempt, answer: ChildAnswer) -> None:
        """Log why a child is not kept: once for each task and each reason."""
        words = f"{attempt.task.name}: {answer.left_behind}"
        if answer.left_behind and words not in self._noted:
            self._noted.add(words)
            logger.info(
                "task %s: its handler has left %s in its process, which is replaced",
                attempt.task.name,
                answer.left_behind,
                extra=log_fields(attempt.claimed),
            )


class ChildProcess:
    """The worker's side of a child.  One slot at a time uses it; any thread may kill it."""

    def __init__(self, control: socket.socket, *, max_jobs: int) -> None:
        """``control``: the socket of the server, which :meth:`start` asks to fork the child."""
        self.killed_for: AttemptEnd | None = None
        self._control = control
        self._max_jobs = max_jobs
        self._jobs_begun = 0
        self._has_answered = False
        self._lock = Lock()
        """Held to use or to close what other threads than the slot's use."""
        self._pid: int | None = None
        self._process: int | None = None
        """The descriptor of the process (pidfd), which is readable when it has ended."""
        self._status: int | None = None
        self._files = ExitStack()

    @property
    def has_started(self) -> bool:
        return self._pid is not None

    @property
    def pid(self) -> int | None:
        """Its process; None before it was started."""
        return self._pid

    @property
    def is_fresh(self) -> bool:
        """Whether it has run no other job than its last one."""
        return self._jobs_begun <= 1

    @property
    def may_stay(self) -> bool:
        """Whether it can run another job."""
        is_intact = self._has_answered and self.killed_for is None
        return is_intact and self._jobs_begun < self._max_jobs

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended: its number may be another one's by now."""
        return self._has_ended(within=0)

    def start(self) -> None:
        """Have the server fork it, if it does not run yet.  Raises OSError and NotStarted."""
        if self.has_started:
            return
        pairs = [socket.socketpair() for _ in range(3)]
        (jobs, _), (self._notices, _), (self._life, _) = pairs
        for ours, _ in pairs:
            self._files.enter_context(ours)
        self._jobs = Channel(jobs)
        self._notices.setblocking(False)
        self._life.setblocking(False)
        try:
            socket.send_fds(self._control, [FORK], [theirs.fileno() for _, theirs in pairs])
        except (BrokenPipeError, ConnectionResetError, TimeoutError) as error:
            raise NotStarted(
                f"the server of the child processes does not answer: {error}"
            ) from error
        finally:
            for _, theirs in pairs:
                theirs.close()
        if self._life not in wait([self._life, self._control], STARTS_WITHIN):
            raise NotStarted("the server of the child processes does not answer")
        told, descriptors, *_ = socket.recv_fds(self._life, NUMBER.size, 1)
        if descriptors:
            [self._process] = descriptors
            self._files.callback(os.close, self._process)
        if not told:
            raise NotStarted("the server of the child processes has ended, or has no more files")
        (number,) = NUMBER.unpack(told)
        if number < 0:
            raise OSError(-number, os.strerror(-number))
        self._pid = number

    def run(self, attempt: RunningAttempt) -> ChildAnswer:
        """Run one attempt; returns by its timeout, whatever the handler does.

        Raises Died and BadMessage.
        """
        self._has_answered = False
        self._jobs_begun += 1
        attempt.begin()
        wait_for = partial(self._wait_for, until=attempt.deadline)
        try:
            self._jobs.send(ChildJob(attempt.claimed, attempt.worker_id), wait_for)
            self.notify(attempt)
            while isinstance(message := self._jobs.receive(wait_for), Progress):
                attempt.report(message)
        except (EOFError, OSError):
            return ChildAnswer(self._outcome_after_end(attempt))
        if not isinstance(message, ChildAnswer):
            raise BadMessage(f"the handler's process has sent {type(message).__name__}")
        self._has_answered = not message.left_behind
        self._log(attempt, message.outcome)
        return message

    def notify(self, attempt: RunningAttempt) -> None:
        """Tell the handler whether it is cancelled, and whether the worker stops.

        Never waits, because the heartbeat calls it: a child reads these messages before each job.
        """
        with self._lock, suppress(OSError):  # the child has died, or is closed
            if attempt.is_cancelled():
                self._notices.send(NOTICE.pack(attempt.claimed.message_id))
            if attempt.is_stopping():
                self._notices.send(NOTICE.pack(STOP))

    def kill(self, end: AttemptEnd | None = None) -> None:
        """Kill the child and the processes of its group; its attempt ends as ``end``."""
        with self._lock:
            self.killed_for = self.killed_for or end
            if self._pid is not None and not self.has_ended:
                kill_group(self._pid)

    def show_stack(self) -> None:
        """Let the child write to stderr what its threads are doing."""
        with self._lock:
            if self._pid is not None and not self.has_ended:
                os.kill(self._pid, signal.SIGUSR1)

    def close(self) -> None:
        self.kill()
        with self._lock:
            self._pid = None
            self._files.close()

    def _wait_for(self, event: int, *, until: float | None) -> None:
        """Wait until the child reads or writes.  Raises EOFError if it, or its server, has ended.

        Kills it at the deadline.
        """
        poll = select.poll()
        poll.register(self._jobs, event)
        poll.register(self._control, select.POLLIN)
        poll.register(self._life if self._process is None else self._process, select.POLLIN)
        while True:
            left = LONGEST_WAIT if until is None else max(until - time.monotonic(), 0)
            ready = [number for number, _ in poll.poll(1000 * min(left, LONGEST_WAIT))]
            if left == 0:
                self.kill(AttemptEnd.TIMEOUT)
                raise EOFError
            if self._jobs.fileno() in ready:
                return
            if ready:
                raise EOFError

    def _has_ended(self, *, within: float) -> bool:
        """Whether the process ends within so many seconds, if its server does not end before."""
        if self._process is None:
            return self._exit_status(within=within) is not None
        return self._process in wait([self._process, self._control], within)

    def _exit_status(self, *, within: float) -> int | None:
        """The exit status, once the server has told it."""
        if self._status is None and wait([self._life, self._control], within):
            with suppress(OSError):  # the server has ended, or another thread has read it
                if told := self._life.recv(NUMBER.size):
                    (self._status,) = NUMBER.unpack(told)
        return self._status

    def _outcome_after_end(self, attempt: RunningAttempt) -> Outcome:
        """The outcome of an attempt whose child has ended, or has closed its connection.

        Raises Died if nobody has killed it.
        """
        if self.killed_for is None:
            deadline = float("inf") if attempt.deadline is None else attempt.deadline
            within = max(min(deadline - time.monotonic(), ENDS_WITHIN), 0)
            if not self._has_ended(within=within):
                self.kill(AttemptEnd.TIMEOUT if time.monotonic() >= deadline else None)
        if self.killed_for is not None:
            self._has_ended(within=IS_KILLED_WITHIN)
        match self.killed_for:
            case AttemptEnd.TIMEOUT:
                return after_timeout(attempt.task, attempt.claimed)
            case AttemptEnd.INTERRUPTED:
                return Interrupted(attempt.task.settings.max_interruptions)
            case AttemptEnd.CANCELLED:
                return Cancelled("a cancel has killed the handler's process")
        raise Died(self._reason(self._exit_status(within=ENDS_WITHIN)))

    def _reason(self, status: int | None) -> str:
        if status is None and wait([self._control], 0):
            return "was killed together with the server of the child processes"
        if status is None:
            return "has ended; its server has not told how"
        if status >= 0:
            return f"ended with exit code {status}"
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:  # a signal without a name
            return f"was killed by signal {-status}"

    def _log(self, attempt: RunningAttempt, outcome: Outcome) -> None:
        if isinstance(outcome, Retried | Failed) and outcome.end is not AttemptEnd.DISCARDED:
            log_failure(attempt.task, attempt.claimed, outcome)
            if outcome.error.type == "MemoryError":
                self._has_answered = False  # its memory may not be enough for the next job
        if isinstance(outcome, Unreadable):
            log_waiting(outcome.error.message)
