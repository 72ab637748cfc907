"""Row security on pgqueue's tables: a row that is hidden is not taken for a missing one."""

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Barrier, Event, Thread
from typing import Any

import psycopg
import pytest
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, Engine, NullPool, create_engine, make_url, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from chaos.interleavings.logical_workers import pairs
from chaos.workers import wait_until
from pgqueue import Job, JobContext, JobStatus, Limit, PgQueue, RowsHidden, Worker, schema
from pgqueue.database.opening import own_connection
from pgqueue.database.settings import JANITOR
from pgqueue.outcomes import Released
from pgqueue.repository.admit import drop_useless
from pgqueue.repository.batches import Batches
from pgqueue.repository.jobs import Jobs
from pgqueue.repository.rescue import Rescues
from pgqueue.repository.settle import Attempts
from pgqueue.repository.tables import array_of
from pgqueue.repository.workers import Workers
from pgqueue.worker.duties.prune import PruneRound, RoundState

PATIENCE = 60
HIDDEN = "Row security hides rows"


@pytest.fixture
def role(engine: Engine) -> Iterator[str]:
    """The role of workers, which does not own the tables."""
    name = f"clerk_{uuid.uuid4().hex[:8]}"
    with engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {name} LOGIN PASSWORD 'x'"))
        schema.grant(worker=name, connection=connection)
    yield name
    with engine.begin() as connection:
        connection.execute(text(f"DROP OWNED BY {name}; DROP ROLE {name}"))


@pytest.fixture
def clerk(engine: Engine, role: str) -> Iterator[Engine]:
    """An engine of that role, whose connections have no settings of pgqueue: as behind a pooler
    that resets them, and as in the application."""
    clerk = create_engine(make_url(engine.url).set(username=role, password="x"))
    yield clerk
    clerk.dispose()


@contextmanager
def row_security(engine: Engine, table: str = "jobs") -> Iterator[None]:
    with engine.begin() as connection:
        connection.execute(text(f"ALTER TABLE pgqueue.{table} ENABLE ROW LEVEL SECURITY"))
        # Whatever it writes: only what it reads is hidden.
        connection.execute(
            text(f"CREATE POLICY write ON pgqueue.{table} FOR INSERT WITH CHECK (true)")
        )
    yield
    with engine.begin() as connection:
        connection.execute(text(f"DROP POLICY write ON pgqueue.{table}"))
        connection.execute(text(f"ALTER TABLE pgqueue.{table} DISABLE ROW LEVEL SECURITY"))


class CursorBehindPooler(psycopg.Cursor[Any]):
    """Forgets the settings of its connection after each transaction, as PgBouncer makes it."""

    def execute(self, *args: Any, **options: Any) -> Any:
        if self.connection.info.transaction_status is TransactionStatus.IDLE:
            self.connection.pgconn.exec_(b"DISCARD ALL")
        return super().execute(*args, **options)


@pytest.mark.parametrize("is_pooled", [False, True])
def test_a_worker_runs_nothing_under_row_security_and_everything_afterwards(
    engine: Engine, clerk: Engine, role: str, caplog: pytest.LogCaptureFixture, is_pooled: bool
) -> None:
    if is_pooled:
        options = {"cursor_factory": CursorBehindPooler, "prepare_threshold": None}
        clerk = create_engine(clerk.url, connect_args=options, poolclass=NullPool)
    queue = PgQueue(clerk, notify=not is_pooled)
    has_run = Event()

    @queue.task
    def work(n: int) -> None:
        if n == 0:
            has_run.set()

    worker = Worker(queue, concurrency=2, poll_interval=timedelta(milliseconds=100))
    runs = Thread(target=worker.run)
    runs.start()
    try:
        work.delay(0)
        assert has_run.wait(PATIENCE)
        with row_security(engine):
            with Session(engine) as session:
                work.enqueue_many(session, [{"n": n} for n in range(1, 21)])
                session.commit()
            wait_until(lambda: "claimer: the database refuses" in caplog.text)
        wait_until(lambda: statuses(engine) == {JobStatus.SUCCEEDED: 21})
    finally:
        worker.stop()
        runs.join(PATIENCE)

    line = next(line for line in caplog.messages if line.startswith("claimer: the database"))
    assert "pgqueue.jobs from" in line if is_pooled else 'table "jobs"' in line
    assert "ALTER TABLE pgqueue.jobs DISABLE ROW LEVEL SECURITY" in line
    assert f"ALTER ROLE {role} BYPASSRLS" in line
    assert "pgqueue grant" not in line


@pytest.mark.parametrize("table", ["jobs", "leases"])
def test_an_attempt_that_ends_under_row_security_is_not_taken_for_one_that_was_lost(
    engine: Engine, clerk: Engine, table: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue, starts = PgQueue(clerk), []
    have_begun, may_end = Barrier(4), Event()

    def start(name: str) -> None:
        starts.append(name)
        have_begun.wait(PATIENCE)
        may_end.wait(PATIENCE)

    @queue.task(name="plain", max_attempts=1)
    def plain() -> None:
        start("plain")

    @queue.task(name="transactional", max_attempts=1)
    def transactional(session: Session) -> None:
        start("transactional")

    @queue.task(name="finishing", max_attempts=1)
    def finishing(ctx: JobContext) -> None:
        start("finishing")
        with ctx.finish():
            pass

    worker = Worker(queue, concurrency=3)
    runs = Thread(target=worker.run)
    runs.start()
    try:
        for task in (plain, transactional, finishing):
            task.delay()
        have_begun.wait(PATIENCE)
        with row_security(engine, table):
            may_end.set()
            wait_until(lambda: sum(HIDDEN in line for line in caplog.messages) == 2)
        wait_until(lambda: JobStatus.RUNNING not in statuses(engine))
    finally:
        worker.stop()
        runs.join(PATIENCE)

    assert sorted(starts) == ["finishing", "plain", "transactional"]
    with Session(engine) as session:
        ended = {job.task: job.last_error for job in session.scalars(select(Job))}
    assert ended["plain"] is None
    for name in ("transactional", "finishing"):
        assert HIDDEN in str(ended[name])


def test_a_claim_in_ones_own_transaction_says_what_is_hidden_and_from_whom(
    engine: Engine, clerk: Engine, role: str
) -> None:
    queue = PgQueue(clerk)

    @queue.task
    def work() -> None: ...

    work.delay()
    with (
        row_security(engine),
        Session(clerk) as session,
        pytest.raises(RowsHidden, match=rf"pgqueue\.jobs from the role {role}"),
        queue.claim(session),
    ):
        pass
    assert statuses(engine) == {JobStatus.PENDING: 1}
    with Session(clerk) as session:
        with queue.claim(session) as claimed:
            assert claimed is not None
        session.commit()
    assert statuses(engine) == {JobStatus.SUCCEEDED: 1}


def test_a_hidden_job_is_not_called_missing(engine: Engine, clerk: Engine) -> None:
    queue = PgQueue(clerk)

    @queue.task
    def work() -> None: ...

    job_id = work.delay().id
    with (
        row_security(engine),
        Session(clerk) as session,
        pytest.raises(RowsHidden, match=r"pgqueue\.jobs"),
    ):
        queue.cancel(session, job_id)


@pytest.mark.parametrize("table", ["jobs", "leases", "workers", "batch_jobs"])
def test_no_statement_deletes_or_ends_what_it_cannot_see(
    engine: Engine, clerk: Engine, table: str
) -> None:
    """Also without the settings of pgqueue's own connections, behind a pooler that resets them."""
    queue = PgQueue(engine)

    @queue.task(name="work")
    def work() -> None: ...

    @queue.task(name="wait", limit=Limit(1))
    def wait() -> None: ...

    worker_id = uuid.uuid4()
    tasks = array_of(["work"])
    with engine.begin() as connection:
        Workers(connection).register(worker_id, hostname="", pid=1, queues=["default"], slots=1)
    with Session(engine) as session:
        ended = work.enqueue(session).id
        session.commit()
        attempts = Attempts(session, worker_id)
        [given_up] = attempts.claim(pairs(), tasks=tasks, limit=1).rows
        session.execute(  # a cancel that came between its claim and its start
            text("UPDATE pgqueue.jobs SET outcome = 'cancelled', finished_at = now()")
        )
        session.execute(
            text(
                "INSERT INTO pgqueue.dead_letters (job_id, outcome, queue, task, finished_at)"
                " SELECT id, outcome, queue, task, finished_at FROM pgqueue.jobs"
            )
        )
        held = work.enqueue(session).id
        session.commit()
        [claimed] = attempts.claim(pairs(), tasks=tasks, limit=1).rows
        with queue.batch(session) as batch:
            waiting = work.enqueue(session).id
        job = wait.enqueue(session)
        blocked, given = job.id, [{"limit_keys": job.limit_keys, "job_id": job.id}]
        session.commit()
    assert (given_up.job_id, claimed.job_id) == (ended, held)
    with engine.begin() as connection:
        assert queue.check(Session(connection)) == []

    def end_batch(connection: Connection) -> object:
        return Batches(connection).look(batch.id)

    steps: list[Callable[[Connection], object]] = [
        lambda line: Rescues(line).rescue(),
        lambda line: Attempts(line, worker_id).claim(pairs(), tasks=tasks, limit=10),
        end_batch,
        lambda line: line.execute(drop_useless(), {"given": json.dumps(given)}),
        lambda line: Jobs(line).requeue(ended, notify=False),
        lambda line: Workers(line).deregister(worker_id),
        lambda line: Attempts(line, worker_id).settle([(claimed, Released())]),
        end_batch,
        lambda line: Workers(line).deregister(worker_id),
        lambda line: Rescues(line).rescue(),
    ]
    with row_security(engine, table):
        for step in steps:
            with suppress(RowsHidden, DBAPIError), clerk.begin() as connection:
                step(connection)

    with Session(engine) as session:
        assert queue.check(session) == []
        unfinished = select(Job.id).where(Job.outcome.is_(None), Job.id != ended)
        assert set(session.scalars(unfinished)) == {held, waiting, blocked}
        assert queue.get_batch(session, batch.id).outcome is None
        assert session.scalar(text("SELECT count(*) FROM pgqueue.job_attempts")) == 0


def test_row_security_on_a_table_of_the_application_does_not_stop_the_pruning(
    engine: Engine, clerk: Engine, role: str
) -> None:
    queue = PgQueue(clerk)

    @queue.task
    def work() -> None: ...

    with Session(engine) as session:
        ids = [work.enqueue(session).id for _ in range(3)]
        session.commit()
    with engine.begin() as connection:
        for statement in (
            "UPDATE pgqueue.jobs SET outcome = 'succeeded', attempts = 1,"
            " created_at = now() - interval '1 year', finished_at = now() - interval '1 year'",
            "DELETE FROM pgqueue.message_queue",
            "CREATE TABLE tenant_rows (job_id bigint REFERENCES pgqueue.jobs)",
            f"INSERT INTO tenant_rows VALUES ({ids[1]})",
            "ALTER TABLE tenant_rows ENABLE ROW LEVEL SECURITY",
            f"GRANT SELECT ON tenant_rows TO {role}",
        ):
            connection.execute(text(statement))

    pruning = PruneRound(queue.retention)
    with own_connection(clerk, JANITOR, isolation_level="READ COMMITTED") as connection:
        while pruning.step(connection) is RoundState.MORE:
            pass

    with Session(engine) as session:
        assert session.scalars(select(Job.id)).all() == [ids[1]]


def statuses(engine: Engine) -> dict[JobStatus, int]:
    with Session(engine) as session:
        found = session.scalars(select(Job.status)).all()
    return {JobStatus(status): found.count(status) for status in found}
