"""Equal parts of a time, such as the sixty minutes of an hour, for charts.

They are counted from 1970 on, in UTC, so that the same moment is always in the same part.
"""

from typing import Any

import sqlalchemy as sa

from pgqueue.repository.reading import moment
from pgqueue.repository.tables import pg, seconds

SPAN = sa.cast(sa.bindparam("seconds", type_=sa.Double), sa.Double)
"""The whole time, in seconds."""
SIZE = sa.cast(sa.bindparam("size", type_=sa.Double), sa.Double)
"""The size of a part, in seconds."""
ONE = sa.literal_column("1", sa.BigInteger)


def bucket_of(at: sa.ColumnElement[Any]) -> sa.ColumnElement[int]:
    """The number of the part in which a moment is."""
    since_1970 = sa.cast(sa.extract("epoch", at), sa.Double)
    return sa.cast(pg.floor(since_1970 / SIZE, type_=sa.Double), sa.BigInteger)


def first_bucket() -> sa.ColumnElement[Any]:
    """The beginning of the first part."""
    first = bucket_of(pg.statement_timestamp() - seconds(SPAN)) + ONE
    begins = sa.cast(first, sa.Double) * SIZE
    return pg.to_timestamp(begins, type_=sa.DateTime(timezone=True))


def in_all_buckets(sums: sa.Subquery) -> sa.Executable:
    """The beginning of each part up to now, and its sums, 0 where ``sums`` has no row.

    The first column of ``sums`` is the number of the part.
    """
    part, *columns = sums.c
    number = sa.column("number", sa.BigInteger)
    first = bucket_of(pg.statement_timestamp() - seconds(SPAN)) + ONE
    parts = (
        pg.generate_series(first, bucket_of(pg.statement_timestamp()))
        .table_valued(number)
        .render_derived(name="part")
    )
    begins = pg.to_timestamp(sa.cast(parts.c.number, sa.Double) * SIZE)
    none = sa.literal_column("0", sa.BigInteger)
    return (
        sa.select(moment(begins), *(sa.func.coalesce(column, none) for column in columns))
        .select_from(parts.outerjoin(sums, part == parts.c.number))
        .order_by(parts.c.number)
    )
