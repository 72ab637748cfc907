"""The demo's workers: real processes, started by the command line everyone uses."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO
from uuid import UUID

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from pgqueue.errors import PgQueueError
from pgqueue.models import Lease, WorkerProcess

COMMAND = ("--app", "pgqueue.demo.indexer:queue", "worker", "--concurrency", "4", "--grace", "5")
PATIENCE = 15.0
"""Seconds for a worker to stop when asked to."""


class DemoFailed(PgQueueError, RuntimeError):
    """Something happened that the demo did not stage."""


@dataclass(frozen=True, slots=True)
class Killed:
    """The worker that was killed, and when, by the database's clock."""

    pid: int
    worker_id: UUID
    at: datetime


class Crew:
    """Worker processes that end with the ``with`` block, however it ends."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._members: list[subprocess.Popen[bytes]] = []
        self._output: IO[bytes] = log.open("ab")

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members:
            member.kill()
        for member in self._members:
            member.wait()
        self._output.close()

    @property
    def pids(self) -> list[int]:
        return [member.pid for member in self._members]

    def hire(self) -> int:
        """Start one more worker; returns its process id."""
        member = subprocess.Popen(  # noqa: S603  # our own command
            [sys.executable, "-m", "pgqueue", *COMMAND],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,  # Ctrl-C is for the demo, which then ends its workers
        )
        self._members.append(member)
        return member.pid

    def look_after(self) -> None:
        """Raise when a worker has ended that nobody has killed."""
        for member in self._members:
            if member.poll() is not None:
                last = self._log.read_text(errors="replace").strip().splitlines()[-3:]
                raise DemoFailed(
                    f"worker {member.pid} ended by itself, with {member.returncode}: "
                    f"{' | '.join(last) or 'it logged nothing'}"
                )

    def are_registered(self, session: Session) -> bool:
        """Whether every worker has entered itself into the table of workers."""
        pids = session.scalars(select(WorkerProcess.pid).where(WorkerProcess.dead_at.is_(None)))
        return set(self.pids) <= set(pids)

    def kill_at_work(self, session: Session) -> Killed | None:
        """SIGKILL the first worker, if it has jobs in its hands; else leave it alone.

        It is frozen for the look, so that it cannot finish them meanwhile.
        """
        victim = self._members[0]
        worker_id = session.scalars(
            select(WorkerProcess.id).where(WorkerProcess.pid == victim.pid)
        ).one()
        os.kill(victim.pid, signal.SIGSTOP)
        os.waitpid(victim.pid, os.WUNTRACED)
        held = select(func.count()).where(Lease.worker_id == worker_id)
        if session.scalars(held).one() < 2:  # one alone may be at its COMMIT already
            os.kill(victim.pid, signal.SIGCONT)
            return None
        killed_at = session.scalars(select(func.clock_timestamp())).one()
        victim.kill()
        victim.wait()
        self._members.remove(victim)
        return Killed(victim.pid, worker_id, killed_at)

    def dismiss(self) -> None:
        """Stop all workers as a deployment would, by SIGTERM."""
        for member in self._members:
            member.terminate()
        for member in self._members:
            if code := member.wait(PATIENCE):
                raise DemoFailed(f"worker {member.pid} ended with {code} after SIGTERM")
        self._members.clear()
