"""Processes that enqueue under one unique key at the same time."""

from datetime import timedelta
from typing import Any

from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from chaos.workers import FORKS
from pgqueue import DuplicateJob, PgQueue, Unique

queue = PgQueue()
CLIENTS = 8
ROUNDS = 25
PATIENCE = 60.0


@queue.task(name="contest.finished")
def finished(key: str, client: int, number: int) -> None: ...


@queue.task(name="contest.started", unique=Unique(by=("key",), until="started"))
def started(key: str, client: int, number: int) -> None: ...


TASKS = {"finished": finished, "started": started}


def compete(url: str, until: str, on_conflict: str, many: bool) -> list[list[Any]]:
    """Let eight processes enqueue under one key; returns what each has seen: ids and errors."""
    barrier, answers = FORKS.Barrier(CLIENTS), FORKS.SimpleQueue()
    given = (url, until, on_conflict, many, barrier, answers)
    clients = [FORKS.Process(target=_enqueue, args=(*given, client)) for client in range(CLIENTS)]
    for client in clients:
        client.start()
    seen = [answers.get() for _ in clients]
    for client in clients:
        client.join(PATIENCE)
        assert client.exitcode == 0
    return seen


def _enqueue(
    url: str, until: Any, on_conflict: Any, many: bool, barrier: Any, answers: Any, client: int
) -> None:
    engine = create_engine(url)
    queue.bind(engine)
    unique = Unique(by=("key",), until=until, on_conflict=on_conflict)
    task = TASKS[until].options(unique=unique, delay=timedelta(hours=1))
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
    engine.dispose()
    answers.put(seen)
