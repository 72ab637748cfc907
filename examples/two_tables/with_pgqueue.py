"""With pgqueue: one transaction as before; the job, its attempts and its errors are kept.

DATABASE_URL=postgresql://... python -m examples.two_tables.with_pgqueue
"""

import os
from datetime import timedelta

from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from examples.payments import open_shop, pay
from pgqueue import Job, PgQueue, Retry

queue = PgQueue(os.environ.get("DATABASE_URL"))


@queue.task(max_attempts=4, retry=Retry.constant(timedelta(0)))
def pay_order(session: Session, order_id: int) -> None:
    pay(session, order_id)


def work_one(engine: Engine) -> bool:
    """Run one job in a transaction of this Session; False if none is due."""
    with Session(engine) as session, session.begin(), queue.claim(session) as claimed:
        if claimed is None:
            return False
        claimed.run()
    return True


def work_until_empty(engine: Engine) -> None:
    while work_one(engine):
        pass


if __name__ == "__main__":
    open_shop()
    queue.upgrade()
    with queue.session() as session, session.begin():
        pay_order.enqueue_many(session, [(1,), (2,), (-3,)])
    work_until_empty(queue.engine)
    with queue.session() as session:
        for job in session.scalars(select(Job).where(Job.task == pay_order.name).order_by(Job.id)):
            print(job.id, job.status, job.attempts, job.args, job.last_error)
