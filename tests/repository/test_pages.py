"""Pages of jobs: right beside every status, and at once beside many waiting and ended jobs."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import Connection, NullPool, create_engine, text

from chaos.plans import TELLING, Plan, plans_of
from pgqueue import JobStatus
from pgqueue.errors import OptionError
from pgqueue.repository.claim_order import Position
from pgqueue.repository.conditions import JobFilter
from pgqueue.repository.job_line import JobLine
from pgqueue.repository.jobs import Jobs
from pgqueue.repository.listing import Listing
from pgqueue.repository.pages import FIRST_WINDOW, Pages, PageStart
from pgqueue.testing.databases import fresh_database

ENDED = 100_000
WAITING = 20 * FIRST_WINDOW
LIMIT = 20

HISTORY = f"""
    INSERT INTO pgqueue.jobs (task, queue, outcome, attempts, created_at, finished_at)
    SELECT 'a', 'default', 'succeeded', 1,
           clock_timestamp() - interval '100 days' + n * interval '1 minute', clock_timestamp()
    FROM generate_series(1, {ENDED}) AS n;
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
    INSERT INTO pgqueue.jobs (task, queue, outcome, attempts, created_at, finished_at)
    SELECT 'a', 'default', 'succeeded', 1,
           clock_timestamp() - interval '30 days' + n * interval '10 seconds', clock_timestamp()
    FROM generate_series(1, {ENDED}) AS n;
    WITH job AS (
        INSERT INTO pgqueue.jobs (task, queue, priority, tags, run_at, outcome, finished_at)
        SELECT 'a', 'bulk', n % 3, CASE WHEN n % 3 = 2 AND n < 500 THEN '["vip"]'::jsonb END,
               date_trunc('minute', clock_timestamp()) + n % 7 * interval '1s',
               outcome, CASE WHEN outcome = 'succeeded' THEN clock_timestamp() END
        FROM generate_series(1, {WAITING}) AS n,
             LATERAL (SELECT CASE WHEN n % 900 = 0 AND n < {2 * FIRST_WINDOW} THEN 'succeeded' END
                      AS outcome) AS ended
        RETURNING *)
    INSERT INTO pgqueue.message_queue (queue, priority, run_at, target_id, task)
    SELECT queue, priority, run_at, id, task FROM job WHERE outcome IS NULL;
"""


@pytest.fixture(scope="module", params=["analyzed", "unknown to the planner"])
def history(
    server_url: str, template_url: str, request: pytest.FixtureRequest
) -> Iterator[Connection]:
    """Many ended jobs, before and after some that failed, wait or run; then many that wait, and few
    of these have succeeded."""
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
AT_EASE = timedelta(minutes=10)
AT_ONCE = timedelta(0)
PENDING = JobFilter(statuses=frozenset({JobStatus.PENDING}))
SUCCEEDED = JobFilter(statuses=frozenset({JobStatus.SUCCEEDED}))


def all_pages(
    connection: Connection, which: JobFilter, *, limit: int, patience: timedelta = AT_EASE
) -> list[list[JobLine]]:
    pages: list[list[JobLine]] = []
    start: PageStart | None = None
    while True:
        page = Pages(connection, patience=patience).page(which, limit=limit, start=start)
        pages.append([*page.jobs])
        start = page.next_start
        if start is None:
            return pages


class TestPages:
    # Of the succeeded, no index tells where they are: they are searched, for a bounded time.
    @pytest.mark.parametrize("name", sorted(PAGES.keys() - {"succeeded"}))
    def test_pages_come_by_keys_beside_many_ended_jobs(
        self, history: Connection, name: str
    ) -> None:
        which = PAGES[name]
        with plans_of(history) as plans:
            page = Pages(history, patience=AT_EASE).page(which, limit=LIMIT)

        ids = [job.id for job in page.jobs]
        assert len(ids) == LIMIT
        assert ids == sorted(ids, reverse=True)
        if which.statuses:
            assert {job.status for job in page.jobs} <= which.statuses
        for plan in plans.seen:
            assert_no_scan_of_jobs(plan)

    def test_pages_follow_each_other_without_a_gap(self, history: Connection) -> None:
        statuses = frozenset({JobStatus.RUNNING, JobStatus.PENDING})
        which = JobFilter(statuses=statuses, queue="mail")

        pages = all_pages(history, which, limit=100)

        ids = [job.id for page in pages for job in page]
        assert ids == Listing(history).ids(which)[::-1]
        assert [len(page) for page in pages] == [100] * 5 + [30]

    def test_no_job_has_an_id_below_zero(self, history: Connection) -> None:
        assert Pages(history).page(JobFilter(before=0), limit=1).jobs == []

    def test_pages_of_each_status_have_the_jobs_in_it(self, history: Connection) -> None:
        numbers = {}
        for status in JobStatus:
            ids = Listing(history).ids(JobFilter(statuses=frozenset({status}), queue="mail"))
            numbers[status.value] = len(ids)

        assert numbers == {
            "pending": 500, "running": 30, "blocked": 0, "succeeded": 0, "failed": 0, "cancelled": 0
        }  # fmt: skip


class TestPagesOfWaitingJobs:
    def test_pages_of_waiting_jobs_read_no_more_messages_than_they_show(
        self, history: Connection
    ) -> None:
        page = Pages(history, patience=AT_EASE).page(PENDING, limit=LIMIT)
        with plans_of(history) as plans:
            following = Pages(history, patience=AT_EASE).page(
                PENDING, limit=LIMIT, start=page.next_start
            )

        assert len(following.jobs) == LIMIT
        assert plans.only.scans_of("message_queue") <= {
            "Index Scan message_queue_pkey",
            "Index Only Scan message_queue_pkey",
        }
        pairs, around_each = (
            4,
            20,
        )  # for its status, a message is looked for among those of its time
        read = plans.only.rows_of("message_queue")
        assert read <= pairs * (LIMIT + 4) + around_each * (LIMIT + 1)
        assert_no_scan_of_jobs(plans.only)

    def test_pages_of_waiting_jobs_are_in_the_order_of_claims_and_show_each_job_once(
        self, history: Connection
    ) -> None:
        pages = all_pages(history, PENDING, limit=997)

        jobs = [job for page in pages for job in page]
        places = [(job.priority, job.run_at) for job in jobs]
        assert places == sorted(places)
        assert sorted(job.id for job in jobs) == Listing(history).ids(PENDING)
        assert {len(page) for page in pages[:-1]} == {997}

    def test_pages_of_older_waiting_jobs_stay_among_them(self, history: Connection) -> None:
        ids = Listing(history).ids(PENDING)
        start = ids[len(ids) // 2]

        first = Pages(history, patience=AT_EASE).page(PENDING, limit=LIMIT, start=start)
        second = Pages(history, patience=AT_EASE).page(PENDING, limit=LIMIT, start=first.next_start)

        assert len(second.jobs) == LIMIT
        assert all(job.id < start for job in [*first.jobs, *second.jobs])

    def test_pages_of_waiting_jobs_begin_where_no_other_list_does(
        self, history: Connection
    ) -> None:
        with pytest.raises(OptionError, match="another status"):
            Pages(history, patience=AT_EASE).page(SUCCEEDED, limit=LIMIT, start=Position())


class TestPagesOfSucceededJobs:
    def test_succeeded_jobs_are_all_found_below_an_id(self, history: Connection) -> None:
        which = replace(SUCCEEDED, before=10**9, after=2 * ENDED - 20_000)

        pages = all_pages(history, which, limit=10_000)

        ids = [job.id for page in pages for job in page]
        assert ids == Listing(history).ids(which)[::-1]
        assert {len(page) for page in pages[:-1]} == {10_000}

    def test_pages_of_succeeded_jobs_beside_many_that_wait_say_how_far_the_search_has_come(
        self, history: Connection
    ) -> None:
        page = Pages(history, patience=AT_ONCE).page(SUCCEEDED, limit=LIMIT)

        assert (page.jobs, page.searched_to is None) == ([], False)


class TestSearches:
    @pytest.mark.parametrize(
        "which",
        [
            JobFilter(task="rare", after=ENDED - 10 * FIRST_WINDOW),
            replace(SUCCEEDED, queue="bulk", after=2 * ENDED),
            replace(PENDING, tag="vip", after=2 * ENDED),
        ],
        ids=str,
    )
    def test_searches_that_stop_go_on_where_they_have_stopped(
        self, history: Connection, which: JobFilter
    ) -> None:
        which = replace(which, before=10**9)
        pages = all_pages(history, which, limit=50, patience=AT_ONCE)

        assert sorted(job.id for page in pages for job in page) == Listing(history).ids(which)
        assert [] in pages, "a part without a job that fits"

    def test_searches_say_how_far_they_have_come(self, history: Connection) -> None:
        page = Pages(history, patience=AT_ONCE).page(JobFilter(task="none"), limit=LIMIT)

        assert page.jobs == []
        assert isinstance(page.next_start, int)
        stopped = (
            Pages(history, patience=AT_EASE)
            .page(JobFilter(before=page.next_start + 1), limit=1)
            .jobs[0]
        )
        assert (stopped.id, stopped.created_at) == (page.next_start, page.searched_to)

    @pytest.mark.parametrize(("since", "until"), [(None, 79.5), (80, None), (31, 26), (25.5, 25)])
    def test_searches_begin_and_end_near_the_times_that_are_asked_for(
        self, history: Connection, since: float | None, until: float | None
    ) -> None:
        ended = JobFilter(queue="default", task="a")
        which = replace(
            ended,
            created_after=None if since is None else timedelta(days=since),
            created_before=None if until is None else timedelta(days=until),
        )
        with plans_of(history) as plans:
            page = Pages(history, patience=AT_EASE).page(which, limit=LIMIT)

        expected = Listing(history).ids(which)[::-1]
        assert [job.id for job in page.jobs] == expected[:LIMIT]
        if until is not None:
            # A minute more than was asked for, the probes, and a window.
            assert sum(plan.rows_of("jobs") for plan in plans.seen) < 15_000


def assert_no_scan_of_jobs(plan: Plan) -> None:
    # The running ones may be read by a bitmap of their keys; the buffers tell that from a scan.
    by_key = {"Index Scan jobs_pkey", "Index Only Scan jobs_pkey", "Bitmap Heap Scan"}
    assert plan.scans_of("jobs") <= by_key
    assert plan.buffers < 5_000


@pytest.mark.parametrize("queue", ["default", None])
def test_the_job_of_a_unique_key_is_found_by_an_index(
    history: Connection, queue: str | None
) -> None:
    with plans_of(history) as plans:
        assert Jobs(history).with_keys(["seven"], queue) == []

    # Perhaps by a bitmap of that index; the buffers tell that from a scan.
    assert plans.only.scans_of("jobs") <= {"Index Scan jobs_held_unique_key", "Bitmap Heap Scan"}
    assert plans.only.buffers < 100
