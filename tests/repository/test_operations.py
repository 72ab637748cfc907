"""Cancel and requeue, of a job in every state it can be in: what they do, and what they say."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial

import pytest
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.orm import Session

from chaos.interleavings.logical_workers import (
    ERROR,
    PATIENCE,
    LogicalWorker,
    committed,
    declare_dead,
    enqueue,
    execute,
    rescue,
    status_of,
    stored,
    violations,
    waiting,
    workers_at,
)
from pgqueue import (
    Change,
    DuplicateJob,
    Job,
    JobAttempt,
    JobNotFound,
    JobStatus,
    MessageQueue,
    PgQueue,
    SchemaMissing,
)
from pgqueue.database.opening import driver_connection
from pgqueue.outcomes import AttemptEnd, Cancelled, Failed, Retried, Succeeded
from pgqueue.repository.claim import Claimed
from pgqueue.repository.tables import CHANNEL

queue = PgQueue()
CANCELLED, CANCEL_REQUESTED, REQUEUED, DUE_NOW, CHANGED, *_, UNCHANGED = Change


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
    [claimed] = worker.claim_in_transaction()
    return claimed


def leased(worker: LogicalWorker, engine: Engine, job_id: int) -> Claimed:
    [claimed] = worker.claim()
    return claimed


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


# What each operation says of a job in a state; None: not tried.
SAYS: list[tuple[State, JobStatus, dict[str, Change | None]]] = [
    (state, status, dict(zip(("cancel", "requeue", "run_now", "change"), says, strict=True)))
    for state, status, *says in (
        (pending, JobStatus.PENDING, CANCELLED, UNCHANGED, UNCHANGED, CHANGED),
        (delayed, JobStatus.PENDING, CANCELLED, UNCHANGED, DUE_NOW, CHANGED),
        (backing_off, JobStatus.PENDING, None, None, DUE_NOW, CHANGED),
        (locked, JobStatus.PENDING, CANCELLED, UNCHANGED, UNCHANGED, UNCHANGED),
        (leased, JobStatus.RUNNING, CANCEL_REQUESTED, UNCHANGED, UNCHANGED, UNCHANGED),
        (flagged, JobStatus.RUNNING, CANCEL_REQUESTED, UNCHANGED, None, None),
        (damaged, JobStatus.BLOCKED, CANCELLED, UNCHANGED, None, None),
        (succeeded, JobStatus.SUCCEEDED, UNCHANGED, UNCHANGED, UNCHANGED, UNCHANGED),
        (failed, JobStatus.FAILED, UNCHANGED, REQUEUED, UNCHANGED, UNCHANGED),
        (cancelled, JobStatus.CANCELLED, UNCHANGED, REQUEUED, None, UNCHANGED),
    )
]
BECOMES = {
    CANCELLED: JobStatus.CANCELLED, REQUEUED: JobStatus.PENDING, DUE_NOW: JobStatus.PENDING
}  # fmt: skip
ACTS: dict[str, Callable[[Connection | Session, int], Change]] = {
    "cancel": queue.cancel,
    "requeue": queue.requeue,
    "run_now": queue.run_now,
    "change": partial(queue.change, priority=1),
}


@pytest.mark.parametrize(
    ("act", "state", "status", "change"),
    [
        pytest.param(act, state, status, change, id=f"{act}-{state.__name__}")
        for state, status, says in SAYS
        for act, change in says.items()
        if change is not None
    ],
)
def test_an_operation_says_what_it_has_done_and_waits_for_no_handler(
    engine: Engine,
    impatient: Engine,
    worker: LogicalWorker,
    act: str,
    state: State,
    status: JobStatus,
    change: Change,
) -> None:
    job_id = enqueue(engine, key="k")
    state(worker, engine, job_id)
    before = violations(engine)
    assert (before != []) is (state is damaged)

    assert committed(impatient, ACTS[act], job_id) is change

    assert status_of(engine, job_id) is BECOMES.get(change, status)
    assert violations(engine) == (before if act == "requeue" else [])


@pytest.mark.parametrize("act", ACTS)
def test_an_unknown_job_is_named(session: Session, act: str) -> None:
    with pytest.raises(JobNotFound, match="job 4711 does not exist"):
        ACTS[act](session, 4711)


@pytest.mark.parametrize(("act", "priority"), [("run_now", 5), ("change", 1)])
def test_the_attempts_and_crashes_of_a_job_that_is_moved_count_on(
    engine: Engine, worker: LogicalWorker, act: str, priority: int
) -> None:
    job_id = enqueue(engine)
    delay = timedelta(hours=1) if act == "run_now" else timedelta(0)
    worker.settle(leased(worker, engine, job_id), Retried(delay, ERROR, AttemptEnd.CRASHED))

    committed(engine, ACTS[act], job_id)

    again = leased(worker, engine, job_id)
    assert (again.attempt, again.crashes, again.priority) == (2, 1, priority)


@pytest.mark.parametrize(("act", "state"), [("run_now", backing_off), ("change", pending)])
def test_the_workers_are_told_that_a_moved_job_stands_behind_their_cursors(
    engine: Engine, worker: LogicalWorker, act: str, state: State
) -> None:
    job_id = enqueue(engine)
    state(worker, engine, job_id)
    with engine.connect() as listener, engine.begin() as connection:
        driver = driver_connection(listener)
        driver.autocommit = True
        driver.execute(f"LISTEN {CHANNEL}")

        ACTS[act](connection, job_id)
        connection.commit()

        [told] = driver.notifies(timeout=60, stop_after=1)
        assert told.payload == "rewind"


class TestCancel:
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
            assert holder.claim_in_transaction()
            committed(engine, queue.cancel, job_id)
            holder.transaction.rollback()

            assert other.look(10).taken == 1
            assert other.look(10).taken == 0

    def test_a_cancel_that_is_rolled_back_has_done_nothing(
        self, engine: Engine, session: Session, worker: LogicalWorker
    ) -> None:
        job_id = enqueue(engine)
        queue.cancel(session, job_id)
        session.rollback()

        assert [claimed.job_id for claimed in worker.claim()] == [job_id]
        assert violations(engine) == []


class TestRequeue:
    @pytest.mark.parametrize("notify", [True, False])
    def test_a_requeue_wakes_workers_unless_the_application_does_without(
        self, engine: Engine, worker: LogicalWorker, notify: bool
    ) -> None:
        job_id = enqueue(engine, max_attempts=1)
        failed(worker, engine, job_id)
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as listening:
            listening.exec_driver_sql(f"LISTEN {CHANNEL}")

            committed(engine, PgQueue(notify=notify).requeue, job_id)

            listening.exec_driver_sql(f"NOTIFY {CHANNEL}, 'the last word'")
            heard = driver_connection(listening).notifies(timeout=PATIENCE, stop_after=notify + 1)
            assert [word.payload for word in heard] == ["rewind"] * notify + ["the last word"]

    def test_a_requeued_job_is_as_new_and_its_old_attempts_stay_on_record(
        self, engine: Engine, worker: LogicalWorker
    ) -> None:
        job_id = enqueue(engine, key="k", max_attempts=1)
        failed(worker, engine, job_id)

        committed(engine, queue.requeue, job_id)

        [job] = stored(engine, Job)
        assert (job.attempts, job.outcome, job.finished_at) == (0, None, None)
        assert job.held_unique_key == "k"
        [claimed] = worker.claim()
        assert claimed.attempt == 1
        assert worker.settle(claimed, Failed(ERROR))
        assert len(stored(engine, JobAttempt)) == 2
        assert violations(engine) == []

    def test_a_requeue_with_a_taken_key_raises_and_leaves_the_transaction_usable(
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

    def test_a_zombie_of_before_a_requeue_is_fenced(self, engine: Engine) -> None:
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

        worker.run_next(Succeeded())
        assert violations(engine) == []

    def test_a_job_cancelled_under_a_lock_never_has_two_messages(self, engine: Engine) -> None:
        job_id = enqueue(engine)
        with workers_at(engine, 1) as [worker]:
            assert worker.claim_in_transaction()
            with engine.begin() as connection:
                assert queue.cancel(connection, job_id) is Change.CANCELLED
                assert queue.requeue(connection, job_id) is Change.UNCHANGED
            worker.transaction.rollback()

            assert committed(engine, queue.requeue, job_id) is Change.REQUEUED

        assert len(stored(engine, MessageQueue)) == 1
        assert violations(engine) == []

    def test_a_requeue_waits_for_a_settle_in_flight_and_then_sees_it(
        self, engine: Engine, worker: LogicalWorker
    ) -> None:
        job_id = enqueue(engine)
        claimed = leased(worker, engine, job_id)
        assert worker.settle_in_transaction(claimed, Failed(ERROR))
        with engine.connect() as operator:
            requeue = partial(queue.requeue, operator, job_id)
            with waiting(engine, operator, requeue) as changes:
                worker.transaction.commit()
            operator.commit()

        assert changes == [Change.REQUEUED]
        assert violations(engine) == []


def test_where_there_are_no_tables_every_call_says_what_brings_them(empty_engine: Engine) -> None:
    calls: dict[str, list[object]] = {
        "cancel": [1], "requeue": [1], "run_now": [1], "pause": ["mail"], "resume": ["mail"],
        "check": [], "counts": [], "run_again": [1], "delete": [1],
    }  # fmt: skip
    for call, arguments in calls.items():
        with (
            empty_engine.connect() as connection,
            pytest.raises(SchemaMissing, match="app module:queue upg"),
        ):
            getattr(queue, call)(connection, *arguments)


class TestDelete:
    @pytest.mark.parametrize("state", [succeeded, failed, cancelled, pending])
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
