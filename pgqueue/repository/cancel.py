"""Cancel many jobs: those that wait end at once, by one statement for each thousand.

No index finds a message by its job, so a message is found while the jobs are selected, and deleted
by its whole key.
"""

import json
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.orm import Session

from pgqueue.errors import JobNotFound
from pgqueue.models import JobStatus
from pgqueue.repository.jobs import Change, Jobs
from pgqueue.repository.listing import MESSAGES, JobFilter, Listing
from pgqueue.repository.tables import (
    AS_IT_STANDS,
    CANCELLED,
    CTID,
    PLACE,
    among,
    array_of,
    array_parameter,
    clock,
    dead_letters,
    document,
    equal,
    jobs,
    leases,
    message_queue,
    text_parameter,
    waiting_messages,
)

AT_ONCE = 1000
"""Jobs that one statement cancels; their rows stay locked until the transaction ends."""
KEYS = {
    message_queue: (*PLACE, "id", "target_id"),
    waiting_messages: ("limit_keys", *PLACE, "target_id"),
}
"""The columns that find one message, and its job."""


def waiting_jobs(which: JobFilter, table: sa.Table, *, limit: int | None = None) -> sa.Executable:
    """The messages of jobs that wait, the newest first: workers claim the oldest meanwhile."""
    job_id = table.c.target_id
    leased = sa.exists().where(leases.c.target_id == job_id)
    columns = [sa.cast(table.c[name], sa.Text).label(name) for name in KEYS[table]]
    found = sa.select(*columns).where(~leased, *which.words(table, job_id))
    return found.order_by(job_id.desc()).limit(limit)


@cache
def cancel_waiting(table: sa.Table) -> sa.Executable:
    """End these jobs as cancelled; returns those that it has ended.

    Locks the row of a job first and then its message, as every change of a job does.  Waits for
    neither: a job that another transaction has locked, or a worker has claimed, stays as it is.
    """
    found = document("found", *(sa.column(name, table.c[name].type) for name in KEYS[table]))
    locked = (
        sa.select(*found.c)
        .select_from(found.join(jobs, jobs.c.id == found.c.target_id))
        .with_for_update(key_share=True, skip_locked=True, of=jobs)
        .cte("locked")
    )
    message = (
        sa.select(CTID)
        .select_from(table)
        .where(*equal(table, locked, KEYS[table]))
        .with_for_update(skip_locked=True)
        .offset(AS_IT_STANDS)
        .lateral("message")
    )
    places = sa.select(message.c.ctid).select_from(locked.join(message, sa.true()))
    taken = sa.delete(table).where(among(places) == CTID).returning(table.c.target_id).cte("taken")
    job = (
        sa.update(jobs)
        .where(jobs.c.id == taken.c.target_id, jobs.c.outcome.is_(None))
        .values(outcome=CANCELLED, finished_at=clock(), held_unique_key=sa.null())
        .returning(jobs.c.id, jobs.c.outcome, jobs.c.queue, jobs.c.task, jobs.c.finished_at)
        .cte("job")
    )
    letter = pg_insert(dead_letters).from_select(
        ["job_id", "outcome", "queue", "task", "finished_at"], sa.select(job)
    )
    return sa.select(job.c.id).add_cte(letter.on_conflict_do_nothing().cte("letter"))


@cache
def jobs_of_keys(*, in_one_queue: bool) -> sa.Executable:
    """The unfinished jobs that hold these unique keys.

    Without a queue, reads the index of the keys that are held, but no jobs beside these.
    """
    of_queue = [jobs.c.queue == text_parameter("queue")] if in_one_queue else []
    return sa.select(jobs.c.id).where(
        jobs.c.held_unique_key == sa.any_(array_parameter("keys", sa.Text)),
        jobs.c.held_unique_key.is_not(None),
        jobs.c.outcome.is_(None),
        *of_queue,
    )


class Chunk(NamedTuple):
    """Jobs that waited when they were selected."""

    table: sa.Table
    messages: Sequence[Mapping[str, str]]
    """The keys of their messages."""

    @property
    def job_ids(self) -> list[int]:
        return [int(message["target_id"]) for message in self.messages]


class Cancels:
    """Cancels jobs behind one Session or Connection."""

    def __init__(self, executor: Session | sa.Connection) -> None:
        self._executor = executor

    def waiting(
        self, which: JobFilter, *, only: Container[int] | None = None, limit: int | None = None
    ) -> Iterator[Chunk]:
        """The jobs of the filter that wait, the newest first; ``only``: of these ids; ``limit``: at
        most so many of each status.

        Locks nothing.  Reads them from a cursor of the server: there may be a million.
        """
        for status, table in MESSAGES.items():
            if status not in which.statuses:
                continue
            rows = self._executor.execute(
                waiting_jobs(which, table, limit=limit), execution_options={"yield_per": AT_ONCE}
            )
            for part in rows.mappings().partitions():
                found = [dict(row) for row in part]
                if only is not None:
                    found = [row for row in found if int(row["target_id"]) in only]
                if found:
                    yield Chunk(table, found)

    def end(self, chunk: Chunk) -> set[int]:
        """End the jobs of a chunk that still wait; returns these.  Waits for no lock."""
        parameters = {"found": json.dumps(chunk.messages)}
        rows = self._executor.execute(cancel_waiting(chunk.table), parameters)
        return {row[0] for row in rows}

    def all_of(self, which: JobFilter) -> Counter[Change]:
        """Cancel all jobs of the filter in this transaction; returns how many, by the result.

        First ends the jobs that wait.  Then cancels the others one by one: those that run, and
        those that have started meanwhile.  This may wait for transactions that have locked rows.
        """
        counts: Counter[Change] = Counter()
        left: list[int] = []
        for chunk in self.waiting(which):
            ended = self.end(chunk)
            counts[Change.CANCELLED] += len(ended)
            left += [job_id for job_id in chunk.job_ids if job_id not in ended]
        if JobStatus.RUNNING in which.statuses:
            running = replace(which, statuses=frozenset({JobStatus.RUNNING}))
            left += Listing(self._executor).ids(running)
        return +(counts + self._each(left))

    def of_keys(self, keys: Sequence[str], queue: str | None) -> Counter[Change]:
        """Cancel the jobs that hold these unique keys, in a queue or in all."""
        parameters = {"keys": array_of(keys)} | ({} if queue is None else {"queue": queue})
        statement = jobs_of_keys(in_one_queue=queue is not None)
        return self._each([row[0] for row in self._executor.execute(statement, parameters)])

    def _each(self, job_ids: Iterable[int]) -> Counter[Change]:
        """Cancel jobs one by one; this may wait for transactions that have locked rows."""
        counts: Counter[Change] = Counter()
        for job_id in sorted(set(job_ids)):
            try:
                counts[Jobs(self._executor).cancel(job_id)] += 1
            except JobNotFound:  # deleted as it succeeded, by keep=timedelta(0)
                counts[Change.UNCHANGED] += 1
        return counts
