"""``Job.status``: right in every state, and asked for without reading all jobs."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import fresh_database
from sqlalchemy import Engine, Select, create_engine, func, select, text
from sqlalchemy.orm import Session, aliased

from chaos.logical import ERROR, crew, enqueue, worker_settings
from chaos.plans import AUTO_EXPLAIN, plans_of
from pgqueue import Job, JobStatus, OptionError, PgQueue
from pgqueue.outcomes import Cancelled, Failed, Succeeded
from pgqueue.repository import Health

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
        with engine.begin() as connection:
            for table in ("jobs", "message_queue", "leases", "dead_letters"):
                connection.execute(
                    text(f"ALTER TABLE pgqueue.{table} SET (autovacuum_enabled = off)")
                )
        make_one_of_each(engine, url)
        with engine.begin() as connection:
            connection.execute(text("ANALYZE"))
            connection.execute(text(STALE_CROWD))
        engine.dispose()
        yield url


def make_one_of_each(engine: Engine, url: str, *, count: int = 5) -> dict[JobStatus, set[int]]:
    """So many jobs of every status there is; RUNNING in both modes, and crashed in one."""
    made: dict[JobStatus, set[int]] = {status: set() for status in JobStatus}
    with crew(worker_settings(url), 2) as [worker, dead]:
        endings = (Succeeded(), Failed(ERROR), Cancelled("enough"))
        for _ in range(count):
            for outcome in endings:
                with engine.begin() as connection:
                    id = enqueue(connection)
                [claimed] = worker.claim()
                worker.settle(claimed, outcome)
                name = type(outcome).__name__.lower()
                made[JobStatus(name)].add(id)
            with engine.begin() as connection:
                made[JobStatus.RUNNING].add(enqueue(connection))
            worker.claim()
        with engine.begin() as connection:
            made[JobStatus.RUNNING].add(enqueue(connection))
        dead.start()
        dead.transaction.rollback()
    with engine.begin() as connection:
        made[JobStatus.PENDING] = {enqueue(connection) for _ in range(count)}
        lost = enqueue(connection)
        connection.execute(
            text("DELETE FROM pgqueue.message_queue WHERE target_id = :id"), {"id": lost}
        )
        made[JobStatus.BLOCKED] = {lost}
    return made


@pytest.fixture
def made(engine: Engine, database_url: str) -> dict[JobStatus, set[int]]:
    return make_one_of_each(engine, database_url, count=2)


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

    def test_the_counts_say_the_same(self, session: Session, made: Made) -> None:
        counts = {row.status: row.jobs for row in PgQueue().counts(session)}

        assert counts == {status: len(ids) for status, ids in made.items()}

    def test_the_narrow_tables_count_all_but_the_succeeded_and_the_lost(
        self, session: Session, made: Made
    ) -> None:
        counts = {row.status: row.jobs for row in Health(session).counts_but_succeeded()}

        left_out = (JobStatus.SUCCEEDED, JobStatus.BLOCKED)
        assert counts == {s: len(ids) for s, ids in made.items() if s not in left_out}


def ids_of(made: Made, *statuses: JobStatus) -> set[int]:
    return set().union(*(made[status] for status in statuses))


# BLOCKED is no comparison's business: nothing in this version makes a job wait so.
KNOWN = [status for status in JobStatus if status is not JobStatus.BLOCKED]


class TestComparisons:
    @pytest.mark.parametrize("status", KNOWN)
    @pytest.mark.parametrize("spelled", [JobStatus, str, lambda status: status.value])
    def test_equal_and_unequal(
        self, session: Session, made: Made, status: JobStatus, spelled: Callable[[Any], Any]
    ) -> None:
        is_it = select(Job.id).where(Job.status == spelled(status))
        is_not = select(Job.id).where(Job.status != spelled(status))

        everything = ids_of(made, *JobStatus)
        assert found(session, is_it) == made[status]
        others = found(session, is_not)
        assert others - made[JobStatus.BLOCKED] == everything - made[status] - ids_of(
            made, JobStatus.BLOCKED
        )

    @pytest.mark.parametrize(
        "statuses",
        [
            [],
            [JobStatus.RUNNING],
            [JobStatus.PENDING, JobStatus.RUNNING],
            [JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.SUCCEEDED],
            ["failed", JobStatus.PENDING],
            KNOWN,
        ],
        ids=str,
    )
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

    @pytest.mark.parametrize("value", ["done", None, 3, "", "RUNNING"])
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
        options = " ".join(f"-c {name}={value}" for name, value in AUTO_EXPLAIN.items())
        engine = create_engine(crowd_url, connect_args={"options": options})
        with Session(engine) as session, plans_of(session.connection()) as plans:
            Health(session).counts_but_succeeded()
            session.rollback()  # the server tells the plan when the statement's portal goes

        assert "Seq Scan" not in plans.only.scans_of("jobs")
        assert plans.only.buffers < 500
        engine.dispose()

    @pytest.mark.parametrize("status", [one for one in KNOWN if one is not JobStatus.SUCCEEDED])
    def test_a_filter_never_reads_all_jobs(self, crowd_url: str, status: JobStatus) -> None:
        options = " ".join(f"-c {name}={value}" for name, value in AUTO_EXPLAIN.items())
        engine = create_engine(crowd_url, connect_args={"options": options})
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
        options = " ".join(f"-c {name}={value}" for name, value in AUTO_EXPLAIN.items())
        engine = create_engine(crowd_url, connect_args={"options": options})
        unfinished = select(Job.id).where(Job.status != JobStatus.SUCCEEDED)
        with Session(engine) as session, plans_of(session.connection()) as plans:
            session.execute(unfinished).all()

        assert "Seq Scan" not in plans.only.scans_of("jobs")
        assert plans.only.buffers < 500
        engine.dispose()
