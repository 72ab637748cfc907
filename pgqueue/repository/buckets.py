"""Equal parts of a time, such as the sixty minutes of an hour, for charts.

They are counted from 1970 on, in UTC, so that the same moment is always in the same part.
"""

from typing import Any

import sqlalchemy as sa

from pgqueue.repository.reading import moment
from pgqueue.repository.tables import pg, seconds

SPAN = seconds(sa.cast(sa.bindparam("seconds", type_=sa.Double), sa.Double))
"""The whole time."""
SIZE = seconds(sa.cast(sa.bindparam("size", type_=sa.Double), sa.Double))
"""The size of a part."""
TIME = sa.DateTime(timezone=True)
START = sa.literal_column("timestamptz '1970-01-01 00:00:00+00'", TIME)


def bucket_of(
    at: sa.ColumnElement[Any], size: sa.ColumnElement[Any] = SIZE
) -> sa.ColumnElement[Any]:
    """The beginning of the part in which a moment is."""
    return pg.date_bin(size, at, START, type_=TIME)


def first_bucket() -> sa.ColumnElement[Any]:
    """The beginning of the first part."""
    return bucket_of(pg.statement_timestamp() - SPAN) + SIZE


def in_all_buckets(sums: sa.Subquery) -> sa.Executable:
    """The beginning of each part up to now, and its sums, 0 where ``sums`` has no row.

    The first column of ``sums`` is the beginning of the part.
    """
    part, *columns = sums.c
    last = bucket_of(pg.statement_timestamp())
    parts = (
        pg.generate_series(first_bucket(), last, SIZE)
        .table_valued(sa.column("at", TIME))
        .render_derived(name="part")
    )
    none = sa.literal_column("0", sa.BigInteger)
    return (
        sa.select(moment(parts.c.at), *(sa.func.coalesce(column, none) for column in columns))
        .select_from(parts.outerjoin(sums, part == parts.c.at))
        .order_by(parts.c.at)
    )
