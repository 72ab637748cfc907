"""What a run works with: a database, workers, the ledger of acknowledged jobs, the judge."""

from __future__ import annotations

import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError

from chaos import history, sample_tasks
from chaos.broken import Broken
from chaos.checker import Checker
from chaos.machine import Machine
from chaos.sampler import Sampler
from chaos.workers import PATIENCE, Member, Workers, wait_until
from pgqueue import Task
from pgqueue.embedded import EmbeddedPostgres

T = TypeVar("T")

CHUNK = 5000
LEFT = (
    "SELECT 'message', * FROM pgqueue.message_queue LIMIT 20",
    "SELECT 'lease', * FROM pgqueue.leases LIMIT 20",
    "SELECT 'worker', id, pid, backend_pid, heartbeat_at, dead_at FROM pgqueue.workers",
)
"""Of jobs that do not end."""
SERVER = (
    "SELECT 'server process', pid, application_name, state, wait_event, pg_blocking_pids(pid),"
    " xact_start, state_change, left(query, 100) FROM pg_stat_activity"
    " WHERE datname = current_database() AND (state != 'idle' OR xact_start IS NOT NULL)",
    "SELECT 'now', clock_timestamp()",
)
"""What it is doing while one waits in vain."""


class Environment:
    """What a scenario works with.  Leaves no process behind."""

    def __init__(
        self,
        url: str,
        directory: Path,
        *,
        seed: int = 0,
        mutation: str | None = None,
        server: EmbeddedPostgres | None = None,
    ) -> None:
        self.url = url
        self.directory = directory
        self.mutation = mutation
        self.dice = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.members: list[Member] = []
        self.acknowledged: set[int] = set()
        self.requeued: Counter[int] = Counter()
        """How often each job has begun anew."""
        self._server = server
        # A scenario may take the server away between two looks.
        self.engine: Engine = _engine(url)
        self.queue = sample_tasks.queue
        self.queue.notify = True
        self.queue.bind(self.engine)
        self.sampler = Sampler(self.engine, self.queue)
        self._machine = Machine(directory)
        os.environ["CHAOS_DIRECTORY"] = str(directory)

    def __enter__(self) -> Self:
        self.queue.upgrade()
        self.execute(sample_tasks.EFFECTS)
        self.sampler.start()
        self._machine.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> Literal[False]:
        self.sampler.stop()
        self._machine.stop()
        for member in self.members:
            if member.is_running:
                member.kill()
        if error is not None:
            error.add_note(str(self._machine))
            error.add_note(self._last_lines())
        self.engine.dispose()
        return False

    @property
    def server(self) -> EmbeddedPostgres:
        """The server, of a scenario that has its own."""
        assert self._server is not None, "say server=Server.OWN"
        return self._server

    def lead_to(self, url: str) -> None:
        """Go on with another server, which has taken over from the first."""
        self.url = url
        self.engine.dispose()
        self.engine = _engine(url)
        self.queue.bind(self.engine)

    def next_name(self) -> str:
        self.counts["workers"] += 1
        return f"w{self.counts['workers']}"

    def count(self, what: str, times: int = 1) -> None:
        """Count a fault, for the summary."""
        self.counts[what] += times

    def timed(self, began: float) -> None:
        """What began then, by ``time.monotonic()``, is over: keep the longest, for the summary."""
        took = int(1000 * (time.monotonic() - began))
        self.counts["slowest ms"] = max(self.counts["slowest ms"], took)

    def workers(self, count: int, **options: Any) -> Workers:
        """Start workers; what a :class:`pgqueue.Worker` takes, the spans in seconds."""
        return Workers(self, count, **options)

    def freeze(self, member: Member) -> None:
        """SIGSTOP, counted."""
        member.freeze()
        self.count("freezes")

    def kill(self, member: Member) -> None:
        """kill -9, counted."""
        member.kill()
        self.count("kills")

    def finish(self, *fleets: Workers) -> None:
        """Wait until all jobs have ended, and stop the workers, each of which has to end well."""
        self.until_ended()
        for workers in fleets:
            workers.stop()

    def leases_of(self, member: Member) -> int:
        """How many leases a worker process holds."""
        held = (
            "SELECT count(*) FROM pgqueue.leases JOIN pgqueue.workers ON id = worker_id"
            " WHERE pid = :pid"
        )
        return int(self.scalar(held, pid=member.pid))

    def enqueue(self, task: Task[..., Any], rows: Iterable[tuple[Any, ...]]) -> list[int]:
        """Enqueue and commit; the ids go into the ledger when COMMIT has returned."""
        ids: list[int] = []
        rows = list(rows)
        for start in range(0, len(rows), CHUNK):
            with self.queue.session() as session:
                new = task.enqueue_many(session, rows[start : start + CHUNK])
                session.commit()
            ids += new
            self.acknowledged.update(new)
        self.count("jobs", len(ids))
        return ids

    def requeue(self, job: int) -> None:
        with self.queue.session() as session, session.begin():
            self.queue.requeue(session, job)
        self.requeued[job] += 1
        self.count("requeues")

    def open(self, gate: str) -> None:
        """Let the handlers that wait for this gate go on."""
        (self.directory / f"gate-{gate}").touch()

    def history(self, word: str | None = None) -> list[history.Event]:
        events = history.read(self.directory)
        return [event for event in events if word is None or event.word == word]

    def rows(self, statement: str, **parameters: Any) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.execute(text(statement), parameters))

    def scalar(self, statement: str, **parameters: Any) -> Any:
        return self.rows(statement, **parameters)[0][0]

    def interruptions(self) -> Counter[tuple[int, int]]:
        """How often a stop has interrupted an attempt, by job and attempt."""
        interrupted = (
            "SELECT job_id, attempt FROM pgqueue.job_attempts WHERE outcome = 'interrupted'"
        )
        return Counter((row[0], row[1]) for row in self.rows(interrupted))

    def execute(self, statement: str, **parameters: Any) -> None:
        with self.engine.begin() as connection:
            connection.execute(text(statement), parameters)

    def until(self, condition: Callable[[], T], *, seconds: float = PATIENCE, what: str = "") -> T:
        """Look until it is so.  A database that is away is looked at again; damage ends it."""

        def look() -> T | None:
            self.sampler.raise_if_broken()
            try:
                return condition()
            except DBAPIError:
                return None

        try:
            found = wait_until(look, seconds=seconds, what=what)
        except Broken as broken:
            broken.add_note(self._all_of(SERVER))
            raise
        assert found is not None, "wait_until returns what is true"
        return found

    def let_pass(self, seconds: float) -> None:
        """Time that passes is the fault."""
        over_at = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > over_at, seconds=seconds + PATIENCE)

    def unfinished(self) -> int:
        """How many jobs have not ended; reads the narrow tables only."""
        return int(
            self.scalar(
                "SELECT count(*) FROM (SELECT target_id FROM pgqueue.message_queue"
                " UNION SELECT target_id FROM pgqueue.leases"
                " UNION SELECT target_id FROM pgqueue.waiting_messages) AS job"
            )
        )

    def until_ended(
        self, *, seconds: float = PATIENCE, meanwhile: Callable[[], object] = lambda: None
    ) -> None:
        """Wait until nothing waits and nothing runs; so long without an end of any is too long.

        ``meanwhile`` is done again and again: a look that ends the run when something is wrong.
        """

        def fewer_than(count: int) -> list[int]:
            meanwhile()
            left = self.unfinished()
            return [left] if left < count else []

        left = sys.maxsize
        while left:
            look = partial(fewer_than, left)
            try:
                [left] = self.until(look, seconds=seconds, what="all jobs end")
            except Broken as broken:
                broken.add_note(self._all_of(LEFT))
                raise

    def _all_of(self, statements: tuple[str, ...]) -> str:
        """What the server answers to these, for whoever reads why a scenario broke."""
        with suppress(DBAPIError):
            return "\n".join(str(row) for statement in statements for row in self.rows(statement))
        return "and the database does not answer"

    def until_ended_of(self, tasks: Sequence[Task[..., Any]], *, seconds: float = PATIENCE) -> None:
        """Wait until no job of these tasks is left."""
        unfinished = (
            "SELECT count(*) FROM pgqueue.jobs WHERE outcome IS NULL AND task = ANY(:tasks)"
        )
        names = [task.name for task in tasks]
        self.until(
            lambda: self.scalar(unfinished, tasks=names) == 0,
            seconds=seconds,
            what=f"all jobs end of {', '.join(names)}",
        )

    def until_left(self, count: int, *, seconds: float = PATIENCE) -> None:
        """Wait until so many jobs, or fewer, are left: the moment for the next fault."""
        self.until(
            lambda: self.unfinished() <= count, seconds=seconds, what=f"{count} jobs are left"
        )

    def until_ended_are(self, count: int, *, seconds: float = PATIENCE) -> None:
        """Wait until so many jobs have ended, or more; reads all jobs."""

        def ended() -> bool:
            statement = "SELECT count(*) FROM pgqueue.jobs WHERE outcome IS NOT NULL"
            return int(self.scalar(statement)) >= count

        self.until(ended, seconds=seconds, what=f"{count} jobs have ended")

    def until_started(self, *jobs: int, attempt: int = 1, seconds: float = PATIENCE) -> float:
        """Wait until these jobs have started this attempt; the time of the last start."""

        def started() -> float | None:
            starts = {e.job: e.at for e in self.history(history.START) if e.attempt == attempt}
            return max(starts[job] for job in jobs) if starts.keys() >= set(jobs) else None

        at = self.until(started, seconds=seconds, what=f"attempt {attempt} of {jobs} starts")
        assert at is not None, "it is waited for"
        return at

    def expect(self, holds: bool, words: str) -> None:
        """Say what was broken unless it holds."""
        if not holds:
            raise Broken(words)

    def judge(self, **outcomes: int) -> None:
        """Judge the tables and the histories.  Outcomes: how many jobs have ended how."""
        Checker(self).all(outcomes or {"succeeded": len(self.acknowledged)})

    def _last_lines(self) -> str:
        parts = []
        for member in self.members[-8:]:
            lines = member.log.read_text(errors="replace").splitlines()
            parts.append("\n".join([f"--- {member.name}, pid {member.pid}", *lines[-25:]]))
        return "\n".join(parts)


def _engine(url: str) -> Engine:
    # Whoever looks on must not wait for ever for what he looks at.
    options = {"options": "-c lock_timeout=20000"}
    return create_engine(url, pool_pre_ping=True, connect_args=options)


def describe(error: BaseException) -> str:
    """What broke, with the last lines of the workers."""
    return "".join(traceback.format_exception(error))
