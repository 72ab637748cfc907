"""Clients that enqueue at once, in several ways, beside two workers."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from sqlalchemy import Connection, Engine, text
from worker_rig import running, wait_until

from pgqueue import PgQueue, Worker

NUMBERS = 40
CLIENTS = 2
"""Of each way."""


def enqueue_and_run(
    queue: PgQueue, engine: Engine, *ways: Callable[[Connection, int], None]
) -> None:
    """Enqueue for each number, each in a transaction of its own, until all jobs have succeeded."""

    def enqueue_all(enqueue: Callable[[Connection, int], None]) -> None:
        for number in range(NUMBERS):
            with engine.begin() as connection:
                enqueue(connection, number)

    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(running(Worker(queue)))
        clients = stack.enter_context(ThreadPoolExecutor())
        list(clients.map(enqueue_all, ways * CLIENTS))
        have_succeeded = text("SELECT bool_and(outcome = 'succeeded') FROM pgqueue.jobs")
        with engine.connect() as connection:
            wait_until(lambda: connection.scalar(have_succeeded))
