"""The rows of a query in pages, in the order of a key, from any row on."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import Session
from sqlalchemy.types import NullType

from pgqueue.errors import ArgumentsError, PgQueueError

MOST_ROWS = 10_000


class Page(NamedTuple):
    """Some rows of a query."""

    rows: Sequence[Any]
    last_key: list[str] | None
    """The key of the last row, as text; None if there are no rows."""
    is_last: bool


class Pages:
    """A query that is read in pages.

    The key is stored as text and compared by the server as what it is, so it may have any type.
    """

    def __init__(self, query: Any, key: Any, size: int, *, where: str) -> None:
        """
        Args:
            query: A ``select()`` without an order and a limit of its own.
            key: A column, or several, whose values together are unique and never NULL.  None: the
                primary key of the one class that the query selects.
            size: The rows of a page.
            where: How errors name the caller.
        """
        self._where = where
        if not isinstance(query, sa.Select):
            raise ArgumentsError(
                f"{where}: the rows come from a select(), not from {type(query).__name__}, of "
                "which nobody can store how far it was read"
            )
        if not query.compare(query.order_by(None).limit(None).offset(None)):
            raise ArgumentsError(
                f"{where}: the rows come in the order of the key, a page at a time; omit order_by, "
                "limit and offset"
            )
        if not isinstance(size, int) or not 1 <= size <= MOST_ROWS:
            raise ArgumentsError(f"{where}: size is from 1 to {MOST_ROWS} rows, not {size!r}")
        self._size = size
        self._query = query
        self._is_scalar = len(query.column_descriptions) == 1
        self._key = self._primary_key() if key is None else _columns(key)
        if any(isinstance(column.type, NullType) for column in self._key):
            raise ArgumentsError(
                f"{where}: SQLAlchemy does not know the type of the key; give it one by type_="
            )

    def read(self, session: Session, after: Sequence[str] | None) -> Page:
        """Read the page after the row with this key; None: the first."""
        texts = [
            sa.cast(column, sa.Text).label(f"pgqueue_key_{number}")
            for number, column in enumerate(self._key)
        ]
        query = self._query.add_columns(*texts).order_by(*self._key).limit(self._size + 1)
        if after is not None:
            values = (
                sa.cast(sa.literal(text, sa.Text), column.type)
                for text, column in zip(after, self._key, strict=True)
            )
            query = query.where(sa.tuple_(*self._key) > sa.tuple_(*values))
        found = session.execute(query).freeze()
        columns = range(len(self._query.column_descriptions) + len(texts))
        keys = [list(key) for key in found().columns(*columns[-len(texts) :])]
        if any(None in key for key in keys):
            raise PgQueueError(
                f"{self._where}: the key of a row is NULL, so the row has no place in the order; "
                "leave such rows out, or give another key="
            )
        if len(keys) > self._size and keys[-1] == keys[-2]:
            raise PgQueueError(
                f"{self._where}: two rows have the key {', '.join(keys[-1])}, so one would be "
                "skipped; give a key= that is unique"
            )
        rows = found().columns(*columns[: -len(texts)])
        page = rows.scalars() if self._is_scalar else rows
        last_key = keys[: self._size][-1] if keys else None
        return Page(page.fetchmany(self._size), last_key, is_last=len(keys) <= self._size)

    def _primary_key(self) -> list[Any]:
        described = self._query.column_descriptions
        entity = described[0]["entity"] if described else None
        if not self._is_scalar or entity is None or described[0]["expr"] is not entity:
            raise ArgumentsError(
                f"{self._where}: give key=, the column, or columns, by which the rows are ordered "
                "and found again; their values are unique and never NULL"
            )
        mapper = sa.inspect(entity).mapper
        names = (mapper.get_property_by_column(column).key for column in mapper.primary_key)
        return [getattr(entity, name) for name in names]


def _columns(key: Any) -> list[Any]:
    return list(key) if isinstance(key, tuple | list) else [key]
