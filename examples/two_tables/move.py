"""Moves the waiting jobs of the two tables to pgqueue.

DATABASE_URL=postgresql://... python -m examples.two_tables.move
"""

from sqlalchemy import text
from sqlalchemy.orm import Session

from examples.two_tables.with_pgqueue import pay_order, queue

TAKE_ALL = text("""
WITH taken AS (
    DELETE FROM message_queue
    WHERE id IN (SELECT id FROM message_queue FOR UPDATE SKIP LOCKED)
    RETURNING target_id
)
UPDATE jobs
SET status = 'moved'
FROM taken
WHERE jobs.id = taken.target_id AND jobs.attempts <= 3
RETURNING jobs.id, jobs.data
""")


def move(session: Session) -> int:
    """Enqueue every waiting job, in the transaction that deletes its message."""
    waiting = sorted(session.execute(TAKE_ALL), key=lambda job: job.id)
    return len(pay_order.enqueue_many(session, [(job.data["order_id"],) for job in waiting]))


if __name__ == "__main__":
    queue.upgrade()
    with queue.session() as session, session.begin():
        print("moved", move(session))
