"""``JobFilter``: the conditions on jobs, each declared once.

The statements, the filter line, the options of the commands, the form of the dashboard, the log of
operators and :class:`~pgqueue.operations.Selection` read these declarations.  A new condition is a
field here.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from datetime import datetime, timedelta
from enum import Enum, StrEnum
from typing import Any, TypedDict

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from pgqueue.models import STATES, WAITING, JobStatus
from pgqueue.repository.tables import (
    NEWLINE,
    array_of,
    batch_jobs,
    dead_letters,
    jobs,
    pg,
)
from pgqueue.rules.limits import name_of
from pgqueue.rules.unique import stored_forms

LAST_ID = 2**63 - 1
"""The highest id of a job, an end of the type ``bigint``."""

MESSAGES = [STATES[status].table for status in WAITING]
"""The tables that have the messages of jobs that wait."""


class ValueKind(StrEnum):
    """How a condition is written: in a filter line, and as an option of a command."""

    TEXT = "text"
    JOB = "job"
    """The id of a job."""
    BATCH = "batch"
    """The id of a batch."""
    ARGUMENTS = "arguments"
    ERROR = "error"
    """The fingerprint of an error."""
    PART = "part"
    """A part of a text, written as an error that is no fingerprint."""
    SINCE = "since"
    UNTIL = "until"
    SPAN = "span"
    NUMBER = "number"
    """A number that a value of a job is compared with."""
    UNWRITTEN = "unwritten"
    """Part of a status in a filter line, or of the scope of a limited user."""


RANGES: Mapping[ValueKind, tuple[int, int]] = {
    ValueKind.JOB: (-LAST_ID, LAST_ID),
    ValueKind.BATCH: (-LAST_ID, LAST_ID),
    ValueKind.NUMBER: (1, 2**15 - 1),
}
"""The least and the largest value of a condition, by its kind."""


class By(Enum):
    """Which row answers a condition."""

    POSITION = "position"
    """That of a message, by its key."""
    ID = "id"
    """The one with the job's id, in each table that has the job."""
    ROW = "row"
    """The row of the job, and no index."""


Sql = Callable[[Any, sa.Table, sa.ColumnElement[int]], sa.ColumnElement[bool] | None]
"""Makes a condition of its value, a table, and the column with the ids of jobs there.

Returns None if rows of the table cannot answer it.
"""


def condition(
    by: By,
    sql: Sql,
    kind: ValueKind,
    word: str = "",
    help: str = "",
    *,
    option: str = "",
    default: Any = None,
) -> Any:
    """Declare a condition.

    ``word``: in a filter line.  ``help``: what follows "Only jobs".  ``option``: of the commands;
    empty for one that only a filter line has.
    """
    about = {"by": by, "sql": sql, "kind": kind, "word": word, "help": help, "option": option}
    return field(default=default, metadata=about)


def _task(value: str, table: sa.Table, _: Any) -> sa.ColumnElement[bool]:
    return table.c.task == sa.cast(value, sa.Text)


def _queue(value: str, table: sa.Table, _: Any) -> sa.ColumnElement[bool]:
    return table.c.queue == sa.cast(value, sa.Text)


def _queues(values: frozenset[str], table: sa.Table, _: Any) -> sa.ColumnElement[bool]:
    return table.c.queue == sa.any_(_texts(values))


def _due(value: bool, table: sa.Table, _: Any) -> sa.ColumnElement[bool] | None:
    if table not in MESSAGES:
        return None
    due = table.c.run_at <= pg.statement_timestamp()
    return due if value else ~due


def _retried(value: bool, table: sa.Table, _: Any) -> sa.ColumnElement[bool] | None:
    if table not in MESSAGES:
        return None
    used = table.c.attempt > sa.literal(0, sa.SmallInteger)
    return used if value else ~used


def _before(value: int, _: sa.Table, id: sa.ColumnElement[int]) -> sa.ColumnElement[bool]:
    return id < value


def _after(value: int, _: sa.Table, id: sa.ColumnElement[int]) -> sa.ColumnElement[bool]:
    return id > value


def _batch(value: int, _: sa.Table, id: sa.ColumnElement[int]) -> sa.ColumnElement[bool]:
    return id.in_(sa.select(batch_jobs.c.job_id).where(batch_jobs.c.batch_id == value))


def _error(value: int, table: sa.Table, id: sa.ColumnElement[int]) -> sa.ColumnElement[bool]:
    has_error = dead_letters.c.fingerprint == sa.cast(value, sa.BigInteger)
    if table is dead_letters:
        return has_error
    return id.in_(sa.select(dead_letters.c.job_id).where(has_error))


def _is(clause: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    return sa.type_coerce(clause, sa.Boolean)


def _tag(value: str, *_: Any) -> sa.ColumnElement[bool]:
    return _is(jobs.c.tags.has_key(sa.cast(value, sa.Text)))


def _tags(values: frozenset[str], *_: Any) -> sa.ColumnElement[bool]:
    return _is(jobs.c.tags.has_any(_texts(values)))


def _limit_key(value: str, *_: Any) -> sa.ColumnElement[bool]:
    """It is one of the lines of ``limit_keys``."""
    keys = pg.string_to_array(jobs.c.limit_keys, NEWLINE, type_=sa.ARRAY(sa.Text))
    return sa.cast(value, sa.Text) == sa.any_(keys)


def _unique_key(value: str, *_: Any) -> sa.ColumnElement[bool]:
    return jobs.c.unique_key.in_([sa.cast(form, sa.Text) for form in stored_forms(value)])


def _args(values: Iterable[tuple[str, Any]], *_: Any) -> sa.ColumnElement[bool]:
    given = sa.cast(sa.literal(json.dumps(dict(values)), sa.Text), JSONB)
    return _is(jobs.c.args.contains(given))


def _text(value: str, *_: Any) -> sa.ColumnElement[bool]:
    wanted = pg.lower(sa.cast(value, sa.Text))
    at = pg.strpos(pg.lower(jobs.c.last_error), wanted, type_=sa.Integer)
    return at > sa.literal(0, sa.Integer)


def _took(value: timedelta, *_: Any) -> sa.ColumnElement[bool]:
    return jobs.c.finished_at - jobs.c.started_at >= sa.cast(value, sa.Interval)


def _attempts(value: int, *_: Any) -> sa.ColumnElement[bool]:
    return jobs.c.attempts >= sa.cast(value, sa.SmallInteger)


def _created_after(value: datetime | timedelta, *_: Any) -> sa.ColumnElement[bool]:
    return jobs.c.created_at >= _time(value)


def _created_before(value: datetime | timedelta, *_: Any) -> sa.ColumnElement[bool]:
    return jobs.c.created_at <= _time(value)


@dataclass(frozen=True, slots=True)
class JobFilter:
    """A filter for jobs; a job matches if all conditions given here hold."""

    statuses: frozenset[JobStatus] = frozenset()
    """Empty: any status."""
    task: str | None = condition(
        By.ID, _task, ValueKind.TEXT, "task", "of this task", option="--task"
    )
    queue: str | None = condition(
        By.POSITION, _queue, ValueKind.TEXT, "queue", "of this queue", option="--queue"
    )
    tag: str | None = condition(
        By.ROW, _tag, ValueKind.TEXT, "tag", "with this tag", option="--tag"
    )
    batch: int | None = condition(
        By.ID, _batch, ValueKind.BATCH, "batch", "of this batch", option="--batch"
    )
    limit_key: str | None = condition(
        By.ROW,
        _limit_key,
        ValueKind.TEXT,
        "limit",
        "under this key, as `jobs ID` shows it",
        option="--limit-key",
    )
    unique_key: str | None = condition(
        By.ROW, _unique_key, ValueKind.TEXT, "key", "with this unique key", option="--unique-key"
    )
    created_before: datetime | timedelta | None = condition(
        By.ROW,
        _created_before,
        ValueKind.UNTIL,
        "created",
        "enqueued at least so long ago",
        option="--older-than",
    )
    error: int | None = condition(
        By.ID,
        _error,
        ValueKind.ERROR,
        "error",
        "that have failed with this error, as `pgqueue failures` names it",
        option="--error",
    )
    before: int | None = condition(
        By.ID, _before, ValueKind.JOB, "before", "older than this one", option="--before"
    )
    after: int | None = condition(
        By.ID, _after, ValueKind.JOB, "after", "newer than this one", option="--after"
    )
    args: tuple[tuple[str, Any], ...] = condition(
        By.ROW, _args, ValueKind.ARGUMENTS, "arg.NAME", "with this argument", default=()
    )
    """Names and values in their JSON form."""
    text: str | None = condition(
        By.ROW, _text, ValueKind.PART, "error", "whose last error contains this text"
    )
    """In upper or lower case."""
    created_after: datetime | timedelta | None = condition(
        By.ROW, _created_after, ValueKind.SINCE, "created", "enqueued since this time"
    )
    """A timedelta: since so long ago."""
    took: timedelta | None = condition(
        By.ROW, _took, ValueKind.SPAN, "took", "that have ended, and whose last attempt ran so long"
    )
    attempts: int | None = condition(
        By.ROW,
        _attempts,
        ValueKind.NUMBER,
        "attempts",
        "that have used up at least so many attempts",
        option="--attempts",
    )
    are_due: bool | None = condition(By.POSITION, _due, ValueKind.UNWRITTEN)
    """Of the jobs that wait, those that are due, or those that are not due yet."""
    are_retried: bool | None = condition(By.ID, _retried, ValueKind.UNWRITTEN)
    """Of the jobs that wait, those that have used up an attempt, or the others."""
    queues: frozenset[str] | None = condition(By.POSITION, _queues, ValueKind.UNWRITTEN)
    """Only jobs of one of these queues: those that a user may see."""
    tags: frozenset[str] | None = condition(By.ROW, _tags, ValueKind.UNWRITTEN)
    """Only jobs with one of these tags: those that a user may see."""

    @property
    def names_arguments(self) -> bool:
        """Whether a condition has values of arguments, such as a key that is made from them."""
        return self != self.without_arguments()

    def without_arguments(self) -> "JobFilter":
        """The filter without the conditions that have values of arguments."""
        key = self.limit_key
        is_value = key is not None and key != name_of(key)
        return replace(self, args=(), unique_key=None, limit_key=None if is_value else key)

    def between(self, *, after: int = 0, before: int) -> "JobFilter":
        """The filter, only for jobs with ids between these two as well."""
        after = after if self.after is None else max(after, self.after)
        before = before if self.before is None else min(before, self.before)
        return replace(self, after=after or None, before=before)

    def given(self) -> dict[str, Any]:
        """The conditions that are given, by their names."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {each.name: values[each.name] for each in fields(self) if _is_given(each, values)}

    def clauses(self, table: sa.Table, id: sa.ColumnElement[int]) -> list[sa.ColumnElement[bool]]:
        """The conditions, without the status, for a table with columns task and queue."""
        of_job = self.clauses_of_row()
        if of_job and table is not jobs:
            # One probe by key for each row; an EXISTS could become a join that reads all jobs.
            each = sa.select(sa.and_(*of_job)).where(jobs.c.id == id).correlate_except(jobs)
            of_job = [each.scalar_subquery().is_(sa.true())]
        return [*self.clauses_of_position(table), *self._answered(By.ID, table, id), *of_job]

    def clauses_of_position(self, table: sa.Table) -> list[sa.ColumnElement[bool]]:
        """The conditions that the key of a message answers."""
        return list(self._answered(By.POSITION, table, jobs.c.id))

    def clauses_of_row(self) -> list[sa.ColumnElement[bool]]:
        """The conditions that only the row of a job answers, and no index."""
        return [
            sa.type_coerce(clause, sa.Boolean) for clause in self._answered(By.ROW, jobs, jobs.c.id)
        ]

    def _answered(
        self, by: By, table: sa.Table, id: sa.ColumnElement[int]
    ) -> Iterator[sa.ColumnElement[bool]]:
        given = self.given()
        for each in CONDITIONS:
            if each.name in given and each.metadata["by"] is by:
                clause = each.metadata["sql"](given[each.name], table, id)
                if clause is not None:
                    yield clause


CONDITIONS: tuple[Field[Any], ...] = fields(JobFilter)[1:]
"""The fields with a declaration: all but the statuses."""

WRITTEN: Mapping[str, Field[Any]] = {
    each.name: each for each in CONDITIONS if each.metadata["kind"] is not ValueKind.UNWRITTEN
}
"""The conditions that a user may write."""


class JobConditions(TypedDict, total=False):
    """The conditions of ``cancel_where``; a job matches if all of them hold."""

    task: str | None
    queue: str | None
    tag: str | None
    batch: int | None
    limit_key: str | None
    unique_key: str | None


class Conditions(JobConditions, total=False):
    """The conditions of a :class:`Selection`."""

    before: int | None
    after: int | None
    error: str | int | None
    text: str | None
    args: Mapping[str, Any] | None
    created_after: datetime | timedelta | None
    created_before: datetime | timedelta | None
    took: timedelta | None
    attempts: int | None


def _is_given(each: Field[Any], values: Mapping[str, Any]) -> bool:
    return bool(values[each.name] != each.default)


def _time(time: datetime | timedelta) -> sa.ColumnElement[Any]:
    if isinstance(time, timedelta):
        return pg.statement_timestamp() - sa.cast(time, sa.Interval)
    return sa.cast(time, sa.DateTime(timezone=True))


def _texts(values: Iterable[str]) -> sa.ColumnElement[Any]:
    """An array of texts; an empty one matches nothing."""
    return sa.cast(sa.literal(array_of(sorted(values)), sa.Text), sa.ARRAY(sa.Text))
