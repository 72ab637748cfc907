"""The fast path: sends our own statements through psycopg directly.

SQLAlchemy's work for one execution takes longer than psycopg's, and for a statement of one row
longer than the server's.  If no listener or option of the application would see the difference, a
statement that was built and compiled once goes to the driver with its parameters, and its rows
come back as tuples.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, cast

import psycopg
import sqlalchemy as sa
from psycopg.rows import tuple_row
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from pgqueue.repository.reading import Moment, Span
from pgqueue.repository.tables import Executor
from pgqueue.repository.transactions import NOTHING

Parameters = Mapping[str, Any]

CURSOR = "pgqueue.cursor"
"""The name in ``connection.info`` of a cursor to use again, which SQLAlchemy forgets with the
driver's connection.  psycopg takes a tenth of the time of a statement to make a cursor."""


def fetch(executor: Executor, statement: sa.Executable, parameters: Parameters) -> Sequence[Any]:
    """Run one of the cached statements; returns its rows.

    Raises what SQLAlchemy raises.  If the application listens to its connections, logs them or
    translates schemas, and with other drivers and AsyncSession, SQLAlchemy executes the statement.
    """
    if isinstance(executor, Session) or (driver := _driver_of(executor)) is None:
        return executor.execute(statement, parameters).all()
    words, constants, readers = _in_words_of_driver(statement)
    try:
        cursor = executor.info.pop(CURSOR, None) or driver.cursor(row_factory=tuple_row)
        rows: list[Any] = cursor.execute(words, {**constants, **parameters}).fetchall()
        if len(rows) <= 1:  # it holds parameters and rows: those of many jobs may be megabytes
            executor.info[CURSOR] = cursor
    except psycopg.Error as error:
        if driver.closed:
            # SQLAlchemy must see the error itself: it then also discards the pool's other
            # connections.
            with suppress(DBAPIError):
                executor.exec_driver_sql(NOTHING)
        raise DBAPIError.instance(
            words,
            dict(parameters),
            error,
            psycopg.Error,
            hide_parameters=executor.engine.hide_parameters,
            connection_invalidated=driver.closed,
            dialect=executor.dialect,
        ) from error
    except Exception:
        raise  # nothing was sent yet: psycopg cannot adapt a value, for example
    except BaseException:
        executor.invalidate()  # interrupted: the server may still send data
        raise
    if readers is None:
        return rows
    return [
        tuple(
            value if read is None else read(value) for value, read in zip(row, readers, strict=True)
        )
        for row in rows
    ]


def is_listened_to(target: sa.Engine | sa.Connection) -> bool:
    """Whether listeners or the log would see the statements that are executed there."""
    engine = target.engine
    if _may_have_listeners(target) or _may_have_listeners(engine):
        dispatch = target.dispatch
        if dispatch.before_cursor_execute or dispatch.after_cursor_execute:
            return True
        if dispatch.before_execute or dispatch.after_execute:
            return True
    driven = engine.dialect.dispatch
    if driven.handle_error or driven.do_execute:
        return True
    return engine.logger.isEnabledFor(logging.INFO)


def _may_have_listeners(target: sa.Engine | sa.Connection) -> bool:
    """The flag that SQLAlchemy asks before it looks for listeners, which takes it longer: on each
    new connection it first joins those of its engine."""
    return bool(getattr(target, "_has_events", True))


def _driver_of(connection: sa.Connection) -> "psycopg.Connection[Any] | None":
    driver = driver_unseen(connection)
    transaction = connection.get_nested_transaction() or connection.get_transaction()
    if driver is None or (transaction is None and not driver.autocommit):
        # SQLAlchemy must begin the transaction itself, or it would not know that it has to end one.
        return None
    return driver if transaction is None or transaction.is_active else None


def driver_unseen(connection: sa.Connection) -> "psycopg.Connection[Any] | None":
    """Return the driver's connection if it is psycopg's and nothing observes its statements."""
    is_translated = connection.get_execution_options().get("schema_translate_map")
    if is_translated or is_listened_to(connection):
        return None
    driver = connection.connection.dbapi_connection
    return driver if isinstance(driver, psycopg.Connection) else None


@cache
def _in_words_of_driver(
    statement: sa.Executable,
) -> tuple[str, dict[str, Any], "Sequence[Callable[[Any], Any] | None] | None"]:
    dialect: Any = PGDialect_psycopg
    # Lists of values are rendered in full: their length is part of the text.
    compiled = cast(sa.ClauseElement, statement).compile(
        dialect=dialect(), compile_kwargs={"render_postcompile": True}
    )
    constants = {name: value for name, value in compiled.params.items() if value is not None}
    types = [column.type for column in getattr(statement, "exported_columns", ())]
    readers = [
        each.process_result_value if isinstance(each, Moment | Span) else None for each in types
    ]
    return compiled.string, constants, readers if any(readers) else None
