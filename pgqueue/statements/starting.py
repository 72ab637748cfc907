"""What is asked of the database right before the first attempt of a job starts its handler."""

from functools import cache

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
    func,
    literal_column,
    null,
    select,
)

from pgqueue.statements.tables import jobs, pg, seconds

EXPIRES_IN = "pgqueue.expires_in"
"""The key, in the meta of a job, of an ``expires_in`` that one enqueue has given: seconds, or null
for none."""

_KEY = cast(literal_column(f"'{EXPIRES_IN}'", Text), Text)
_NUMBER = literal_column("'number'", Text)
_NULL = literal_column("'null'", Text)
_LONGEST = cast(literal_column("3155760000"), Numeric)
_ZERO = cast(literal_column("0"), Numeric)


@cache
def has_expired() -> Executable:
    """Whether a job is too late to start; no row if it is gone.

    A job that has started before, even if it was snoozed or interrupted, is never too late.
    """
    job = bindparam("job_id", type_=BigInteger)
    never_started = and_(
        *(jobs.c[name] == literal_column("0") for name in ("attempts", "snoozes", "interruptions"))
    )
    late = pg.clock_timestamp() > jobs.c.run_at + seconds(_expires_in())
    return select(func.coalesce(and_(never_started, late), literal_column("false"))).where(
        jobs.c.id == job
    )


def _expires_in() -> ColumnElement[float | None]:
    """The job's own value, if it has one.  Meta may be written by hand: a number too large for a
    timestamp counts as a hundred years."""
    own = pg.jsonb_extract_path_text(jobs.c.meta, _KEY, type_=Text)
    kind = pg.jsonb_typeof(pg.jsonb_extract_path(jobs.c.meta, _KEY))
    number = func.least(func.greatest(cast(own, Numeric), _ZERO), _LONGEST)
    of_task = cast(bindparam("expires_in", type_=Float), Float)
    return case((kind == _NUMBER, cast(number, Float)), (kind == _NULL, null()), else_=of_task)
