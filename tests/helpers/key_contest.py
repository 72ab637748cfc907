"""Clients that enqueue under one unique key at the same time."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session

from chaos.workers import PATIENCE
from pgqueue import DuplicateJob, PgQueue, Unique

queue = PgQueue()
CLIENTS = 8
ROUNDS = 10


@queue.task(name="contest.finished")
def finished(key: str, client: int, number: int) -> None: ...


@queue.task(name="contest.started", unique=Unique(by=("key",), until="started"))
def started(key: str, client: int, number: int) -> None: ...


@queue.task(name="contest.succeeded", max_attempts=1)
def succeeded(key: str, client: int, number: int) -> None:
    raise ValueError


TASKS = {"finished": finished, "started": started, "succeeded": succeeded}


def compete(
    url: str, until: str, on_conflict: str, many: bool, *, across: bool = False
) -> list[list[Any]]:
    """Let eight clients enqueue under one key; returns what each has seen: ids and errors."""
    engine = create_engine(url, pool_size=CLIENTS)
    queue.bind(engine)
    barrier = threading.Barrier(CLIENTS)

    def enqueue(client: int) -> list[Any]:
        return _enqueue(engine, until, on_conflict, many, barrier, client, across)

    with ThreadPoolExecutor(CLIENTS) as clients:
        seen = list(clients.map(enqueue, range(CLIENTS)))
    engine.dispose()
    return seen


def _enqueue(
    engine: Engine,
    until: Any,
    on_conflict: Any,
    many: bool,
    barrier: threading.Barrier,
    client: int,
    across: bool,
) -> list[Any]:
    scope: Any = "queues" if across else None
    unique = Unique(by=("key",), until=until, on_conflict=on_conflict, across=scope)
    task = TASKS[until].options(unique=unique, delay=timedelta(hours=1))
    if across:
        task = task.options(queue=f"queue{client % 2}")
    seen: list[Any] = []
    barrier.wait(PATIENCE)
    for number in range(ROUNDS):
        try:
            with Session(engine) as session, session.begin():
                if many:
                    rows = [("one", client, number), ("two", client, number)]
                    seen += task.enqueue_many(session, rows if client % 2 else rows[::-1])
                else:
                    seen.append(task.enqueue(session, "one", client, number).id)
        except DuplicateJob:
            seen.append("duplicate")
        except Exception as error:
            seen.append(repr(error)[:300])
    return seen
