"""With pgqueue: the claim is part of your transaction as before, and the job is kept.

DATABASE_URL=postgresql://... python -m examples.delete_returning.with_pgqueue
"""

import os

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from examples.payments import open_shop, pay
from pgqueue import PgQueue

queue = PgQueue(os.environ.get("DATABASE_URL"))


@queue.task
def pay_item(session: Session, item: int) -> None:
    pay(session, item)


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
        pay_item.enqueue_many(session, [(item,) for item in range(1, 4)])
    work_until_empty(queue.engine)
