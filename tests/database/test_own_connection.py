"""Connections of a worker's own, beside those of the application."""

from threading import Barrier

from sqlalchemy import create_engine, text

from chaos.logical import run_together
from pgqueue.unit_of_work import own_connection

ROUNDS = 20


def test_a_worker_and_its_application_may_connect_first_at_the_same_moment(
    database_url: str,
) -> None:
    for _ in range(ROUNDS):
        engine = create_engine(database_url)
        start = Barrier(2)

        def as_worker() -> None:
            start.wait()
            with own_connection(engine, {}) as connection:
                connection.execute(text("SELECT 1"))

        def as_application() -> None:
            start.wait()
            with engine.connect() as connection:
                connection.execution_options(isolation_level="AUTOCOMMIT")
                connection.execute(text("SELECT 1"))

        run_together(as_worker, as_application)
        engine.dispose()
