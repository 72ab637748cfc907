"""With pgqueue: the claim is a committed lease of a worker, which sends heartbeats.

DATABASE_URL=postgresql://... python -m examples.claim_with_cte.with_pgqueue
"""

import os

from sqlalchemy import select
from sqlalchemy.orm import Session

from examples.shop import open_shop, pay
from pgqueue import Job, PgQueue, Worker

queue = PgQueue(os.environ.get("DATABASE_URL"))


@queue.task
def pay_order(session: Session, order_id: int) -> None:
    pay(session, order_id)


if __name__ == "__main__":
    open_shop()
    queue.upgrade()
    with queue.session() as session, session.begin():
        pay_order.enqueue_many(session, [(1,), (2,), (3,)])
    Worker(queue).run_until_empty()
    with queue.session() as session:
        for job in session.scalars(select(Job).where(Job.task == pay_order.name).order_by(Job.id)):
            print(job.id, job.status, job.started_at, job.finished_at)
