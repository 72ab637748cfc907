"""Bounds of ids for a list of jobs: from its batch, and from the times of its jobs.

No index finds jobs by the time at which they were enqueued, but their ids are nearly in the order
of these times.  A few probes by key find the id at a time.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import cache

import sqlalchemy as sa

from pgqueue.repository.conditions import LAST_ID, JobFilter
from pgqueue.repository.reading import moment
from pgqueue.repository.tables import Executor, array_of, array_parameter, batch_jobs, jobs, pg

DISORDER = timedelta(minutes=1)
"""By how much the times of jobs may contradict the order of their ids."""
NEAR = 32
"""How many jobs from an id on one probe reads."""
PRECISION = 1000
"""How many ids too many a bound may leave in a list."""


class IdBounds:
    """Bounds of ids, read behind one Session or Connection."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def added_to(self, which: JobFilter) -> JobFilter:
        """The filter, with the bounds of ids that follow from its batch and its times."""
        if which.batch is not None:
            lowest, highest = self._ids_of_batch(which.batch)
            which = which.between(after=lowest - 1, before=highest + 1)
        if which.created_after is None and which.created_before is None:
            return which
        parameters = {"before": LAST_ID if which.before is None else which.before}
        now, newest = self._executor.execute(newest_id(), parameters).one()
        after, before = which.after or 0, (newest or 0) + 1
        if (since := _at(which.created_after, now)) is not None:
            after = max(after, self._first_id_since(since, after, before) - 1)
        if (until := _at(which.created_before, now)) is not None:
            before = self._last_id_until(until, after, before) + 1
        return which.between(after=after, before=before)

    def _ids_of_batch(self, batch_id: int) -> tuple[int, int]:
        lowest, highest = self._executor.execute(ids_of_batch(), {"batch_id": batch_id}).one()
        return (1, 0) if lowest is None else (lowest, highest)

    def _first_id_since(self, at: datetime, after: int, before: int) -> int:
        """An id such that the jobs with lower ids were enqueued before a time."""
        return self._bisected(at - DISORDER, after, before) - PRECISION

    def _last_id_until(self, at: datetime, after: int, before: int) -> int:
        """An id such that the jobs with higher ids were enqueued after a time."""
        return self._bisected(at + DISORDER, after, before) - 1

    def _bisected(self, at: datetime, after: int, before: int) -> int:
        """An id between two others: the probes from it on find no job enqueued before a time.

        A probe at most :data:`PRECISION` ids lower has found such a job, unless none has.
        """
        ids: Sequence[int] = [max(before - 2**n, after + 1) for n in range(before.bit_length() + 1)]
        high = before
        while True:
            parameters = {"ids": array_of(map(str, ids)), "before": before, "at": at}
            low = self._executor.execute(highest_before(), parameters).scalar()
            if low is None:
                return min(ids)
            high = min((id for id in ids if id > low), default=high)
            if high - low <= PRECISION:
                return high
            ids = range(low, high, (high - low) // NEAR + 1)


@cache
def ids_of_batch() -> sa.Executable:
    """The lowest and the highest id of a batch."""
    id = batch_jobs.c.job_id
    of_batch = batch_jobs.c.batch_id == _bound("batch_id")
    bounds = [edge(id, type_=sa.BigInteger) for edge in (pg.min, pg.max)]
    return sa.select(*bounds).where(of_batch)


@cache
def newest_id() -> sa.Executable:
    """The present time, and the highest id below another one."""
    newest = pg.max(jobs.c.id, type_=sa.BigInteger)
    return sa.select(moment(pg.statement_timestamp()), newest).where(jobs.c.id < _bound("before"))


@cache
def highest_before() -> sa.Executable:
    """The highest of these ids at which one of the next jobs was enqueued before a time."""
    ids = pg.unnest(array_parameter("ids", sa.BigInteger))
    given = sa.select(ids.label("id")).subquery("given")
    near = (
        sa.select(jobs.c.created_at)
        .where(jobs.c.id >= given.c.id, jobs.c.id < _bound("before"))
        .order_by(jobs.c.id)
        .limit(sa.literal_column(str(NEAR)))
        .lateral("near")
    )
    time = sa.DateTime(timezone=True)
    at = sa.cast(sa.bindparam("at", type_=time), time)
    return (
        sa.select(given.c.id)
        .select_from(given.join(near, near.c.created_at < at))
        .order_by(given.c.id.desc())
        .limit(1)
    )


def _bound(name: str) -> sa.ColumnElement[int]:
    return sa.bindparam(name, type_=sa.BigInteger)


def _at(time: datetime | timedelta | None, now: datetime) -> datetime | None:
    return now - time if isinstance(time, timedelta) else time
