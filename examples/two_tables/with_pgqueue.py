"""With pgqueue: the job and its attempts are kept; the payment commits with the job's end.

DATABASE_URL=postgresql://... python -m examples.two_tables.with_pgqueue
"""

import os
from datetime import timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from examples.shop import open_shop, pay
from pgqueue import Job, PgQueue, Retry, Worker

queue = PgQueue(os.environ.get("DATABASE_URL"))


@queue.task(max_attempts=4, retry=Retry.constant(timedelta(0)))
def pay_order(session: Session, order_id: int) -> None:
    pay(session, order_id)


if __name__ == "__main__":
    open_shop()
    queue.upgrade()
    with queue.session() as session, session.begin():
        pay_order.enqueue_many(session, [(1,), (2,), (-3,)])
    Worker(queue).run_until_empty()
    with queue.session() as session:
        for job in session.scalars(select(Job).where(Job.task == pay_order.name).order_by(Job.id)):
            print(job.id, job.status, job.attempts, job.args, job.last_error)
