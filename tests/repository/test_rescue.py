"""Rescue: what the dead held comes back, and nothing of the living is touched."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from sqlalchemy import Connection, Engine, func, select, text

from chaos.interleavings.logical_workers import (
    LogicalWorker,
    committed,
    declare_dead,
    enqueue,
    execute,
    rescue,
    run_together,
    stored,
    violations,
    waiting,
    workers_at,
)
from pgqueue import Change, Job, JobAttempt, JobStatus, Lease, MessageQueue, PgQueue
from pgqueue.repository.workers import Beat, Workers
from pgqueue.worker.duties.rescue import RESCUE_LOCK, SEARCH_EVERY, Rescue
from pgqueue.worker.liveness import Witness


@contextmanager
def holding_one(engine: Engine) -> Iterator[LogicalWorker]:
    """A worker that has claimed the only job."""
    with workers_at(engine, 1) as [worker]:
        worker.claim_new(engine)
        yield worker


def look(connection: Connection, rescuer: Rescue) -> int:
    """What the upkeep of a worker does again and again."""
    return rescuer.rescue(connection, rescuer.read_notices(connection))


def only_job(engine: Engine) -> Job:
    [job] = stored(engine, Job)
    return job


class TestWhose:
    def test_only_leases_of_dead_and_of_missing_workers_are_rescued(self, engine: Engine) -> None:
        with engine.begin() as connection:
            ids = [enqueue(connection) for _ in range(3)]
        with workers_at(engine, 3) as [living, dead, missing]:
            for worker in (living, dead, missing):
                worker.claim(1)
            declare_dead(engine, dead)
            execute(engine, "DELETE FROM pgqueue.workers WHERE id = :id", id=missing.id)

            rescued = rescue(engine)

        assert rescued == {ids[1]: None, ids[2]: None}
        assert [lease.target_id for lease in stored(engine, Lease)] == [ids[0]]
        assert violations(engine) == []

    def test_a_lease_that_another_rescuer_works_on_is_passed_by(self, engine: Engine) -> None:
        with engine.begin() as connection:
            ids = [enqueue(connection) for _ in range(2)]
        with workers_at(engine, 1) as [worker]:
            worker.claim(2)
            declare_dead(engine, worker)
        with engine.connect() as other:
            lock = text("SELECT 1 FROM pgqueue.leases WHERE target_id = :id FOR UPDATE")
            other.execute(lock, {"id": ids[0]})

            rescued = rescue(engine)

        assert rescued == {ids[1]: None}
        assert rescue(engine) == {ids[0]: None}

    def test_many_rescuers_rescue_each_lease_once(self, engine: Engine) -> None:
        with engine.begin() as connection:
            ids = [enqueue(connection) for _ in range(200)]
        with workers_at(engine, 1) as [worker]:
            worker.claim(200)
            declare_dead(engine, worker)
        rescued: list[int] = []

        run_together(*[lambda: rescued.extend(rescue(engine))] * 4)

        assert sorted(rescued) == ids
        assert violations(engine) == []


class TestWhatBecomesOfTheJob:
    def test_a_rescued_job_keeps_its_time_counts_the_crash_and_is_claimed_alone(
        self, engine: Engine
    ) -> None:
        job_id = enqueue(engine)
        run_at = only_job(engine).run_at
        with workers_at(engine, 2) as [dead, living]:
            dead.claim()
            declare_dead(engine, dead)

            rescue(engine)

            [message], [attempt] = stored(engine, MessageQueue), stored(engine, JobAttempt)
            assert (message.run_at, message.attempt, message.crashes) == (run_at, 1, 1)
            assert message.alone
            assert (attempt.job_id, attempt.outcome) == (job_id, "crashed")
            assert attempt.worker_id == dead.id
            assert living.claim(ahead=True) == []
            [claimed] = living.claim()
        assert (claimed.attempt, claimed.crashes) == (2, 1)

    def test_a_job_fails_when_its_last_attempt_crashed(self, engine: Engine) -> None:
        job_id = enqueue(engine, max_attempts=2)
        for expected in (None, "failed"):
            with workers_at(engine, 1) as [worker]:
                worker.claim()
                declare_dead(engine, worker)

                assert rescue(engine) == {job_id: expected}

        job = only_job(engine)
        assert (job.status, job.attempts) == (JobStatus.FAILED, 2)
        assert violations(engine) == []

    def test_a_rescued_job_ends_cancelled_when_somebody_had_asked_for_that(
        self, engine: Engine
    ) -> None:
        job_id = enqueue(engine, max_attempts=1)
        with workers_at(engine, 1) as [worker]:
            worker.claim()
            assert committed(engine, PgQueue().cancel, job_id) is Change.CANCEL_REQUESTED
            declare_dead(engine, worker)

            assert rescue(engine) == {job_id: "cancelled"}

        assert only_job(engine).status is JobStatus.CANCELLED
        assert violations(engine) == []


class TestDeclaringDead:
    def test_a_worker_that_has_beaten_since_it_was_seen_is_spared(self, engine: Engine) -> None:
        with workers_at(engine, 1) as [worker], engine.begin() as connection:
            fleet = Workers(connection)
            [seen] = fleet.members()
            assert Workers(worker.identity).beat(worker.id) == Beat([], is_quiet=False)

            assert not fleet.declare_dead(seen)

            assert [member.id for member in fleet.members()] == [worker.id]

    def test_a_beat_in_flight_is_waited_for_and_spares_the_worker(self, engine: Engine) -> None:
        with workers_at(engine, 1) as [worker]:
            with engine.connect() as connection:
                [seen] = Workers(connection).members()
            assert Workers(worker.transaction).beat(worker.id) == Beat([], is_quiet=False)
            with engine.connect() as rescuer:
                declare = partial(Workers(rescuer).declare_dead, seen)
                with waiting(engine, rescuer, declare) as declared:
                    worker.transaction.commit()

            assert declared == [False]

    def test_a_presence_is_locked_until_its_connection_ends(self, engine: Engine) -> None:
        with workers_at(engine, 2) as [dies, lives]:
            with engine.connect() as connection:
                before = {one.id: one.is_locked for one in Workers(connection).members()}
            dies.crash(engine)
            with engine.connect() as connection:
                after = {one.id: one.is_locked for one in Workers(connection).members()}

        assert before == {dies.id: True, lives.id: True}
        assert after == {dies.id: False, lives.id: True}

    def test_a_first_look_declares_no_worker_dead_however_old_the_heartbeats(
        self, engine: Engine
    ) -> None:
        with workers_at(engine, 1) as [worker]:
            worker.claim_new(engine)
            worker.crash(engine)
            execute(engine, "UPDATE pgqueue.workers SET heartbeat_at = '2020-01-01'")
            with engine.connect() as connection:
                witness, now = Witness(), time.monotonic()
                members = Workers(connection).members()

                assert witness.dead_among(members, asked_at=now, answered_at=now) == []
        assert only_job(engine).status is JobStatus.RUNNING

    def test_jobs_of_a_worker_that_another_has_declared_dead_are_rescued_at_the_next_look(
        self, engine: Engine
    ) -> None:
        with holding_one(engine) as worker, engine.connect() as connection:
            rescuer = Rescue()
            rescuer.searched_at = time.monotonic()

            before = look(connection, rescuer)
            declare_dead(engine, worker)
            after = look(connection, rescuer)

        assert (before, after) == (0, 1)

    def test_what_was_left_of_a_rescue_is_found_by_a_search_now_and_then(
        self, engine: Engine
    ) -> None:
        with holding_one(engine) as worker, engine.connect() as connection:
            declare_dead(engine, worker)
            with engine.begin() as other:
                long_ago = "UPDATE pgqueue.workers SET dead_at = dead_at - interval '1 minute'"
                other.execute(text(long_ago))
            rescuer = Rescue()
            rescuer.searched_at = time.monotonic()

            too_soon = look(connection, rescuer)
            rescuer.searched_at -= SEARCH_EVERY.total_seconds()
            in_time = look(connection, rescuer)

        assert (too_soon, in_time) == (0, 1)

    def test_a_rescue_goes_on_without_its_lock_when_somebody_keeps_that(
        self, engine: Engine
    ) -> None:
        """Any role that can connect can take it, and a rescuer may be stuck with it."""
        with (
            holding_one(engine) as worker,
            engine.connect() as stranger,
            engine.connect() as connection,
        ):
            declare_dead(engine, worker)
            stranger.execute(select(func.pg_advisory_lock(RESCUE_LOCK)))
            patient, impatient = Rescue(lock_wait=3600), Rescue(lock_wait=0)

            rescued = [look(connection, one) for one in (patient, patient, impatient)]

        assert rescued == [0, 0, 1]
        assert violations(engine) == []

    def test_the_rows_of_the_dead_are_forgotten_once_they_hold_nothing(
        self, engine: Engine
    ) -> None:
        with workers_at(engine, 3) as [holding, done, living]:
            holding.claim_new(engine)
            declare_dead(engine, holding, done)
            with engine.begin() as connection:
                connection.execute(
                    text("UPDATE pgqueue.workers SET dead_at = dead_at - interval '25 hours'")
                )
                Workers(connection).forget_dead()
                left = set(connection.scalars(text("SELECT id FROM pgqueue.workers")))

        assert left == {holding.id, living.id}

    def test_a_worker_that_holds_something_cannot_deregister(self, engine: Engine) -> None:
        with workers_at(engine, 2) as [holding, free]:
            holding.claim_new(engine)
            for worker in (holding, free):
                Workers(worker.identity).deregister(worker.id)

            with engine.connect() as connection:
                assert [member.id for member in Workers(connection).members()] == [holding.id]
