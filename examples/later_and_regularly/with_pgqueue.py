"""With pgqueue: `delay` and `run_at` are options, and a unique key keeps the regular job single.

DATABASE_URL=postgresql://... python -m examples.later_and_regularly.with_pgqueue
"""

import os
from datetime import UTC, datetime, time, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from examples.shop import open_shop, pay
from pgqueue import Job, PgQueue, Worker

queue = PgQueue(os.environ.get("DATABASE_URL"))


@queue.task
def pay_order(session: Session, order_id: int) -> None:
    pay(session, order_id)


@queue.task(unique_key=lambda order_id, due: f"rent:{order_id}:{due.isoformat()}")
def pay_rent(session: Session, order_id: int, due: datetime) -> None:
    """Pay, and leave the successor in the same commit."""
    pay(session, order_id)
    schedule_rent(session, order_id, due + timedelta(days=1))


def schedule_rent(session: Session, order_id: int, due: datetime) -> Job:
    return pay_rent.options(run_at=due).enqueue(session, order_id, due)


if __name__ == "__main__":
    open_shop()
    queue.upgrade()
    today = datetime.combine(datetime.now(UTC), time(), UTC)
    with queue.session() as session, session.begin():
        pay_order.options(delay=timedelta(hours=1)).enqueue(session, 1)
        schedule_rent(session, 2, today)
        schedule_rent(session, 2, today)  # a second process that starts: the same job, not another
    print(Worker(queue).run_until_empty())
    with queue.session() as session:
        for job in session.scalars(select(Job).order_by(Job.run_at)):
            print(job.id, job.status, job.task, job.run_at)
