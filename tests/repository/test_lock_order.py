"""Lock order: everything that writes, all at once, on the same jobs, and never a deadlock."""

import random
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from chaos.interleavings.logical_workers import (
    ERROR,
    LogicalWorker,
    declare_dead,
    enqueue_many,
    execute,
    logical_workers,
    rescue,
    run_together,
    violations,
    worker_settings,
)
from pgqueue import Change, DuplicateJob, Job, JobNotFound, Keep, PgQueue
from pgqueue.outcomes import Cancelled, Failed, Outcome, Retried, Succeeded
from pgqueue.rules.retention import Retention
from pgqueue.worker.duties.prune import PruneRound, RoundState

AT_ONCE = timedelta(0)
TASKS = {"tests.task": None}
queue = PgQueue()
OUTCOMES: list[Outcome] = [
    Succeeded(),
    Succeeded({"sum": 1}),
    Retried(timedelta(0), ERROR),
    Failed(ERROR),
    Cancelled("enough"),
]


@queue.task(name="tests.task", unique_key=lambda n: f"k{n}")
def once(n: int) -> None: ...


later = once.options(delay=timedelta(hours=1), unique_key=None)


class Storm:
    """Ten threads at the same few jobs, and how often each did something."""

    def __init__(self, engine: Engine, *, rounds: int) -> None:
        self.done: Counter[str] = Counter()
        self._engine = engine
        self._workers = worker_settings(engine.url)
        self._chance = random.Random(1)
        self._rounds = rounds

    def rage(self) -> None:
        operators = ("cancel", "requeue", "run_now", "change", "prune")
        kinds = ("enqueue", *operators, "lease", "lease", "hold", "hold", "rescue")
        run_together(*(partial(self._repeat, kind) for kind in kinds))

    def _repeat(self, kind: str) -> None:
        action = getattr(self, f"_{kind}")
        for _ in range(self._rounds):
            self.done[kind] += action()

    def _enqueue(self) -> bool:
        with Session(self._engine) as session, session.begin():
            enqueue_many(session, 20)
            once.enqueue_many(session, [(n,) for n in range(5)])
            later.enqueue_many(session, [(n,) for n in range(5)])
        return True

    def _operate(
        self,
        act: Callable[[Session, int], Change],
        refusals: tuple[type[Exception], ...] = (JobNotFound,),
    ) -> bool:
        with Session(self._engine) as session, session.begin():
            try:
                return bool(act(session, self._some_job(session)))
            except refusals:
                return False

    def _cancel(self) -> bool:
        return self._operate(queue.cancel)

    def _requeue(self) -> bool:
        return self._operate(queue.requeue, (DuplicateJob, JobNotFound))

    def _run_now(self) -> bool:
        return self._operate(queue.run_now)

    def _change(self) -> bool:
        return self._operate(partial(queue.change, priority=self._chance.randrange(10)))

    def _prune(self) -> bool:
        with logical_workers(self._workers, 1) as [worker]:
            prune_round = PruneRound(Retention(Keep(AT_ONCE, AT_ONCE, AT_ONCE), {}, TASKS))
            while prune_round.step(worker.transaction) is RoundState.MORE:
                pass
        return prune_round.deleted > 0

    def _rescue(self) -> bool:
        return bool(rescue(self._engine))

    def _lease(self) -> bool:
        with logical_workers(self._workers, 1) as [worker]:
            for _ in range(20):
                claimed = worker.claim(10)
                if self._chance.random() < 0.2:
                    declare_dead(self._engine, worker)  # and settle all the same
                worker.attempts.delete_succeeded(claimed[:2])
                worker.attempts.settle_succeeded(claimed[:4])
                worker.attempts.settle(
                    [(one, self._chance.choice(OUTCOMES)) for one in claimed[4:]]
                )
        return True

    def _hold(self) -> bool:
        with logical_workers(self._workers, 1) as [worker]:
            for _ in range(20):
                self._run_in_transaction(worker)
            if self._chance.random() < 0.3:
                declare_dead(self._engine, worker)
        return True

    def _run_in_transaction(self, worker: LogicalWorker) -> None:
        """Claim and settle in one transaction."""
        for claimed in worker.claim_in_transaction(2):
            outcome = self._chance.choice(OUTCOMES)
            if not worker.settle_in_transaction(claimed, outcome):
                worker.transaction.rollback()
                return
        worker.transaction.commit()

    def _some_job(self, session: Session) -> int:
        recent = session.scalars(select(Job.id).order_by(Job.id.desc()).limit(60)).all()
        return self._chance.choice(recent)


def storm(engine: Engine, *, rounds: int) -> Counter[str]:
    """Let a storm pass, and see that it has left no damage; returns what was done how often."""
    enqueue_many(engine, 60)
    storm = Storm(engine, rounds=rounds)

    storm.rage()

    execute(engine, "UPDATE pgqueue.workers SET dead_at = clock_timestamp()")
    rescue(engine)
    assert violations(engine) == []
    return storm.done


def test_a_storm_of_everything_meets_no_deadlock(engine: Engine) -> None:
    storm(engine, rounds=5)


@pytest.mark.battery
@pytest.mark.timeout(900)
def test_a_long_storm_meets_no_deadlock(engine: Engine) -> None:
    assert min(storm(engine, rounds=1000).values()) > 0
