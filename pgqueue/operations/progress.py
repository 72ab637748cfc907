"""``Progress``: how far an action on jobs has come.

The jobs up to ``cursor`` are done, except those in ``left_ids``.  The row of the action in the log
has both, and the counts.  Each transaction that changes jobs locks this row first, reads the
progress of other processes with the same action, and records its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from pgqueue.operations.results import Result
from pgqueue.repository.operator_actions import MOST_IDS, LogEntry, OperatorActions

LONGEST_SPREAD = timedelta(days=366)


class Progress:
    """How far an action on jobs has come, in the log; or only in memory if it is not logged."""

    entry: LogEntry
    """The action as the log has it; without an id if the log does not have it."""

    def __init__(self, entry: LogEntry) -> None:
        self.entry = entry

    @property
    def is_finished(self) -> bool:
        return self.entry.finished_at is not None

    @property
    def cursor(self) -> int:
        return self.entry.cursor or 0

    @property
    def left_ids(self) -> Sequence[int]:
        """The jobs up to the cursor that are still to be changed, one by one."""
        return self.entry.left_ids

    @property
    def number_done(self) -> int:
        return self.entry.jobs + self.entry.skipped

    def is_done(self, job_id: int) -> bool:
        return self.is_finished or (job_id <= self.cursor and job_id not in self.left_ids)

    def room(self, at_most: int) -> int:
        """How many more jobs the limit of the action admits; ``at_most`` without a limit."""
        limit = self.entry.options.get("limit")
        if not isinstance(limit, int):
            return at_most
        return max(0, min(at_most, limit - self.number_done - len(self.left_ids)))

    def due_at(self, number: int) -> datetime | None:
        """When the job with this number is due; None if the jobs are not spread."""
        seconds, number_of_jobs = self.entry.options.get("spread_s"), self.entry.options.get("of")
        if not isinstance(seconds, int | float) or not isinstance(number_of_jobs, int):
            return None
        if number_of_jobs <= 0 or not 0 <= seconds <= LONGEST_SPREAD.total_seconds():
            return None  # somebody has edited the row
        share = min(number, number_of_jobs) / number_of_jobs
        return self.entry.at + timedelta(seconds=seconds * share)

    def lock(self, session: Session) -> None:
        """Read the progress of all processes; others wait until this transaction ends."""
        if self.entry.id is not None:
            locked = OperatorActions(session).locked(self.entry)
            # The row is deleted after 90 days; the action then goes on without the log.
            self.entry = locked or replace(self.entry, id=None)

    def record(
        self, session: Session, results: Sequence[Result], *, cursor: int, left: Sequence[int] = ()
    ) -> None:
        """Count the results, and move the cursor if it is lower; :meth:`lock` it first.

        ``left``: jobs up to the cursor that are still to be changed, one by one.
        """
        entry, done = self.entry, {result.id for result in results}
        changed = [result.id for result in results if result.is_changed]
        self.entry = replace(
            entry,
            jobs=entry.jobs + len(changed),
            skipped=entry.skipped + len(results) - len(changed),
            first_ids=[*entry.first_ids, *changed][:MOST_IDS],
            cursor=max(cursor, self.cursor),
            left_ids=[id for id in (*entry.left_ids, *left) if id not in done],
        )
        if entry.id is not None:
            OperatorActions(session).move(self.entry, is_finished=False)

    def finish(self, session: Session) -> None:
        """Note when the action has ended; :meth:`lock` it first."""
        log = OperatorActions(session)
        if self.entry.id is not None:
            log.move(self.entry, is_finished=True)
            self.lock(session)
        else:
            now, _ = log.now_and_last_job()
            self.entry = replace(self.entry, finished_at=now)


def spread_of(spread: timedelta | None, jobs: int | None) -> Mapping[str, float]:
    """The options of the log that :meth:`Progress.due_at` reads."""
    of = {} if jobs is None else {"of": jobs}
    return of if spread is None else {"spread_s": spread.total_seconds(), **of}
