"""The environment of the chaos scenarios, for tests that start worker processes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self

import worker_tasks
from sqlalchemy import Connection
from sqlalchemy.orm import Session

from chaos.environment import Environment
from chaos.workers import PATIENCE as PATIENCE
from chaos.workers import Member, Workers
from chaos.workers import wait_until as wait_until
from pgqueue import PgQueue, Violation, Worker
from pgqueue.database.opening import worker_engine
from pgqueue.options import OptionsOfWorker
from pgqueue.worker.runtime import WorkerRuntime

WorkerProgram = Member


def promised(seconds: float) -> float:
    """The bound of a promise about time; a busy machine is held to one that it can keep."""
    return seconds if "PGQUEUE_TIMED" in os.environ else max(PATIENCE, seconds)


def endings(worker: Worker) -> dict[str, int]:
    """Work until nothing is left; returns how often attempts have ended how."""
    return worker.run_until_empty(timeout=60)


@contextmanager
def running(worker: Worker) -> Iterator[None]:
    """Run a worker in a thread of this process, and stop it at the end."""
    thread = Thread(target=worker.run)
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        thread.join(PATIENCE)
    assert not thread.is_alive()


def runtime_of(queue: PgQueue) -> WorkerRuntime:
    """What the threads of a worker share, and none of the threads."""
    config = OptionsOfWorker(concurrency=1, poll_interval=timedelta(1), grace=timedelta(1))
    return WorkerRuntime(queue, config, worker_engine(queue.engine), stopping=Event())


class Rig(Environment):
    """A database with pgqueue's tables, an application on it, and its worker processes."""

    def __init__(self, url: str, directory: Path, *, worker_url: str | None = None) -> None:
        super().__init__(url, directory)
        self._worker_url = worker_url
        defaults = {"poll_interval": 0.5, "grace": 5, "by_command": False}
        self._workers = Workers(self, 0, **defaults)
        self.execute(worker_tasks.EFFECTS)

    def __enter__(self) -> Self:
        return self  # and looks at nothing meanwhile, unlike a scenario

    def start(self, *, waits: bool = True, modules: Any = (), **options: Any) -> Member:
        """Start a worker process; waits until the database knows it."""
        modules = ["worker_tasks", *modules]
        worker = self._workers.add(url=self._worker_url, modules=modules, **options)
        if waits:
            self.until(lambda: self.is_registered(worker), what=f"{worker.name} is registered")
        return worker

    def is_registered(self, worker: Member) -> bool:
        alive = "SELECT count(*) FROM pgqueue.workers WHERE pid = :pid AND dead_at IS NULL"
        return bool(self.scalar(alive, pid=worker.pid))

    def session(self) -> Session:
        return self.queue.session()

    def check(self) -> list[Violation]:
        with self.session() as session:
            return self.queue.check(session)

    def run(self, statement: str, **parameters: Any) -> None:
        self.execute(statement, **parameters)

    def raw(self) -> Connection:
        """A connection in autocommit, for what must not be in a transaction."""
        return self.engine.connect().execution_options(isolation_level="AUTOCOMMIT")

    def notes(self, word: str | None = None, *, job: int | None = None) -> list[dict[str, Any]]:
        """What the handlers have written down."""
        return [
            {"word": e.word, "job": e.job, "attempt": e.attempt, "pid": e.pid, "at": e.at}
            | e.details
            for e in self.history(word)
            if job is None or e.job == job
        ]

    def until_ended(self, *jobs: int, seconds: float = PATIENCE, **_: Any) -> None:
        """Wait until these jobs, or all, have ended."""
        self.until(
            lambda: self.unfinished(*jobs) == 0, seconds=seconds, what=f"jobs {jobs or ''} end"
        )

    def unfinished(self, *jobs: int) -> int:
        statement = "SELECT count(*) FROM pgqueue.jobs WHERE outcome IS NULL"
        if jobs:
            statement += f" AND id IN ({', '.join(map(str, jobs))})"
        return int(self.scalar(statement))

    def outcomes(self) -> dict[str | None, int]:
        """How many jobs have ended how."""
        rows = self.rows("SELECT outcome, count(*) FROM pgqueue.jobs GROUP BY outcome")
        return {row[0]: row[1] for row in rows}

    def outcome(self, job: int) -> str | None:
        found: str | None = self.scalar("SELECT outcome FROM pgqueue.jobs WHERE id = :id", id=job)
        return found

    def attempts(self, job: int) -> int:
        return int(self.scalar("SELECT attempts FROM pgqueue.jobs WHERE id = :id", id=job))

    def bad_attempts(self, job: int | None = None) -> list[str]:
        """How the attempts that did not end well have ended, in their order."""
        which = "" if job is None else f"WHERE job_id = {job}"
        order = "ORDER BY job_id, message_id, attempt"
        return [
            row[0] for row in self.rows(f"SELECT outcome FROM pgqueue.job_attempts {which} {order}")
        ]

    def effects(self, job: int | None = None) -> int:
        which = "" if job is None else f"WHERE job = {job}"
        return int(self.scalar(f"SELECT count(*) FROM effects {which}"))

    def each_success_has_one_effect(self) -> bool:
        """Whether the effects are those of the jobs that succeeded, one each."""
        wrong = """
            SELECT count(*) FROM (SELECT id FROM pgqueue.jobs WHERE outcome = 'succeeded') AS job
            FULL JOIN (SELECT job, count(*) AS n FROM effects GROUP BY job) AS effect
                ON effect.job = job.id
            WHERE job.id IS NULL OR effect.n IS DISTINCT FROM 1
        """
        return int(self.scalar(wrong)) == 0

    def most_starts(self) -> int:
        """The most often any attempt of a job has started, by the ledger."""
        starts = [(note["job"], note["attempt"]) for note in self.notes("start")]
        return max(map(starts.count, set(starts)), default=0)

    def backends(self, worker: Member) -> list[int]:
        statement = (
            "SELECT pid FROM pg_stat_activity"
            " WHERE split_part(application_name, ' ', 1) = :name ORDER BY pid"
        )
        return [row[0] for row in self.rows(statement, name=worker.name)]

    def declared_dead(self) -> int:
        return int(self.scalar("SELECT count(*) FROM pgqueue.workers WHERE dead_at IS NOT NULL"))
