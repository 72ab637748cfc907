"""With pgqueue in transaction mode: the claim is a locked message, and the job is kept.

DATABASE_URL=postgresql://... python -m examples.delete_returning.with_pgqueue
"""

import os

from sqlalchemy.orm import Session

from examples.shop import open_shop, pay
from pgqueue import PgQueue, Worker

queue = PgQueue(os.environ.get("DATABASE_URL"))


@queue.task
def pay_item(session: Session, item: int) -> None:
    pay(session, item)


if __name__ == "__main__":
    open_shop()
    queue.upgrade()
    with queue.session() as session, session.begin():
        pay_item.enqueue_many(session, [(item,) for item in range(1, 4)])
    print(Worker(queue).run_until_empty())
