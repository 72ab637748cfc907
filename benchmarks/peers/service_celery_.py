"""A Flask service whose requests save a row, and send a job to Redis by Celery after the commit."""

from celery_ import CeleryAdapter, nothing
from protocol import Tables, main, url
from service_ import Requests, db, new_service


def place_order(order):
    db.session.commit()
    nothing.delay(order.number)


class CeleryService(Requests, Tables, CeleryAdapter):
    def setup(self):
        super().setup()
        self.serve(new_service(place_order, url()))

    def empty(self):
        super().empty()
        self.sql("TRUNCATE orders")


if __name__ == "__main__":
    main(CeleryService)
