"""The fence: a worker's late word changes nothing, whichever part of its lease has passed on."""

import uuid
from datetime import timedelta
from functools import partial

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from chaos.interleavings.logical_workers import (
    ERROR,
    LogicalWorker,
    declare_dead,
    enqueue,
    rescue,
    status_of,
    violations,
    waiting,
    workers_at,
)
from pgqueue import Change, Job, JobStatus, PgQueue
from pgqueue.outcomes import Cancelled, Failed, Outcome, Released, Retried, Snoozed, Succeeded
from pgqueue.repository.claim import Claimed
from pgqueue.repository.workers import Workers

OUTCOMES: list[Outcome] = [
    Succeeded(),
    Succeeded({"late": True}),
    Retried(timedelta(0), ERROR),
    Failed(ERROR),
    Cancelled("late"),
    Snoozed(timedelta(0)),
    Released(),
]
EVERYTHING = (
    "SELECT to_jsonb(j), (SELECT jsonb_agg(to_jsonb(l)) FROM pgqueue.leases AS l), "
    "(SELECT jsonb_agg(to_jsonb(m)) FROM pgqueue.message_queue AS m), "
    "(SELECT jsonb_agg(to_jsonb(a)) FROM pgqueue.job_attempts AS a), "
    "(SELECT jsonb_agg(to_jsonb(d)) FROM pgqueue.dead_letters AS d) FROM pgqueue.jobs AS j"
)


def everything(engine: Engine) -> object:
    with engine.connect() as connection:
        return connection.execute(text(EVERYTHING)).all()


def settled(worker: LogicalWorker, claimed: Claimed, outcome: Outcome, *, how: str) -> bool:
    if how == "one success":
        return bool(worker.attempts.settle_one_success(claimed))
    if how == "successes":
        ours = worker.attempts.settle_succeeded([claimed])
        return ours is None or bool(ours)
    return bool(worker.attempts.settle([(claimed, outcome)]))


HOW = pytest.mark.parametrize(
    ("how", "outcomes"),
    [("in general", OUTCOMES), ("successes", [Succeeded()]), ("one success", [Succeeded()])],
    ids=["in general", "successes", "one success"],
)


class TestEachColumnOfTheFence:
    @pytest.mark.parametrize("column", ["job_id", "message_id", "attempt", "worker_id"])
    @HOW
    def test_a_settle_that_differs_in_a_column_of_the_fence_changes_nothing(
        self,
        engine: Engine,
        worker: LogicalWorker,
        column: str,
        how: str,
        outcomes: list[Outcome],
    ) -> None:
        claimed = worker.claim_new(engine)
        before = everything(engine)
        if column == "worker_id":
            worker.id, other = uuid.uuid4(), claimed
        else:
            other = claimed._replace(**{column: getattr(claimed, column) + 1})

        for outcome in outcomes:
            assert not settled(worker, other, outcome, how=how)

        assert everything(engine) == before

    def test_of_two_verdicts_on_one_message_only_that_on_the_current_attempt_counts(
        self, engine: Engine, worker: LogicalWorker
    ) -> None:
        job_id = enqueue(engine)
        [claimed] = worker.claim()
        late = [(claimed._replace(attempt=attempt), Failed(ERROR)) for attempt in (0, 2, 3)]

        settled = worker.attempts.settle([*late, (claimed, Succeeded()), *late])

        assert settled == {job_id: "succeeded"}


class TestZombies:
    def test_what_a_rescued_worker_says_late_changes_nothing(self, engine: Engine) -> None:
        outcome = Retried(timedelta(0), ERROR)
        with workers_at(engine, 2) as [zombie, heir]:
            old = zombie.claim_new(engine)
            declare_dead(engine, zombie)
            rescue(engine)
            assert not zombie.settle(old, outcome)
            [new] = heir.claim()
            before = everything(engine)

            assert not zombie.settle(old, outcome)
            late = zombie.attempts
            assert late.settle_succeeded([old]) == {}
            assert late.settle_one_success(old) == {}

            assert everything(engine) == before
            assert heir.settle(new, Succeeded())

    def test_a_settle_that_waits_for_a_rescue_loses_to_it(self, engine: Engine) -> None:
        with workers_at(engine, 1) as [zombie]:
            old = zombie.claim_new(engine)
            declare_dead(engine, zombie)
            with engine.connect() as rescuer:
                assert Workers(rescuer).rescue()
                settle = partial(zombie.settle, old, Succeeded())
                with waiting(engine, zombie.line, settle) as settled:
                    rescuer.commit()

            assert settled == [False]
        assert violations(engine) == []


class TestTheArbiter:
    @HOW
    def test_a_job_that_has_ended_stays_as_it_ended(
        self, engine: Engine, worker: LogicalWorker, how: str, outcomes: list[Outcome]
    ) -> None:
        for outcome in outcomes:
            job_id = enqueue(engine)
            [claimed] = worker.claim()
            with Session(engine) as session, session.begin():
                job = session.get_one(Job, job_id)
                job.outcome, job.finished_at, job.attempts = "succeeded", job.created_at, 1

            assert not settled(worker, claimed, outcome, how=how)

            assert status_of(engine, job_id) is JobStatus.SUCCEEDED
        assert violations(engine) == []

    @pytest.mark.parametrize("outcome", [Retried(timedelta(0), ERROR), Succeeded()])
    def test_a_settle_that_waits_for_a_cancel_inserts_no_message(
        self, engine: Engine, outcome: Outcome
    ) -> None:
        """The cancel of a job whose claim is not committed yet."""
        job_id = enqueue(engine)
        with workers_at(engine, 1) as [worker], Session(engine) as operator:
            [claimed] = worker.claim_in_transaction()
            assert PgQueue().cancel(operator, job_id) is Change.CANCELLED
            settle = partial(worker.settle_in_transaction, claimed, outcome)
            with waiting(engine, worker.transaction, settle) as results:
                operator.commit()

            assert results == [False]
            worker.transaction.rollback()
            assert worker.claim() == []
        assert violations(engine) == []
        assert status_of(engine, job_id) is JobStatus.CANCELLED
