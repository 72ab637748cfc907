"""``Job.status``: right in every state, and asked for without reading all jobs."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import pytest
from sqlalchemy import (
    Connection,
    Engine,
    NullPool,
    Select,
    column,
    create_engine,
    delete,
    exists,
    func,
    select,
    table,
    text,
)
from sqlalchemy.orm import Session, aliased

from chaos.interleavings.logical_workers import ERROR, enqueue, execute, workers_at
from chaos.plans import TELLING, plans_of
from pgqueue import Job, JobStatus, OptionError, PgQueue
from pgqueue.outcomes import Cancelled, Failed, Succeeded
from pgqueue.repository.health import Health
from pgqueue.testing.databases import fresh_database

JOBS = 200_000
STALE_CROWD = f"""
    INSERT INTO pgqueue.jobs (task, outcome, attempts, finished_at)
    SELECT 'tests.task', 'succeeded', 1, now() FROM generate_series(1, {JOBS})
"""


@pytest.fixture(scope="module")
def crowd_url(server_url: str, template_url: str) -> Iterator[str]:
    """Some jobs of every status, analysed; and then 200,000 that no statistics know of."""
    with fresh_database(server_url, template_url=template_url) as url:
        engine = create_engine(url)
        for table in ("jobs", "message_queue", "leases", "dead_letters"):
            execute(engine, f"ALTER TABLE pgqueue.{table} SET (autovacuum_enabled = off)")
        make_one_of_each(engine)
        with engine.begin() as connection:
            connection.execute(text("ANALYZE"))
            connection.execute(text(STALE_CROWD))
        engine.dispose()
        yield url


BACKLOG = 100_000
AT_ONE_MOMENT = """
    WITH job AS (INSERT INTO pgqueue.jobs (task, run_at)
                 SELECT 'tests.task', now() FROM generate_series(1, :jobs) RETURNING *)
    INSERT INTO pgqueue.message_queue (queue, priority, run_at, target_id, task)
    SELECT queue, priority, run_at, id, task FROM job ORDER BY id
"""
MY_TASKS = """
    CREATE TABLE tasks (user_id integer, job_id bigint);
    INSERT INTO tasks SELECT 0, id FROM pgqueue.jobs;
"""
TASKS_OF_OTHERS = """
    INSERT INTO tasks SELECT 1 + id / 20, id FROM pgqueue.jobs;
    CREATE INDEX ON tasks (user_id);
    ANALYZE tasks;
"""


@pytest.fixture(scope="module", params=["never analyzed", "drained"])
def backlog(
    server_url: str, template_url: str, request: pytest.FixtureRequest
) -> Iterator[Connection]:
    """My tasks, with jobs of every status, beside a backlog; and what the planner knows of it."""
    with fresh_database(server_url, template_url=template_url) as url:
        quiet = create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
        with quiet.connect() as connection:
            for name in ("jobs", "message_queue", "leases", "dead_letters"):
                off = text(f"ALTER TABLE pgqueue.{name} SET (autovacuum_enabled = off)")
                connection.execute(off)
            make_one_of_each(quiet)
            connection.execute(text(MY_TASKS))
            connection.execute(text(AT_ONE_MOMENT), {"jobs": BACKLOG})
            connection.execute(text(TASKS_OF_OTHERS))
            if request.param == "drained":
                connection.execute(text("ANALYZE"))
                connection.execute(text(DRAINED))
        told = create_engine(url, poolclass=NullPool, connect_args=TELLING)
        # In a transaction a plan is told only when the next statement comes.
        with told.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            yield connection


DRAINED = """
    WITH taken AS (DELETE FROM pgqueue.message_queue WHERE id > 100 RETURNING target_id)
    UPDATE pgqueue.jobs SET outcome = 'succeeded', finished_at = clock_timestamp()
    FROM taken WHERE jobs.id = target_id
"""


def make_one_of_each(engine: Engine, *, count: int = 5) -> dict[JobStatus, set[int]]:
    """So many jobs of every status there is."""
    made: dict[JobStatus, set[int]] = {status: set() for status in JobStatus}
    with workers_at(engine, 1) as [worker]:
        for _ in range(count):
            for outcome in (Succeeded(), Failed(ERROR), Cancelled("enough")):
                id = enqueue(engine)
                worker.run_next(outcome)
                made[JobStatus(type(outcome).__name__.lower())].add(id)
            made[JobStatus.RUNNING].add(worker.claim_new(engine).job_id)
    made[JobStatus.PENDING] = {enqueue(engine) for _ in range(count)}
    lost = enqueue(engine)
    execute(engine, "DELETE FROM pgqueue.message_queue WHERE target_id = :id", id=lost)
    made[JobStatus.BLOCKED] = {lost}
    return made


@pytest.fixture
def made(engine: Engine) -> dict[JobStatus, set[int]]:
    return make_one_of_each(engine, count=2)


def found(session: Session, statement: Select[Any]) -> set[int]:
    ids = session.scalars(statement).all()
    assert len(ids) == len(set(ids))
    return set(ids)


Made = dict[JobStatus, set[int]]


class TestValues:
    def test_it_is_loaded_with_the_row(self, session: Session, made: Made) -> None:
        loaded = {job.id: job.status for job in session.scalars(select(Job))}

        assert loaded == {id: status for status, ids in made.items() for id in ids}
        assert all(isinstance(status, JobStatus) for status in loaded.values())

    def test_group_by_and_order_by_know_every_value(self, session: Session, made: Made) -> None:
        statement = select(Job.status, func.count()).group_by(Job.status).order_by(Job.status)

        rows = session.execute(statement).all()

        expected = sorted((status, len(ids)) for status, ids in made.items())
        assert [tuple(row) for row in rows] == expected

    def test_the_view_says_the_same(self, session: Session, made: Made) -> None:
        rows = session.execute(text("SELECT id, status FROM pgqueue.job_overview")).all()

        assert {row[0]: row[1] for row in rows} == {
            id: status.value for status, ids in made.items() for id in ids
        }

    def test_the_counts_say_the_same_but_of_jobs_that_stand_nowhere(
        self, session: Session, made: Made
    ) -> None:
        counts = {row.status: row.jobs for row in PgQueue().counts(session)}
        narrow = {row.status: row.jobs for row in Health(session).counts(succeeded=False)}

        expected = {status: len(ids) for status, ids in made.items()}
        assert counts == {**narrow, JobStatus.SUCCEEDED: expected[JobStatus.SUCCEEDED]}
        assert {**counts, JobStatus.BLOCKED: expected[JobStatus.BLOCKED]} == expected


def ids_of(made: Made, *statuses: JobStatus) -> set[int]:
    return set().union(*(made[status] for status in statuses))


# BLOCKED is no comparison's business: nothing in this version makes a job wait so.
KNOWN = [status for status in JobStatus if status is not JobStatus.BLOCKED]


class TestComparisons:
    @pytest.mark.parametrize("spelled", [JobStatus, str])
    def test_equal_and_unequal(
        self, session: Session, made: Made, spelled: Callable[[Any], Any]
    ) -> None:
        everything = ids_of(made, *KNOWN)
        for status in KNOWN:
            is_it = select(Job.id).where(Job.status == spelled(status))
            is_not = select(Job.id).where(Job.status != spelled(status))

            assert found(session, is_it) == made[status]
            assert found(session, is_not) - made[JobStatus.BLOCKED] == everything - made[status]

    @pytest.mark.parametrize("statuses", [[], ["failed", JobStatus.PENDING], KNOWN], ids=str)
    def test_in_and_not_in(self, session: Session, made: Made, statuses: list[Any]) -> None:
        inside = select(Job.id).where(Job.status.in_(statuses))
        outside = select(Job.id).where(Job.status.not_in(statuses))

        expected = ids_of(made, *(JobStatus(status) for status in statuses))
        blocked = made[JobStatus.BLOCKED]
        assert found(session, inside) == expected
        assert found(session, outside) - blocked == ids_of(made, *KNOWN) - expected

    def test_an_alias_compares_its_own_rows(self, session: Session, made: Made) -> None:
        other = aliased(Job)
        both = select(Job.id).join(other, other.id == Job.id)

        same = both.where(Job.status == "running", other.status.in_(["running", "failed"]))
        nothing = both.where(Job.status == "running", other.status == "pending")

        assert found(session, same) == made[JobStatus.RUNNING]
        assert found(session, nothing) == set()
        by_alias = select(other.status, func.count()).group_by(other.status)
        counted = Counter({row[0]: row[1] for row in session.execute(by_alias)})
        assert counted == Counter({status: len(ids) for status, ids in made.items()})

    def test_it_joins_with_other_conditions(self, session: Session, made: Made) -> None:
        either = (Job.status == JobStatus.FAILED) | (Job.status == JobStatus.PENDING)

        assert found(session, select(Job.id).where(either)) == ids_of(
            made, JobStatus.FAILED, JobStatus.PENDING
        )
        assert found(session, select(Job.id).where(~(Job.status == "failed"))) == ids_of(
            made, *JobStatus
        ) - ids_of(made, JobStatus.FAILED)

    def test_a_join_finds_what_the_expression_finds(self, session: Session, made: Made) -> None:
        """Two forms of one question, by the narrow tables and by the row."""
        other = aliased(Job)
        joined = select(Job.id).join(other, other.id == Job.id)
        blocked = made[JobStatus.BLOCKED]
        for statuses in combinations(KNOWN, 2):
            expected = ids_of(made, *statuses)
            rest = ids_of(made, *KNOWN) - expected
            assert found(session, select(Job.id).where(Job.status.in_(statuses))) == expected
            by_row = joined.where(Job.status.expression.in_(statuses))
            assert found(session, by_row) == expected
            assert found(session, joined.where(Job.status.in_(statuses))) == expected
            negated = ~Job.status.not_in(statuses)
            assert found(session, select(Job.id).where(negated)) - blocked == expected
            assert found(session, joined.where(negated)) - blocked == expected
            for condition in (Job.status.not_in(statuses), ~Job.status.in_(statuses)):
                assert found(session, select(Job.id).where(condition)) - blocked == rest
                assert found(session, joined.where(condition)) - blocked == rest

    def test_other_places_than_a_join_find_the_same(self, session: Session, made: Made) -> None:
        waits = Job.status == JobStatus.PENDING
        expected = made[JobStatus.PENDING]
        other = aliased(Job)
        is_other = other.id == Job.id

        assert found(session, select(other.id).where(exists().where(is_other, waits))) == expected
        subquery = select(Job.id).where(waits)
        assert found(session, select(other.id).where(other.id.in_(subquery))) == expected
        assert found(session, select(Job.id).where(Job.id.in_(expected), waits)) == expected
        assert session.scalars(select(func.count().filter(waits)).select_from(Job)).one() == len(
            expected
        )
        labelled = session.execute(select(Job.id, waits.label("waits")))
        assert {row.id for row in labelled if row.waits} == expected

    def test_a_delete_starts_at_the_narrow_tables_too(self, session: Session, made: Made) -> None:
        deleted = session.scalars(
            delete(Job).where(Job.status.in_(["failed", "cancelled"])).returning(Job.id)
        )

        assert set(deleted) == ids_of(made, JobStatus.FAILED, JobStatus.CANCELLED)

    def test_of_the_messages_due_at_one_moment_ten_are_looked_at(self, session: Session) -> None:
        """A job that is none of ten is taken for one that waits; ``check`` reports the damage."""
        session.execute(text(AT_ONE_MOMENT), {"jobs": 15})
        lost = session.scalars(select(func.max(Job.id))).one()
        drop = text("DELETE FROM pgqueue.message_queue WHERE target_id >= :id")
        session.execute(drop, {"id": lost})
        waiting = select(Job.id).where(Job.status.expression == JobStatus.PENDING)

        assert len(found(session, waiting)) == 15
        assert session.get_one(Job, lost).status is JobStatus.PENDING
        session.expire_all()
        session.execute(drop, {"id": lost - 5})
        assert len(found(session, waiting)) == 9
        assert session.get_one(Job, lost).status is JobStatus.BLOCKED

    @pytest.mark.parametrize("value", ["done", None, 3])
    def test_what_is_no_status_is_refused_with_those_that_are(self, value: Any) -> None:
        for compare in (
            lambda: Job.status == value,
            lambda: Job.status != value,
            lambda: Job.status.in_(["failed", value]),
            lambda: Job.status.not_in([value]),
        ):
            with pytest.raises(OptionError, match="pending, running, blocked, succeeded"):
                compare()


class TestPlans:
    def test_the_counts_of_the_narrow_tables_do_not_read_all_jobs(self, crowd_url: str) -> None:
        engine = create_engine(crowd_url, connect_args=TELLING)
        with Session(engine) as session, plans_of(session.connection()) as plans:
            Health(session).counts(succeeded=False)
            session.rollback()  # the server tells the plan when the statement's portal goes

        assert "Seq Scan" not in plans.only.scans_of("jobs")
        assert plans.only.buffers < 500
        engine.dispose()

    @pytest.mark.parametrize("status", [one for one in KNOWN if one is not JobStatus.SUCCEEDED])
    def test_a_filter_never_reads_all_jobs(self, crowd_url: str, status: JobStatus) -> None:
        engine = create_engine(crowd_url, connect_args=TELLING)
        with Session(engine) as session, plans_of(session.connection()) as plans:
            rows = session.execute(select(Job.id).where(Job.status == status)).all()

        assert 5 <= len(rows) <= 6
        assert plans.only.scans_of("jobs") <= {
            "Index Scan jobs_pkey",
            "Index Only Scan jobs_pkey",
            "Bitmap Heap Scan",
        }
        assert plans.only.buffers < 200
        engine.dispose()

    def test_neither_does_what_is_not_succeeded(self, crowd_url: str) -> None:
        engine = create_engine(crowd_url, connect_args=TELLING)
        unfinished = select(Job.id).where(Job.status != JobStatus.SUCCEEDED)
        with Session(engine) as session, plans_of(session.connection()) as plans:
            session.execute(unfinished).all()

        assert "Seq Scan" not in plans.only.scans_of("jobs")
        assert plans.only.buffers < 500
        engine.dispose()


TASKS = table("tasks", column("user_id"), column("job_id"))
MINE = select(Job.id).join(TASKS, TASKS.c.job_id == Job.id).where(TASKS.c.user_id == 0)
JOINED: dict[str, Callable[[Any], Any]] = {
    "join": MINE.where,
    "newest": lambda condition: MINE.where(condition).order_by(Job.id.desc()).limit(10),
    "group": lambda condition: (
        MINE.where(condition).with_only_columns(Job.queue, func.count()).group_by(Job.queue)
    ),
    "exists": lambda condition: select(TASKS.c.job_id).where(
        TASKS.c.user_id == 0, exists().where(Job.id == TASKS.c.job_id, condition)
    ),
    "ids": lambda condition: select(Job.id).where(
        Job.id.in_(select(TASKS.c.job_id).where(TASKS.c.user_id == 0)), condition
    ),
}
by_row = Job.status.expression
CONDITIONS = {
    "pending": by_row == JobStatus.PENDING,
    "not pending": by_row != JobStatus.PENDING,
    "ended": by_row.not_in([JobStatus.PENDING, JobStatus.RUNNING]),
}


@pytest.mark.journey
class TestBesideABacklog:
    @pytest.mark.parametrize("joined", JOINED)
    def test_the_expression_costs_probes_of_the_rows_it_meets(
        self, backlog: Connection, joined: str
    ) -> None:
        for name, condition in CONDITIONS.items():
            with plans_of(backlog) as plans:
                rows = backlog.execute(JOINED[joined](condition)).all()

            assert rows, name
            assert plans.only.buffers < 1_000, name

    @pytest.mark.parametrize("status", [JobStatus.PENDING, JobStatus.RUNNING, JobStatus.FAILED])
    def test_a_page_of_one_status_reads_no_jobs_but_of_that_status(
        self, backlog: Connection, status: JobStatus
    ) -> None:
        of_status = select(Job.id).where(Job.status == status)
        for statement in (
            of_status.limit(5),
            of_status.order_by(Job.id).limit(5),
            of_status.order_by(Job.id.desc()).limit(5),
            of_status.where(Job.id > 1).order_by(Job.id).limit(5),
        ):
            with plans_of(backlog) as plans:
                assert len(backlog.execute(statement).all()) in (4, 5)

            assert plans.only.scans_of("jobs") <= {
                "Index Scan jobs_pkey",
                "Index Only Scan jobs_pkey",
                "Bitmap Heap Scan",
            }
            assert "jobs" not in plans.only.whole_scans

    def test_loading_a_job_costs_a_probe(self, backlog: Connection) -> None:
        newest = select(Job).order_by(Job.id.desc()).limit(10)
        with plans_of(backlog) as plans:
            rows = backlog.execute(newest).all()

        assert len(rows) == 10
        assert plans.only.buffers < 500
