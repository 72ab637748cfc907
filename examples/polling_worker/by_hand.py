"""By hand: a worker that polls, and processes a batch of rows in one transaction.

DATABASE_URL=postgresql://... python -m examples.polling_worker.by_hand
"""

import time
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import Connection, Engine, Row, text

from examples.payments import open_shop, send_receipt

MAIL_JOBS = text("""
CREATE TABLE IF NOT EXISTS mail_jobs (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    order_id bigint NOT NULL,
    status text NOT NULL DEFAULT 'pending',
    attempts integer NOT NULL DEFAULT 0,
    last_error text,
    run_at timestamptz NOT NULL DEFAULT now()
)
""")

ENQUEUE = text("INSERT INTO mail_jobs (order_id) VALUES (:order_id) RETURNING id")

LOCK_A_BATCH = text("""
SELECT id, order_id, attempts
FROM mail_jobs
WHERE status = 'pending' AND run_at <= now()
ORDER BY run_at, id
LIMIT :batch_size
FOR UPDATE SKIP LOCKED
""")

SUCCEED = text("UPDATE mail_jobs SET status = 'success', attempts = attempts + 1 WHERE id = :id")

RETRY_OR_FAIL = text("""
UPDATE mail_jobs
SET attempts = attempts + 1,
    status = CASE WHEN attempts + 1 < :max_attempts THEN 'pending' ELSE 'failed' END,
    run_at = now() + :retry_interval,
    last_error = :error
WHERE id = :id
""")

REQUEUE_FAILED = text("""
UPDATE mail_jobs
SET status = 'pending', attempts = 0, run_at = now()
WHERE status = 'failed'
""")


@dataclass(frozen=True)
class Settings:
    poll_interval: timedelta = timedelta(seconds=2)
    batch_size: int = 10
    max_attempts: int = 3
    retry_interval: timedelta = timedelta(seconds=5)


def create_tables(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(MAIL_JOBS)


def enqueue(connection: Connection, order_id: int) -> int:
    job_id: int = connection.execute(ENQUEUE, {"order_id": order_id}).scalar_one()
    return job_id


def work_a_batch(engine: Engine, settings: Settings) -> int:
    """Lock some rows and process them one by one in one transaction.  Return their number."""
    with engine.begin() as connection:
        batch = connection.execute(LOCK_A_BATCH, {"batch_size": settings.batch_size}).all()
        for job in batch:
            run(connection, job, settings)
        return len(batch)


def run(connection: Connection, job: Row[tuple[int, int, int]], settings: Settings) -> None:
    try:
        send_receipt(job.order_id)
    except Exception as error:
        how = {
            "max_attempts": settings.max_attempts,
            "retry_interval": settings.retry_interval,
            "error": str(error),
        }
        connection.execute(RETRY_OR_FAIL, {"id": job.id, **how})
    else:
        connection.execute(SUCCEED, {"id": job.id})


def work(engine: Engine, settings: Settings | None = None) -> None:
    """Process batches for ever."""
    settings = settings or Settings()
    while True:
        if work_a_batch(engine, settings) == 0:
            time.sleep(settings.poll_interval.total_seconds())


def requeue_failed(connection: Connection) -> int:
    """Retry all failed jobs."""
    return connection.execute(REQUEUE_FAILED).rowcount


if __name__ == "__main__":
    engine = open_shop()
    create_tables(engine)
    with engine.begin() as connection:
        for order_id in (1, 2, -3):
            enqueue(connection, order_id)
    while work_a_batch(engine, Settings(retry_interval=timedelta(0))):
        pass
    with engine.connect() as connection:
        for job in connection.execute(text("SELECT * FROM mail_jobs ORDER BY id")):
            print(job)
