"""How connections are opened and set up: a worker's own, and those of the application's pool."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from sqlalchemy import URL, Connection, Dialect, Engine, create_engine, event, make_url
from sqlalchemy.engine.interfaces import IsolationLevel
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from pgqueue import redaction
from pgqueue.database.keepalive import (
    NETWORK,
    keep_from_children,
    name_of_connection,
    notice_loss_of_server,
)
from pgqueue.errors import ArgumentsError, PgQueueError
from pgqueue.repository.transactions import set_config

logger = redaction.logger(__name__)

DRIVER = "postgresql+psycopg"


def on_psycopg(url: str | URL, where: str = "PgQueue", *, always: bool = False) -> URL:
    """Make ``postgres://`` and ``postgresql://`` mean psycopg 3 in every SQLAlchemy version.

    URLs of async drivers get psycopg 3 too: the queue itself works synchronously; with ``always``,
    those of all drivers.  Raises ArgumentsError, which does not show the URL: it may have a
    password.
    """
    if isinstance(url, str):
        scheme, separator, rest = url.partition("://")
        if scheme in ("postgres", "postgresql"):
            url = f"{DRIVER}{separator}{rest}"
    try:
        parsed = make_url(url)
        refuse_others(parsed.get_backend_name(), where)
        is_changed = always or parsed.get_dialect().is_async
    except (ArgumentError, ValueError):  # a port that is no number is a ValueError
        raise ArgumentsError(
            f"{where} needs the URL of a database; one looks like postgresql://user@host/database"
        ) from None
    return parsed.set(drivername=DRIVER) if is_changed else parsed


def refuse_others(database: str, where: str = "PgQueue") -> None:
    """Raise ArgumentsError for a database that is not PostgreSQL."""
    if database != "postgresql":
        raise ArgumentsError(
            f"{where} needs a PostgreSQL database, not {database}; "
            "give a URL that begins with postgresql://"
        )


def worker_engine(engine: Engine) -> Engine:
    """The engine that a worker uses: the application's own, or a copy of it on psycopg."""
    if engine.dialect.driver == "psycopg":
        return engine
    # The number of slots is the limit.
    return create_engine(engine.url.set(drivername=DRIVER), max_overflow=1000)


class ConnectFailed(PgQueueError):
    """Code of the application, which ran while a connection was opened, has raised an error."""


_contexts: "WeakKeyDictionary[Dialect, Callable[[], AbstractContextManager[object]]]" = (
    WeakKeyDictionary()
)
"""By dialect, which an engine shares with its copies and keeps when it is disposed of."""


def call_listeners_in(
    engine: Engine, context: Callable[[], AbstractContextManager[object]]
) -> None:
    """Call the application's listeners for new connections of an engine in this context.

    They may need one, such as Flask's; the threads of a worker have none.
    """
    _contexts[engine.dialect] = context


def connect(engine: Engine) -> Connection:
    """A connection of the engine's pool, whose listeners may have left a transaction open."""
    with _contexts.get(engine.dialect, nullcontext)():
        try:
            return engine.connect()
        except TypeError as error:
            if "bytes-like" not in str(error):
                raise
            raise PgQueueError(
                "the database has the encoding SQL_ASCII, with which drivers return bytes for "
                "text: add client_encoding=utf8 to the URL, as in postgresql://user@host/database"
                "?client_encoding=utf8"
            ) from error


def end_open_transactions(engine: Engine) -> None:
    """Commit what the listeners of an engine leave open, for the rest of this process.

    For a program of pgqueue's own.  An application may want the rest of its listener's transaction.
    """
    if not event.contains(engine, "checkout", _commit_left_open):
        event.listen(engine, "checkout", _commit_left_open)  # after those of the application


def _commit_left_open(connection: Any, *_: Any) -> None:
    connection.commit()


def connect_idle(engine: Engine) -> Connection:
    """A connection of the engine's pool, in no transaction, so that its mode can be set.

    A listener for ``connect`` or ``checkout`` may have left a transaction open.  It is committed:
    a rollback would undo the settings of the listener.  Sends nothing if there is none.
    """
    connection = connect(engine)
    try:
        driver: Any = connection.connection.dbapi_connection
        driver.commit()
    except BaseException:
        connection.close()
        raise
    return connection


def warn_of_unheard_listeners(engine: Engine, used: Engine) -> None:
    """Warn if a worker's connections are another engine's, whose listeners are not called."""
    if used is engine:
        return
    events = engine.pool.dispatch
    listeners = [*events.connect, *events.checkout, *events.first_connect]
    theirs = [
        getattr(one, "__qualname__", repr(one))
        for one in listeners
        if not (getattr(one, "__module__", None) or "").startswith("sqlalchemy.")
    ]
    if theirs:
        logger.warning(
            "the engine is on %s, so the worker makes connections of its own on psycopg, and the "
            "listeners of the engine for connections are not called there: %s; make the engine "
            "with postgresql+psycopg, or give settings as options in its URL",
            engine.dialect.driver,
            ", ".join(theirs),
        )


@contextmanager
def worker_engine_for_now(engine: Engine) -> Iterator[Engine]:
    """Like :func:`worker_engine`; closes the connections of the copy at the end."""
    on_psycopg = worker_engine(engine)
    try:
        yield on_psycopg
    finally:
        if on_psycopg is not engine:
            on_psycopg.dispose()


def connection_parameters(engine: Engine) -> dict[str, Any]:
    """Return how an engine connects, as libpq parameters, read from a connection that it makes.

    The URL is not enough: ``connect_args``, a ``creator`` or a listener for ``do_connect`` may
    add a certificate, options or a password.
    """
    with worker_engine_for_now(engine) as twin, own_connection(twin, {}) as connection:
        # Not psycopg's get_parameters(): it leaves out port 5432, and PGPORT would replace it.
        options = driver_connection(connection).pgconn.info
        return {each.keyword.decode(): each.val.decode() for each in options if each.val}


def with_own_pool(engine: Engine) -> Engine:
    """An engine that connects in the same way, with a pool of its own and no listeners.

    It shares the compiled statements: to compile them for each connection of a worker takes a third
    of a short run.  The public option ``compiled_cache`` takes another dictionary, not the cache of
    an engine: all statements would be compiled again for it, and it would never forget one.
    """
    private = Engine(engine.pool.recreate(), engine.dialect, engine.url)
    private._compiled_cache = engine._compiled_cache
    return private


@contextmanager
def errors_of_listeners() -> Iterator[None]:
    """Raise any error of the application's code as ConnectFailed, for which a worker waits as for
    the database."""
    try:
        yield
    except (SQLAlchemyError, psycopg.Error):
        raise
    except Exception as error:
        raise ConnectFailed(
            "no connection: a listener or creator of the engine has raised "
            f"{type(error).__name__}: {error}; a worker calls it in its threads, outside of a "
            "request"
        ) from error


def _connect_for_worker(engine: Engine) -> Connection:
    with errors_of_listeners():
        return connect_idle(engine)


@contextmanager
def own_connection(
    engine: Engine,
    settings: Mapping[str, str],
    *,
    isolation_level: IsolationLevel = "AUTOCOMMIT",
    purpose: str = "",
) -> Iterator[Connection]:
    """Open a connection outside the pool, set it up, and close it at the end.

    ``purpose``: what the worker uses it for, shown in ``pg_stat_activity``.
    """
    if not hasattr(engine.dialect, "default_isolation_level"):
        # Make the dialect query the server's properties, through the application's pool.
        # SQLAlchemy does this at the first connection of a pool, and other threads wait for it only
        # in the same pool; in another pool they would use a half-initialized dialect.
        with _connect_for_worker(engine) as connection:
            connection.detach()  # otherwise it would stay in the pool
    # Handlers that hold all connections of the application's pool must not keep a worker from its
    # heartbeat.
    with _connect_for_worker(with_own_pool(engine)) as connection:
        connection.execution_options(isolation_level=isolation_level)
        connection.detach()
        name = name_of_connection(driver_connection(connection), purpose)
        configure(connection, {**settings, **name})
        yield connection


def configure(connection: Connection, settings: Mapping[str, str]) -> None:
    """Apply the settings that the server accepts; skip the others."""
    keep_from_children(driver := driver_connection(connection))
    notice_loss_of_server(driver.fileno(), settings)
    if settings and not _set(connection, settings):
        for name, value in settings.items():
            _set(connection, {name: value})


def _set(connection: Connection, settings: Mapping[str, str]) -> bool:
    """Apply all settings in one round trip, or none; returns whether the server accepted them."""
    try:
        connection.exec_driver_sql(set_config(len(settings)), tuple(chain(*settings.items())))
        connection.commit()
    except DBAPIError as error:
        if error.connection_invalidated:
            raise
        connection.rollback()
        logger.info("the server does not accept one of %s: %s", list(settings), error.orig)
        return False
    return True


def let_server_notice_loss(connection: Connection) -> None:
    """Apply the settings of NETWORK to a connection of the application's pool, once.

    Without them, rows that a handler has locked would stay locked for hours after its host
    vanishes, while the rescued job waits for them on another host.
    """
    if NOTICES_LOSS not in connection.info:
        configure(connection, NETWORK)
        connection.info[NOTICES_LOSS] = True


def leave_autocommit(connection: Connection) -> None:
    """Enable transactions on a connection of the application, whatever its engine's default.

    SQLAlchemy would set and reset the isolation level each time the connection leaves the pool;
    :func:`begin_now` sets the level anyway.
    """
    if driver_connection(connection).autocommit:
        connection.execution_options(isolation_level="READ COMMITTED")


NOTICES_LOSS = "pgqueue.notices_loss"


READ_COMMITTED: IsolationLevel = "READ COMMITTED"


STRICTER: tuple[IsolationLevel, ...] = ("REPEATABLE READ", "SERIALIZABLE")


def isolation_of(engine: Engine) -> IsolationLevel:
    """The isolation level of an application engine's transactions; asks the server.

    For an engine in AUTOCOMMIT, whose handlers have transactions all the same: READ COMMITTED.
    """
    with _connect_for_worker(engine) as connection:
        connection.detach()
        level = connection.get_isolation_level()
        return level if level in STRICTER else READ_COMMITTED


def driver_connection(connection: Connection) -> Any:
    """The psycopg connection itself, also behind a detached or an async connection."""
    dbapi_connection: Any = connection.connection.dbapi_connection
    return getattr(dbapi_connection, "driver_connection", dbapi_connection)


def backend_pid(connection: Connection) -> int:
    """The process id of the server process behind a connection."""
    pid: int = driver_connection(connection).info.backend_pid
    return pid
