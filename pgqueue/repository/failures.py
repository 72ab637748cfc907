"""Failed jobs by their error, for a user who may see only some of the jobs."""

import json
from collections.abc import Iterable
from datetime import datetime, timedelta
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa

from pgqueue.repository.conditions import JobFilter
from pgqueue.repository.reading import moment
from pgqueue.repository.tables import (
    FAILED,
    Executor,
    count_rows,
    dead_letters,
    document,
    error_groups,
    jobs,
    pg,
)

MOST_COUNTED = 1000
"""Jobs of a group that are counted."""
MOST_KINDS = 99
"""Kinds of errors that are counted."""
HOUR, HOURS = 3600.0, 24
"""The parts of a trend, in seconds, and how many there are."""


def failed_groups(
    which: JobFilter,
    *,
    limit: int,
    since: timedelta | None,
    of: tuple[int, str] | None,
    is_limited: bool,
) -> sa.Executable:
    """The groups with the newest errors, each with its failed jobs that match.

    ``of``: only the group with this fingerprint and task.  ``is_limited``: only groups with such
    jobs.
    """
    column, letter = error_groups.c, dead_letters.c
    conditions: list[sa.ColumnElement[bool]] = []
    if since is not None:
        span = sa.cast(since, sa.Interval)
        conditions.append(column.last_at > pg.statement_timestamp() - span)
    if of is not None:
        conditions += [
            column.fingerprint == sa.cast(of[0], sa.BigInteger),
            column.task == sa.cast(of[1], sa.Text),
        ]
    if is_limited:
        found = _failed_with(error_groups, which).correlate(error_groups)
        conditions.append(found.exists())
    group = (
        sa.select(error_groups)
        .where(*conditions)
        .order_by(column.last_at.desc(), column.fingerprint, column.task)
        .limit(limit)
        .subquery("failed")
    )
    # Apart, because in the order of ids all jobs of a large group would be read and sorted.
    some = _failed_with(group, which).limit(MOST_COUNTED + 1).correlate(group).subquery("some")
    counted = sa.select(count_rows().label("jobs")).select_from(some).lateral("counted")
    last = (
        _failed_with(group, which)
        .order_by(letter.job_id.desc())
        .limit(1)
        .correlate(group)
        .subquery("last")
    )
    newest = (
        sa.select(jobs.c.id, jobs.c.last_error, jobs.c.finished_at)
        .join(last, last.c.job_id == jobs.c.id)
        .lateral("newest")
    )
    return (
        sa.select(
            group.c.fingerprint,
            group.c.task,
            group.c.error_type,
            group.c.place,
            group.c.message,
            group.c.attempts,
            moment(group.c.first_at),
            moment(group.c.last_at),
            group.c.first_version,
            moment(group.c.muted_until),
            group.c.job_id,
            counted.c.jobs,
            newest.c.id,
            newest.c.last_error,
            moment(newest.c.finished_at),
        )
        .select_from(group.join(counted, sa.true()).outerjoin(newest, sa.true()))
        .order_by(group.c.last_at.desc(), group.c.fingerprint, group.c.task)
    )


def _failed_with(group: sa.FromClause, which: JobFilter) -> sa.Select[Any]:
    """The failed jobs of a group that match."""
    letter = dead_letters.c
    return sa.select(letter.job_id).where(
        letter.fingerprint == group.c.fingerprint,
        letter.task == group.c.task,
        letter.outcome == FAILED,
        *which.clauses(dead_letters, letter.job_id),
    )


def failed_lately(which: JobFilter) -> sa.Executable:
    """How many of the newest failed jobs of these groups have failed in each of the last hours.

    ``given``: their fingerprints and tasks.
    """
    group = document("given", sa.column("fingerprint", sa.BigInteger), sa.column("task", sa.Text))
    letter = dead_letters.c
    newest = (
        _failed_with(group, which)
        .with_only_columns(letter.finished_at)
        .order_by(letter.job_id.desc())
        .limit(MOST_COUNTED)
        .correlate(group)
        .lateral("newest")
    )
    age = pg.date_part("epoch", pg.statement_timestamp() - newest.c.finished_at, type_=sa.Double)
    hour = sa.cast(pg.floor(age / _hours(1)), sa.Integer)
    return (
        sa.select(group.c.fingerprint, group.c.task, hour, count_rows())
        .join_from(group, newest, age.between(_hours(-1), _hours(HOURS)))
        .group_by(group.c.fingerprint, group.c.task, hour)
    )


def _hours(number: int) -> sa.ColumnElement[float]:
    return sa.literal(number * HOUR, sa.Double)


@cache
def number_of_groups() -> sa.Executable:
    """How many groups of the last day are not muted and have failed jobs."""
    column, letter = error_groups.c, dead_letters.c
    day: sa.ColumnElement[Any] = sa.literal_column("interval '1 day'")
    now = pg.statement_timestamp()
    # A probe of the index for each group.  An EXISTS could become a join that reads all dead
    # letters, and with LIMIT 1 or an equality another index would be read in full.
    failed = (
        sa.select(pg.min(letter.fingerprint, type_=sa.BigInteger))
        .where(letter.fingerprint >= column.fingerprint, letter.fingerprint <= column.fingerprint)
        .correlate(error_groups)
        .scalar_subquery()
    )
    found = (
        sa.select(column.fingerprint)
        .where(
            column.last_at > now - day,
            sa.func.coalesce(column.muted_until < now, sa.true()),
            failed.is_not(None),
        )
        .limit(sa.literal_column(str(MOST_KINDS + 1)))
        .subquery("found")
    )
    return sa.select(count_rows()).select_from(found)


class FailedGroup(NamedTuple):
    """The failed jobs of a task with one kind of error."""

    fingerprint: int
    task: str
    error_type: str
    place: str
    """The functions of the application through which the error was raised, the handler first."""
    message: str
    """Of the last such attempt of any job; secrets are masked."""
    attempts: int
    """How many attempts of any job have failed so since ``first_at``."""
    first_at: datetime
    last_at: datetime
    first_version: str
    muted_until: datetime | None
    job_id: int
    """The job of the last such attempt; it may have been deleted since."""
    jobs: int
    """How many of the jobs that match are failed now; more than MOST_COUNTED are not counted."""
    newest_id: int | None
    """The newest of these jobs."""
    newest_error: str | None
    newest_at: datetime | None


class FailedGroups:
    """The groups behind one Session or Connection."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def newest(
        self,
        which: JobFilter,
        *,
        limit: int,
        since: timedelta | None = None,
        is_limited: bool,
    ) -> list[FailedGroup]:
        """The groups with the newest errors; ``which``: the jobs that are counted and shown.

        ``is_limited``: leave out groups without such jobs.
        """
        return self._found(which, limit=limit, since=since, of=None, is_limited=is_limited)

    def trends(
        self, which: JobFilter, groups: Iterable[FailedGroup]
    ) -> dict[tuple[int, str], list[int]]:
        """How many jobs of each group have failed in each hour of the last day, of the newest
        MOST_COUNTED; by fingerprint and task."""
        found = {(one.fingerprint, one.task): [0] * HOURS for one in groups}
        given = [{"fingerprint": fingerprint, "task": task} for fingerprint, task in found]
        rows = self._executor.execute(failed_lately(which), {"given": json.dumps(given)})
        for fingerprint, task, hour, failed in rows:
            found[fingerprint, task][HOURS - 1 - min(max(hour, 0), HOURS - 1)] += failed
        return found

    def number(self) -> int:
        """How many kinds of errors of the last day are not muted and have failed jobs, up to
        MOST_KINDS."""
        return int(self._executor.execute(number_of_groups()).scalar_one())

    def one(
        self, which: JobFilter, fingerprint: int, task: str, *, is_limited: bool
    ) -> FailedGroup | None:
        of = (fingerprint, task)
        found = self._found(which, limit=1, since=None, of=of, is_limited=is_limited)
        return found[0] if found else None

    def _found(self, which: JobFilter, **words: Any) -> list[FailedGroup]:
        rows = self._executor.execute(failed_groups(which, **words))
        return [FailedGroup(*row) for row in rows]
