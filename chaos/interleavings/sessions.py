"""What sessions can do to one job, statement by statement, and what each of them was told."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from chaos.interleavings.logical_workers import ERROR, TASKS, pairs, settle_in
from chaos.interleavings.scheduler import Stepper, stop_before_statements
from pgqueue import Job, PgQueue
from pgqueue.database.opening import driver_connection
from pgqueue.errors import JobNotFound, OptionError
from pgqueue.outcomes import Exhausted, Failed, Outcome, Released, Retried, Succeeded
from pgqueue.repository.claim import Claimed
from pgqueue.repository.jobs import Change, Jobs
from pgqueue.repository.many import ManyJobs
from pgqueue.repository.rescue import SeenWorker
from pgqueue.repository.settle import Attempts
from pgqueue.repository.workers import Workers

Attempt = tuple[int, int, int]
"""Job, message, attempt."""

AGAIN = Retried(timedelta(0), ERROR)
FAIL = Failed(ERROR)

REGISTER = text(
    "INSERT INTO pgqueue.workers (id, hostname, pid, backend_pid, queues, slots)"
    " VALUES (:id, 'here', 1, 1, '[]', 1) RETURNING heartbeat_at"
)


@dataclass
class ScriptedJob:
    """One order of two scripts about one job, which is alone in a queue of its own."""

    name: str
    queue: str
    job_id: int
    order: str = ""
    workers: list[SeenWorker] = field(default_factory=list)
    started: list[Attempt] = field(default_factory=list)
    accepted: list[Attempt] = field(default_factory=list)
    successes: set[str] = field(default_factory=set)
    """The results of the successes that were accepted."""
    requeues: int = 0
    is_deleted: bool = False

    def __str__(self) -> str:
        return f"{self.name}, order {self.order or '(only one)'}, job {self.job_id}"


class ScriptedSession:
    """One session of a worker or an operator: T, and the connection beside it.

    Every statement of a worker is followed by a COMMIT of its own, although a worker commits
    many of them by themselves: on a server, too, there is time between the two.
    """

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.stepper: Stepper | None = None
        self.main = engine.connect()
        self.side = engine.connect()
        self.pids = [driver_connection(one).info.backend_pid for one in (self.main, self.side)]
        self.main.rollback()
        self.side.rollback()
        for connection in (self.main, self.side):
            stop_before_statements(connection, self._pause)
        self._queue = PgQueue()

    def take(self, job: ScriptedJob, connection: Connection) -> None:
        """Come to a job as a worker that nobody has seen before."""
        self.job = job
        self.worker_id = uuid.uuid4()
        heartbeat_at: datetime = connection.execute(REGISTER, {"id": self.worker_id}).scalar_one()
        job.workers.append(SeenWorker(self.worker_id, heartbeat_at, is_locked=False))

    def leave(self) -> None:
        self.stepper = None
        self.main.rollback()
        self.side.rollback()

    def close(self) -> None:
        self.main.close()
        self.side.close()

    def _pause(self) -> None:
        if self.stepper is not None:
            self.stepper.pause()

    # Workers

    def claim(self) -> list[Claimed]:
        attempts = Attempts(self.side, self.worker_id)
        claimed = attempts.claim(pairs(self.job.queue, [5]), tasks=TASKS, limit=1).rows
        self.side.commit()
        self._started(claimed)
        return claimed

    def settle(self, claimed: Claimed, outcome: Outcome) -> None:
        outcome = self._possible(claimed, outcome)
        attempts = Attempts(self.side, self.worker_id)
        accepted = attempts.settle([(claimed, outcome)])
        self.side.commit()
        if accepted:
            self._accepted(claimed, outcome)

    def settle_leanly(self, claimed: Claimed) -> None:
        exceptions = Attempts(self.side, self.worker_id).settle_succeeded([claimed])
        self.side.commit()
        if exceptions is None or exceptions:
            self._accepted(claimed, Succeeded())

    def reconcile(self) -> None:
        """Give back what the tables say is ours, and nobody here knows of."""
        leases = Workers(self.side).leases_of(self.worker_id)
        self.side.commit()
        for job_id, message_id, attempt in leases:
            lost = Claimed(0, "", message_id, job_id, "", "", "", 1, attempt, 0)
            accepted = Attempts(self.side, self.worker_id).settle([(lost, Released())])
            self.side.commit()
            if accepted:
                self._accepted(lost, Released())

    # A claim in a transaction of the caller's

    def claim_in_transaction(self) -> list[Claimed]:
        attempts = Attempts(self.main, self.worker_id)
        return attempts.claim(pairs(self.job.queue, [5]), tasks=TASKS, limit=1).rows

    def settle_in_transaction(self, claimed: Claimed, outcome: Outcome) -> None:
        outcome = self._possible(claimed, outcome)
        if settle_in(self.main, self.worker_id, claimed, outcome):
            self.main.commit()
            self._started([claimed])
            self._accepted(claimed, outcome)
        else:
            self.main.rollback()

    # Operators, and other workers

    def operate(self, action: Callable[[Jobs], Change]) -> Change:
        """Do something to the job in a transaction of its own, as an operator does."""
        try:
            change = action(Jobs(self.main))
        except JobNotFound:
            self.main.rollback()
            return Change.UNCHANGED
        self.main.commit()
        self.job.requeues += change is Change.REQUEUED
        return change

    def cancel(self) -> Change:
        return self.operate(lambda jobs: jobs.cancel(self.job.job_id))

    def requeue(self) -> Change:
        return self.operate(lambda jobs: jobs.requeue(self.job.job_id, notify=False))

    def requeue_with_others(self) -> Change:
        """Requeue the job as one of many: it stays as it is if that would have to wait."""

        def requeue(_: Jobs) -> Change:
            done = ManyJobs(self.main).requeue({self.job.job_id: None}, notify=False)
            return done.get(self.job.job_id, Change.UNCHANGED)

        return self.operate(requeue)

    def delete(self) -> None:
        """A job that runs, or that a worker is about to start, is refused and stays."""
        with Session(self.main, join_transaction_mode="control_fully") as session:
            job = session.get(Job, self.job.job_id)
            try:
                if job is not None:
                    session.delete(job)
                session.commit()
            except OptionError:
                session.rollback()
                return
        self.job.is_deleted = True

    def declare_dead(self) -> None:
        """All other workers of this job."""
        for member in self.job.workers:
            if member.id != self.worker_id:
                Workers(self.side).declare_dead(member)
        self.side.commit()

    def rescue(self) -> None:
        self.declare_dead()
        Workers(self.side).rescue()
        self.side.commit()

    def _started(self, claimed: list[Claimed]) -> None:
        self.job.started += [(one.job_id, one.message_id, one.attempt) for one in claimed]

    def _accepted(self, claimed: Claimed, outcome: Outcome) -> None:
        self.job.accepted.append((claimed.job_id, claimed.message_id, claimed.attempt))
        if isinstance(outcome, Succeeded) and outcome.result is not None:
            self.job.successes.add(str(outcome.result))

    def _possible(self, claimed: Claimed, outcome: Outcome) -> Outcome:
        """An attempt after the last may only find the job exhausted."""
        if claimed.attempt > claimed.max_attempts:
            return Exhausted()
        if isinstance(outcome, Succeeded):
            return Succeeded(f"{self.name} in attempt {claimed.attempt} of {claimed.message_id}")
        return outcome
