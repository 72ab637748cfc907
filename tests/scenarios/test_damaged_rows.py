"""Rows that a hand has written: the tables refuse what would fail the claims of all jobs."""

import pytest
import worker_tasks
from sqlalchemy import Engine, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from worker_rig import endings

from pgqueue import PgQueue, Worker

REFUSED = [
    "jobs SET args = NULL",
    "jobs SET task = NULL",
    "jobs SET queue = NULL",
    "jobs SET max_attempts = 0",
    "jobs SET max_attempts = 30001",
    "jobs SET max_attempts = NULL",
    "jobs SET attempts = NULL",
    "jobs SET priority = 10",
    "jobs SET run_at = 'infinity'",
    "jobs SET run_at = '-infinity'",
    "jobs SET run_at = '0044-03-15 BC'",
    "jobs SET created_at = 'infinity'",
    "jobs SET started_at = '-infinity'",
    "jobs SET outcome = 'done', finished_at = now()",
    "jobs SET outcome = 'failed'",
    "jobs SET finished_at = now()",
    "message_queue SET attempt = -1",
    "message_queue SET attempt = 31001",
    "message_queue SET crashes = -1",
    "message_queue SET crashes = 31001",
    "message_queue SET priority = 12",
    "message_queue SET priority = -1",
    "message_queue SET run_at = 'infinity'",
    "message_queue SET run_at = '-infinity'",
    "message_queue SET run_at = '10000-01-01 00:00:00+00'",
    "message_queue SET queue = NULL",
    "message_queue SET task = NULL",
    "message_queue SET target_id = NULL",
    "message_queue SET alone = NULL",
    "leases SET attempt = 32767",
    "leases SET attempt = 0",
    "leases SET crashes = -1",
    "leases SET worker_id = NULL",
]
"""What the tables themselves do not take: some of it would fail the claims of all."""

RUNS_ANYWAY = [
    "jobs SET attempts = 32767 WHERE id = :id",
    "jobs SET run_at = '2001-01-01Z' WHERE id = :id",
    "jobs SET queue = 'a\"b', priority = 0 WHERE id = :id",
    "jobs SET last_error = repeat('x', 1000000) WHERE id = :id",
    "jobs SET max_attempts = 1 WHERE id = :id",
    'jobs SET args = \'{"n": 1, "n": 2}\' WHERE id = :id',
    "message_queue SET crashes = 31000 WHERE target_id = :id",
]
"""Odd, and no harm: the job runs."""


def test_what_would_fail_the_claims_of_all_is_refused_by_the_tables(engine: Engine) -> None:
    with Session(engine) as session:
        id = worker_tasks.quick.enqueue(session, 1).id
        lease = (
            "INSERT INTO pgqueue.leases (target_id, message_id, attempt, worker_id) "
            "VALUES (:id, 1, 1, gen_random_uuid())"
        )
        session.execute(text(lease), {"id": id})

        for change in REFUSED:
            with pytest.raises(IntegrityError), session.begin_nested():
                session.execute(text(f"UPDATE pgqueue.{change}"))


def test_a_row_that_only_looks_odd_runs_and_one_whose_attempts_are_used_up_fails(
    engine: Engine,
) -> None:
    queue = PgQueue(engine)
    take = queue.task(name="take")(_take)
    used_up = "message_queue SET attempt = 31000 WHERE target_id = :id"
    with queue.session() as session, session.begin():
        for change in (*RUNS_ANYWAY, used_up):
            session.execute(text(f"UPDATE pgqueue.{change}"), {"id": take.enqueue(session, 1).id})

    ended = endings(Worker(queue, ["*"]))

    assert ended == {"succeeded": len(RUNS_ANYWAY), "failed": 1}


def _take(n: int) -> int:
    return n
