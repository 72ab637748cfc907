"""Threads of a worker at the edge of what the server takes, or says: without a process around."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from chaos.logical import TASKS, crew, enqueue, enqueue_many, pairs, worker_settings
from pgqueue import Job, PgQueue
from pgqueue.autocommit import autocommitting
from pgqueue.outcomes import Retried, Succeeded
from pgqueue.repository import Attempts, Claimed, Fleet
from pgqueue.unit_of_work import worker_engine
from pgqueue.worker import transactional
from pgqueue.worker.crew import Crew, Run
from pgqueue.worker.plan import checked_plan
from pgqueue.worker.settler import Settler
from pgqueue.worker.shift import _crew_of

MANY = 50
DIGITS = [1] * 500_000
"""A megabyte as JSON, six as the server keeps it: fifty are more than one value may have."""


@contextmanager
def crew_on(engine: Engine) -> Iterator[Crew]:
    """What the threads of a worker share, and none of the threads."""
    plan = checked_plan(["default"], 1, "lease", 1, timedelta(1), timedelta(1))
    queue = PgQueue(engine)
    queue.task(name="tests.task")(lambda: None)
    shared = _crew_of(queue, plan, worker_engine(engine), threading.Event())
    with autocommitting(engine) as connection:
        name = shared.presence.worker_id
        Fleet(connection).register(name, hostname="here", pid=1, queues=["default"], slots=1)
    yield shared
    shared.listener.close()


def claimed_by(crew: Crew, engine: Engine, count: int) -> list[Claimed]:
    with autocommitting(engine) as connection:
        attempts = Attempts(connection, crew.presence.worker_id)
        return attempts.claim(pairs(), tasks=TASKS, limit=count).rows


@pytest.mark.battery
def test_more_results_than_the_server_takes_at_once_are_all_kept(engine: Engine) -> None:
    with engine.begin() as connection:
        enqueue_many(connection, MANY)
    with crew_on(engine) as shared:
        settler = Settler(
            shared.engine, shared.bench, shared.presence, shared.outage, goes_on=lambda _: None
        )
        for claimed in claimed_by(shared, engine, MANY):
            shared.bench.done(claimed, Succeeded(DIGITS))

        settler.start()
        settler.finish(seconds=60)

    kept = "SELECT outcome, jsonb_array_length(result) FROM pgqueue.jobs"
    with engine.connect() as connection:
        assert connection.execute(text(kept)).all() == [("succeeded", len(DIGITS))] * MANY


def test_what_a_settler_has_not_written_when_it_gives_up_is_named(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with engine.begin() as connection:
        enqueue_many(connection, 3)
    with crew_on(engine) as shared:
        settler = Settler(
            shared.engine, shared.bench, shared.presence, shared.outage, goes_on=lambda _: None
        )
        jobs = claimed_by(shared, engine, 3)
        with engine.connect() as migration:
            migration.execute(text("LOCK TABLE pgqueue.jobs"))
            for claimed, result in zip(jobs, (None, None, "kept"), strict=True):
                shared.bench.done(claimed, Succeeded(result))
            settler.start()
            settler.finish(seconds=0.1)
            settler.join(60)

    [said] = [line for line in caplog.messages if "not written down" in line]
    assert all(str(claimed.job_id) in said for claimed in jobs)


class TestAfterACommitWhoseAnswerWasLost:
    def test_a_worker_that_is_told_nothing_lets_the_fence_decide(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It was carried out, or not: the attempt counts once, and as one that has started."""
        monkeypatch.setattr(transactional, "LOOK_FOR", 0.0)
        with engine.begin() as connection:
            enqueue_many(connection, 2)
        with crew_on(engine) as shared, autocommitting(engine) as connection:
            not_carried_out, carried_out = claimed_by(shared, engine, 2)
            attempts = Attempts(connection, shared.presence.worker_id)
            attempts.settle([(carried_out, Succeeded())])
            for claimed in (not_carried_out, carried_out):
                outcome = transactional._after_unknown_commit(shared, shared.run_of(claimed))
                assert isinstance(outcome, Retried)
                attempts.settle([(claimed, outcome)])

        with Session(engine) as session:
            assert session.get_one(Job, not_carried_out.job_id).attempts == 1
            assert session.get_one(Job, carried_out.job_id).outcome == "succeeded"

    def test_it_asks_by_the_name_that_it_had_when_the_attempt_began(
        self, engine: Engine, database_url: str
    ) -> None:
        with engine.begin() as connection:
            enqueue(connection)
        with crew_on(engine) as shared, crew(worker_settings(database_url), 1) as [worker]:
            _, claimed = worker.start()
            run = Run(claimed, shared.tasks["tests.task"], worker_id=worker.id)

            assert transactional.was_committed(shared, run) is False
            worker.transaction.rollback()
