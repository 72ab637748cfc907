"""Retention in a worker: jobs that are deleted when they succeed, and pruning beside the work."""

import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, NullPool, create_engine, text
from sqlalchemy.orm import Session
from worker_rig import endings, wait_until

from pgqueue import Cancel, Change, Job, JobContext, Keep, PgQueue, Retry, Worker, schema
from pgqueue.database.opening import worker_engine
from pgqueue.database.settings import JANITOR
from pgqueue.worker.duties.prune import Prune
from pgqueue.worker.duty_list import DutyList
from pgqueue.worker.outage import Outage

AT_ONCE = timedelta(0)


@pytest.fixture
def queue(database_url: str) -> Iterator[PgQueue]:
    engine = create_engine(database_url, pool_size=20)
    yield PgQueue(engine)
    engine.dispose()


def work(queue: PgQueue) -> dict[str, int]:
    found = endings(Worker(queue, concurrency=2))
    with queue.session() as session:
        assert queue.check(session) == []
    return found


def kept(queue: PgQueue) -> dict[str, list[str]]:
    """The outcomes of the jobs that are there, by task."""
    found: dict[str, list[str]] = {}
    with queue.session() as session:
        for job in session.query(Job).order_by(Job.id):
            found.setdefault(job.task, []).append(job.outcome or "-")
    return found


def records(engine: Engine) -> int:
    with engine.connect() as connection:
        tables = ("job_attempts", "leases", "message_queue")
        return sum(
            connection.execute(text(f"SELECT count(*) FROM pgqueue.{name}")).scalar_one()
            for name in tables
        )


HANDLERS: dict[str, Callable[..., Any]] = {
    "plain": lambda: None,
    "with a result": lambda: 7,
}


def with_session(session: Session) -> None:
    session.execute(text("SELECT 1"))


async def on_loop() -> None: ...


HANDLERS |= {"transactional": with_session, "async": on_loop}


class TestDeletedAtOnce:
    @pytest.mark.parametrize("kind", HANDLERS)
    def test_a_job_that_succeeds_is_gone_and_its_neighbours_stay(
        self, queue: PgQueue, kind: str
    ) -> None:
        gone = queue.task(name="gone", keep=AT_ONCE)(HANDLERS[kind])
        stays = queue.task(name="stays")(HANDLERS[kind])
        for _ in range(3):
            gone.delay()
            stays.delay()

        assert work(queue) == {"succeeded": 6}

        assert kept(queue) == {"stays": ["succeeded"] * 3}
        assert records(queue.engine) == 0

    def test_failed_and_cancelled_jobs_stay_for_their_time(self, queue: PgQueue) -> None:
        @queue.task(name="task", keep=AT_ONCE, retry=Retry.never())
        def task(error: str) -> object:
            if error == "fail":
                raise ValueError
            return Cancel() if error == "cancel" else None

        for error in ("fail", "cancel", ""):
            task.delay(error)

        assert work(queue) == {"failed": 1, "cancelled": 1, "succeeded": 1}

        assert kept(queue) == {"task": ["failed", "cancelled"]}

    def test_a_cancel_that_came_before_the_end_wins(self, queue: PgQueue) -> None:
        @queue.task(name="task", keep=AT_ONCE)
        def task(ctx: JobContext) -> None:
            with queue.session() as operator, operator.begin():
                assert queue.cancel(operator, ctx.job_id) is Change.CANCEL_REQUESTED

        task.delay()

        assert work(queue) == {"cancelled": 1}
        assert kept(queue) == {"task": ["cancelled"]}

    def test_failed_attempts_of_a_job_are_deleted_with_it(self, queue: PgQueue) -> None:
        @queue.task(name="task", keep=AT_ONCE, retry=Retry.constant(AT_ONCE))
        def task(ctx: JobContext) -> None:
            if ctx.attempt == 1:
                raise ValueError

        task.delay()

        assert work(queue) == {"retried": 1, "succeeded": 1}
        assert (kept(queue), records(queue.engine)) == ({}, 0)

    @pytest.mark.parametrize("kind", ["plain", "transactional"])
    @pytest.mark.parametrize("deferred", ["", "DEFERRABLE INITIALLY DEFERRED"])
    def test_a_job_to_which_a_row_refers_has_succeeded_and_stays(
        self, queue: PgQueue, kind: str, deferred: str
    ) -> None:
        task = queue.task(name="task", keep=AT_ONCE)(HANDLERS[kind])
        with queue.engine.begin() as connection:
            key = f"job bigint REFERENCES pgqueue.jobs {deferred}"
            connection.execute(text(f"CREATE TABLE orders ({key})"))
        first, _ = task.delay(), task.delay()
        with queue.engine.begin() as connection:
            connection.execute(text("INSERT INTO orders VALUES (:id)"), {"id": first.id})

        assert work(queue) == {"succeeded": 2}

        assert kept(queue) == {"task": ["succeeded"]}

    def test_the_rule_of_a_queue_is_that_of_its_jobs(self, database_url: str) -> None:
        queue = PgQueue(database_url, queue_keep={"brief": AT_ONCE})
        task = queue.task(name="task", queue="brief")(HANDLERS["plain"])
        task.delay()
        task.options(queue="default").delay()

        assert work(queue) == {"succeeded": 2}
        assert kept(queue) == {"task": ["succeeded"]}
        queue.engine.dispose()


def pruning(engine: Engine, queue: PgQueue) -> DutyList:
    duty = Prune(queue.retention, first_after=0, pause=0.01)
    return DutyList(engine, JANITOR, Outage(), [duty], name="janitor")


class TestPrune:
    def test_a_worker_prunes_in_rounds_until_it_is_stopped(self, queue: PgQueue) -> None:
        queue.task(name="task", keep=Keep(succeeded=timedelta(hours=1)))(HANDLERS["plain"])
        old = text(
            "INSERT INTO pgqueue.jobs (task, outcome, created_at, finished_at, attempts)"
            " VALUES ('task', 'succeeded', '2020-01-01', '2020-01-01', 1)"
        )
        engine = worker_engine(queue.engine)
        pruner = pruning(engine, queue)
        pruner.start()
        try:
            for _ in range(2):
                with queue.engine.begin() as connection:
                    connection.execute(old)
                wait_until(lambda: not kept(queue), what="the job is pruned")
        finally:
            pruner.stop(seconds=60)

        assert not pruner.is_alive()
        assert pruner.failure is None
        if engine is not queue.engine:
            engine.dispose()

    def test_a_table_that_cannot_be_pruned_stops_no_other_and_no_worker(
        self, queue: PgQueue, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Whatever the rows hold: a NULL in an array, the largest numbers, minutes of the future;
        and a table whose rows a trigger keeps."""
        with queue.engine.begin() as connection:
            connection.execute(text(DAMAGED))
        pruner = pruning(worker_engine(queue.engine), queue)
        pruner.start()
        try:
            wait_until(lambda: damaged(queue.engine) == AFTER_PRUNING, what="others are pruned")
        finally:
            pruner.stop(seconds=60)

        assert pruner.failure is None
        [line] = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
        assert "pgqueue.error_groups cannot be pruned" in line
        assert "these rows stay" in line

    def test_a_worker_without_the_right_to_delete_names_the_remedy_once(
        self, queue: PgQueue, role: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Counted(Prune):
            rounds = 0

            def step(self, connection: Connection) -> float:
                self.rounds += 1  # each ends with its first step
                return super().step(connection)

        queue.task(name="task", keep=Keep(succeeded=timedelta(hours=1)))(HANDLERS["plain"])
        as_role = queue.engine.url.update_query_dict({"options": f"-c role={role}"})
        engine = create_engine(as_role, poolclass=NullPool)
        duty = Counted(queue.retention, first_after=0, pause=0.01)
        pruner = DutyList(engine, JANITOR, Outage(), [duty], name="janitor")
        pruner.start()
        try:
            wait_until(lambda: duty.rounds > 2, what="it tries again")
        finally:
            pruner.stop(seconds=60)

        assert pruner.failure is None
        [line] = [r.getMessage() for r in caplog.records if r.levelname != "INFO"]
        assert "permission denied for table jobs" in line
        assert "`pgqueue grant --worker ROLE`" in line


DAMAGED = """
    INSERT INTO pgqueue.task_minutes (at, task, succeeded, ran, waited)
    SELECT date_trunc('hour', now(), 'UTC') - interval '2 days' + n * interval '1 minute', 'a',
           2147483647, CASE n WHEN 1 THEN '{1,NULL,2147483647}'::int[] ELSE '{1,2,3}' END, '{}'
    FROM generate_series(1, 2) AS n;
    INSERT INTO pgqueue.task_minutes (at, task) VALUES ('2999-01-01', 'a');
    INSERT INTO pgqueue.queue_minutes (at, queue, started)
    SELECT date_trunc('hour', now(), 'UTC') - interval '2 days' + n * interval '1 minute', 'q',
           2147483647
    FROM generate_series(1, 2) AS n;
    INSERT INTO pgqueue.queue_minutes (at, queue, counted_at) VALUES ('2999-01-01', 'q', now());
    INSERT INTO pgqueue.deploys VALUES ('', '1', '2020-01-01'), ('', '2', '2020-01-02');
    INSERT INTO pgqueue.operator_actions (at, actor, action) VALUES ('2020-01-01', 'ada', 'pause');
    INSERT INTO pgqueue.error_groups
    VALUES (1, 'a', 'ValueError', '', 1, '2020-01-01', '2020-01-01', '', 1, '');
    CREATE FUNCTION pgqueue.keep() RETURNS trigger LANGUAGE plpgsql
    AS $$ BEGIN RAISE EXCEPTION 'these rows stay'; END $$;
    CREATE TRIGGER keep BEFORE DELETE ON pgqueue.error_groups
    FOR EACH ROW EXECUTE FUNCTION pgqueue.keep();
"""
AFTER_PRUNING = {
    "task_minutes": '(a,2147483647,"{2,2,2147483647}",{})',
    "queue_minutes": "(q,2147483647)",
    "deploys": "2",
    "operator_actions": "",
    "error_groups": "a",
}


def damaged(engine: Engine) -> dict[str, str]:
    """What is left in each table."""
    words = {
        "task_minutes": "(task, succeeded, ran, waited)::text",
        "queue_minutes": "(queue, started)::text",
        "deploys": "version",
        "operator_actions": "actor",
        "error_groups": "task",
    }
    with engine.connect() as connection:
        return {
            table: connection.execute(
                text(f"SELECT coalesce(string_agg({word}, ' '), '') FROM pgqueue.{table}")
            ).scalar_one()
            for table, word in words.items()
        }


@pytest.fixture
def role(queue: PgQueue) -> Iterator[str]:
    """A worker's role as an older version of pgqueue has granted it."""
    name = f"pruner_{uuid.uuid4().hex[:8]}"
    with queue.engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {name}"))
        schema.grant(worker=name, connection=connection)
        connection.execute(text(f"REVOKE DELETE ON pgqueue.jobs FROM {name}"))
    yield name
    with queue.engine.begin() as connection:
        connection.execute(text(f"DROP OWNED BY {name}; DROP ROLE {name}"))
