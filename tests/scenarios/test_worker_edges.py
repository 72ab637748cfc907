"""Threads of a worker at the edge of what the server takes, or says: without a process around."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session
from worker_rig import runtime_of

from chaos.interleavings.logical_workers import (
    TASKS,
    enqueue_many,
    pairs,
)
from chaos.workers import wait_until
from pgqueue import Job, PgQueue, Worker
from pgqueue.database.autocommit import autocommitting
from pgqueue.handler.outcome import after_error
from pgqueue.outcomes import Retried, Succeeded
from pgqueue.repository.claim import Claimed
from pgqueue.repository.settle import Attempts
from pgqueue.repository.workers import Workers
from pgqueue.worker import unknown_commits
from pgqueue.worker.pool_transaction import PoolTransaction
from pgqueue.worker.rows import MOST_NAMED
from pgqueue.worker.runtime import WorkerRuntime
from pgqueue.worker.settler import Settler

MANY = 46
DIGITS = [1] * 500_000
"""A megabyte as JSON, six as the server keeps it: 46 are more than one value may have."""


@contextmanager
def crew_on(engine: Engine) -> Iterator[WorkerRuntime]:
    """What the threads of a worker share, and none of the threads."""
    queue = PgQueue(engine)
    queue.task(name="tests.task")(lambda: None)
    shared = runtime_of(queue)
    with autocommitting(engine) as connection:
        name = shared.identity.worker_id
        Workers(connection).register(name, hostname="here", pid=1, queues=["default"], slots=1)
    yield shared


def settler_of(shared: WorkerRuntime) -> Settler:
    return Settler(shared)


def claimed_by(logical_workers: WorkerRuntime, engine: Engine, count: int) -> list[Claimed]:
    with autocommitting(engine) as connection:
        attempts = Attempts(connection, logical_workers.identity.worker_id)
        return attempts.claim(pairs(), tasks=TASKS, limit=count).rows


@contextmanager
def broken_transaction(engine: Engine) -> Iterator[Connection]:
    """A transaction whose server process has ended."""
    with engine.connect() as connection, engine.connect() as other:
        pid = connection.scalar(text("SELECT pg_backend_pid()"))
        other.execute(text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": pid})
        yield connection


@pytest.mark.battery
def test_more_results_than_the_server_takes_at_once_are_all_kept(engine: Engine) -> None:
    with engine.begin() as connection:
        enqueue_many(connection, MANY)
    with crew_on(engine) as shared:
        settler = settler_of(shared)
        for claimed in claimed_by(shared, engine, MANY):
            shared.ledger.done(claimed, Succeeded(DIGITS))

        settler.start()
        settler.stop(seconds=240)

    kept = "SELECT outcome, jsonb_array_length(result) FROM pgqueue.jobs"
    with engine.connect() as connection:
        assert connection.execute(text(kept)).all() == [("succeeded", len(DIGITS))] * MANY


REFUSAL = """
    CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF NEW.id = {job} THEN RAISE EXCEPTION 'not this one'; END IF;
        RETURN NEW;
    END $$;
    CREATE TRIGGER refuse BEFORE UPDATE ON pgqueue.jobs
    FOR EACH ROW EXECUTE FUNCTION public.refuse()
"""


@pytest.mark.parametrize("outcome", [Succeeded(), Succeeded(1)], ids=["plain", "with a result"])
def test_an_outcome_that_a_trigger_refuses_holds_up_no_other(
    engine: Engine, outcome: Succeeded, caplog: pytest.LogCaptureFixture
) -> None:
    with engine.begin() as connection:
        bad, *others = enqueue_many(connection, 5)
        connection.execute(text(REFUSAL.format(job=bad)))
    with crew_on(engine) as shared:
        settler = settler_of(shared)
        for claimed in claimed_by(shared, engine, 5):
            shared.ledger.done(claimed, outcome)
        settler.start()
        wait_until(lambda: ended(engine) == others)

        with engine.begin() as connection:
            connection.execute(text("DROP TRIGGER refuse ON pgqueue.jobs"))
        wait_until(lambda: ended(engine) == [bad, *others])
        settler.stop(seconds=60)

    told = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert [line for line in told if f"job {bad}: the database refuses its outcome" in line]
    assert len(told) == 1


REFUSED_CLAIM = """
    CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF NEW.target_id IN {jobs} THEN RAISE EXCEPTION 'not this one'; END IF;
        RETURN NEW;
    END $$;
    CREATE TRIGGER refuse BEFORE INSERT ON pgqueue.leases
    FOR EACH ROW EXECUTE FUNCTION public.refuse()
"""


def test_a_job_whose_claim_a_trigger_refuses_holds_up_no_other(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    queue = PgQueue(engine)

    @queue.task
    def quick(number: int) -> None: ...

    with queue.session() as session:
        ids = quick.enqueue_many(session, [(number,) for number in range(9)])
        session.commit()
    bad = ids[3], ids[4]
    with engine.begin() as connection:
        connection.execute(text(REFUSED_CLAIM.format(jobs=bad)))

    beside = Worker(queue, concurrency=8).run_until_empty(timeout=60)
    told = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    with engine.begin() as connection:
        connection.execute(text("DROP TRIGGER refuse ON pgqueue.leases"))
    after = Worker(queue).run_until_empty(timeout=60)

    assert (beside, after) == ({"succeeded": 7}, {"succeeded": 2})
    assert [line.partition(":")[0] for line in told] == [f"job {id}" for id in bad]


def test_many_jobs_whose_claims_are_refused_hold_up_the_others_once(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Each refused claim takes a number, which no rollback gives back."""
    queue = PgQueue(engine)

    @queue.task
    def quick(number: int) -> None: ...

    with queue.session() as session:
        bad = quick.enqueue_many(session, [(number,) for number in range(120)])
        quick.enqueue(session, 120)
        session.commit()
    counting = REFUSED_CLAIM.replace("THEN", "THEN PERFORM nextval('public.refusals');")
    with engine.begin() as connection:
        connection.execute(text("CREATE SEQUENCE public.refusals"))
        connection.execute(text(counting.format(jobs=tuple(bad))))

    assert Worker(queue, concurrency=8).run_until_empty(timeout=60) == {"succeeded": 1}

    with engine.connect() as connection:
        refusals = connection.scalar(text("SELECT last_value FROM public.refusals"))
    assert len(bad) <= refusals < 2 * len(bad)
    assert len([each for each in caplog.records if each.levelname == "ERROR"]) == MOST_NAMED


def ended(engine: Engine) -> list[int]:
    with engine.connect() as connection:
        statement = text("SELECT id FROM pgqueue.jobs WHERE outcome = 'succeeded' ORDER BY id")
        return list(connection.scalars(statement))


def test_what_a_settler_has_not_written_when_it_gives_up_is_named(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with engine.begin() as connection:
        enqueue_many(connection, 3)
    with crew_on(engine) as shared:
        settler = settler_of(shared)
        jobs = claimed_by(shared, engine, 3)
        with engine.connect() as migration:
            migration.execute(text("LOCK TABLE pgqueue.jobs"))
            for claimed, result in zip(jobs, (None, None, "kept"), strict=True):
                shared.ledger.done(claimed, Succeeded(result))
            settler.start()
            settler.stop(seconds=0.1)
            settler.join(60)

    [said] = [line for line in caplog.messages if "are not recorded" in line]
    assert all(str(claimed.job_id) in said for claimed in jobs)


class TestAfterACommitWhoseAnswerWasLost:
    def test_a_worker_that_does_not_learn_of_its_commit_lets_the_fence_decide(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It was carried out, or not: the attempt counts once, and as one that has started."""
        monkeypatch.setattr(unknown_commits, "LOOK_FOR", 0.0)
        with engine.begin() as connection:
            enqueue_many(connection, 2)
        with crew_on(engine) as shared, autocommitting(engine) as connection:
            not_carried_out, carried_out = claimed_by(shared, engine, 2)
            attempts = Attempts(connection, shared.identity.worker_id)
            attempts.settle([(carried_out, Succeeded())])
            for claimed in (not_carried_out, carried_out):
                attempt = shared.attempt_of(claimed)
                transaction = PoolTransaction(shared, attempt)
                transaction.transaction_name = "1 00000001"
                with (
                    broken_transaction(shared.engine) as broken,
                    pytest.raises(ConnectionError, match="cannot say whether") as raised,
                ):
                    transaction.commit_writes(broken)
                outcome = after_error(attempt.task, claimed, raised.value)
                assert isinstance(outcome, Retried)
                attempts.settle([(claimed, outcome)])

        with Session(engine) as session:
            assert session.get_one(Job, not_carried_out.job_id).attempts == 1
            assert session.get_one(Job, carried_out.job_id).outcome == "succeeded"
