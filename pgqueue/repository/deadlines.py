"""Deadlines of single jobs, and what is asked of the database right before a job's
first attempt starts its handler.
"""

from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import array

from pgqueue.repository.tables import jobs, pg

EXPIRES_IN = "pgqueue.expires_in"
"""The key, in the meta of a job, of an ``expires_in`` that one enqueue has given: seconds, or null
for none."""

DUE = "pgqueue.due"
"""The key, in the meta of a job under limits that may expire, of when it was due and when it was
admitted: an admission gives the job another ``run_at``.  Null before the admission."""

_KEY = sa.cast(sa.literal_column(f"'{EXPIRES_IN}'", sa.Text), sa.Text)
_DUE = sa.cast(sa.literal_column(f"'{DUE}'", sa.Text), sa.Text)
_FIRST, _SECOND = (sa.cast(sa.literal_column(text), sa.Text) for text in ("'0'", "'1'"))
_NUMBER = sa.literal_column("'number'", sa.Text)
_NULL = sa.literal_column("'null'", sa.Text)
_LONGEST = sa.cast(sa.literal_column("3155760000"), sa.Numeric)
_LATEST = sa.cast(sa.literal_column("253402300800"), sa.Numeric)
_ZERO = sa.cast(sa.literal_column("0"), sa.Numeric)


@cache
def has_expired() -> sa.Executable:
    """Whether a job is too late to start; no row if it is gone.

    A job that has started before, even if it was snoozed or interrupted, is never too late.
    """
    # The job's own value, if it has one.  Meta may be written by hand: a number too large for a
    # timestamp counts as a hundred years.
    own = pg.jsonb_extract_path_text(jobs.c.meta, _KEY, type_=sa.Text)
    kind = pg.jsonb_typeof(pg.jsonb_extract_path(jobs.c.meta, _KEY))
    number = sa.func.least(sa.func.greatest(sa.cast(own, sa.Numeric), _ZERO), _LONGEST)
    expires_in = sa.case(
        (kind == _NUMBER, sa.cast(number, sa.Float)),
        (kind == _NULL, sa.null()),
        else_=sa.cast(sa.bindparam("expires_in", type_=sa.Float), sa.Float),
    )
    late = _epoch(pg.clock_timestamp()) > _due() + expires_in
    return sa.select(
        sa.func.coalesce(sa.and_(_has_never_started(), late), sa.literal_column("false"))
    ).where(jobs.c.id == sa.bindparam("job_id", type_=sa.BigInteger))


def _has_never_started() -> sa.ColumnElement[bool]:
    counts = ("attempts", "snoozes", "interruptions")
    return sa.and_(*(jobs.c[name] == sa.literal_column("0") for name in counts))


def meta_after_admission(admitted: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """The meta of a job that is admitted: with the time at which it was due, if it may expire."""
    times = pg.jsonb_build_array(_due(), sa.extract("epoch", admitted))
    noted = pg.jsonb_set(jobs.c.meta, array([_DUE]), times)
    may_expire = pg.jsonb_extract_path(jobs.c.meta, _DUE).is_not(None)
    return sa.case((may_expire, noted), else_=jobs.c.meta)


def _due() -> sa.ColumnElement[float]:
    """When a job was due, before a limit made it wait; also if it is admitted a second time.

    A time that the job gets after its admission, as by a requeue, replaces the noted time.
    """
    due, admitted = (pg.jsonb_extract_path(jobs.c.meta, _DUE, place) for place in (_FIRST, _SECOND))
    is_current = admitted == pg.to_jsonb(sa.extract("epoch", jobs.c.run_at))
    number = sa.cast(
        pg.jsonb_extract_path_text(jobs.c.meta, _DUE, _FIRST, type_=sa.Text), sa.Numeric
    )
    noted = sa.func.greatest(sa.func.least(number, _LATEST), _ZERO)
    known = sa.and_(is_current, pg.jsonb_typeof(due) == _NUMBER)
    return sa.case((known, sa.cast(noted, sa.Float)), else_=_epoch(jobs.c.run_at))


def _epoch(moment: sa.ColumnElement[Any]) -> sa.ColumnElement[float]:
    return sa.cast(sa.extract("epoch", moment), sa.Float)
