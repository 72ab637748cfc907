"""With pgqueue: a loop of claims, or a worker; each job is settled separately.

DATABASE_URL=postgresql://... python -m examples.polling_worker.with_pgqueue
"""

import os
import time
from datetime import timedelta

from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from examples.payments import open_shop, send_receipt
from pgqueue import Job, JobStatus, PgQueue, Retry, Worker

queue = PgQueue(os.environ.get("DATABASE_URL"))


@queue.task(queue="mail", max_attempts=3, retry=Retry.constant(timedelta(seconds=5)))
def mail_receipt(order_id: int) -> None:
    send_receipt(order_id)


def work_one(engine: Engine) -> bool:
    """Send one receipt; False if none is due."""
    with (
        Session(engine) as session,
        session.begin(),
        queue.claim(session, queues=["mail"]) as claimed,
    ):
        if claimed is None:
            return False
        claimed.run()
    return True


def poll(engine: Engine, interval: timedelta = timedelta(seconds=2)) -> None:
    while True:
        if not work_one(engine):
            time.sleep(interval.total_seconds())


def requeue_failed(session: Session) -> int:
    """Retry all failed receipts."""
    is_failed = (Job.status == JobStatus.FAILED, Job.queue == "mail")
    failed = session.scalars(select(Job.id).where(*is_failed)).all()
    for job_id in failed:
        queue.requeue(session, job_id)
    return len(failed)


if __name__ == "__main__":
    open_shop()
    queue.upgrade()
    with queue.session() as session, session.begin():
        mail_receipt.enqueue_many(session, [(1,), (2,), (-3,)])
    while work_one(queue.engine):
        pass
    Worker(queue, concurrency=10, poll_interval=timedelta(seconds=2)).run_until_empty()
    with queue.session() as session:
        for job in session.scalars(select(Job).where(Job.queue == "mail").order_by(Job.id)):
            print(job.id, job.status, job.attempts, job.run_at, job.last_error)
