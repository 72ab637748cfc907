"""With pgqueue: `delay` and `run_at` are options, and regular work is a schedule.

DATABASE_URL=postgresql://... python -m examples.later_and_regularly.with_pgqueue
"""

import os
from contextlib import suppress
from datetime import timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from examples.payments import open_shop, pay
from pgqueue import DuplicateSchedule, Job, PgQueue, Worker

queue = PgQueue(os.environ.get("DATABASE_URL"))


@queue.task
def pay_order(session: Session, order_id: int) -> None:
    pay(session, order_id)


@queue.task
def pay_rent(session: Session, order_id: int) -> None:
    pay(session, order_id)


def schedule_rent(session: Session, order_id: int, cron: str = "0 0 * * *") -> None:
    """Pay the rent each day.  A second process finds that the schedule exists."""
    with suppress(DuplicateSchedule):
        queue.schedules.add(session, pay_rent, cron, name=f"rent:{order_id}", args=(order_id,))


if __name__ == "__main__":
    open_shop()
    queue.upgrade()
    with queue.session() as session, session.begin():
        pay_order.options(delay=timedelta(hours=1)).enqueue(session, 1)
        schedule_rent(session, 2)
        schedule_rent(session, 2)
        queue.schedules.trigger(session, "rent:2")  # today's
    print(Worker(queue).run_until_empty())
    with queue.session() as session:
        for job in session.scalars(select(Job).order_by(Job.run_at)):
            print(job.id, job.status, job.task, job.run_at)
        for schedule in queue.schedules.list(session):
            print(schedule.name, *schedule.next_runs(3))
