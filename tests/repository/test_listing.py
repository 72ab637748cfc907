"""What is known of one job, and of other sessions."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, NullPool, create_engine, text
from sqlalchemy.orm import Session

from pgqueue import JobNotFound, JobStatus
from pgqueue.repository.conditions import JobFilter
from pgqueue.repository.health import Health
from pgqueue.repository.listing import Listing
from pgqueue.repository.pages import Pages
from pgqueue.testing.databases import fresh_database


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


NOW = datetime.now(UTC)
IN_EACH_STATUS = """
    INSERT INTO pgqueue.jobs (task, queue, tags, args, attempts, created_at, outcome, finished_at)
    SELECT status, queue, tags, args, attempts, clock_timestamp() - age,
           CASE WHEN status IN ('succeeded', 'failed', 'cancelled') THEN status END,
           CASE WHEN status IN ('succeeded', 'failed', 'cancelled') THEN clock_timestamp() END
    FROM unnest(ARRAY['pending', 'running', 'blocked', 'succeeded', 'failed', 'cancelled'])
         AS status,
         (VALUES ('bulk', NULL, '{}', 2, interval '3 days'),
                 ('mail', '["vip", "eu"]'::jsonb, '{"order_id": 42, "name": "Ada"}'::jsonb,
                  3, interval '1 hour')) AS job (queue, tags, args, attempts, age)
    ORDER BY age DESC;
    INSERT INTO pgqueue.message_queue (queue, priority, run_at, target_id, task)
    SELECT queue, priority, run_at, id, task FROM pgqueue.jobs WHERE task = 'pending';
    INSERT INTO pgqueue.waiting_messages (limit_keys, queue, priority, run_at, target_id, task)
    SELECT 'key', queue, priority, run_at, id, task FROM pgqueue.jobs WHERE task = 'blocked';
    INSERT INTO pgqueue.leases (target_id, message_id, attempt, worker_id)
    SELECT id, 0, 1, gen_random_uuid() FROM pgqueue.jobs WHERE task = 'running';
    INSERT INTO pgqueue.dead_letters (job_id, outcome, queue, task)
    SELECT id, outcome, queue, task FROM pgqueue.jobs WHERE outcome IN ('failed', 'cancelled');
"""


@pytest.fixture(scope="module")
def one_that_fits(server_url: str, template_url: str) -> Iterator[Connection]:
    """Two jobs in each status, of which the newer is in queue mail and has tags."""
    with (
        fresh_database(server_url, template_url=template_url) as url,
        create_engine(url, poolclass=NullPool).begin() as connection,
    ):
        connection.execute(text(IN_EACH_STATUS))
        yield connection


CONDITIONS = {
    "with these arguments": JobFilter(args=(("order_id", 42), ("name", "Ada"))),
    "created since": JobFilter(created_after=timedelta(days=2)),
    "created since a time": JobFilter(created_after=NOW - timedelta(days=2)),
    "created before": JobFilter(queue="mail", created_before=timedelta(minutes=1)),
    "created before a time": JobFilter(queue="mail", created_before=NOW),
    "with so many attempts": JobFilter(attempts=3),
    "of one of these queues": JobFilter(queues=frozenset({"mail", "other"})),
    "with one of these tags": JobFilter(tags=frozenset({"vip", "other"})),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_condition_holds_in_every_status(one_that_fits: Connection, name: str) -> None:
    for status in JobStatus:
        which = replace(CONDITIONS[name], statuses=frozenset({status}))
        listed = Pages(one_that_fits).page(which, limit=9).jobs

        assert [(job.status, job.queue) for job in listed] == [(status, "mail")]
        assert Listing(one_that_fits).ids(which) == [job.id for job in listed]


def test_a_user_without_queues_sees_no_job(one_that_fits: Connection) -> None:
    assert Listing(one_that_fits).ids(JobFilter(queues=frozenset())) == []
    assert Listing(one_that_fits).ids(JobFilter(tags=frozenset())) == []


ENDED_AND_RETRIED = """
    UPDATE pgqueue.jobs SET started_at = created_at, finished_at = created_at + interval '10 s',
                            last_error = 'Timeout of the SERVER'
    WHERE queue = 'mail' AND task IN ('failed', 'cancelled');
    UPDATE pgqueue.message_queue SET attempt = 1 WHERE queue = 'mail';
    UPDATE pgqueue.message_queue SET run_at = clock_timestamp() + interval '1 day'
    WHERE queue = 'bulk';
    UPDATE pgqueue.jobs SET run_at = message_queue.run_at
    FROM pgqueue.message_queue WHERE target_id = jobs.id;
"""


@pytest.mark.parametrize(
    ("status", "condition"),
    [
        ("failed", {"text": "timeout of the server"}),
        ("cancelled", {"took": timedelta(seconds=10)}),
        ("pending", {"are_retried": True}),
        ("pending", {"are_due": True}),
    ],
)
def test_a_condition_on_the_end_or_the_start_holds(
    one_that_fits: Connection, status: str, condition: dict[str, Any]
) -> None:
    one_that_fits.execute(text(ENDED_AND_RETRIED))
    which = JobFilter(frozenset({JobStatus(status)}), **condition)
    [job] = Pages(one_that_fits).page(which, limit=9).jobs

    assert job.queue == "mail"
    assert Listing(one_that_fits).ids(which) == [job.id]
