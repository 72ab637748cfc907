"""Moves waiting and abandoned rows of `tasks` to pgqueue.

DATABASE_URL=postgresql://... python -m examples.claim_with_cte.move
"""

from sqlalchemy import text
from sqlalchemy.orm import Session

from examples.claim_with_cte.with_pgqueue import pay_order, queue

# The old workers have been stopped, so every "running" task is abandoned.
TAKE_ALL = text("""
DELETE FROM tasks
WHERE status IN ('pending', 'running')
RETURNING id, order_id
""")


def move(session: Session) -> int:
    """Enqueue every unfinished task, in the transaction that deletes its row."""
    unfinished = sorted(session.execute(TAKE_ALL), key=lambda task: task.id)
    return len(pay_order.enqueue_many(session, [(task.order_id,) for task in unfinished]))


if __name__ == "__main__":
    queue.upgrade()
    with queue.session() as session, session.begin():
        print("moved", move(session))
