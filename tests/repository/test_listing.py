"""Pages of jobs: right beside every status, and at once beside many ended jobs."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
from sqlalchemy import Connection, Engine, NullPool, create_engine, text
from sqlalchemy.orm import Session

from chaos.plans import TELLING, Plan, plans_of
from pgqueue import JobNotFound, JobStatus
from pgqueue.repository.cancel import Cancels
from pgqueue.repository.health import Health
from pgqueue.repository.listing import JobFilter, Listing
from pgqueue.testing.databases import fresh_database

ENDED = 100_000
LIMIT = 20

HISTORY = f"""
    INSERT INTO pgqueue.jobs (task, queue, outcome, attempts, finished_at)
    SELECT 'a', 'default', 'succeeded', 1, clock_timestamp() FROM generate_series(1, {ENDED});
    WITH job AS (
        INSERT INTO pgqueue.jobs (task, queue, outcome, attempts, finished_at)
        SELECT CASE n % 10 WHEN 0 THEN 'rare' ELSE 'a' END, 'default', 'failed', 1,
               clock_timestamp()
        FROM generate_series(1, 2000) AS n RETURNING *)
    INSERT INTO pgqueue.dead_letters (job_id, outcome, queue, task)
    SELECT id, outcome, queue, task FROM job;
    WITH job AS (
        INSERT INTO pgqueue.jobs (task, queue) SELECT 'a', 'mail' FROM generate_series(1, 500)
        RETURNING *)
    INSERT INTO pgqueue.message_queue (queue, priority, run_at, target_id, task)
    SELECT queue, priority, run_at, id, task FROM job;
    WITH job AS (
        INSERT INTO pgqueue.jobs (task, queue) SELECT 'a', 'mail' FROM generate_series(1, 30)
        RETURNING *)
    INSERT INTO pgqueue.leases (target_id, message_id, attempt, worker_id)
    SELECT id, 0, 1, gen_random_uuid() FROM job;
    INSERT INTO pgqueue.jobs (task, queue, outcome, attempts, finished_at)
    SELECT 'a', 'default', 'succeeded', 1, clock_timestamp() FROM generate_series(1, {ENDED});
"""


@pytest.fixture(scope="module", params=["analyzed", "unknown to the planner"])
def history(
    server_url: str, template_url: str, request: pytest.FixtureRequest
) -> Iterator[Connection]:
    """Many ended jobs, before and after some that failed, wait or run."""
    with fresh_database(server_url, template_url=template_url) as url:
        quiet = create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
        with quiet.connect() as connection:
            connection.execute(text("ALTER TABLE pgqueue.jobs SET (autovacuum_enabled = off)"))
            connection.execute(text(HISTORY))
            if request.param == "analyzed":
                connection.execute(text("ANALYZE"))
        told = create_engine(url, poolclass=NullPool, connect_args=TELLING)
        # In a transaction a plan is told only when the next statement comes.
        with told.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            yield connection


PAGES = {
    "all": JobFilter(),
    "a common task": JobFilter(task="a"),
    "pending": JobFilter(statuses=frozenset({JobStatus.PENDING})),
    "running": JobFilter(statuses=frozenset({JobStatus.RUNNING})),
    "failed": JobFilter(statuses=frozenset({JobStatus.FAILED})),
    "failed of a rare task": JobFilter(statuses=frozenset({JobStatus.FAILED}), task="rare"),
    "succeeded": JobFilter(statuses=frozenset({JobStatus.SUCCEEDED})),
    "many": JobFilter(statuses=frozenset(JobStatus) - {JobStatus.CANCELLED}),
    "older": JobFilter(before=ENDED // 2),
    "pending and failed, older": JobFilter(
        statuses=frozenset({JobStatus.PENDING, JobStatus.FAILED}), before=ENDED + 300
    ),
}


class TestPages:
    @pytest.mark.parametrize("name", PAGES)
    def test_come_by_keys_beside_many_ended_jobs(self, history: Connection, name: str) -> None:
        which = PAGES[name]
        with plans_of(history) as plans:
            page = Listing(history).page(which, limit=LIMIT)

        ids = [job.id for job in page.jobs]
        assert len(ids) == LIMIT
        assert ids == sorted(ids, reverse=True)
        if which.statuses:
            assert {job.status for job in page.jobs} <= which.statuses
        assert_no_scan_of_jobs(plans.only)

    def test_of_each_status_are_those_that_stand_there(self, history: Connection) -> None:
        numbers = {}
        for status in JobStatus:
            ids = Listing(history).ids(JobFilter(statuses=frozenset({status}), queue="mail"))
            numbers[status.value] = len(ids)

        assert numbers == {
            "pending": 500, "running": 30, "blocked": 0, "succeeded": 0, "failed": 0, "cancelled": 0
        }  # fmt: skip

    def test_follow_each_other_without_a_gap(self, history: Connection) -> None:
        which = JobFilter(statuses=frozenset({JobStatus.RUNNING, JobStatus.PENDING}))
        seen, before = [], None
        while True:
            page = Listing(history).page(
                JobFilter(statuses=which.statuses, before=before), limit=100
            )
            seen += [job.id for job in page.jobs]
            before = page.next_before
            if before is None:
                break

        assert seen == Listing(history).ids(which)[::-1]
        assert len(seen) == 530


@pytest.mark.parametrize("queue", ["default", None])
def test_the_job_of_a_unique_key_is_found_by_an_index(
    history: Connection, queue: str | None
) -> None:
    with plans_of(history) as plans:
        assert Cancels(history).of_keys(["seven"], queue) == {}

    # Perhaps by a bitmap of that index; the buffers tell that from a scan.
    assert plans.only.scans_of("jobs") <= {"Index Scan jobs_held_unique_key", "Bitmap Heap Scan"}
    assert plans.only.buffers < 100


def assert_no_scan_of_jobs(plan: Plan) -> None:
    # The running ones may be read by a bitmap of their keys; the buffers tell that from a scan.
    by_key = {"Index Scan jobs_pkey", "Index Only Scan jobs_pkey", "Bitmap Heap Scan"}
    assert plan.scans_of("jobs") <= by_key
    assert plan.buffers < 5_000


def test_a_missing_job_is_named(session: Session) -> None:
    with pytest.raises(JobNotFound, match="job 4711 does not exist"):
        Listing(session).job(4711)


def test_an_idle_transaction_is_named_with_its_process_and_age(
    session: Session, engine: Engine
) -> None:
    with Session(engine) as idle:
        pid = idle.execute(text("SELECT pg_backend_pid()")).scalar_one()

        old = Health(session).old_transactions(timedelta(0))

    [found] = [one for one in old if f"session {pid} of " in one.who]
    assert found.state == "idle in transaction"
    assert found.seconds >= 0
