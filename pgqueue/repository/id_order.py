"""Jobs by descending ids, the newest first."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache

import sqlalchemy as sa

from pgqueue.models import UNFINISHED, Job, JobStatus
from pgqueue.repository.conditions import JobFilter
from pgqueue.repository.job_line import JobLine, columns_of_line
from pgqueue.repository.listing import job_ids
from pgqueue.repository.reading import moment
from pgqueue.repository.tables import Executor, dead_letters, jobs


class IdOrder:
    """The jobs of a filter, in windows from an id down to the id of a row of one table."""

    def __init__(self, executor: Executor, which: JobFilter) -> None:
        self._executor, self._which = executor, which
        self._table = _table_of_windows(which)

    def end(self, start: int, size: int) -> int | None:
        if self._table is None:
            return None
        parameters = {"before": start, "size": size}
        end: int | None = self._executor.execute(id_below(self._table), parameters).scalar()
        return None if end is None or end <= (self._which.after or 0) else end

    def read(self, start: int, end: int | None, limit: int) -> Sequence[tuple[JobLine, int]]:
        after = self._which.after if end is None else end - 1
        rows = list_jobs(replace(self._which, before=start, after=after), limit=limit)
        return [(JobLine(*row), row.id) for row in self._executor.execute(rows)]

    def searched_to(self, end: int) -> datetime | None:
        return self._executor.execute(time_of_id(), {"job_id": end}).scalar()


def _table_of_windows(which: JobFilter) -> sa.Table | None:
    """The table whose rows a list passes over; None if an index finds its jobs, or few are read."""
    if not which.statuses or JobStatus.SUCCEEDED in which.statuses:
        return jobs
    # No index finds the newest messages: they are all read.
    are_few = which.statuses.issubset(UNFINISHED) or not which.clauses_of_row()
    return None if are_few else dead_letters


def list_jobs(which: JobFilter, *, limit: int) -> sa.Executable:
    """The newest matching jobs, by descending id."""
    found = job_ids(which, limit=limit, newest_first=True).subquery("found")
    return sa.select(*columns_of_line()).join(found, found.c.id == Job.id).order_by(Job.id.desc())


@cache
def id_below(table: sa.Table) -> sa.Executable:
    """The id of the row that comes so many below another id."""
    id = jobs.c.id if table is jobs else table.c.job_id
    before, size = (sa.bindparam(name, type_=sa.BigInteger) for name in ("before", "size"))
    rows = sa.select(id).where(id < before).order_by(id.desc())
    return rows.offset(size - sa.literal_column("1", sa.BigInteger)).limit(1)


@cache
def time_of_id() -> sa.Executable:
    """When the first job from this id on was enqueued."""
    from_id_on = jobs.c.id >= sa.bindparam("job_id", type_=sa.BigInteger)
    return sa.select(moment(jobs.c.created_at)).where(from_id_on).order_by(jobs.c.id).limit(1)
