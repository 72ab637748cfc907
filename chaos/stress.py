"""A storm: sessions that do everything at once to the same few jobs."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from sqlalchemy import Engine, create_engine, select
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from chaos.environment import Environment
from chaos.interleavings.logical_workers import (
    ERROR,
    PATIENCE,
    TASK,
    LogicalWorker,
    declare_dead,
    enqueue_many,
    rescue,
    run_together,
    worker_settings,
)
from chaos.sample_tasks import queue
from pgqueue import Change, DuplicateJob, Job
from pgqueue.errors import JobNotFound, OptionError
from pgqueue.outcomes import Cancelled, Failed, Outcome, Retried, Succeeded
from pgqueue.repository.settle import Attempts

OUTCOMES: list[Outcome] = [
    Succeeded(),
    Succeeded({"sum": 1}),
    Retried(timedelta(0), ERROR),
    Failed(ERROR),
    Cancelled("enough"),
]
SESSIONS = {
    "enqueue": 4,
    "cancel": 4,
    "delete": 1,
    "requeue": 1,
    "lease": 1,
    "hold": 1,
    "rescue": 1,
}
STRICT = ("REPEATABLE READ", "SERIALIZABLE")
BY_ITSELF = ("enqueue", "cancel", "delete", "lease", "hold", *STRICT)
"""What does not depend on others: a requeue needs a failed job, and the workers rescue too."""

KEYS = 24
RECENT = 40
ROUNDS = 4
"""Claims of one worker, which then leaves, dead or alive."""


@queue.task(name=TASK, unique_key=lambda n: f"k{n}")
def once(n: int) -> None:
    """What the storm enqueues with keys, of which there are few."""


class Storm:
    """Sessions at the same few jobs for a while, and how often each has done something."""

    def __init__(self, environment: Environment, *, seconds: float, rounds: int) -> None:
        self.done: Counter[str] = Counter()
        self.replayed = 0
        self._engine = create_engine(environment.url, pool_size=32)
        self._workers: Engine = worker_settings(environment.url)
        self._chance = random.Random(environment.dice.random())
        self._deadline = time.monotonic() + seconds
        self._rounds = rounds
        self._has_failed = False

    def rage(self) -> None:
        """Until everything was done so often, and the time is over; or one has failed."""
        kinds = [kind for kind, count in SESSIONS.items() for _ in range(count)]
        actions = [partial(self._repeat, kind, getattr(self, f"_{kind}")) for kind in kinds]
        strict = [partial(self._repeat, one, partial(self._be_strict, one)) for one in STRICT]
        try:
            run_together(*actions, *strict)
        finally:
            self._engine.dispose()
            self._workers.dispose()

    @property
    def lacks(self) -> list[str]:
        """What was not done often enough."""
        few = [kind for kind in BY_ITSELF if self.done[kind] < self._rounds]
        return few if self.replayed else [*few, "a replayed transaction"]

    def _repeat(self, kind: str, action: Any) -> None:
        try:
            while not self._is_over():
                self.done[kind] += bool(action())
        except BaseException:
            self._has_failed = True
            raise

    def _is_over(self) -> bool:
        late = time.monotonic() - self._deadline
        return self._has_failed or late > PATIENCE or (late > 0 and not self.lacks)

    def _enqueue(self) -> bool:
        """Keys in any order, most of which are free again at once."""
        keys = [(n,) for n in range(KEYS)]
        self._chance.shuffle(keys)
        with Session(self._engine) as session:
            once.enqueue_many(session, keys)
            enqueue_many(session, 5)
            (session.commit if self._chance.random() < 0.2 else session.rollback)()
        return True

    def _be_strict(self, level: Any) -> bool:
        """Enqueue beside something else that is read, as an application does, which also
        replays its transaction when PostgreSQL asks for it."""
        strict = self._engine.execution_options(isolation_level=level)
        keys = self._chance.sample(range(KEYS), 3)
        try:
            with Session(strict) as session, session.begin():
                self._some_job(session)
                if self._chance.random() < 0.5:
                    once.enqueue_many(session, [(n,) for n in keys])
                else:
                    once.enqueue(session, keys[0])
        except OperationalError as error:
            if "could not serialize" not in str(error):
                raise
            self.replayed += 1
        return True

    def _cancel(self) -> bool:
        return self._change(queue.cancel)

    def _requeue(self) -> bool:
        return self._change(queue.requeue)

    def _change(self, change: Callable[[Session, int], Change]) -> bool:
        with Session(self._engine) as session:
            job = self._some_job(session)
            try:
                changed = change(session, job)
            except (DuplicateJob, JobNotFound):
                return False
            session.commit()
        return bool(changed)

    def _delete(self) -> bool:
        """Of a job that has ended; but of none whose message a worker may have locked, which then
        stays behind for the next claim to drop."""
        ended = select(Job.id).where(Job.outcome.in_(["succeeded", "failed"])).limit(1)
        with Session(self._engine) as session:
            id = session.scalar(ended)
            job = session.get(Job, id) if id is not None else None
            if job is None:
                return False
            try:
                session.delete(job)
                session.commit()
            except OptionError:  # it was requeued meanwhile, and runs
                return False
        return True

    def _rescue(self) -> bool:
        return bool(rescue(self._engine))

    def _lease(self) -> bool:
        worker = LogicalWorker(self._workers)
        attempts = Attempts(worker.line, worker.id)
        for _ in range(ROUNDS):
            claimed = worker.claim(10)
            if self._chance.random() < 0.3:
                declare_dead(self._engine, worker)  # and settle all the same
            # As the settler does: by ascending ids.
            attempts.settle_succeeded(sorted(claimed[:4], key=lambda one: one.job_id))
            attempts.settle([(one, self._chance.choice(OUTCOMES)) for one in claimed[4:]])
        worker.close()
        return True

    def _hold(self) -> bool:
        worker = LogicalWorker(self._workers)
        for _ in range(ROUNDS):
            self._run_in_transaction(worker)
        if self._chance.random() < 0.3:
            declare_dead(self._engine, worker)
        worker.close()
        return True

    def _run_in_transaction(self, worker: LogicalWorker) -> None:
        for claimed in worker.claim_in_transaction(2):
            outcome = self._chance.choice(OUTCOMES)
            if not worker.settle_in_transaction(claimed, outcome):
                worker.transaction.rollback()
                return
        worker.transaction.commit()

    def _some_job(self, session: Session) -> int:
        recent = select(Job.id).order_by(Job.id.desc()).limit(RECENT)
        return self._chance.choice(session.scalars(recent).all() or [0])
