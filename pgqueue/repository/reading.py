"""How times are read: in a form that depends on no setting of the session.

The text of a time depends on ``DateStyle``, that of a span on ``IntervalStyle``, and drivers read
only the usual ones.  A database, a role or an application may set others, so statements return
seconds.
"""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import sqlalchemy as sa

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Span(sa.TypeDecorator[timedelta]):
    """A span that is read in seconds."""

    impl = sa.Numeric
    cache_ok = True

    def process_result_value(self, value: Decimal | None, dialect: Any = None) -> timedelta | None:
        return None if value is None else timedelta(microseconds=round(value * 1_000_000))


class Moment(sa.TypeDecorator[datetime]):
    """A time that is read in seconds since 1970."""

    impl = sa.Numeric
    cache_ok = True

    def process_result_value(self, value: Decimal | None, dialect: Any = None) -> datetime | None:
        return None if value is None else EPOCH + timedelta(microseconds=round(value * 1_000_000))


def moment(time: sa.ColumnElement[Any]) -> sa.ColumnElement[datetime]:
    """What to select for a time."""
    return _seconds(time, Moment())


def span(interval: sa.ColumnElement[Any]) -> sa.ColumnElement[timedelta]:
    """What to select for an interval."""
    return _seconds(interval, Span())


def readable(column: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """What to select for a column of a table, whatever its type."""
    match column.type:
        case sa.DateTime():
            return moment(column)
        case sa.Interval():
            return span(column)
    return column


def _seconds(value: sa.ColumnElement[Any], type_: sa.TypeDecorator[Any]) -> sa.ColumnElement[Any]:
    return sa.type_coerce(sa.extract("epoch", value), type_).label(getattr(value, "name", None))
