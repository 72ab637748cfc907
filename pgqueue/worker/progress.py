"""Writes what handlers report of their progress, at most once a second and beside their work."""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Engine

from pgqueue import redaction
from pgqueue.context import LONGEST_NOTE, Progress
from pgqueue.database.settings import CLAIMING
from pgqueue.handler.attempt import RunningAttempt
from pgqueue.handler.error_reports import storable_words
from pgqueue.handler.outcome import secrets_of
from pgqueue.repository.claim import Claimed
from pgqueue.repository.progress import ProgressReports
from pgqueue.tasks import Task
from pgqueue.worker.loop import NEVER, Loop
from pgqueue.worker.outage import Outage

logger = redaction.logger(__name__)

WRITING = {**CLAIMING, "lock_timeout": "250"}
"""Milliseconds to wait for a lock on a whole table; rows that are locked are skipped."""
EVERY = 1.0
"""Seconds between two writes."""
LAST_TRIES = 5
"""Writes to try after an attempt has ended, if its job's row is locked."""
LOCKED = "its row is locked, or a later attempt runs"


@dataclass(slots=True)
class Report:
    """The last progress of one attempt."""

    run: RunningAttempt
    progress: Progress
    tries_left: int = LAST_TRIES

    def as_row(self) -> dict[str, Any]:
        run = self.run
        return row_of_progress(run.task, run.claimed, run.worker_id, self.progress)


def row_of_progress(
    task: Task[..., Any], claimed: Claimed, worker_id: UUID, progress: Progress
) -> dict[str, Any]:
    """The progress of one attempt as the statement takes it, without secrets."""
    done, total, note = progress
    if note is not None:
        note = storable_words(note, secrets=secrets_of(task, claimed))[:LONGEST_NOTE]
    return {
        "job_id": claimed.job_id,
        "message_id": claimed.message_id,
        "attempt": claimed.attempt,
        "worker_id": str(worker_id),
        "progress": {"done": done, "total": total, "note": note},
    }


class ProgressWriter(Loop):
    """Started by the first report; has a connection while handlers report."""

    def __init__(self, engine: Engine, outage: Outage, *, must_wait: Callable[[Any], bool]) -> None:
        """``must_wait``: whether a write would make the transaction of an attempt fail."""
        super().__init__(
            engine,
            WRITING,
            outage,
            name="progress",
            isolation_level="AUTOCOMMIT",
            first_in=NEVER,
            repeat_after=EVERY,
        )
        self._must_wait = must_wait
        self._lock = Lock()
        self._reports: dict[int, Report] = {}
        """The reports to write, by job."""

    def report(self, run: RunningAttempt, progress: Progress) -> None:
        """Keep the progress of an attempt until it is written.  Called by its handler."""
        if run.is_lost:
            return
        with self._lock:
            self._reports[run.claimed.job_id] = Report(run, progress)
            if self.ident is None and not self.stopping.is_set():
                self.start()
        self.wake()

    def step(self, connection: Connection) -> float:
        """Write what was reported, and pause: other reports may come meanwhile."""
        with self._lock:
            reports, self._reports = self._reports, {}
        # Read before the write: an attempt that ends meanwhile gets its last tries afterwards.
        ended = {job_id for job_id, report in reports.items() if report.run.has_ended}
        rows = [
            report.as_row()
            for report in reports.values()
            if not report.run.is_lost and not self._must_wait(report.run)
        ]
        written: set[int] = set()
        try:
            written = ProgressReports(connection).write(rows)
        finally:
            self._keep(reports, written=written, ended=ended)
        self.stopping.wait(EVERY)
        return 0.0 if self._reports else NEVER

    def end(self) -> None:
        """Write what is left."""
        if self._reports:
            self.reconnecting.run(self.step)
        for job_id in self._reports:
            logger.info("job %d: its last progress is not recorded: the worker stops", job_id)

    def stop(self, *, seconds: float) -> None:
        with self._lock:  # no report starts the thread any more
            self.stopping.set()
        super().stop(seconds=seconds)

    def _keep(self, reports: dict[int, Report], *, written: set[int], ended: set[int]) -> None:
        """Keep the reports that could not be written, unless their attempts have ended long ago."""
        for job_id, report in reports.items():
            if job_id in written:
                continue
            report.tries_left -= job_id in ended
            if report.run.is_lost or report.tries_left <= 0:
                logger.info(
                    "job %d: its last progress is not recorded: %s",
                    job_id,
                    "its attempt was lost" if report.run.is_lost else LOCKED,
                )
                continue
            with self._lock:
                self._reports.setdefault(job_id, report)
