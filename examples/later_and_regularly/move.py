"""Moves the scheduled jobs to pgqueue, each at its time.

DATABASE_URL=postgresql://... python -m examples.later_and_regularly.move
"""

from datetime import UTC

from sqlalchemy import text
from sqlalchemy.orm import Session

from examples.later_and_regularly.with_pgqueue import pay_order, queue, schedule_rent

TAKE_ALL = text("""
DELETE FROM scheduled_jobs
WHERE id IN (SELECT id FROM scheduled_jobs FOR UPDATE SKIP LOCKED)
RETURNING order_id, run_at, every
""")


def move(session: Session) -> int:
    """Enqueue the single jobs, and make schedules of the daily ones."""
    scheduled = session.execute(TAKE_ALL).all()
    for job in scheduled:
        if job.every is None:
            pay_order.options(run_at=job.run_at).enqueue(session, job.order_id)
        else:
            at = job.run_at.astimezone(UTC)
            schedule_rent(session, job.order_id, f"{at.minute} {at.hour} * * *")
    return len(scheduled)


if __name__ == "__main__":
    queue.upgrade()
    with queue.session() as session, session.begin():
        print("moved", move(session))
