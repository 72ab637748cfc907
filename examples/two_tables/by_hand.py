"""By hand: a table of jobs, a table of messages, and one transaction for both.

DATABASE_URL=postgresql://... python -m examples.two_tables.by_hand
"""

import json

from sqlalchemy import Connection, Engine, text

from examples.payments import open_shop, pay

JOBS = text("""
CREATE TABLE IF NOT EXISTS jobs (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    status text NOT NULL DEFAULT 'new',
    attempts integer NOT NULL DEFAULT 0,
    data jsonb NOT NULL
)
""")

MESSAGES = text("""
CREATE TABLE IF NOT EXISTS message_queue (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    target_id bigint NOT NULL REFERENCES jobs (id),
    status text NOT NULL DEFAULT 'new',
    created timestamptz NOT NULL DEFAULT clock_timestamp()
)
""")

ENQUEUE = text("""
WITH job AS (INSERT INTO jobs (data) VALUES (:data) RETURNING id)
INSERT INTO message_queue (target_id) SELECT id FROM job RETURNING target_id
""")

TAKE = text("""
DELETE FROM message_queue
WHERE id = (
    SELECT id
    FROM message_queue
    WHERE status = 'new'
    ORDER BY created, id
    LIMIT 1
    FOR UPDATE SKIP LOCKED
)
RETURNING target_id
""")

# A mistake that goes unnoticed while the ids of both tables are equal: the subselect reads and
# locks the wrong table.
TAKE_BY_THE_WRONG_ID = text("""
DELETE FROM message_queue
WHERE id = (
    SELECT id
    FROM jobs
    WHERE status = 'new'
    ORDER BY id
    LIMIT 1
    FOR UPDATE SKIP LOCKED
)
RETURNING target_id
""")

LOCK = text("SELECT data FROM jobs WHERE id = :id AND attempts <= 3 FOR UPDATE")
COMPLETE = text("UPDATE jobs SET status = 'complete' WHERE id = :id")
FAIL = text("UPDATE jobs SET status = 'failed', attempts = attempts + 1 WHERE id = :id")
RETRY = text("INSERT INTO message_queue (target_id) VALUES (:id)")


def create_tables(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(JOBS)
        connection.execute(MESSAGES)


def enqueue(connection: Connection, order_id: int) -> int:
    job_id: int = connection.execute(
        ENQUEUE, {"data": json.dumps({"order_id": order_id})}
    ).scalar_one()
    return job_id


def work_one(engine: Engine) -> bool:
    """Delete a message and do its job in one transaction.  Return False if there is none."""
    with engine.begin() as connection:
        job_id = connection.scalar(TAKE)
        if job_id is None:
            return False
        job = connection.execute(LOCK, {"id": job_id}).one_or_none()
        if job is None:  # it has used up its attempts, and its last message is gone
            return True
        try:
            with connection.begin_nested():
                pay(connection, job.data["order_id"])
        except Exception:
            connection.execute(FAIL, {"id": job_id})
            connection.execute(RETRY, {"id": job_id})
        else:
            connection.execute(COMPLETE, {"id": job_id})
        return True


def work_until_empty(engine: Engine) -> None:
    while work_one(engine):
        pass


if __name__ == "__main__":
    engine = open_shop()
    create_tables(engine)
    with engine.begin() as connection:
        for order_id in (1, 2, -3):
            enqueue(connection, order_id)
    work_until_empty(engine)
    with engine.connect() as connection:
        for job in connection.execute(text("SELECT * FROM jobs ORDER BY id")):
            print(job)
