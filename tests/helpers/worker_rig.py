"""Worker processes that a test starts, kills, stops and looks at from outside."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import worker_tasks
from chores_worker import run
from sqlalchemy import Connection, Engine, create_engine, make_url, text
from sqlalchemy.orm import Session

from chaos.workers import FORKS, is_stopped
from chaos.workers import PATIENCE as PATIENCE
from chaos.workers import wait_until as wait_until
from pgqueue import Violation, Worker

T = TypeVar("T")

EFFECTS = "CREATE TABLE IF NOT EXISTS effects (id serial, job bigint, attempt int, pid int)"


def promised(seconds: float) -> float:
    """The bound of a promise about time; a busy machine is held to one that it can keep."""
    return seconds if "PGQUEUE_TIMED" in os.environ else max(PATIENCE, seconds)


def endings(worker: Worker) -> dict[str, int]:
    """Work until nothing is left; returns how often attempts have ended how."""
    return worker.run_until_empty(timeout=60)


class WorkerProgram:
    """One process that runs a worker."""

    def __init__(self, url: str, directory: Path, name: str, options: dict[str, Any]) -> None:
        self.name = name
        self.log = directory / f"{name}.log"
        own_url = make_url(url).update_query_dict({"application_name": name})
        environment = {
            "CHAOS_URL": own_url.render_as_string(hide_password=False),
            "CHAOS_DIRECTORY": str(directory),
        }
        self.log.touch()
        self._process = FORKS.Process(target=run, args=(environment, self.log, options))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None, "started above"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.is_alive()

    def send(self, number: signal.Signals) -> None:
        # Whoever has ended has been waited for, and its number may be another's by now.
        assert self.is_running, f"{self.name} has ended before it could be sent {number!r}"
        os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            # The kernel stops its threads one by one; a handler may get a few lines further.
            wait_until(self.is_stopped, what=f"{self.name} has stopped")

    def is_stopped(self) -> bool:
        return is_stopped(self.pid)

    def kill(self) -> None:
        """kill -9; returns when the process is gone."""
        if self.is_running:
            self._process.kill()
        self._process.join(PATIENCE)

    def terminate(self, *, seconds: float = PATIENCE) -> int:
        """SIGTERM; returns the exit code."""
        self.send(signal.SIGTERM)
        return self.exit_code(seconds=seconds)

    def exit_code(self, *, seconds: float = PATIENCE) -> int:
        self._process.join(seconds)
        assert self._process.exitcode is not None, f"{self.name} has not ended in {seconds} s"
        return self._process.exitcode


class Rig:
    """A database, an application on it, and its worker processes."""

    def __init__(self, url: str, directory: Path, *, worker_url: str | None = None) -> None:
        self.url = url
        self.worker_url = worker_url or url
        self.directory = directory
        self.engine: Engine = create_engine(url, pool_pre_ping=True)
        self.queue = worker_tasks.queue
        self.queue.notify = True
        self.queue.bind(self.engine)
        self.workers: list[WorkerProgram] = []
        with self.engine.begin() as connection:
            connection.execute(text(EFFECTS))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> Literal[False]:
        for worker in self.workers:
            worker.kill()
        if error is not None:
            error.add_note(self._report())
        self.engine.dispose()
        return False

    def start(self, *, waits: bool = True, **options: Any) -> WorkerProgram:
        """Start a worker process; waits until the database knows it."""
        name = f"worker-{len(self.workers) + 1}"
        given = {"concurrency": 4, "poll_interval": 0.5, "grace": 5, **options}
        worker = WorkerProgram(self.worker_url, self.directory, name, given)
        self.workers.append(worker)
        if waits:
            self.until(lambda: self.is_registered(worker), what=f"{name} is registered")
        return worker

    def is_registered(self, worker: WorkerProgram) -> bool:
        alive = "SELECT count(*) FROM pgqueue.workers WHERE pid = :pid AND dead_at IS NULL"
        return bool(self.scalar(alive, pid=worker.pid))

    def session(self) -> Session:
        return self.queue.session()

    def check(self) -> list[Violation]:
        with self.session() as session:
            return self.queue.check(session)

    def rows(self, statement: str, **parameters: Any) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.execute(text(statement), parameters))

    def scalar(self, statement: str, **parameters: Any) -> Any:
        return self.rows(statement, **parameters)[0][0]

    def run(self, statement: str, **parameters: Any) -> None:
        with self.engine.begin() as connection:
            connection.execute(text(statement), parameters)

    def raw(self) -> Connection:
        """A connection in autocommit, for what must not be in a transaction."""
        return self.engine.connect().execution_options(isolation_level="AUTOCOMMIT")

    def open(self, gate: str) -> None:
        """Let the handlers that wait for this gate go on."""
        (self.directory / f"gate-{gate}").touch()

    def notes(self, word: str | None = None, *, job: int | None = None) -> list[dict[str, Any]]:
        """What the handlers have written down."""
        try:
            lines = (self.directory / "ledger").read_text().splitlines()
        except FileNotFoundError:
            return []
        notes = [json.loads(line) for line in lines]
        return [
            note
            for note in notes
            if (word is None or note["word"] == word) and (job is None or note["job"] == job)
        ]

    def until(self, condition: Callable[[], T], *, seconds: float = PATIENCE, what: str = "") -> T:
        """Look until it is so; what it returned then."""
        return wait_until(condition, seconds=seconds, what=what)

    def until_started(self, *jobs: int, attempt: int = 1, seconds: float = PATIENCE) -> float:
        """Wait until these jobs have started an attempt; the time of the last start."""

        def started() -> float | None:
            starts = {n["job"]: n["at"] for n in self.notes("start") if n["attempt"] == attempt}
            return max(starts[job] for job in jobs) if starts.keys() >= set(jobs) else None

        at = self.until(started, seconds=seconds, what=f"attempt {attempt} of {jobs} starts")
        assert at is not None
        return at

    def until_ended(self, *jobs: int, seconds: float = PATIENCE) -> None:
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

    def backends(self, worker: WorkerProgram) -> list[int]:
        statement = (
            "SELECT pid FROM pg_stat_activity"
            " WHERE split_part(application_name, ' ', 1) = :name ORDER BY pid"
        )
        return [row[0] for row in self.rows(statement, name=worker.name)]

    def declared_dead(self) -> int:
        return int(self.scalar("SELECT count(*) FROM pgqueue.workers WHERE dead_at IS NOT NULL"))

    def _report(self) -> str:
        parts = []
        for worker in self.workers:
            lines = worker.log.read_text(errors="replace").splitlines()
            parts.append("\n".join([f"--- {worker.name}, pid {worker.pid}", *lines[-40:]]))
        return "\n".join(parts)
