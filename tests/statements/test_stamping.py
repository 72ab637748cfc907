"""The stamp: of all who meet the message of a crash, one starts, and the crash is on record."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from sqlalchemy import Engine, text

from chaos import sample_tasks
from chaos.interleavings.logical_workers import (
    ERROR,
    LogicalWorker,
    committed,
    enqueue,
    execute,
    run_together,
    status_of,
    stored,
    violations,
    waiting,
    worker_settings,
    workers_at,
)
from pgqueue import Change, Job, JobAttempt, JobStatus, Lease, PgQueue
from pgqueue.connections.opening import worker_engine
from pgqueue.outcomes import Exhausted, Outcome, Retried, Succeeded
from pgqueue.repository import Attempts, Claimed, Workers
from pgqueue.worker.config import checked_config
from pgqueue.worker.rescuer import Rescue
from pgqueue.worker.running_attempt import RunningAttempt
from pgqueue.worker.supervisor import _runtime_of
from pgqueue.worker.transaction_mode.claim_gate import ClaimGate


def attempts_on_record(engine: Engine) -> list[tuple[int, str]]:
    return sorted((row.attempt, row.outcome) for row in stored(engine, JobAttempt))


def crash_in_transaction(engine: Engine) -> Claimed:
    """Start one job in T, and end its worker: state S3."""
    with workers_at(engine, 1) as [worker]:
        _, claimed = worker.start()
        worker.crash(engine)
    return claimed


class TestCompareAndSet:
    @pytest.mark.parametrize("crashed", [False, True], ids=["a new message", "a crashed one"])
    def test_of_two_who_have_seen_the_same_only_one_starts(
        self, engine: Engine, crashed: bool
    ) -> None:
        enqueue(engine)
        if crashed:
            crash_in_transaction(engine)
        with workers_at(engine, 4) as four:
            seen = []
            for worker in four:
                seen.append(worker.lock())
                worker.transaction.rollback()  # as when T breaks behind the worker's back
            stamps: list[Claimed] = []

            def stamp(worker: LogicalWorker) -> None:
                [locked] = seen[four.index(worker)]
                if claimed := worker.stamp(locked):
                    stamps.append(claimed)

            run_together(*(lambda one=one: stamp(one) for one in four))

            assert [claimed.attempt for claimed in stamps] == [2 if crashed else 1]
        assert attempts_on_record(engine) == ([(1, "crashed")] if crashed else [])

    def test_a_claimer_and_a_locker_of_a_crashed_message_do_not_both_start(
        self, engine: Engine
    ) -> None:
        enqueue(engine)
        crash_in_transaction(engine)
        with workers_at(engine, 2) as [locker, claimer]:
            [locked] = locker.lock()
            locker.transaction.rollback()

            [claimed] = claimer.claim()

            assert (claimed.attempt, claimed.crashes) == (2, 1)
            assert locker.stamp(locked) is None
            assert claimer.settle(claimed, Succeeded())
            assert locker.stamp(locked) is None
        assert attempts_on_record(engine) == [(1, "crashed")]
        assert violations(engine) == []


class TestCrashes:
    def test_every_crash_is_recorded_and_at_max_attempts_the_job_fails_without_a_start(
        self, engine: Engine
    ) -> None:
        job_id = enqueue(engine, max_attempts=2)
        starts = [crash_in_transaction(engine).attempt for _ in range(2)]
        with workers_at(engine, 1) as [worker]:
            [locked] = worker.lock()
            claimed = worker.stamp(locked)
            assert claimed is not None
            assert claimed.attempt > claimed.max_attempts

            assert worker.settle_in_transaction(claimed, Exhausted())
            worker.transaction.commit()

        assert starts == [1, 2]
        [job] = stored(engine, Job)
        assert (job.id, job.status, job.attempts) == (job_id, JobStatus.FAILED, 2)
        assert str(job.last_error).startswith("The worker that ran this attempt died")
        told = [str(attempt.error) for attempt in stored(engine, JobAttempt)]
        assert told == [job.last_error] * 2
        assert attempts_on_record(engine) == [(1, "crashed"), (2, "crashed")]
        assert violations(engine) == []

    def test_a_crash_while_the_job_is_found_exhausted_adds_no_attempt(self, engine: Engine) -> None:
        enqueue(engine, max_attempts=1)
        for _ in range(3):
            crash_in_transaction(engine)
        with workers_at(engine, 1) as [worker]:
            [claimed] = worker.claim()

            assert worker.settle(claimed, Exhausted())

        assert [job.attempts for job in stored(engine, Job)] == [1]
        assert violations(engine) == []

    def test_a_locked_job_that_did_not_start_loses_no_attempt(self, engine: Engine) -> None:
        enqueue(engine)
        with workers_at(engine, 2) as [first, second]:
            first.lock()
            first.crash(engine)

            _, claimed = second.start()

        assert (claimed.attempt, claimed.crashes) == (1, 0)
        assert attempts_on_record(engine) == []


class TestRefusals:
    def test_a_job_that_has_ended_is_not_started(self, engine: Engine) -> None:
        job_id = enqueue(engine)
        with workers_at(engine, 1) as [worker]:
            [locked] = worker.lock()
            assert committed(engine, PgQueue().cancel, job_id) is Change.CANCELLED

            assert worker.stamp(locked) is None

            worker.transaction.rollback()
            assert worker.claim() == []
        assert violations(engine) == []

    def test_a_stamp_that_comes_after_its_message_has_gone_leaves_no_lease(
        self, engine: Engine
    ) -> None:
        """Nobody would settle it, nobody rescue it, and the job's next message would be dropped."""
        enqueue(engine)
        with workers_at(engine, 2) as [late, other]:
            [locked] = late.lock()
            late.transaction.rollback()
            other.run_next(Retried(timedelta(0), ERROR))

            assert late.stamp(locked) is None

            [again] = other.claim()
            assert again.attempt == 2

    def test_a_second_message_of_a_running_job_is_not_started(self, engine: Engine) -> None:
        with engine.begin() as connection:
            enqueue(connection)
            connection.execute(
                text(
                    "INSERT INTO pgqueue.message_queue (queue, priority, run_at, target_id, task) "
                    "SELECT queue, priority, run_at, target_id, task FROM pgqueue.message_queue"
                )
            )
        with workers_at(engine, 2) as [first, second]:
            [locked] = first.lock()
            [twin] = second.lock()
            assert first.stamp(locked) is not None

            assert second.stamp(twin) is None

            second.transaction.rollback()
            [seen] = second.lock()
            assert (seen.seen_message_id, seen.seen_held) == (locked.message_id, True)


class TestTheCommit:
    def test_a_stamp_does_not_wait_for_the_disk_and_nothing_after_it_is_changed(
        self, engine: Engine
    ) -> None:
        with workers_at(engine, 2) as [dead, worker]:
            dead.start_new(engine)
            dead.crash(engine)  # stamped by the other statement next
            [locked] = worker.lock()
            with worker_settings(engine.url).connect() as side:
                setting = text("SHOW synchronous_commit")
                before = side.scalar(setting)

                assert Attempts(side, worker.id).stamp(locked) is not None

                assert side.scalar(setting) == "off"
                side.commit()
                assert side.scalar(setting) == before


class TestLeftStamps:
    def test_those_of_ended_jobs_are_cleared_away_and_no_others(self, engine: Engine) -> None:
        ended, running = enqueue(engine), enqueue(engine)
        with workers_at(engine, 2) as [dead, worker]:
            dead.start()
            dead.crash(engine)
            execute(
                engine,
                "UPDATE pgqueue.jobs SET outcome = 'succeeded', attempts = 1, "
                "finished_at = clock_timestamp() WHERE id = :id",
                id=ended,
            )
            [locked] = worker.lock(2)
            assert worker.stamp(locked) is not None

            with engine.begin() as connection:
                Workers(connection).drop_left_stamps()

            assert [lease.target_id for lease in stored(engine, Lease)] == [running]

    @pytest.mark.parametrize(
        "outcome", [Succeeded(), Retried(timedelta(0), ERROR), Retried(timedelta(hours=1), ERROR)]
    )
    def test_one_that_comes_while_an_outcome_is_committed_goes_at_the_next_look(
        self, engine: Engine, outcome: Outcome
    ) -> None:
        """It sees the job as it was, waits for the lease to go, and takes its place."""
        job_id = enqueue(engine)
        with workers_at(engine, 2) as [late, worker], engine.connect() as looking:
            [seen] = late.lock()
            late.transaction.rollback()  # as when T breaks behind the worker's back
            _, claimed = worker.start()
            assert worker.settle_in_transaction(claimed, outcome)
            with waiting(engine, late.line, lambda: late.stamp(seen)) as stamps:
                worker.transaction.commit()
            assert [stamp and stamp.job_id for stamp in stamps] == [job_id]

            rescuer = Rescue()
            assert rescuer.rescue(looking, rescuer.read_notices(looking)) == 0

            assert stored(engine, Lease) == []
            ended = status_of(engine, job_id) is JobStatus.SUCCEEDED
            assert ended == isinstance(outcome, Succeeded)
        assert violations(engine) == []

    def test_that_of_an_attempt_that_runs_stays(self, engine: Engine) -> None:
        with workers_at(engine, 1) as [worker], engine.connect() as looking:
            claimed = worker.start_new(engine)

            rescuer = Rescue()
            rescuer.rescue(looking, rescuer.read_notices(looking))

            assert worker.settle_in_transaction(claimed, Succeeded())
            worker.transaction.commit()

    def test_none_is_left_by_a_slot_whose_transaction_has_ended_meanwhile(
        self, engine: Engine
    ) -> None:
        """It may have waited for others' stamps, or for the database to be back."""
        enqueue(engine)
        with workers_at(engine, 1) as [worker], turnstile_of(engine) as claim_gate:
            [locked] = worker.lock()
            with engine.begin() as connection:
                end = text("SELECT pg_terminate_backend(:pid, 5000)")
                assert connection.scalar(end, {"pid": worker.pids[2]})

            row = locked.claimed(attempt=1, crashes=0)
            run = RunningAttempt(
                row, sample_tasks.call, worker_id=worker.id, stopping=threading.Event()
            )
            run.begin_on(worker.transaction)
            assert run.server_process is None  # whose number may be another's by now
            stamped = claim_gate.stamp(locked, worker.transaction)

            worker.transaction.invalidate()
            assert stamped is None
        assert stored(engine, Lease) == []


@contextmanager
def turnstile_of(engine: Engine) -> Iterator[ClaimGate]:
    """That of a worker that does nothing else."""
    plan = checked_config(["default"], 1, "transaction", 1, timedelta(1), timedelta(1))
    stopping = threading.Event()
    logical_workers = _runtime_of(PgQueue(engine), plan, worker_engine(engine), stopping)
    claim_gate = ClaimGate(logical_workers, poll_interval=1, until_empty=False)
    yield claim_gate
    claim_gate.close()
    logical_workers.listener.close()
