"""Moves the remaining rows of `items` to pgqueue.

DATABASE_URL=postgresql://... python -m examples.delete_returning.move
"""

from sqlalchemy import text
from sqlalchemy.orm import Session

from examples.delete_returning.with_pgqueue import pay_item, queue

TAKE_ALL = text("""
DELETE FROM items
WHERE id IN (SELECT id FROM items FOR UPDATE SKIP LOCKED)
RETURNING id
""")


def move(session: Session) -> int:
    """Enqueue every item that no worker holds, in the transaction that deletes it."""
    items = sorted(session.scalars(TAKE_ALL))
    return len(pay_item.enqueue_many(session, [(item,) for item in items]))


if __name__ == "__main__":
    queue.upgrade()
    with queue.session() as session, session.begin():
        print("moved", move(session))
