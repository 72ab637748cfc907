"""The worker's side of a child process."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import spawn
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from threading import Lock
from typing import Any, Protocol
from uuid import UUID

from pgqueue import execution
from pgqueue.context import Finishing, Progress
from pgqueue.errors import TaskDefinitionError
from pgqueue.outcomes import (
    AttemptEnd,
    ErrorReport,
    Failed,
    Interrupted,
    Outcome,
    Retried,
    Succeeded,
    Unreadable,
)
from pgqueue.repository import Claimed
from pgqueue.tasks import Task
from pgqueue.worker.processes import protocol
from pgqueue.worker.processes.protocol import LONGEST_LINE, AttemptKey, ProtocolError

PROGRAM = Path(__file__).with_name("bootstrap.py")
READY_WITHIN = 60.0
"""Seconds in which a child must import the application, and in which it must accept a job."""
LOOK_EVERY = 0.25
"""Seconds between two checks whether the child lives, while its slot waits for an answer."""
DIE_WITHIN = 1.0
"""Seconds that a child has to end before it is killed."""
TELL_WITHIN = 10.0
"""The same for a child that has closed its connection: the exit status is the reason to report."""
MOST_JOBS = 10_000
"""Jobs after which a child is replaced, which bounds the memory that handlers leak."""


class Refused(Exception):
    """The child cannot run this task at all, for the reason in ``error``."""

    def __init__(self, error: ErrorReport) -> None:
        self.error = error


class EndOfJob(Finishing, Protocol):
    """What a worker does when its child reports that a handler has called ``ctx.finish()``."""

    def look(self) -> None: ...


class ProcessAttempt(Protocol):
    """The part of a running attempt that a child process needs."""

    child: "Child | None"

    @property
    def claimed(self) -> Claimed: ...

    @property
    def task(self) -> Task[..., Any]: ...

    @property
    def deadline(self) -> float | None: ...

    @property
    def is_settled(self) -> bool: ...

    @property
    def finishing(self) -> EndOfJob | None: ...

    worker_id: UUID

    def begin(self) -> None: ...

    def begin_in(self, child: "Child") -> None: ...

    def is_cancelled(self) -> bool: ...

    def is_stopping(self) -> bool: ...

    def report(self, progress: Progress) -> None: ...


class Child:
    """Runs the jobs of one task.  One slot at a time uses it; any thread may kill it."""

    def __init__(
        self, setup: Mapping[str, Any], *, start: Callable[..., "Popen[bytes]"], task_name: str
    ) -> None:
        self.task_name = task_name
        self.killed_for: AttemptEnd | None = None
        self._link, theirs = socket.socketpair()
        self._sending = Lock()
        self._received = bytearray()
        self._start_message = protocol.line(setup)
        self._is_ready = False
        self._jobs_left = MOST_JOBS
        with theirs:
            number = theirs.fileno()
            flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # -X, -W, -O ..., as multiprocessing passes them on
            self._process = start(
                [
                    os.fsdecode(spawn.get_executable()),
                    *flags,
                    str(PROGRAM),
                    str(number),
                    str(os.getpid()),
                ],
                stdin=DEVNULL,
                pass_fds=[number],
                process_group=0,
            )

    @property
    def may_stay(self) -> bool:
        """Whether it can run another job."""
        is_well = self.killed_for is None and self._jobs_left > 0
        return is_well and self._process.poll() is None

    def run(self, run: ProcessAttempt) -> Outcome:
        """Run one attempt; returns by its timeout, whatever the handler does."""
        key = AttemptKey(run.claimed.message_id, run.claimed.attempt)
        reason = "has closed its connection to the worker"
        try:
            self._get_ready()
            run.begin()
            self._send_job(run)
            answer = self._answer(run, key)
            if answer is not None:
                return self._after_answer(run, protocol.outcome_of(answer, key))
        except Refused as refused:
            self.kill(AttemptEnd.FAILED)
            return _after_refusal(run, refused.error)
        except TimeoutError:
            self.kill(AttemptEnd.TIMEOUT)
        except ProtocolError:
            self.kill(AttemptEnd.CRASHED)
            reason = "has sent an invalid answer"
        return self._after_death(run, reason)

    def notify(self, run: ProcessAttempt) -> None:
        """Tell the handler whether it is cancelled, and whether the worker stops.

        Never waits: the heartbeat calls this.
        """
        sent, asked = (False, False), (run.is_cancelled(), run.is_stopping())
        while sent != asked:
            if not self._sending.acquire(blocking=False):
                return  # the thread that is sending checks again after it has sent
            try:
                key = AttemptKey(run.claimed.message_id, run.claimed.attempt)
                message = {"of": key, "cancelled": asked[0], "stopping": asked[1]}
                os.write(self._link.fileno(), protocol.line(message))
            except OSError:
                return  # the child is dead, or does not read: the timeout applies
            finally:
                self._sending.release()
            sent, asked = asked, (run.is_cancelled(), run.is_stopping())

    def kill(self, end: AttemptEnd) -> None:
        """Kill the child and its process group; its attempt ends as ``end``."""
        self.killed_for = self.killed_for or end
        if self._process.poll() is None:
            self._kill_group()
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)  # so that its slot sees the end at once

    def ask_to_leave(self) -> None:
        with suppress(OSError):
            os.write(self._link.fileno(), protocol.line({"leave": True}))

    def reap(self, *, within: float = DIE_WITHIN) -> int | None:
        """Wait a moment for the child to end, kill it, and return its exit status, if any."""
        if self._link.fileno() < 0:
            return None  # reaped already
        if self.killed_for is None:
            with suppress(TimeoutExpired):
                self._process.wait(within)
        status = self._process.returncode
        # While processes of its group run, the kernel does not reuse the group's number.
        self._kill_group()
        self._link.close()
        with suppress(TimeoutExpired):
            self._process.wait(DIE_WITHIN)
        return status

    def _get_ready(self) -> None:
        """Wait until the child has imported the application, if it has not yet."""
        if self._is_ready:
            return
        self._send(self._start_message)
        answer = self._line(until=time.monotonic() + READY_WITHIN)
        if answer is None:
            return  # the child has died: the next read finds this out
        error = protocol.refusal_of(answer)
        if error is not None:
            raise Refused(error)
        self._is_ready = True

    def _send_job(self, run: ProcessAttempt) -> None:
        self._jobs_left -= 1
        # Only a handler that may call ctx.finish() needs the id.
        worker_id = None if run.finishing is None else str(run.worker_id)
        self._send(protocol.line({"run": run.claimed, "worker_id": worker_id}))
        self.notify(run)

    def _send(self, line: bytes) -> None:
        with self._sending, suppress(BrokenPipeError, ConnectionResetError):
            self._link.settimeout(READY_WITHIN)
            self._link.sendall(line)

    def _answer(self, run: ProcessAttempt, key: AttemptKey) -> bytes | None:
        """Handle progress and ctx.finish() until the child answers; returns the answer."""
        while (answer := self._line(until=run.deadline)) is not None:
            progress = protocol.progress_of(answer, key)
            if progress is not None:
                run.report(progress)
            elif run.finishing is not None and protocol.is_finished(answer, key):
                run.finishing.look()
            else:
                return answer
        return None

    def _line(self, *, until: float | None) -> bytes | None:
        """The next line from the child; None if it has died.  Raises TimeoutError."""
        while (end := self._received.find(b"\n")) < 0:
            if len(self._received) > LONGEST_LINE:
                raise ProtocolError
            chunk = self._receive(until)
            if not chunk:
                return None
            self._received += chunk
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line

    def _receive(self, until: float | None) -> bytes:
        while True:
            left = LOOK_EVERY if until is None else min(until - time.monotonic(), LOOK_EVERY)
            if left <= 0:
                raise TimeoutError
            try:
                self._link.settimeout(left)
                return self._link.recv(65536)
            except TimeoutError:
                # Processes that its handler has forked may keep the other end open.
                if self._process.poll() is not None:
                    return b""
            except OSError:
                return b""

    def _after_answer(self, run: ProcessAttempt, outcome: Outcome) -> Outcome:
        if isinstance(outcome, Retried | Failed) and outcome.end is not AttemptEnd.DISCARDED:
            if run.is_settled:
                execution.log_error_after_finish(run.task, run.claimed, outcome.error)
            else:
                execution.log_failure(run.task, run.claimed, outcome)
            if outcome.error.type == "MemoryError":
                self._jobs_left = 0  # its memory may not be enough for the next job
        if isinstance(outcome, Unreadable):
            execution.log_waiting(outcome.error.message)
        return outcome

    def _after_death(self, run: ProcessAttempt, reason: str) -> Outcome:
        status = self.reap(within=TELL_WITHIN)
        if run.is_settled:
            return Succeeded()  # ctx.finish() has settled the attempt
        match self.killed_for:
            case AttemptEnd.TIMEOUT:
                late = execution.too_late(run.task)
                if run.deadline is None or not self._is_ready:
                    late = TimeoutError(
                        f"its child process accepted no job within {READY_WITHIN:.0f} s"
                    )
                return execution.after_error(run.task, run.claimed, late, end=AttemptEnd.TIMEOUT)
            case AttemptEnd.INTERRUPTED:
                return Interrupted(run.task.settings.max_interruptions)
            case None if status is not None:
                reason = _reason_of(status)
        when = "" if self._is_ready else " before the handler could start"
        return execution.after_crash(run.task, run.claimed, f"the handler's process {reason}{when}")

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # in case its handler has moved it to another group


def _after_refusal(run: ProcessAttempt, error: ErrorReport) -> Outcome:
    report = ErrorReport(
        error.type, f"the task cannot run in a child process: {error.message}", error.traceback
    )
    cause = TaskDefinitionError(report.message)
    return execution.after_error(run.task, run.claimed, cause, reported=report)


def _reason_of(status: int) -> str:
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a signal without a name
        return f"was killed by signal {-status}"
