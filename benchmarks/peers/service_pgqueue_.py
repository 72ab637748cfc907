"""A Flask service whose requests save a row, and enqueue a job in the same transaction.

Option: ``enqueues`` (false: a request only saves the row).
"""

from benchmarks.peers.protocol import Adapter, Tables, main, option, url
from benchmarks.peers.service_ import Requests, db, new_service
from pgqueue.flask import PgQueue

queue = PgQueue()


@queue.task(name="nothing")
def nothing(number: int) -> None: ...


def place_order(order):
    if option("enqueues", True):
        nothing.enqueue(db.session, order.number)
    db.session.commit()


class PgqueueService(Requests, Tables, Adapter):
    def setup(self):
        app = new_service(place_order, url())
        queue.init_app(app, db)
        with app.app_context():
            queue.upgrade()
        self.serve(app)

    def empty(self):
        self.sql("TRUNCATE orders, pgqueue.jobs, pgqueue.message_queue")

    def left(self):
        return self.sql("SELECT count(*) FROM pgqueue.jobs WHERE outcome IS NULL")[0][0]


if __name__ == "__main__":
    main(PgqueueService)
