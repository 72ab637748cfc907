"""Deadlines, and what is asked of the database right before a job's first attempt starts its
handler."""

from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Executable,
    Float,
    Numeric,
    Text,
    and_,
    bindparam,
    case,
    cast,
    extract,
    func,
    literal_column,
    null,
    select,
)
from sqlalchemy.dialects.postgresql import array

from pgqueue.statements.tables import jobs, pg

EXPIRES_IN = "pgqueue.expires_in"
"""The key, in the meta of a job, of an ``expires_in`` that one enqueue has given: seconds, or null
for none."""

DUE = "pgqueue.due"
"""The key, in the meta of a job under limits that may expire, of when it was due and when it was
admitted: an admission gives the job another ``run_at``.  Null before the admission."""

_KEY = cast(literal_column(f"'{EXPIRES_IN}'", Text), Text)
_DUE = cast(literal_column(f"'{DUE}'", Text), Text)
_FIRST, _SECOND = (cast(literal_column(text), Text) for text in ("'0'", "'1'"))
_NUMBER = literal_column("'number'", Text)
_NULL = literal_column("'null'", Text)
_LONGEST = cast(literal_column("3155760000"), Numeric)
_LATEST = cast(literal_column("253402300800"), Numeric)
_ZERO = cast(literal_column("0"), Numeric)


@cache
def has_expired() -> Executable:
    """Whether a job is too late to start; no row if it is gone.

    A job that has started before, even if it was snoozed or interrupted, is never too late.
    """
    job = bindparam("job_id", type_=BigInteger)
    late = _epoch(pg.clock_timestamp()) > _due() + _expires_in()
    return select(func.coalesce(and_(_has_never_started(), late), literal_column("false"))).where(
        jobs.c.id == job
    )


def _has_never_started() -> ColumnElement[bool]:
    counts = ("attempts", "snoozes", "interruptions")
    return and_(*(jobs.c[name] == literal_column("0") for name in counts))


def meta_after_admission(admitted: ColumnElement[Any]) -> ColumnElement[Any]:
    """The meta of a job that is admitted: with the time at which it was due, if it may expire."""
    times = pg.jsonb_build_array(_due(), extract("epoch", admitted))
    noted = pg.jsonb_set(jobs.c.meta, array([_DUE]), times)
    may_expire = pg.jsonb_extract_path(jobs.c.meta, _DUE).is_not(None)
    return case((may_expire, noted), else_=jobs.c.meta)


def _due() -> ColumnElement[float]:
    """When a job was due, before a limit made it wait; also if it is admitted a second time.

    A time that the job gets after its admission, as by a requeue, replaces the noted time.
    """
    due, admitted = (pg.jsonb_extract_path(jobs.c.meta, _DUE, place) for place in (_FIRST, _SECOND))
    is_current = admitted == pg.to_jsonb(extract("epoch", jobs.c.run_at))
    number = cast(pg.jsonb_extract_path_text(jobs.c.meta, _DUE, _FIRST, type_=Text), Numeric)
    noted = func.greatest(func.least(number, _LATEST), _ZERO)
    known = and_(is_current, pg.jsonb_typeof(due) == _NUMBER)
    return case((known, cast(noted, Float)), else_=_epoch(jobs.c.run_at))


def _epoch(moment: ColumnElement[Any]) -> ColumnElement[float]:
    return cast(extract("epoch", moment), Float)


def _expires_in() -> ColumnElement[float | None]:
    """The job's own value, if it has one.  Meta may be written by hand: a number too large for a
    timestamp counts as a hundred years."""
    own = pg.jsonb_extract_path_text(jobs.c.meta, _KEY, type_=Text)
    kind = pg.jsonb_typeof(pg.jsonb_extract_path(jobs.c.meta, _KEY))
    number = func.least(func.greatest(cast(own, Numeric), _ZERO), _LONGEST)
    of_task = cast(bindparam("expires_in", type_=Float), Float)
    return case((kind == _NUMBER, cast(number, Float)), (kind == _NULL, null()), else_=of_task)
