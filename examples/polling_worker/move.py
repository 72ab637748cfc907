"""Moves the pending rows of `mail_jobs` to pgqueue, each at its time.

DATABASE_URL=postgresql://... python -m examples.polling_worker.move
"""

from sqlalchemy import text
from sqlalchemy.orm import Session

from examples.polling_worker.with_pgqueue import mail_receipt, queue

TAKE_ALL = text("""
DELETE FROM mail_jobs
WHERE id IN (SELECT id FROM mail_jobs WHERE status = 'pending' FOR UPDATE SKIP LOCKED)
RETURNING id, order_id, run_at
""")


def move(session: Session) -> int:
    """Enqueue every pending job, in the transaction that deletes its row."""
    pending = sorted(session.execute(TAKE_ALL), key=lambda job: job.id)
    for job in pending:
        mail_receipt.options(run_at=job.run_at).enqueue(session, job.order_id)
    return len(pending)


if __name__ == "__main__":
    queue.upgrade()
    with queue.session() as session, session.begin():
        print("moved", move(session))
