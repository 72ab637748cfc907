"""Cancel and requeue, of a job in every state it can be in: what they do, and what they say."""

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from chaos.interleavings.logical_workers import (
    ERROR,
    LogicalWorker,
    committed,
    declare_dead,
    enqueue,
    execute,
    rescue,
    violations,
    wait_until,
    waits_for_lock,
    workers_at,
)
from pgqueue import (
    Change,
    DuplicateJob,
    Job,
    JobNotFound,
    JobStatus,
    Lease,
    MessageQueue,
    PgQueue,
    SchemaMissing,
)
from pgqueue.connections.opening import driver_connection
from pgqueue.outcomes import AttemptEnd, Cancelled, Failed, Retried, Succeeded
from pgqueue.repository import Claimed
from pgqueue.statements.tables import CHANNEL

queue = PgQueue()


@pytest.fixture
def impatient(database_url: str) -> Iterator[Engine]:
    """An operator's engine that waits for no lock."""
    engine = create_engine(database_url, connect_args={"options": "-c lock_timeout=300ms"})
    yield engine
    engine.dispose()


# Each brings a pending job into the state its name says.
State = Callable[[LogicalWorker, Engine, int], object]


def pending(worker: LogicalWorker, engine: Engine, job_id: int) -> None: ...


def delayed(worker: LogicalWorker, engine: Engine, job_id: int) -> None:
    with engine.begin() as connection:
        for change in (
            "UPDATE pgqueue.jobs SET run_at = run_at + interval '1 day'",
            "UPDATE pgqueue.message_queue SET run_at = (SELECT run_at FROM pgqueue.jobs)",
        ):
            connection.execute(text(change))


def backing_off(worker: LogicalWorker, engine: Engine, job_id: int) -> None:
    worker.settle(leased(worker, engine, job_id), Retried(timedelta(hours=1), ERROR))


def locked(worker: LogicalWorker, engine: Engine, job_id: int) -> object:
    [row] = worker.lock()
    return row


def stamped(worker: LogicalWorker, engine: Engine, job_id: int) -> Claimed:
    return worker.start()[1]


def leased(worker: LogicalWorker, engine: Engine, job_id: int) -> Claimed:
    [claimed] = worker.claim()
    return claimed


def crashed(worker: LogicalWorker, engine: Engine, job_id: int) -> None:
    worker.start()
    worker.transaction.rollback()


def succeeded(worker: LogicalWorker, engine: Engine, job_id: int) -> None:
    worker.settle(leased(worker, engine, job_id), Succeeded())


def failed(worker: LogicalWorker, engine: Engine, job_id: int) -> None:
    worker.settle(leased(worker, engine, job_id), Failed(ERROR))


def cancelled(worker: LogicalWorker, engine: Engine, job_id: int) -> None:
    worker.settle(leased(worker, engine, job_id), Cancelled("enough"))


def damaged(worker: LogicalWorker, engine: Engine, job_id: int) -> None:
    execute(engine, "DELETE FROM pgqueue.message_queue")


def flagged(worker: LogicalWorker, engine: Engine, job_id: int) -> None:
    leased(worker, engine, job_id)
    assert committed(engine, queue.cancel, job_id) is Change.CANCEL_REQUESTED


CANCELS: list[tuple[State, Change, JobStatus]] = [
    (pending, Change.CANCELLED, JobStatus.CANCELLED),
    (delayed, Change.CANCELLED, JobStatus.CANCELLED),
    (locked, Change.CANCELLED, JobStatus.CANCELLED),
    (stamped, Change.CANCEL_REQUESTED, JobStatus.RUNNING),
    (leased, Change.CANCEL_REQUESTED, JobStatus.RUNNING),
    (flagged, Change.CANCEL_REQUESTED, JobStatus.RUNNING),
    (crashed, Change.CANCELLED, JobStatus.CANCELLED),
    (damaged, Change.CANCELLED, JobStatus.CANCELLED),
    (succeeded, Change.UNCHANGED, JobStatus.SUCCEEDED),
    (failed, Change.UNCHANGED, JobStatus.FAILED),
    (cancelled, Change.UNCHANGED, JobStatus.CANCELLED),
]
REQUEUES: list[tuple[State, Change, JobStatus]] = [
    (pending, Change.UNCHANGED, JobStatus.PENDING),
    (delayed, Change.UNCHANGED, JobStatus.PENDING),
    (locked, Change.UNCHANGED, JobStatus.PENDING),
    (stamped, Change.UNCHANGED, JobStatus.RUNNING),
    (leased, Change.UNCHANGED, JobStatus.RUNNING),
    (flagged, Change.UNCHANGED, JobStatus.RUNNING),
    (crashed, Change.UNCHANGED, JobStatus.RUNNING),
    (damaged, Change.UNCHANGED, JobStatus.BLOCKED),
    (succeeded, Change.UNCHANGED, JobStatus.SUCCEEDED),
    (failed, Change.REQUEUED, JobStatus.PENDING),
    (cancelled, Change.REQUEUED, JobStatus.PENDING),
]

RUN_NOWS: list[tuple[State, Change, JobStatus]] = [
    (pending, Change.UNCHANGED, JobStatus.PENDING),
    (delayed, Change.DUE_NOW, JobStatus.PENDING),
    (backing_off, Change.DUE_NOW, JobStatus.PENDING),
    (locked, Change.UNCHANGED, JobStatus.PENDING),
    (stamped, Change.UNCHANGED, JobStatus.RUNNING),
    (leased, Change.UNCHANGED, JobStatus.RUNNING),
    (crashed, Change.UNCHANGED, JobStatus.RUNNING),
    (succeeded, Change.UNCHANGED, JobStatus.SUCCEEDED),
    (failed, Change.UNCHANGED, JobStatus.FAILED),
]


def name_of(value: object) -> str | None:
    return getattr(value, "__name__", None)


def status_of(engine: Engine, job_id: int) -> JobStatus:
    with Session(engine) as session:
        return session.get_one(Job, job_id).status


class TestCancel:
    @pytest.mark.parametrize(("state", "change", "status"), CANCELS, ids=name_of)
    def test_it_says_what_it_has_done_and_waits_for_no_handler(
        self,
        engine: Engine,
        impatient: Engine,
        worker: LogicalWorker,
        state: State,
        change: Change,
        status: JobStatus,
    ) -> None:
        job_id = enqueue(engine, key="k")
        state(worker, engine, job_id)

        with impatient.begin() as connection:
            assert queue.cancel(connection, job_id) is change

        assert status_of(engine, job_id) is status
        assert violations(engine) == []

    def test_an_unknown_job_is_named(self, session: Session) -> None:
        for act in (queue.cancel, queue.requeue):
            with pytest.raises(JobNotFound, match="job 4711 does not exist"):
                act(session, 4711)

    def test_a_running_job_ends_cancelled_however_its_attempt_ends(
        self, engine: Engine, worker: LogicalWorker
    ) -> None:
        for outcome in (Succeeded(), Succeeded({"sum": 1}), Retried(None, ERROR), Failed(ERROR)):
            job_id = enqueue(engine)
            claimed = leased(worker, engine, job_id)
            assert committed(engine, queue.cancel, job_id) is Change.CANCEL_REQUESTED

            assert worker.settle(claimed, outcome)

            assert status_of(engine, job_id) is JobStatus.CANCELLED
        assert violations(engine) == []

    def test_what_is_left_of_a_job_cancelled_under_a_lock_is_dropped(self, engine: Engine) -> None:
        with workers_at(engine, 2) as [holder, other]:
            job_id = enqueue(engine)
            holder.lock()
            committed(engine, queue.cancel, job_id)
            holder.transaction.rollback()

            assert other.look(10).taken == 1
            assert other.look(10).taken == 0

    def test_what_a_crash_has_left_goes_with_the_job(
        self, engine: Engine, worker: LogicalWorker
    ) -> None:
        job_id = enqueue(engine)
        crashed(worker, engine, job_id)

        committed(engine, queue.cancel, job_id)

        with Session(engine) as session:
            assert session.query(Lease).count() == session.query(MessageQueue).count() == 0

    def test_a_cancel_that_is_rolled_back_has_done_nothing(
        self, engine: Engine, session: Session, worker: LogicalWorker
    ) -> None:
        job_id = enqueue(engine)
        queue.cancel(session, job_id)
        session.rollback()

        assert [claimed.job_id for claimed in worker.claim()] == [job_id]
        assert violations(engine) == []


class TestRequeue:
    @pytest.mark.parametrize(("state", "change", "status"), REQUEUES, ids=name_of)
    def test_it_says_what_it_has_done_and_waits_for_no_handler(
        self,
        engine: Engine,
        impatient: Engine,
        worker: LogicalWorker,
        state: State,
        change: Change,
        status: JobStatus,
    ) -> None:
        job_id = enqueue(engine, key="k")
        state(worker, engine, job_id)
        sound = violations(engine)

        with impatient.begin() as connection:
            assert queue.requeue(connection, job_id) is change

        assert status_of(engine, job_id) is status
        assert violations(engine) == sound

    @pytest.mark.parametrize("notify", [True, False])
    def test_the_sleepers_are_told_unless_the_application_does_without(
        self, engine: Engine, worker: LogicalWorker, notify: bool
    ) -> None:
        job_id = enqueue(engine, max_attempts=1)
        failed(worker, engine, job_id)
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as listening:
            listening.exec_driver_sql(f"LISTEN {CHANNEL}")

            committed(engine, PgQueue(notify=notify).requeue, job_id)

            heard = driver_connection(listening).notifies(timeout=0.2, stop_after=1)
            assert [word.payload for word in heard] == ["rewind"] * notify

    def test_the_job_is_as_new_and_its_old_attempts_stay_on_record(
        self, engine: Engine, worker: LogicalWorker
    ) -> None:
        job_id = enqueue(engine, key="k", max_attempts=1)
        failed(worker, engine, job_id)

        committed(engine, queue.requeue, job_id)

        with Session(engine) as session:
            job = session.get_one(Job, job_id)
            assert (job.attempts, job.outcome, job.finished_at) == (0, None, None)
            assert job.held_unique_key == "k"
        [claimed] = worker.claim()
        assert claimed.attempt == 1
        assert worker.settle(claimed, Failed(ERROR))
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT count(*) FROM pgqueue.job_attempts")) == 2
        assert violations(engine) == []

    def test_a_taken_key_raises_and_leaves_the_transaction_usable(
        self, engine: Engine, session: Session, worker: LogicalWorker
    ) -> None:
        job_id = enqueue(engine, key="k")
        failed(worker, engine, job_id)
        holder = enqueue(session, key="k")

        with pytest.raises(DuplicateJob, match=f"job {job_id}: job {holder} .*'k'") as raised:
            queue.requeue(session, job_id)

        assert raised.value.holder == holder
        other = enqueue(session)
        session.commit()
        assert status_of(engine, job_id) is JobStatus.FAILED
        assert {claimed.job_id for claimed in worker.claim(9)} == {holder, other}
        assert violations(engine) == []

    def test_a_zombie_of_before_is_fenced(self, engine: Engine) -> None:
        job_id = enqueue(engine, max_attempts=1)
        with workers_at(engine, 2) as [zombie, heir]:
            [old] = zombie.claim()
            declare_dead(engine, zombie)
            assert rescue(engine) == {job_id: "failed"}
            assert committed(engine, queue.requeue, job_id) is Change.REQUEUED
            [new] = heir.claim()

            assert not zombie.settle(old, Succeeded())

            assert old.attempt == new.attempt == 1
            assert heir.settle(new, Failed(ERROR))
        assert status_of(engine, job_id) is JobStatus.FAILED

    def test_a_lease_left_on_an_ended_job_is_fenced(
        self, engine: Engine, worker: LogicalWorker
    ) -> None:
        """A claim and a cancel at once: the job ends while a worker has just begun to run it."""
        job_id = enqueue(engine)
        old = leased(worker, engine, job_id)
        with engine.begin() as connection:
            connection.execute(
                text(
                    "WITH ended AS (UPDATE pgqueue.jobs SET outcome = 'cancelled', finished_at = "
                    "now() RETURNING id, outcome, queue, task) INSERT INTO pgqueue.dead_letters "
                    "(job_id, outcome, queue, task) SELECT * FROM ended"
                )
            )
            queue.requeue(connection, job_id)

        assert not worker.settle(old, Succeeded())

        [new] = worker.claim()
        assert worker.settle(new, Succeeded())
        assert violations(engine) == []

    @pytest.mark.parametrize("stamps", [False, True])
    def test_a_job_cancelled_under_a_lock_never_has_two_messages(
        self, engine: Engine, stamps: bool
    ) -> None:
        job_id = enqueue(engine)
        with workers_at(engine, 1) as [worker]:
            [row] = worker.lock()
            with engine.begin() as connection:
                assert queue.cancel(connection, job_id) is Change.CANCELLED
                assert queue.requeue(connection, job_id) is Change.UNCHANGED
            if stamps:
                assert worker.stamp(row) is None
            worker.transaction.rollback()

            assert committed(engine, queue.requeue, job_id) is Change.REQUEUED

        with Session(engine) as session:
            assert session.query(MessageQueue).count() == 1
        assert violations(engine) == []

    def test_it_waits_for_a_settle_in_flight_and_then_sees_it(
        self, engine: Engine, worker: LogicalWorker
    ) -> None:
        job_id = enqueue(engine)
        claimed = stamped(worker, engine, job_id)
        assert worker.settle_in_transaction(claimed, Failed(ERROR))
        changes: list[Change] = []
        with engine.connect() as operator:
            pid = operator.scalar(text("SELECT pg_backend_pid()"))

            def requeue() -> None:
                changes.append(queue.requeue(operator, job_id))
                operator.commit()

            thread = threading.Thread(target=requeue)
            thread.start()
            wait_until(lambda: waits_for_lock(engine, pid))
            worker.transaction.commit()
            thread.join()

        assert changes == [Change.REQUEUED]
        assert violations(engine) == []


class TestRunNow:
    @pytest.mark.parametrize(("state", "change", "status"), RUN_NOWS, ids=name_of)
    def test_it_says_what_it_has_done_and_waits_for_no_handler(
        self,
        engine: Engine,
        impatient: Engine,
        worker: LogicalWorker,
        state: State,
        change: Change,
        status: JobStatus,
    ) -> None:
        job_id = enqueue(engine, key="k")
        state(worker, engine, job_id)

        with impatient.begin() as connection:
            assert queue.run_now(connection, job_id) is change

        assert status_of(engine, job_id) is status
        assert violations(engine) == []

    def test_its_attempts_and_crashes_count_on(self, engine: Engine, worker: LogicalWorker) -> None:
        job_id = enqueue(engine)
        claimed = leased(worker, engine, job_id)
        worker.settle(claimed, Retried(timedelta(hours=1), ERROR, AttemptEnd.CRASHED))

        committed(engine, queue.run_now, job_id)

        again = leased(worker, engine, job_id)
        assert (again.attempt, again.crashes) == (2, 1)

    def test_the_workers_are_told_that_it_stands_behind_their_cursors(
        self, engine: Engine, worker: LogicalWorker
    ) -> None:
        job_id = enqueue(engine)
        backing_off(worker, engine, job_id)
        with engine.connect() as listener, engine.begin() as connection:
            driver = driver_connection(listener)
            driver.autocommit = True
            driver.execute(f"LISTEN {CHANNEL}")

            queue.run_now(connection, job_id)
            connection.commit()

            [told] = driver.notifies(timeout=60, stop_after=1)
            assert told.payload == "rewind"

    def test_a_job_that_does_not_exist_is_an_error(self, engine: Engine) -> None:
        with engine.begin() as connection, pytest.raises(JobNotFound, match="job 7 does not exist"):
            queue.run_now(connection, 7)


CHANGES: list[tuple[State, Change, JobStatus]] = [
    (pending, Change.CHANGED, JobStatus.PENDING),
    (delayed, Change.CHANGED, JobStatus.PENDING),
    (backing_off, Change.CHANGED, JobStatus.PENDING),
    (locked, Change.UNCHANGED, JobStatus.PENDING),
    (stamped, Change.UNCHANGED, JobStatus.RUNNING),
    (leased, Change.UNCHANGED, JobStatus.RUNNING),
    (crashed, Change.UNCHANGED, JobStatus.RUNNING),
    (succeeded, Change.UNCHANGED, JobStatus.SUCCEEDED),
    (failed, Change.UNCHANGED, JobStatus.FAILED),
    (cancelled, Change.UNCHANGED, JobStatus.CANCELLED),
]


class TestChange:
    @pytest.mark.parametrize(("state", "change", "status"), CHANGES, ids=name_of)
    def test_it_says_what_it_has_done_and_waits_for_no_handler(
        self,
        engine: Engine,
        impatient: Engine,
        worker: LogicalWorker,
        state: State,
        change: Change,
        status: JobStatus,
    ) -> None:
        job_id = enqueue(engine, key="k")
        state(worker, engine, job_id)

        with impatient.begin() as connection:
            assert queue.change(connection, job_id, priority=1) is change

        assert status_of(engine, job_id) is status
        assert violations(engine) == []

    def test_its_attempts_and_crashes_count_on(self, engine: Engine, worker: LogicalWorker) -> None:
        job_id = enqueue(engine)
        claimed = leased(worker, engine, job_id)
        worker.settle(claimed, Retried(timedelta(0), ERROR, AttemptEnd.CRASHED))

        committed(engine, queue.change, job_id, priority=1)

        again = leased(worker, engine, job_id)
        assert (again.attempt, again.crashes, again.priority) == (2, 1, 1)

    def test_the_workers_are_told_that_it_stands_behind_their_cursors(
        self, engine: Engine, worker: LogicalWorker
    ) -> None:
        job_id = enqueue(engine)
        with engine.connect() as listener, engine.begin() as connection:
            driver = driver_connection(listener)
            driver.autocommit = True
            driver.execute(f"LISTEN {CHANNEL}")

            queue.change(connection, job_id, priority=1)
            connection.commit()

            [told] = driver.notifies(timeout=60, stop_after=1)
            assert told.payload == "rewind"

    def test_the_handler_of_a_job_cannot_change_it(
        self, engine: Engine, worker: LogicalWorker
    ) -> None:
        job_id = enqueue(engine)
        worker.lock()

        assert queue.change(worker.transaction, job_id, priority=1) is Change.UNCHANGED

    def test_a_job_that_does_not_exist_is_an_error(self, engine: Engine) -> None:
        with engine.begin() as connection, pytest.raises(JobNotFound, match="job 7 does not exist"):
            queue.change(connection, 7, priority=1)


@pytest.mark.parametrize(
    "call", ["cancel", "requeue", "run_now", "pause", "resume", "check", "counts"]
)
def test_where_there_are_no_tables_every_call_says_what_brings_them(
    empty_database_url: str, call: str
) -> None:
    arguments: dict[str, list[object]] = {
        "cancel": [1], "requeue": [1], "run_now": [1], "pause": ["mail"], "resume": ["mail"],
    }  # fmt: skip
    engine = create_engine(empty_database_url)

    with engine.connect() as connection, pytest.raises(SchemaMissing, match="app module:queue upg"):
        getattr(queue, call)(connection, *arguments.get(call, []))

    engine.dispose()


class TestDelete:
    @pytest.mark.parametrize("state", [succeeded, failed, cancelled, pending, leased, crashed])
    def test_a_job_deleted_by_a_session_leaves_nothing_behind(
        self, engine: Engine, session: Session, worker: LogicalWorker, state: State
    ) -> None:
        job_id = enqueue(session)
        session.commit()
        state(worker, engine, job_id)

        session.delete(session.get_one(Job, job_id))
        session.commit()

        for table in ("jobs", "message_queue", "leases", "job_attempts", "dead_letters"):
            assert session.scalar(text(f"SELECT count(*) FROM pgqueue.{table}")) == 0
