"""By hand: a column `run_at` for later work; regular jobs insert their successors.

DATABASE_URL=postgresql://... python -m examples.later_and_regularly.by_hand
"""

from datetime import UTC, datetime, timedelta

from sqlalchemy import Connection, Engine, text

from examples.payments import open_shop, pay

SCHEDULED_JOBS = text("""
CREATE TABLE IF NOT EXISTS scheduled_jobs (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    order_id bigint NOT NULL,
    run_at timestamptz NOT NULL,
    every interval
)
""")

IN_A_WHILE = text("""
INSERT INTO scheduled_jobs (order_id, run_at)
VALUES (:order_id, now() + :delay)
RETURNING id
""")

AT_A_TIME = text("""
INSERT INTO scheduled_jobs (order_id, run_at, every)
VALUES (:order_id, :run_at, :every)
RETURNING id
""")

TAKE = text("""
DELETE FROM scheduled_jobs
WHERE id = (
    SELECT id
    FROM scheduled_jobs
    WHERE run_at <= now()
    ORDER BY run_at, id
    LIMIT 1
    FOR UPDATE SKIP LOCKED
)
RETURNING order_id, run_at, every
""")


def create_tables(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(SCHEDULED_JOBS)


def in_a_while(connection: Connection, order_id: int, delay: timedelta) -> int:
    values = {"order_id": order_id, "delay": delay}
    job_id: int = connection.execute(IN_A_WHILE, values).scalar_one()
    return job_id


def at_a_time(
    connection: Connection, order_id: int, run_at: datetime, *, every: timedelta | None = None
) -> int:
    values = {"order_id": order_id, "run_at": run_at, "every": every}
    job_id: int = connection.execute(AT_A_TIME, values).scalar_one()
    return job_id


def work_one(engine: Engine) -> bool:
    """Run a due job and insert its successor.  Return False if no job is due."""
    with engine.begin() as connection:
        job = connection.execute(TAKE).one_or_none()
        if job is None:
            return False
        pay(connection, job.order_id)
        if job.every is not None:
            at_a_time(connection, job.order_id, job.run_at + job.every, every=job.every)
        return True


def work_until_empty(engine: Engine) -> None:
    while work_one(engine):
        pass


if __name__ == "__main__":
    engine = open_shop()
    create_tables(engine)
    now = datetime.now(UTC)
    with engine.begin() as connection:
        in_a_while(connection, 1, timedelta(hours=1))
        at_a_time(connection, 2, now, every=timedelta(days=1))
    work_until_empty(engine)
    with engine.connect() as connection:
        for job in connection.execute(text("SELECT * FROM scheduled_jobs ORDER BY run_at")):
            print(job)
