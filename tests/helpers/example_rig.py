"""A database of its own for an example, and processes that a test kills while they work.

Work is held up by the database itself: the test inserts the row that the work is about to insert,
and does not commit, so that the work waits inside its INSERT.  The examples know nothing of it.
"""

import importlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import pytest
from sqlalchemy import NullPool, create_engine, text

from chaos.workers import PATIENCE, wait_until
from examples.payments import Base, database_url
from pgqueue import PgQueue, Worker

T = TypeVar("T")

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["pgqueue.public", "sqlalchemy.dialects.postgresql.psycopg"])
OF_PROCESS = "split_part(application_name, ' ', 1) = :name"
"""A worker says behind its name what a connection is for."""


class ExampleProcess:
    """A process that runs a part of an example."""

    def __init__(self, name: str, target: Callable[..., None], *arguments: Any) -> None:
        self.name = name
        self._process = FORKS.Process(target=target, args=(name, *arguments))
        self._process.start()

    def kill(self) -> None:
        """kill -9; returns when the process is gone."""
        self._process.kill()
        self._process.join(PATIENCE)

    def until_ended(self) -> None:
        """Wait until it has ended by itself, and well; pytest's timeout bounds the wait."""
        self._process.join()
        assert self._process.exitcode == 0, f"{self.name} ended with {self._process.exitcode}"


class ExampleRig:
    """A database with the shop's tables, and the processes that work on it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.engine = create_engine(url, poolclass=NullPool)
        self.processes: list[ExampleProcess] = []
        self._environment = pytest.MonkeyPatch()

    def __enter__(self) -> Self:
        self._environment.setenv("DATABASE_URL", self.url)
        Base.metadata.create_all(self.engine)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
        self._environment.undo()

    def enqueue_by_hand(self, example: Any, *order_ids: int) -> None:
        """Make the tables of a hand-written example, and enqueue these orders."""
        example.create_tables(self.engine)
        with self.engine.begin() as connection:
            for order_id in order_ids:
                example.enqueue(connection, order_id)

    def enqueue(self, queue: PgQueue, task: Any, *order_ids: int) -> None:
        queue.bind(self.engine)
        with queue.session() as session, session.begin():
            task.enqueue_many(session, [(order_id,) for order_id in order_ids])

    def start_by_hand(self, module: str, function: str = "work_until_empty") -> ExampleProcess:
        """Start a process that runs one function of a hand-written example."""
        return self._start(_run_by_hand, module, function)

    def start_worker(self, module: str, **options: Any) -> ExampleProcess:
        """Start a process that runs a worker of pgqueue for the tasks of an example."""
        return self._start(_run_worker, module, options)

    def drain(self, module: str, *, processes: int = 1, **options: Any) -> None:
        """Have worker processes run all that is due, and end by themselves."""
        started = [self._start(_run_until_empty, module, options) for _ in range(processes)]
        for process in started:
            process.until_ended()

    def _start(self, target: Callable[..., None], *arguments: Any) -> ExampleProcess:
        process = ExampleProcess(f"process-{len(self.processes) + 1}", target, self.url, *arguments)
        self.processes.append(process)
        return process

    @contextmanager
    def held_up(self, table: str, *, order_id: int) -> Iterator[None]:
        """Have whoever inserts this order's row wait inside the INSERT."""
        self.run(
            f"CREATE UNIQUE INDEX IF NOT EXISTS held_up_{order_id} ON {table} (order_id)"
            f" WHERE order_id = {order_id}"
        )
        with self.engine.connect() as connection:
            row = {"order_id": order_id}
            connection.execute(text(f"INSERT INTO {table} (order_id) VALUES (:order_id)"), row)
            yield
            connection.rollback()

    def until_held_up(self, process: ExampleProcess) -> None:
        """Wait until a process is in the middle of its work."""
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND "
        self.until(lambda: self.scalar(waits + OF_PROCESS, name=process.name))

    def until_forgotten(self, process: ExampleProcess) -> None:
        """Wait until the server has ended all that a killed process had begun."""
        left = f"SELECT count(*) FROM pg_stat_activity WHERE {OF_PROCESS}"
        self.until(lambda: self.scalar(left, name=process.name) == 0)

    def kill_at_work(
        self, start: Callable[[], ExampleProcess], table: str, *, order_id: int
    ) -> None:
        """Start a process and kill it in the middle of one order."""
        with self.held_up(table, order_id=order_id):
            process = start()
            self.until_held_up(process)
            process.kill()
        self.until_forgotten(process)

    def rows(self, statement: str, **parameters: Any) -> list[tuple[Any, ...]]:
        with self.engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text(statement), parameters)]

    def scalar(self, statement: str, **parameters: Any) -> Any:
        return self.rows(statement, **parameters)[0][0]

    def column(self, statement: str, **parameters: Any) -> list[Any]:
        return [row[0] for row in self.rows(statement, **parameters)]

    def run(self, statement: str, **parameters: Any) -> None:
        with self.engine.begin() as connection:
            connection.execute(text(statement), parameters)

    def paid(self) -> list[int]:
        """The orders that have been paid, once for each payment."""
        return self.column("SELECT order_id FROM payments ORDER BY order_id")

    def receipts(self) -> list[int]:
        """The orders whose receipts have been sent, once for each mail."""
        return self.column("SELECT order_id FROM receipts ORDER BY order_id")

    def unfinished(self) -> int:
        """How many of pgqueue's jobs have not ended."""
        return int(self.scalar("SELECT count(*) FROM pgqueue.jobs WHERE outcome IS NULL"))

    def until_all_ended(self, *, seconds: float = PATIENCE) -> None:
        self.until(lambda: self.unfinished() == 0, seconds=seconds)

    def until(self, condition: Callable[[], T], *, seconds: float = PATIENCE) -> T:
        """Look until it is so; what it returned then."""
        return wait_until(condition, seconds=seconds)


def _run_by_hand(name: str, url: str, module: str, function: str) -> None:
    os.environ.update(DATABASE_URL=url, PGAPPNAME=name)
    getattr(importlib.import_module(module), function)(create_engine(database_url()))


def _run_worker(name: str, url: str, module: str, options: dict[str, Any]) -> None:
    _worker(name, url, module, options).run()


def _run_until_empty(name: str, url: str, module: str, options: dict[str, Any]) -> None:
    _worker(name, url, module, options).run_until_empty()


def _worker(name: str, url: str, module: str, options: dict[str, Any]) -> Worker:
    os.environ.update(DATABASE_URL=url, PGAPPNAME=name)
    return Worker(importlib.import_module(module).queue, **options)
