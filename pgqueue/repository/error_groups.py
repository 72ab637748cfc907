"""The errors of attempts, those of one kind together; and the versions in which they occurred."""

import json
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert as pg_insert

from pgqueue.repository.reading import moment
from pgqueue.repository.tables import (
    FAILED,
    Executor,
    array_of,
    array_parameter,
    clock,
    count_rows,
    dead_letters,
    deploys,
    document,
    error_groups,
    pg,
    seconds,
    text_parameter,
)

KEPT = timedelta(days=90)
"""How long a group is kept after the last of its errors, as failed jobs are by default."""
MOST_GROUPS = 5000
"""Groups that are kept: those with the newest errors."""

MOST_DEPLOYS = 200
"""Versions that are shown in one chart."""


@cache
def add_errors() -> sa.Executable:
    """Add to groups, in the order of their keys: other orders could deadlock."""
    given = document(
        "given",
        sa.column("fingerprint", sa.BigInteger),
        sa.column("task", sa.Text),
        sa.column("error_type", sa.Text),
        sa.column("place", sa.Text),
        sa.column("attempts", sa.BigInteger),
        sa.column("at", sa.Double),
        sa.column("job_id", sa.BigInteger),
        sa.column("message", sa.Text),
    )
    names = ["fingerprint", "task", "error_type", "place", "attempts", "job_id", "message"]
    at = pg.to_timestamp(given.c.at, type_=sa.DateTime(timezone=True))
    version = text_parameter("version")
    rows = sa.select(*(given.c[name] for name in names), at, at, version)
    new = pg_insert(error_groups).from_select(
        [*names, "first_at", "last_at", "first_version"],
        rows.order_by(given.c.fingerprint, given.c.task),
    )
    # Of two workers, one may write later what it has met earlier.
    return new.on_conflict_do_update(
        index_elements=[error_groups.c.fingerprint, error_groups.c.task],
        set_={
            "attempts": error_groups.c.attempts + new.excluded.attempts,
            "first_at": sa.func.least(error_groups.c.first_at, new.excluded.first_at),
            "last_at": sa.func.greatest(error_groups.c.last_at, new.excluded.last_at),
            "job_id": new.excluded.job_id,
            "message": new.excluded.message,
        },
    )


@cache
def note_deploy() -> sa.Executable:
    """Note a version of an application, if it is a new one."""
    row = pg_insert(deploys).values(
        application=sa.bindparam("application", type_=sa.Text),
        version=sa.bindparam("version", type_=sa.Text),
    )
    return row.on_conflict_do_nothing()


@cache
def deploys_lately() -> sa.Executable:
    """The versions that were first run within a time, the oldest first."""
    span = seconds(sa.cast(sa.bindparam("seconds", type_=sa.Double), sa.Double))
    return (
        sa.select(deploys.c.application, deploys.c.version, moment(deploys.c.first_at))
        .where(deploys.c.first_at > pg.statement_timestamp() - span)
        .order_by(deploys.c.first_at, deploys.c.application, deploys.c.version)
        .limit(sa.literal_column(str(MOST_DEPLOYS)))
    )


@cache
def groups(*, of_task: bool, lately: bool) -> sa.Executable:
    """The groups with the newest errors, each with its jobs that are failed now.

    ``lately``: only those with an error within a time.
    """
    group = error_groups.c
    letter = (
        sa.select(count_rows().label("jobs"), pg.max(dead_letters.c.job_id).label("newest"))
        .where(
            dead_letters.c.fingerprint == group.fingerprint,
            dead_letters.c.task == group.task,
            dead_letters.c.outcome == FAILED,
        )
        .lateral("letter")
    )
    conditions = [group.task == text_parameter("task")] if of_task else []
    if lately:
        span = seconds(sa.cast(sa.bindparam("seconds", type_=sa.Double), sa.Double))
        conditions.append(group.last_at > pg.statement_timestamp() - span)
    return (
        sa.select(
            group.fingerprint,
            group.task,
            group.error_type,
            group.message,
            group.place,
            group.attempts,
            letter.c.jobs,
            moment(group.first_at),
            moment(group.last_at),
            group.first_version,
            sa.func.coalesce(letter.c.newest, group.job_id),
        )
        .select_from(error_groups.join(letter, sa.true()))
        .where(*conditions)
        .order_by(group.last_at.desc(), group.fingerprint, group.task)
        .limit(sa.bindparam("limit", type_=sa.Integer))
    )


@cache
def types_of_errors() -> sa.Executable:
    """The types of the errors with these fingerprints."""
    given = array_parameter("fingerprints", sa.BigInteger)
    return (
        sa.select(error_groups.c.fingerprint, error_groups.c.error_type)
        .where(error_groups.c.fingerprint == sa.any_(given))
        .distinct()
    )


@cache
def mute_group() -> sa.Executable:
    span = sa.cast(sa.bindparam("seconds", type_=sa.Double), sa.Double)
    return (
        sa.update(error_groups)
        .where(
            error_groups.c.fingerprint == sa.bindparam("of_fingerprint", type_=sa.BigInteger),
            error_groups.c.task == text_parameter("of_task"),
        )
        .values(muted_until=clock() + seconds(span))
        .returning(error_groups.c.task)
    )


@cache
def prune_groups() -> sa.Executable:
    """Delete the groups whose time is over, and those beyond the number that is kept."""
    kept: sa.ColumnElement[Any] = sa.literal_column(f"interval '{KEPT.days} days'")
    last = (
        sa.select(error_groups.c.last_at)
        .order_by(error_groups.c.last_at.desc())
        .offset(sa.literal_column(str(MOST_GROUPS)))
        .limit(sa.literal_column("1"))
        .scalar_subquery()
    )
    over = sa.or_(
        error_groups.c.last_at < pg.statement_timestamp() - kept, error_groups.c.last_at <= last
    )
    old = (
        sa.select(error_groups.c.fingerprint, error_groups.c.task)
        .where(over)
        .with_for_update(skip_locked=True)
        .cte("old")
    )
    return sa.delete(error_groups).where(
        error_groups.c.fingerprint == old.c.fingerprint, error_groups.c.task == old.c.task
    )


@cache
def prune_deploys() -> sa.Executable:
    """Delete the versions whose time is over, but for the newest of each application: its workers
    may still run it."""
    kept: sa.ColumnElement[Any] = sa.literal_column(f"interval '{KEPT.days} days'")
    newer = deploys.alias("newer")
    return sa.delete(deploys).where(
        deploys.c.first_at < pg.statement_timestamp() - kept,
        sa.exists().where(
            newer.c.application == deploys.c.application, newer.c.first_at > deploys.c.first_at
        ),
    )


LONGEST_MUTE = 7 * 24
"""Hours."""


def in_hex(fingerprint: int) -> str:
    """A fingerprint as people see it."""
    return fingerprint.to_bytes(8, "big", signed=True).hex()


class Failures(NamedTuple):
    """The failed attempts of a task with one kind of error."""

    fingerprint: int
    task: str
    error_type: str
    message: str
    """Of the last of them, shortened; secrets are masked."""
    place: str
    """The functions of the application through which the error was raised, the handler first."""
    attempts: int
    """How many attempts have failed so since ``first_at``."""
    failed_jobs: int
    """How many jobs are failed now because of it."""
    first_at: datetime
    last_at: datetime
    first_version: str
    """The version of the application in which it occurred first; empty if it has none."""
    job_id: int
    """The newest of these jobs; if none is failed now, the one of the last attempt."""


class Deployed(NamedTuple):
    """A version of an application, and when a worker has first run it."""

    application: str
    version: str
    first_at: datetime


class ErrorGroups:
    """The groups behind one Session or Connection."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def add(self, rows: Iterable[Mapping[str, Any]], *, version: str) -> None:
        """Add errors; a row has the columns of the statement, ``at`` in seconds since 1970.

        ``version``: of the application, for the groups that are new.
        """
        parameters = {"given": json.dumps(list(rows)), "version": version}
        self._executor.execute(add_errors(), parameters)

    def note_deploy(self, application: str, version: str) -> None:
        names = {"application": application, "version": version}
        self._executor.execute(note_deploy(), names)

    def deploys(self, since: timedelta) -> list[Deployed]:
        """The versions that workers have run first within this time, the oldest first."""
        given = {"seconds": since.total_seconds()}
        return [Deployed(*row) for row in self._executor.execute(deploys_lately(), given)]

    def newest(
        self, *, limit: int, task: str | None = None, since: timedelta | None = None
    ) -> list[Failures]:
        """The groups with the newest errors; ``since``: only those with one within this time."""
        parameters: dict[str, Any] = {"limit": limit}
        if task is not None:
            parameters["task"] = task
        if since is not None:
            parameters["seconds"] = since.total_seconds()
        statement = groups(of_task=task is not None, lately=since is not None)
        return [Failures(*row) for row in self._executor.execute(statement, parameters)]

    def types(self, fingerprints: Iterable[int]) -> dict[int, str]:
        """The types of the errors with these fingerprints, as far as a group is kept."""
        given = {"fingerprints": array_of(map(str, fingerprints))}
        return {row[0]: row[1] for row in self._executor.execute(types_of_errors(), given)}

    def mute(self, fingerprint: int, task: str, span: timedelta) -> bool:
        """Leave a group out of the lists of problems for this time from now on; whether there
        is such a group."""
        names = {"of_fingerprint": fingerprint, "of_task": task, "seconds": span.total_seconds()}
        return self._executor.execute(mute_group(), names).first() is not None

    def prune(self) -> None:
        self._executor.execute(prune_groups())

    def prune_deploys(self) -> None:
        self._executor.execute(prune_deploys())
