"""With pgqueue: a claim in your transaction, or a committed lease of a worker with heartbeats.

DATABASE_URL=postgresql://... python -m examples.claim_with_cte.with_pgqueue
"""

import os

from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from examples.payments import open_shop, pay
from pgqueue import Job, PgQueue, Worker

queue = PgQueue(os.environ.get("DATABASE_URL"))


@queue.task
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
        pay_order.enqueue_many(session, [(1,), (2,), (3,)])
    work_one(queue.engine)
    Worker(queue).run_until_empty()
    with queue.session() as session:
        for job in session.scalars(select(Job).where(Job.task == pay_order.name).order_by(Job.id)):
            print(job.id, job.status, job.started_at, job.finished_at)
