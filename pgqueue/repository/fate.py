"""The fate of a transaction: read by its id, and never inferred from what its rows look like.

A lease that is gone does not show that its attempt was committed: the worker may have settled the
attempt in another transaction meanwhile, after a timeout.
"""

from enum import StrEnum
from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.types import UserDefinedType

from pgqueue.repository.tables import SPACE, Executor, pg, text_parameter


class Fate(StrEnum):
    """What has become of a transaction whose COMMIT was not answered."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    IN_PROGRESS = "in progress"
    """It may still commit."""
    UNKNOWN = "unknown"
    """The server is another one since a failover, or the transaction is too old."""


class _TransactionId(UserDefinedType[str]):
    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "pg_catalog.xid8"


def transaction_name() -> sa.ColumnElement[str]:
    """The name of the transaction that evaluates this: its id, and the timeline of the server.

    A server that was promoted begins another timeline, in which the ids of transactions that it has
    not received are given again.
    """
    id = sa.cast(pg.pg_current_xact_id(type_=_TransactionId()), sa.Text)
    return pg.concat(id, SPACE, _timeline(), type_=sa.Text)


@cache
def fate() -> sa.Executable:
    """The status of a transaction; NULL if this server does not know it.

    A transaction that was open when the server crashed counts as aborted.
    https://www.postgresql.org/docs/current/functions-info.html#FUNCTIONS-PG-SNAPSHOT
    """
    id = sa.cast(text_parameter("transaction_id"), _TransactionId())
    status = pg.pg_xact_status(id, type_=sa.Text)
    return sa.select(sa.case((_timeline() == text_parameter("timeline"), status)))


def _timeline() -> sa.ColumnElement[str]:
    """The name of a WAL file begins with the timeline.  Fails on a server that is in recovery."""
    file = pg.pg_walfile_name(pg.pg_current_wal_insert_lsn())
    return pg.substr(file, sa.literal_column("1"), sa.literal_column("8"), type_=sa.Text)


class Fates:
    """What one Session or Connection knows about transactions."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def of(self, transaction: str) -> Fate:
        """The fate of a transaction, by the name that :func:`transaction_name` gave it."""
        id, _, timeline = transaction.partition(" ")
        given = {"transaction_id": id, "timeline": timeline}
        status = self._executor.execute(fate(), given).scalar()
        return Fate.UNKNOWN if status is None else Fate(status)
